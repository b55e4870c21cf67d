#!/usr/bin/env bash
# Makes the virtual environment for development unless the cache has it, and prints its folder.
#
# It is keyed by requirements-dev.txt and the version of Python; `venv` in the cache always points to the newest.
# The project itself is not in it: everything runs from the top folder of the checkout.
set -euo pipefail
source "$(dirname "$0")/common.sh"

python="${PYTHON:-python3}"
requirements="$project_dir/requirements-dev.txt"

command -v "$python" >/dev/null || die "Python 3.11 or later is needed, and there is no '$python' on the PATH"
version="$("$python" -c 'import platform; print(platform.python_version())')"
version_at_least "$version" 3.11 ||
    die "Python 3.11 or later is needed; '$python' is $version (PYTHON=<another> names a different one)"

key="$({ echo "$version"; name_and_content "$requirements"; } | short_hash)"
venv="$cache_dir/venv-$key"

if ! [ -f "$venv/.complete" ]; then
    lock "venv-$key"
    if ! [ -f "$venv/.complete" ]; then
        say "Python $version: installing $(grep -c '==' "$requirements") packages"
        rm -rf "$venv"
        "$python" -m venv "$venv" >&2 ||
            die "'$python -m venv' failed (on Debian: the package python3-venv is missing)"
        "$venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all: \
            --requirement "$requirements" >&2
        touch "$venv/.complete"
        say 'Python: the virtual environment is complete'
    fi
fi
if [ "$(readlink "$cache_dir/venv" || true)" != "$venv" ]; then
    ln -sfnT "$venv" "$cache_dir/venv"
fi
printf '%s\n' "$venv"

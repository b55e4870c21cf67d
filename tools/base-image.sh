#!/usr/bin/env bash
# Makes the base of the image from Debian packages unless the cache has it, and prints the path of its tar file.
#
#   tools/base-image.sh [ARCH]      amd64 or arm64, by default that of this machine; another one is emulated
#
# For building without an image registry; `docker build` takes a published base instead.
set -euo pipefail
source "$(dirname "$0")/common.sh"

readonly suite=bookworm
readonly include=python3,python3-venv,ca-certificates,util-linux

arch="${1:-$(machine_arch)}"
key="$({ echo "$suite $include $arch"; name_and_content "$0"; } | short_hash)"
tar="$cache_dir/images/base-$key.tar"
if [ -f "$tar" ]; then
    printf '%s\n' "$tar"
    exit 0
fi

[ "$(id -u)" = 0 ] || die 'building the base image needs root'
lock "base-$key"
if ! [ -f "$tar" ]; then
    mkdir -p "$cache_dir/images"
    root="$(mktemp -d "$cache_dir/base.XXXXXX")"
    trap 'rm -rf "$root"' EXIT
    say "base image: installing Debian $suite for $arch with $include"
    log="$cache_dir/base-$arch.log" run=()
    [ "$arch" = "$(machine_arch)" ] || run=("$project_dir/tools/emulate.sh" "$arch")
    # shellcheck disable=SC2046  # no mirror is no argument
    "${run[@]}" debootstrap --arch="$arch" --variant=minbase --include="$include" "$suite" "$root" $(debian_mirror) \
        >"$log" 2>&1 || die "debootstrap failed: $(tail -n 1 "$log") (all of it: $log)"
    # Nobody reads these in a container, and each layer of the store is a copy of all. Python's compiled files are made anew.
    # The licenses stay: whoever passes an image on needs them.
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
        "$root"/usr/share/{man,info,locale,lintian}/* "$root"/dev/*
    find "$root/usr/share/doc" -type f ! -name copyright -delete
    find "$root/usr" -name '*.pyc' -delete
    chmod 755 "$root"
    tar --create --file "$tar.part" --directory "$root" --numeric-owner .
    mv "$tar.part" "$tar"
    say 'base image: done'
fi
printf '%s\n' "$tar"

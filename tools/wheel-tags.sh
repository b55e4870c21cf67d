#!/bin/sh
# Prints pip's options for the wheels that CPython of version $1, such as 3.11, can use on architecture $2, amd64 or arm64,
# with Debian 12's glibc or an older one: pip on another machine would take those for itself.
case "$2" in
    amd64) machine=x86_64 ;;
    arm64) machine=aarch64 ;;
    *) echo "error: no Python packages for the platform '$2'" >&2 && exit 1 ;;
esac
printf -- '--python-version %s --implementation cp --abi %s --abi abi3 --abi none' "$1" "cp$(echo "$1" | tr -d .)"
for glibc in 36 34 31 28 17 12 5; do
    printf -- ' --platform manylinux_2_%s_%s' "$glibc" "$machine"
done
printf -- ' --platform manylinux2014_%s --platform any\n' "$machine"

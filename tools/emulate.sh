#!/usr/bin/env bash
# Runs a command in which programs of another architecture run too.
#
#   tools/emulate.sh ARCH COMMAND…      ARCH is arm64
#
# Needs root. If the machine has no emulator for ARCH, QEMU's is registered with the kernel until the last of these commands
# has ended; where it must not be, there is an error.
set -euo pipefail
source "$(dirname "$0")/common.sh"

[ "${1:-}" = arm64 ] && [ "$#" -gt 1 ] || die 'usage: tools/emulate.sh arm64 COMMAND…'
readonly handler=qemu-aarch64 registry=/proc/sys/fs/binfmt_misc
shift

# The file system is mounted for this script only.
if [ -z "${EMULATE_MOUNTED:-}" ]; then
    [ "$(id -u)" = 0 ] || die 'emulating another architecture needs root'
    EMULATE_MOUNTED=yes exec unshare --mount "$0" arm64 "$@"
fi
mountpoint -q "$registry" || mount --types binfmt_misc none "$registry" ||
    die 'emulating another architecture needs binfmt_misc, which the kernel does not have or does not let us mount'
readonly rule="/usr/lib/binfmt.d/$handler.conf"

# Those who use our registration hold the lock, shared: whoever gets it alone is the last.
mkdir -p "$cache_dir/locks"
exec 8>"$cache_dir/locks/emulation"
exec 7>"$cache_dir/locks/emulation-users"
flock 8
flock --shared 7
if ! [ -e "$registry/$handler" ]; then
    "$project_dir/tools/packages.sh" emulation
    tr -d '\n' <"$rule" >"$registry/register" || die "the kernel does not accept $rule"
    touch "$cache_dir/locks/emulation-ours"
fi
flock --unlock 8
code=0
"$@" 7>&- 8>&- || code=$?
flock 8
flock --unlock 7
if [ -e "$cache_dir/locks/emulation-ours" ] && flock --nonblock 7; then
    rm -f "$cache_dir/locks/emulation-ours"
    echo -1 >"$registry/$handler"
fi
exit "$code"

#!/usr/bin/env bash
# Installs the Debian packages that the image and the test bed need: only those missing, none of their services started.
#
#   tools/packages.sh [emulation]      also the emulator of another architecture
set -euo pipefail
source "$(dirname "$0")/common.sh"

[ "${1:-}" = emulation ] && also='qemu-user-static qemu-aarch64-static' || also=''
# Package, and a command or file that it brings. Asked for by that, so that another source of the same thing will do.
readonly wanted="
$also
buildah buildah
ca-certificates /etc/ssl/certs/ca-certificates.crt
containerd containerd
containernetworking-plugins /usr/lib/cni/bridge
chromium chromium
debootstrap debootstrap
e2fsprogs mkfs.ext4
fonts-dejavu-core /usr/share/fonts/truetype/dejavu/DejaVuSans.ttf
git git
iproute2 ip
iptables iptables
mount losetup
netavark /usr/lib/podman/netavark
openssl openssl
procps sysctl
runc runc
util-linux unshare
xfsprogs mkfs.xfs
"

missing_packages() {
    local package probe
    while read -r package probe; do
        [ -n "$package" ] || continue
        [ -e "$probe" ] || command -v "$probe" >/dev/null || printf '%s ' "$package"
    done <<<"$wanted"
    # Debian's own Python comes without the part that makes virtual environments.
    local python
    python="$(readlink -f "$(command -v "${PYTHON:-python3}")" || true)"
    [[ $python != /usr/bin/* ]] || "$python" -c 'import ensurepip' 2>/dev/null || printf 'python3-venv '
}

# As root /usr/sbin is on the PATH in most shells, but not in all.
PATH="$PATH:/usr/sbin:/sbin"
missing="$(missing_packages)"
[ -n "$missing" ] || exit 0

command -v apt-get >/dev/null || die "these are missing, and there is no apt-get to install them with: $missing"
[ "$(id -u)" = 0 ] || die "these Debian packages are missing, and installing them needs root: $missing"

lock packages
missing="$(missing_packages)"
[ -n "$missing" ] || exit 0

# Installing containerd starts it as a service on most machines. The test bed runs its own: no service is started here.
policy=/usr/sbin/policy-rc.d
if ! [ -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi

log="$cache_dir/packages.log"
say "Debian packages: installing $missing"
export DEBIAN_FRONTEND=noninteractive
# The list may be old or empty; after a failed update, the installation that misses something fails with the cause.
apt-get -q update >"$log" 2>&1 || true
# shellcheck disable=SC2086  # a list of words
apt-get -q -y install --no-install-recommends $missing >>"$log" 2>&1 ||
    die "apt-get could not install $missing: $(grep '^E:' "$log" | head -n 1) (all of it: $log)"
say 'Debian packages: installed'

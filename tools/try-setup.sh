#!/usr/bin/env bash
# Runs a command in a fresh, minimal Debian that has only `make`, `python3` and this checkout, and removes it afterward.
#
#   tools/try-setup.sh RELEASE COMMAND [ARGUMENT…]        such as: tools/try-setup.sh trixie make demo
#
# The machine's own configuration of apt, pip, npm, proxies, names and certificates goes with it. SHARE names folders of the
# machine that appear inside under the same path, such as a cache for Go. Needs root.
set -euo pipefail
source "$(dirname "$0")/common.sh"

[ "$#" -ge 2 ] || die 'usage: tools/try-setup.sh RELEASE COMMAND [ARGUMENT…]'
[ "$(id -u)" = 0 ] || die 'trying the set-up needs root: it creates mounts and namespaces'
release="$1"
shift

# Copies files and folders of the machine to the same path inside, as far as they exist.
copy_configuration() {
    local path
    for path in /etc/resolv.conf /etc/hosts /etc/pip.conf ~/.config/pip ~/.config/go ~/.pip ~/.npmrc /etc/npmrc \
        /usr/local/share/ca-certificates; do
        [ ! -e "$path" ] || (cd / && cp --archive --dereference --parents ".$path" "$root")
    done
    apt-config dump Acquire >"$root/etc/apt/apt.conf.d/99machine"
}

# Prints the variables of the environment that configure proxies, pip, npm, Go and certificates.
configuration_variables() {
    env | grep -i -E '^([a-z]+_proxy|PIP_[A-Z_]+|NPM_CONFIG_[A-Z_]+|GO[A-Z]+|SSL_CERT_[A-Z]+)=' | grep -v '^GOROOT=' || true
}

# Makes a folder the root of this process, which is the first one of its own namespaces, and runs a command there.
readonly enter='
    root="$1"; shift
    mount --bind "$root" "$root"
    for folder in dev sys $SHARE; do mkdir -p "$root/$folder"; mount --rbind "/$folder" "$root/$folder"; done
    mount -t proc proc "$root/proc"
    cd "$root" && pivot_root . . && umount --lazy . && cd /root/checkout
    exec env --ignore-environment "$@"'

mkdir -p "$cache_dir"
root="$(mktemp -d "$cache_dir/try.XXXXXX")"
chmod 755 "$root"
trap 'rm -rf --one-file-system "$root"' EXIT
say "$release: installing a minimal system"
debootstrap --variant=minbase --include=make,python3 "$release" "$root" $(debian_mirror) >"$root.log" 2>&1 ||
    die "debootstrap failed: $(tail -n 1 "$root.log") (all of it: $root.log)"
rm "$root.log"
copy_configuration
mkdir "$root/root/checkout"
(cd "$project_dir" && find . -name .git -prune -o -name '.*_cache' -prune -o -name __pycache__ -prune -o -print0 |
    tar --create --null --no-recursion --files-from -) | tar --extract --directory "$root/root/checkout"
mapfile -t variables < <(configuration_variables)
say "$release: $*"
began=$SECONDS
SHARE="${SHARE:-}" unshare --mount --pid --fork --kill-child bash -euc "$enter" enter "$root" \
    HOME=/root TERM="${TERM:-dumb}" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "${variables[@]}" "$@"
say "$release: done ($((SECONDS - began)) s)"

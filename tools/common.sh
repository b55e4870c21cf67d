# Shared by the scripts of this folder: where things are kept, and how they talk.
# To be sourced: needs bash with errexit.

# Folder of this project, and of everything that is built and kept between runs.
readonly project_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly cache_dir="${NODE_AGENT_CACHE:-$HOME/.cache/node-agent}"

# Progress goes to standard error: standard output is for the one line that callers read.
say() {
    printf '%s  %s\n' "$(date +%H:%M:%S)" "$*" >&2
}

# Prints one line and exits.
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# First 16 digits of the SHA-256 over everything on standard input.
short_hash() {
    sha256sum | cut -c1-16
}

# Contents of files, each behind its name, so that moved bytes change a hash over it.
name_and_content() {
    local file
    for file in "$@"; do
        printf '%s %s\n' "${file##*/}" "$(sha256sum <"$file")"
    done
}

# True if version $1 is at least version $2.
version_at_least() {
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

# This machine's architecture, as Debian, Go and image registries call it.
machine_arch() {
    case "$(uname -m)" in
        x86_64) echo amd64 ;;
        aarch64) echo arm64 ;;
        *) uname -m ;;
    esac
}

# The mirror that this machine's own apt uses, if it is a Debian.
debian_mirror() {
    apt-get indextargets --format '$(ORIGIN) $(SITE)' 'Created-By: Packages' 2>/dev/null |
        sed -n 's/^Debian //p' | grep -v security | head -n 1 || true
}

# Takes an exclusive lock for the rest of this process. Waiting is reported.
lock() {
    mkdir -p "$cache_dir/locks"
    exec 9>"$cache_dir/locks/$1"
    if ! flock --nonblock 9; then
        say "$1: another run is at work on it; waiting"
        flock 9
    fi
}

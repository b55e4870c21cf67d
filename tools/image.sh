#!/usr/bin/env bash
# Builds the image node-agent:dev from the Dockerfile unless the cache has it, and prints the path of its archive.
#
#   tools/image.sh [ARCH]      amd64 or arm64, by default that of this machine
#
# Needs root, and no image registry: the base is made of Debian packages, kopia and the Python packages come ready from
# the cache. The archive is keyed by everything that goes into it.
set -euo pipefail
source "$(dirname "$0")/common.sh"

readonly arch="${1:-$(machine_arch)}"
readonly image="localhost/node-agent:dev-$arch"
readonly python_of_base=3.11
readonly store="$cache_dir/buildah"

# A store of our own without a daemon; images and containers of the machine are not touched.
build_tool() {
    BUILDAH_ISOLATION=chroot buildah --root "$store/$driver" --runroot "$store/$driver-run" --storage-driver "$driver" "$@"
}

# Prints a limit of this process ($1 is its name, $2 its letter for ulimit) as an option of buildah, at most $3: buildah 1.28
# of Debian 12 lowers its own limits before it applies the option, and no limit can be raised again.
own_limit() {
    local soft hard
    soft="$(ulimit "-S$2")" hard="$(ulimit "-H$2")"
    [ "$soft" != unlimited ] && [ "$soft" -le "$3" ] || soft="$3"
    [ "$hard" != unlimited ] && [ "$hard" -le "$3" ] || hard="$3"
    printf -- '--ulimit=%s=%s:%s\n' "$1" "$soft" "$hard"
}

# Overlay is quick but does not work everywhere, such as within a container; vfs copies the whole image for each step.
choose_driver() {
    driver=overlay
    build_tool images --quiet >/dev/null 2>&1 && [ "$(stat -f -c %T "$store")" != overlayfs ] || driver=vfs
}

# Copies all that goes into the image, but for what the cache holds: what is hashed is then what is built.
copy_sources() {
    (cd "$project_dir" && find Dockerfile .dockerignore requirements.txt tools/{kopia,wheel-tags.sh} core exposer nodeagent client datamover \
        -name __pycache__ -prune -o -type f -print | tar --create --files-from -) | tar --extract --directory "$context"
}

# Imports the base in tar file $1. In the store, all bases of a build have the architecture of the image, whatever they are:
# buildah 1.28 looks for no other in a build for it, and a chroot does not mind. The Dockerfile must not ask for another.
ensure_base() {
    local name container
    name="$(base_image "$1")"
    build_tool inspect --type image "$name" >/dev/null 2>&1 && return
    say "image: importing $(basename "$1" .tar)"
    container="$(build_tool from scratch)"
    build_tool add --quiet "$container" "$1" / >/dev/null
    build_tool config --arch "$arch" "$container"
    build_tool commit --quiet --rm "$container" "$name" >/dev/null
}

# Downloads the wheels for the image: the build itself has no network.
ensure_wheels() {
    [ -d "$wheels" ] && return
    say "image: fetching Python packages for $arch"
    local part="$wheels.part"
    rm -rf "$part"
    # shellcheck disable=SC2046  # options without spaces
    "$("$project_dir/tools/venv.sh")/bin/pip" download --quiet --disable-pip-version-check --require-hashes \
        --only-binary :all: $("$project_dir/tools/wheel-tags.sh" "$python_of_base" "$arch") \
        --requirement "$project_dir/requirements.txt" --dest "$part" >&2
    mv "$part" "$wheels"
}

# The name in the store of the base in tar file $1.
base_image() {
    printf 'localhost/node-agent-base:%s-in-%s\n' "$(basename "$1" .tar)" "$arch"
}

# Removes the containers that buildah leaves behind for stages without a step of their own, the image of earlier
# sources ($1 is its ID), and all but a few archives. Layers that are still of use stay.
remove_old() {
    build_tool rm --all >/dev/null
    # shellcheck disable=SC2012  # the names are ours
    ls -t "$cache_dir/images/node-agent-$arch"-*.tar | tail -n +4 | xargs --no-run-if-empty rm -f
    [ -z "$1" ] || [ "$1" = "$(build_tool images --quiet "$image")" ] || build_tool rmi "$1" >/dev/null 2>&1 || true
}

mkdir -p "$cache_dir/images" "$store"
context="$(mktemp -d "$store/context.XXXXXX")"
trap 'rm -rf "$context"' EXIT
copy_sources
key="$(cd "$context" && {
    find . -type f | LC_ALL=C sort | xargs sha256sum
    name_and_content "$project_dir"/tools/{image,base-image}.sh
} | short_hash)"
archive="$cache_dir/images/node-agent-$arch-$key.tar"
if [ -f "$archive" ]; then
    # What is in use is no old one for the other checkouts of this machine.
    touch "$archive"
    printf '%s\n' "$archive"
    exit 0
fi

[ "$(id -u)" = 0 ] || die 'building the image needs root'
command -v buildah >/dev/null || die 'building the image needs buildah; tools/packages.sh installs it'
build_tar="$("$project_dir/tools/base-image.sh")"
base_tar="$("$project_dir/tools/base-image.sh" "$arch")"
# As the last part: during the set-up, kopia is built meanwhile.
kopia="$(GOARCH="$arch" "$project_dir/tools/build.sh" kopia kopia)/kopia"
wheels="$cache_dir/wheels-$arch-$({ echo "$python_of_base"; name_and_content "$project_dir/requirements.txt"; } | short_hash)"

lock image
if ! [ -f "$archive" ]; then
    choose_driver
    earlier="$(build_tool images --quiet "$image" 2>/dev/null || true)"
    ensure_base "$build_tar"
    ensure_base "$base_tar"
    ensure_wheels

    mkdir "$context/image-parts"
    cp -l "$kopia" "$context/image-parts/kopia" 2>/dev/null || cp "$kopia" "$context/image-parts/kopia"
    cp -a "$wheels" "$context/image-parts/wheels"
    sed -i 's/--platform=\$BUILDPLATFORM //' "$context/Dockerfile"

    say "image: building for $arch"
    log="$cache_dir/image-$arch.log"
    # Without these, buildah 1.39 raises both limits to a million, which a root without CAP_SYS_RESOURCE cannot.
    build_tool bud --layers --pull-never --tag "$image" "$(own_limit nofile n 16384)" "$(own_limit nproc u 32768)" \
        --platform "linux/$arch" --build-arg BASE="$(base_image "$base_tar")" \
        --build-arg BUILD_BASE="$(base_image "$build_tar")" --build-arg GO="$(base_image "$build_tar")" \
        --build-arg LIBRARY="/usr/lib/python$python_of_base" --build-arg KOPIA=ready --build-arg PACKAGES=ready \
        "$context" >"$log" 2>&1 || die "buildah failed: $(tail -n 3 "$log" | tr '\n' ' ') (all of it: $log)"
    rm -f "$archive.part"
    build_tool push --quiet "$image" "docker-archive:$archive.part:docker.io/library/node-agent:dev"
    mv "$archive.part" "$archive"
    remove_old "$earlier"
    say "image: done for $arch ($(du -h "$archive" | cut -f1))"
fi
printf '%s\n' "$archive"

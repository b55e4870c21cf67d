#!/usr/bin/env bash
# Builds the image node-agent:dev from the Dockerfile unless the cache has it, and prints the path of its archive.
#
# Needs root, and no image registry: the base is made of Debian packages, kopia and the Python packages come ready from
# the cache. The archive is keyed by everything that goes into it.
set -euo pipefail
source "$(dirname "$0")/common.sh"

readonly image=localhost/node-agent:dev
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
    (cd "$project_dir" && find Dockerfile .dockerignore requirements.txt tools/kopia core exposer nodeagent datamover \
        -name __pycache__ -prune -o -type f -print | tar --create --files-from -) | tar --extract --directory "$context"
}

ensure_base() {
    build_tool inspect --type image "$1" >/dev/null 2>&1 && return
    say 'image: importing the base'
    local container
    container="$(build_tool from scratch)"
    build_tool add --quiet "$container" "$base_tar" / >/dev/null
    build_tool commit --quiet --rm "$container" "$1" >/dev/null
}

# Downloads the wheels that the base's Python needs: the build itself has no network.
ensure_wheels() {
    [ -d "$wheels" ] && return
    say 'image: fetching Python packages'
    local part="$wheels.part" arch abi="cp${python_of_base/./}" platforms=() glibc
    arch="$(uname -m)"
    for glibc in 36 34 31 28 17 12 5; do
        platforms+=(--platform "manylinux_2_${glibc}_$arch")
    done
    rm -rf "$part"
    "$("$project_dir/tools/venv.sh")/bin/pip" download --quiet --disable-pip-version-check --require-hashes \
        --only-binary :all: --python-version "$python_of_base" --implementation cp \
        --abi "$abi" --abi abi3 --abi none "${platforms[@]}" --platform "manylinux2014_$arch" --platform any \
        --requirement "$project_dir/requirements.txt" --dest "$part" >&2
    mv "$part" "$wheels"
}

# Removes the containers that buildah leaves behind for stages without a step of their own, the image of earlier
# sources ($1 is its ID), and all but a few archives. Layers that are still of use stay.
remove_old() {
    build_tool rm --all >/dev/null
    # shellcheck disable=SC2012  # the names are ours
    ls -t "$cache_dir"/images/node-agent-*.tar | tail -n +4 | xargs --no-run-if-empty rm -f
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
archive="$cache_dir/images/node-agent-$key.tar"
if [ -f "$archive" ]; then
    printf '%s\n' "$archive"
    exit 0
fi

[ "$(id -u)" = 0 ] || die 'building the image needs root'
command -v buildah >/dev/null || die 'building the image needs buildah; tools/packages.sh installs it'
kopia="$("$project_dir/tools/build.sh" kopia kopia)/kopia"
base_tar="$("$project_dir/tools/base-image.sh")"
base_image="localhost/node-agent-base:$(basename "$base_tar" .tar)"
wheels="$cache_dir/wheels-$({ echo "$python_of_base"; name_and_content "$project_dir/requirements.txt"; } | short_hash)"

lock image
if ! [ -f "$archive" ]; then
    choose_driver
    earlier="$(build_tool images --quiet "$image" 2>/dev/null || true)"
    ensure_base "$base_image"
    ensure_wheels

    mkdir "$context/image-parts"
    cp -l "$kopia" "$context/image-parts/kopia" 2>/dev/null || cp "$kopia" "$context/image-parts/kopia"
    cp -a "$wheels" "$context/image-parts/wheels"

    say 'image: building'
    # Without these, buildah 1.39 raises both limits to a million, which a root without CAP_SYS_RESOURCE cannot.
    build_tool bud --layers --pull-never --tag "$image" "$(own_limit nofile n 16384)" "$(own_limit nproc u 32768)" \
        --build-arg BASE="$base_image" --build-arg GO="$base_image" --build-arg KOPIA=ready \
        --build-arg PACKAGES=ready "$context" >"$cache_dir/image.log" 2>&1 ||
        die "buildah failed: $(tail -n 3 "$cache_dir/image.log" | tr '\n' ' ') (all of it: $cache_dir/image.log)"
    rm -f "$archive.part"
    build_tool push --quiet "$image" "docker-archive:$archive.part:docker.io/library/node-agent:dev"
    mv "$archive.part" "$archive"
    remove_old "$earlier"
    say "image: done ($(du -h "$archive" | cut -f1))"
fi
printf '%s\n' "$archive"

#!/usr/bin/env bash
# Builds the images of a release, one for each architecture, and the manifest list of them.
#
# The variables are those of Velero's build, which docs/images.md explains: BUILD_OUTPUT_TYPE, BUILD_OS, BUILD_ARCH,
# BUILDX_INSTANCE, REGISTRY, VERSION, TAG_LATEST, INSECURE_REGISTRY.
# Prints a line for each image or archive. Source: Velero v1.18.2, Makefile.
set -euo pipefail
source "$(dirname "$0")/common.sh"

readonly output_type="${BUILD_OUTPUT_TYPE:-tar}" version="${VERSION:-main}" output="$project_dir/_output"
readonly builder="${BUILDX_INSTANCE:-}" image="${REGISTRY:-localhost}/node-agent"
tags=("$version")
[ "${TAG_LATEST:-false}" != true ] || tags+=(latest)

# Prints the name of each image: linux-ARCH.
all_names() {
    local each
    # Docker's own store has images of its machine only.
    if [ "$output_type" = docker ]; then
        printf 'linux-%s\n' "$(machine_arch)"
        return
    fi
    for each in ${BUILD_ARCH//,/ }; do printf 'linux-%s\n' "$each"; done
}

archive_of() {
    printf '%s/node-agent-%s-%s.tar\n' "$output" "$version" "$1"
}

# All tags of image $1, each behind the words that follow.
tagged() {
    local tag
    for tag in "${tags[@]}"; do
        printf '%s\n' "${@:2}" "$image:$tag${1:+-$1}"
    done
}

# -- with docker buildx, from the published base images ---------------------------------------------------------------
build_with_docker() {
    local name="$1" out="type=$output_type" options
    mapfile -t options < <(tagged "$name" --tag)
    [ "$output_type" != tar ] || out="type=docker,dest=$(archive_of "$name")"
    docker buildx build --builder "$builder" --pull --output "$out" --platform "${name%%-*}/${name##*-}" \
        --provenance=false --sbom=false "${options[@]}" --file "$project_dir/Dockerfile" "$project_dir" >&2
}

# -- without an image registry ----------------------------------------------------------------------------------------
build_from_packages() {
    local name="$1" images archive
    mapfile -t images < <(tagged "$name")
    archive="$("$project_dir/tools/image.sh" "${name##*-}")"
    built+=("$archive")
    [ "$output_type" = registry ] ||
        "$python" "$project_dir/tools/archives.py" rename "$archive" "$(archive_of "$name")" "${images[@]}"
    if [ "$output_type" = docker ]; then
        docker load --quiet --input "$(archive_of "$name")" >&2
    fi
}

# Pushes the list, and tags each image of it.
push_list() {
    local layout tag name options=()
    layout="$(mktemp -d)"
    tar --extract --file "$list" --directory "$layout"
    [ "${INSECURE_REGISTRY:-false}" != true ] || options=(--insecure)
    for tag in "${tags[@]}"; do
        "$crane" push "${options[@]}" "$layout" "$image:$tag" >&2
        for name in "${names[@]}"; do
            "$crane" copy "${options[@]}" --platform "linux/${name##*-}" "$image:$tag" "$image:$tag-$name" >&2
        done
    done
    rm -r "$layout"
}

case "$output_type" in
    tar | registry | docker) ;;
    *) die "BUILD_OUTPUT_TYPE: must be tar, registry or docker: \"$output_type\"" ;;
esac
BUILD_OS="${BUILD_OS:-linux}" BUILD_ARCH="${BUILD_ARCH:-amd64,arm64}"
[ "$BUILD_OS" = linux ] || die "BUILD_OS: must be linux: \"$BUILD_OS\""
for arch in ${BUILD_ARCH//,/ }; do
    [ "$arch" = amd64 ] || [ "$arch" = arm64 ] || die "BUILD_ARCH: must be amd64, arm64 or both: \"$BUILD_ARCH\""
done
mapfile -t names < <(all_names)
mkdir -p "$output"
python="$("$project_dir/tools/venv.sh")/bin/python" built=() list="$output/node-agent-$version.oci.tar"

if [ -n "$builder" ]; then
    for name in "${names[@]}"; do build_with_docker "$name"; done
    if [ "$output_type" = registry ]; then
        for tag in "${tags[@]}"; do
            docker buildx imagetools create --builder "$builder" --tag "$image:$tag" "${names[@]/#/$image:$tag-}" >&2
        done
    fi
else
    [ "$output_type" != registry ] || crane="$("$project_dir/tools/build.sh" crane)/crane"
    for name in "${names[@]}"; do build_from_packages "$name"; done
    [ "$output_type" = docker ] || "$python" "$project_dir/tools/archives.py" list "$list" "$image:$version" "${built[@]}"
    [ "$output_type" != registry ] || push_list
fi

case "$output_type" in
    tar)
        for name in "${names[@]}"; do archive_of "$name"; done
        [ -n "$builder" ] || printf '%s\n' "$list"
        ;;
    *)
        for name in "${names[@]}"; do tagged "$name"; done
        [ "$output_type" != registry ] || tagged ''
        ;;
esac

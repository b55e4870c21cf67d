#!/usr/bin/env bash
# Writes the bill of materials of each image of a release into _output/, and prints the files.
#
# The variables are VERSION and BUILD_ARCH, as for images.sh. An image that is not built yet is built.
set -euo pipefail
source "$(dirname "$0")/common.sh"

version="${VERSION:-main}" architectures="${BUILD_ARCH:-amd64,arm64}" output="$project_dir/_output"
python="$("$project_dir/tools/venv.sh")/bin/python"
mkdir -p "$output"
for arch in ${architectures//,/ }; do
    file="$output/node-agent-$version-linux-$arch.cdx.json"
    archive="$("$project_dir/tools/image.sh" "$arch")"
    "$python" "$project_dir/tools/sbom.py" "$archive" "$version" "$file"
    printf '%s\n' "$file"
done

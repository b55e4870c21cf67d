#!/usr/bin/env bash
# Unpacks the source tree of the previous release unless the cache has it, and prints its folder.
#
#   tools/previous.sh              the folder
#   tools/previous.sh --image      the path of that release's image, an archive, which its own tools/image.sh builds
#
# PREVIOUS names another revision. Without it: the newest release tag before HEAD, and as long as there is none, the
# revision below. The tree runs in the virtual environment of this checkout (tools/venv.sh).
set -euo pipefail
source "$(dirname "$0")/common.sh"

# The last commit before maintenance of repositories, and before agents could be installed by chart and command.
# To be removed once a release is tagged.
readonly before_first_release=24bce8f2eb4dd05c23392952a4d98f6763ad6547

cd "$project_dir"
git rev-parse --git-dir >/dev/null 2>&1 || die 'the previous release comes from the git history, and this is no git checkout'
revision="${PREVIOUS:-$(git tag --merged HEAD --no-contains HEAD --sort=-version:refname --list 'v[0-9]*' | head -n 1)}"
revision="${revision:-$before_first_release}"
commit="$(git rev-parse --verify --quiet "$revision^{commit}")" ||
    die "revision $revision is not in this checkout's history (a shallow clone: git fetch --unshallow --tags)"

tree="$cache_dir/previous-sources-${commit:0:16}"
if ! [ -d "$tree" ]; then
    lock "previous-${commit:0:16}"
    if ! [ -d "$tree" ]; then
        say "unpacking the sources of $revision"
        rm -rf "$tree.part"
        mkdir -p "$tree.part"
        git archive "$commit" | tar --extract --directory "$tree.part"
        mv "$tree.part" "$tree"
    fi
fi
cmp -s "$tree/requirements.txt" requirements.txt ||
    say "warning: requirements.txt of $revision differs: its agents run with the packages of this checkout"
if [ "${1:-}" = --image ]; then
    archive="$("$tree/tools/image.sh")"
    # Of the images only those that were used last stay.
    touch "$archive"
    printf '%s\n' "$archive"
    exit
fi
printf '%s\n' "$tree"

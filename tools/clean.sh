#!/usr/bin/env bash
# Removes everything that the scripts of this folder and the tests have made: in the checkout, and in the cache.
#
# Go's own caches and the Debian packages stay: they belong to the machine.
set -euo pipefail
source "$(dirname "$0")/common.sh"

cd "$project_dir"
rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache _output build dist ./*.egg-info
find . -name __pycache__ -prune -exec rm -rf {} +

# By name: the cache may be a folder with other files in it.
[ -d "$cache_dir" ] || exit 0
cd "$cache_dir"
# A build that was killed leaves its layers mounted.
awk -v top="$PWD/buildah/" 'index($2, top) == 1 { print $2 }' /proc/mounts | sort -r |
    xargs --no-run-if-empty umount
rm -rf tools images buildah venv venv-* wheels-* previous-* lock-env locks base.?????? try.?????? try.??????.log base-*.log image-*.log packages.log
rmdir --ignore-fail-on-non-empty "$cache_dir"

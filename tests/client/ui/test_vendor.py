"""What the pages use of other projects is as it was published, with its license."""

import hashlib
import json

from tools.vendor import MANIFEST, VENDOR

_LOCK = VENDOR.parents[3] / "tools" / "pages" / "package-lock.json"


def test_each_file_has_the_hash_of_the_manifest_and_a_license() -> None:
    listed = json.loads(MANIFEST.read_text(encoding="utf-8"))
    files = {name: digest for one in listed for name, digest in one["files"].items()}
    assert set(files) == {path.name for path in VENDOR.iterdir()} - {MANIFEST.name}
    for name, digest in files.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
    for one in listed:
        assert any(name.endswith(".LICENSE") for name in one["files"]), one["package"]


def test_the_versions_are_those_of_the_lock() -> None:
    packages = json.loads(_LOCK.read_text(encoding="utf-8"))["packages"]
    for one in json.loads(MANIFEST.read_text(encoding="utf-8")):
        assert packages[f"node_modules/{one['package']}"]["version"] == one["version"]

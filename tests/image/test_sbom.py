"""The bill of materials of an image: what is found in it, and a document that fits its schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.image.container import run_tool, tar_of
from tests.support.tools import tool

pytestmark = pytest.mark.processes

_SITE = "opt/venv/lib/python3.11/site-packages"
_WHEEL = "ab" * 32
_IMAGE_ID = "cd" * 32
_PACKAGES = {
    "one-1.0": "Name: One\nVersion: 1.0\nLicense-Expression: MIT OR Apache-2.0\n",
    "two-2.0": "Name: two_of\nVersion: 2.0\nLicense: BSD-3-Clause\n",
    "three-3.0": f"Name: three\nVersion: 3.0\nLicense: {'text of a license ' * 20}\n"
    "Classifier: License :: OSI Approved :: Apache Software License\n",
    "four-4.0": "Name: four\nVersion: 4.0\nLicense: UNKNOWN\n",
}
_DPKG = """\
Package: libc6
Status: install ok installed
Architecture: arm64
Source: glibc
Version: 2.36-9+deb12u10
Description: GNU C Library
 which has lines: more of them

Package: gone
Status: deinstall ok config-files
Architecture: arm64
Version: 1
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of two layers with one package of each kind, and a real kopia."""
    wheels = "".join(f"sha256:{_WHEEL} {text.split()[1]} {text.split()[3]}\n" for text in _PACKAGES.values())
    base = {
        "./var/lib/dpkg/status": _DPKG.encode(),
        "./usr/lib/os-release": b'ID=debian\nVERSION_CODENAME=bookworm\nNAME="Debian GNU/Linux"\n',
    }
    own = {
        "opt/venv/wheels.txt": wheels.encode(),
        "usr/local/bin/kopia": tool("kopia", "kopia").read_bytes(),
        **{f"{_SITE}/{name}.dist-info/METADATA": text.encode() for name, text in _PACKAGES.items()},
    }
    config = {"architecture": "arm64", "os": "linux", "created": "2026-11-23T12:00:00.123456789Z"}
    manifest = [{"Config": f"{_IMAGE_ID}.json", "RepoTags": None, "Layers": ["base.tar", "own.tar"]}]
    path = tmp_path_factory.mktemp("image") / "image.tar"
    content = {
        f"{_IMAGE_ID}.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(manifest).encode(),
        "base.tar": tar_of(base),
        "own.tar": tar_of(own),
    }
    path.write_bytes(tar_of(content))
    return path


@pytest.fixture(scope="module")
def text(archive: Path) -> str:
    output = archive.with_name("sbom.json")
    done = run_tool("sbom.py", archive, "v1", output)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return output.read_text()


@pytest.fixture(scope="module")
def found(text: str) -> dict[str, Any]:
    """The components by their package URL."""
    return {component["purl"]: component for component in json.loads(text)["components"]}


def test_the_document_fits_the_schema_and_names_the_image(archive: Path, text: str, tmp_path: Path) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    metadata = json.loads(text)["metadata"]
    assert (metadata["component"]["name"], metadata["component"]["version"]) == ("node-agent", "v1")
    properties = {each["name"]: each["value"] for each in metadata["component"]["properties"]}
    assert properties == {"platform": "linux/arm64", "image-id": f"sha256:{_IMAGE_ID}"}
    assert metadata["timestamp"] == "2026-11-23T12:00:00+00:00"
    run_tool("sbom.py", archive, "v1", tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == text


def test_python_packages_have_the_hash_of_their_wheel_and_their_license(found: dict[str, Any]) -> None:
    licenses = {
        "pkg:pypi/one@1.0": [{"expression": "MIT OR Apache-2.0"}],
        "pkg:pypi/two-of@2.0": [{"license": {"id": "BSD-3-Clause"}}],
        "pkg:pypi/three@3.0": [{"license": {"name": "Apache Software License"}}],
        "pkg:pypi/four@4.0": None,
    }
    packages = {purl: each for purl, each in found.items() if purl.startswith("pkg:pypi/")}
    assert {purl: each.get("licenses") for purl, each in packages.items()} == licenses
    assert {each["hashes"][0]["content"] for each in packages.values()} == {_WHEEL}


def test_debian_packages_are_those_that_are_installed_and_go_modules_those_of_kopia(found: dict[str, Any]) -> None:
    debian = [purl for purl in found if purl.startswith("pkg:deb/")]
    assert debian == ["pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=arm64&distro=bookworm"]
    modules = [each for purl, each in found.items() if purl.startswith("pkg:golang/")]
    assert {each["name"] for each in modules} >= {"stdlib", "github.com/kopia/kopia", "golang.org/x/sys"}
    assert [each["name"] for each in modules if "hashes" not in each] == ["stdlib"]


def test_a_wrong_command_line_prints_the_right_one(archive: Path) -> None:
    done = run_tool("sbom.py", archive)
    assert done.returncode == 2
    assert "tools/sbom.py ARCHIVE VERSION OUTPUT" in done.stderr

#!/usr/bin/env python3
"""Writes the software bill of materials of an image, in CycloneDX 1.6 as JSON.

    tools/sbom.py ARCHIVE VERSION OUTPUT

It lists what is found in the image itself: Debian packages, Python packages with the hash of the wheel that was
installed, and the Go modules that kopia was built from. ARCHIVE is what `docker save` writes. The same image has the
same document.
Source: https://cyclonedx.org/docs/1.6/json/ and https://github.com/package-url/purl-spec
"""

import base64
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import IO, Any, Final
from uuid import NAMESPACE_OID, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

_PACKAGES: Final = "opt/venv/wheels.txt"
"""Written by the Dockerfile: a line `sha256:DIGEST NAME VERSION` for each wheel."""

_METADATA: Final = ".dist-info/METADATA"
_DPKG: Final = "var/lib/dpkg/status"
_RELEASE: Final = "etc/os-release"
_RELEASE_FILES: Final = (_RELEASE, "usr/lib/os-release")
_KOPIA: Final = "usr/local/bin/kopia"
_LONGEST_LICENSE: Final = 100
"""Some packages have the text of their license where its name belongs."""


@dataclass(frozen=True)
class _Image:
    """What an image has: its configuration, and the files that name packages, by path."""

    config: dict[str, Any]
    identifier: str
    files: dict[str, bytes] = field(default_factory=dict)


def main(arguments: list[str]) -> int:
    """Write the document; returns the exit code."""
    if len(arguments) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    archive, version, output = arguments
    image = _read_image(Path(archive))
    components = [*_list_debian(image), *_list_python(image), *_list_go(image)]
    Path(output).write_text(_write(image, version, components), encoding="utf-8")
    return 0


def _write(image: _Image, version: str, components: list[Component]) -> str:
    platform = f"{image.config['os']}/{image.config['architecture']}"
    subject = Component(
        name="node-agent",
        version=version,
        type=ComponentType.CONTAINER,
        bom_ref="image",
        properties=[Property(name="platform", value=platform), Property(name="image-id", value=image.identifier)],
    )
    created = datetime.fromisoformat(image.config["created"][:19] + "+00:00")
    bom = Bom(
        metadata=BomMetaData(component=subject, timestamp=created),
        serial_number=uuid5(NAMESPACE_OID, f"{image.identifier} {version}"),
        components=components,
    )
    bom.register_dependency(subject, components)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def _list_debian(image: _Image) -> Iterator[Component]:
    release = dict(line.split("=", 1) for line in image.files[_RELEASE].decode().splitlines() if "=" in line)
    for block in image.files[_DPKG].decode().strip().split("\n\n"):
        package = _parse(block)
        if package["Status"] == "install ok installed":
            qualifiers = {"arch": package["Architecture"], "distro": release["VERSION_CODENAME"]}
            yield _component("deb", package["Package"], package["Version"], namespace="debian", qualifiers=qualifiers)


def _list_python(image: _Image) -> Iterator[Component]:
    hashes = {}
    for line in image.files[_PACKAGES].decode().splitlines():
        digest, name, version = line.split()
        hashes[name.lower(), version] = digest.removeprefix("sha256:")
    for path, content in image.files.items():
        if path.startswith("opt/venv/") and path.endswith(_METADATA):
            package = _parse(content.decode())
            yield _component(
                "pypi",
                package["Name"].lower().replace("_", "-"),
                package["Version"],
                sha256=hashes[package["Name"].lower(), package["Version"]],
                license_name=_find_license(package),
            )


def _list_go(image: _Image) -> Iterator[Component]:
    with tempfile.NamedTemporaryFile() as binary:
        binary.write(image.files[_KOPIA])
        binary.flush()
        argv = [str(Path(__file__).with_name("go.sh")), "version", "-m", binary.name]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - our own script
    header, *lines = done.stdout.splitlines()
    yield _component("golang", "stdlib", header.split()[1].removeprefix("go"))
    for line in lines:
        # A module: kind, path, version, and the hash of its files. "=>" replaces the module before it.
        words = line.split()
        if words[0] in {"mod", "dep", "=>"} and len(words) == 4:
            digest = base64.b64decode(words[3].removeprefix("h1:")).hex()
            namespace, _, name = words[1].rpartition("/")
            yield _component("golang", name, words[2], namespace=namespace, sha256=digest)


def _component(
    kind: str,
    name: str,
    version: str,
    *,
    namespace: str = "",
    qualifiers: dict[str, str] | None = None,
    sha256: str = "",
    license_name: str = "",
) -> Component:
    purl = PackageURL(kind, namespace or None, name, version, qualifiers)
    return Component(
        name=f"{namespace}/{name}" if kind == "golang" and namespace else name,
        version=version,
        type=ComponentType.LIBRARY,
        purl=purl,
        bom_ref=str(purl),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else (),
        licenses=[LicenseFactory().make_from_string(license_name)] if license_name else (),
    )


def _find_license(package: Message) -> str:
    """Return the license that a Python package declares: an expression, or a name."""
    for name in (package["License-Expression"], package["License"]):
        if name and name != "UNKNOWN" and len(name) <= _LONGEST_LICENSE:
            return str(name)
    classifiers = [each for each in package.get_all("Classifier", []) if each.startswith("License ::")]
    return classifiers[0].rpartition(":: ")[2] if classifiers else ""


def _parse(headers: str) -> Message:
    return HeaderParser().parsestr(headers)


def _read_image(archive: Path) -> _Image:
    with tarfile.open(archive) as source:
        (manifest,) = json.load(_open(source, "manifest.json"))
        identifier = f"sha256:{Path(manifest['Config']).stem}"
        image = _Image(json.load(_open(source, manifest["Config"])), identifier)
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=_open(source, layer)) as entries:
                for entry in entries:
                    path = entry.name.removeprefix("./")
                    if entry.isreg() and (path in {_PACKAGES, _DPKG, _KOPIA} or path.endswith(_METADATA)):
                        image.files[path] = _open(entries, entry.name).read()
                    elif entry.isreg() and path in _RELEASE_FILES:
                        image.files[_RELEASE] = _open(entries, entry.name).read()
    return image


def _open(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    member = archive.extractfile(name)
    if member is None:
        raise ValueError(f"{name} is no file")
    return member


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

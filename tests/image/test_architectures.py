"""The images of all architectures, as `make images` builds them: archives, their manifest list, programs that start.

Programs of another architecture than this machine's run under QEMU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.datamover.support.servers import run_server
from tests.image.container import Container, unpacked
from tests.support.sockets import free_port
from tests.support.tools import tool
from tests.testbed.layout import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_VERSION: Final = "of-a-test"
_ELF_MACHINES: Final = {"amd64": 62, "arm64": 183}
"""Source: /usr/include/elf.h, EM_X86_64 and EM_AARCH64."""

_MACHINE: Final = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
_UID: Final = "5c1d6f0e-0b8e-4a38-9d0b-6a1f0c6f3b77"
_ACCEPT: Final = {"Accept": "application/vnd.oci.image.index.v1+json"}


@dataclass(frozen=True)
class _Built:
    """What a build printed, as paths."""

    archives: dict[str, Path]
    list_archive: Path


def _build(**variables: str) -> list[str]:
    env = {**os.environ, "VERSION": _VERSION, **variables}
    done = subprocess.run([ROOT / "tools" / "images.sh"], env=env, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def built() -> Iterator[_Built]:
    paths = [Path(line) for line in _build(REGISTRY="example.com")]
    yield _Built({arch: path for path in paths for arch in _ELF_MACHINES if arch in path.name}, paths[-1])
    for path in paths:
        path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def containers(built: _Built) -> Iterator[dict[str, Container]]:
    """The unpacked images by architecture."""
    with ExitStack() as stack:
        found = {arch: stack.enter_context(unpacked(archive)) for arch, archive in built.archives.items()}
        emulator = str(ROOT / "tools" / "emulate.sh")
        yield {
            arch: container if arch == _MACHINE else replace(container, prefix=(emulator, arch))
            for arch, container in found.items()
        }


def _elf_machine(path: Path) -> int:
    """The machine that a program or library is for; 0: it is neither."""
    with path.open("rb") as file:
        head = file.read(20)
    return int.from_bytes(head[18:20], "little") if head.startswith(b"\x7fELF") else 0


each_architecture = pytest.mark.parametrize("arch", _ELF_MACHINES)


def test_there_is_an_archive_of_each_architecture_and_a_manifest_list(built: _Built) -> None:
    assert {arch: path.name for arch, path in built.archives.items()} == {
        arch: f"node-agent-{_VERSION}-linux-{arch}.tar" for arch in _ELF_MACHINES
    }
    with tarfile.open(built.list_archive) as archive:

        def read(name: str) -> Any:
            member = archive.extractfile(name)
            assert member is not None
            return json.load(member)

        (top,) = read("index.json")["manifests"]
        images = read(f"blobs/{top['digest'].replace(':', '/')}")["manifests"]
    assert top["annotations"]["io.containerd.image.name"] == f"example.com/node-agent:{_VERSION}"
    assert [image["platform"] for image in images] == [{"architecture": arch, "os": "linux"} for arch in _ELF_MACHINES]


@each_architecture
def test_an_archive_has_the_tag_of_its_platform(built: _Built, arch: str) -> None:
    with tarfile.open(built.archives[arch]) as archive:
        member = archive.extractfile("manifest.json")
        assert member is not None
        assert json.load(member)[0]["RepoTags"] == [f"example.com/node-agent:{_VERSION}-linux-{arch}"]


@each_architecture
def test_all_programs_and_libraries_are_for_the_architecture(containers: dict[str, Container], arch: str) -> None:
    container = containers[arch]
    files = [path for path in container.root.rglob("*") if path.is_file() and not path.is_symlink()]
    machines = {path.name: machine for path in files if (machine := _elf_machine(path))}
    assert container.architecture == arch
    assert set(machines.values()) == {_ELF_MACHINES[arch]}
    assert {"python3.11", "kopia"} <= machines.keys()


@each_architecture
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("python", "-m", "nodeagent", "--version"), id="nodeagent"),
        pytest.param(
            ("python", "-c", "import nodeagent.app, datamover.pod.transfer, datamover.pod.storage_commands"),
            id="all-packages",
        ),
        pytest.param(("/velero", "node-agent", "server", "--help"), id="velero"),
        pytest.param(("python", "-m", "datamover", "--help"), id="datamover"),
        pytest.param(("kopia", "--version"), id="kopia"),
    ],
)
def test_programs_start(containers: dict[str, Container], arch: str, command: tuple[str, ...]) -> None:
    done = containers[arch].run(*command)
    assert (done.returncode, done.stderr) == (0, "")


@each_architecture
def test_the_restore_helper_ends_when_the_data_is_there(containers: dict[str, Container], arch: str) -> None:
    done_file = containers[arch].root / "restores" / "data" / ".velero" / _UID
    done_file.parent.mkdir(parents=True, exist_ok=True)
    done_file.touch()
    wrong, right = containers[arch].run("/velero-restore-helper"), containers[arch].run("/velero-restore-helper", _UID)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert right.returncode == 0, right.stderr
    assert right.stdout.splitlines()[:2] == [
        f"Found the done file /restores/data/.velero/{_UID}",
        "All PodVolumeRestores are done",
    ]


@each_architecture
def test_the_bill_of_materials_has_what_was_pinned_and_installed(containers: dict[str, Container], arch: str) -> None:
    env = {**os.environ, "VERSION": _VERSION, "BUILD_ARCH": arch}
    done = subprocess.run([ROOT / "tools" / "sbom.sh"], env=env, stdout=subprocess.PIPE, text=True, check=True)
    path = Path(done.stdout.strip())
    text = path.read_text()
    path.unlink()
    assert path.name == f"node-agent-{_VERSION}-linux-{arch}.cdx.json"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found: dict[str, dict[str, str]] = {"deb": {}, "pypi": {}, "golang": {}}
    for each in json.loads(text)["components"]:
        kind = each["purl"].removeprefix("pkg:").partition("/")[0]
        found[kind][f"{each['name']}=={each['version']}"] = each.get("hashes", [{"content": ""}])[0]["content"]
    pinned = (ROOT / "requirements.txt").read_text()
    assert sorted(found["pypi"]) == sorted(re.findall(r"(?m)^([a-z0-9-]+==[^ ]+) ", pinned))
    assert [name for name, digest in found["pypi"].items() if f"sha256:{digest}" not in pinned] == []
    installed = containers[arch].run("dpkg-query", "--show", "--showformat", "${Package}==${Version}\n")
    assert sorted(found["deb"]) == sorted(installed.stdout.splitlines())
    assert len(found["golang"]) > 100


def test_a_registry_gets_the_list_and_an_image_for_each_platform(built: _Built, tmp_path: Path) -> None:
    address = f"127.0.0.1:{(port := free_port())}"
    argv: list[str | Path] = [tool("crane", "crane"), "registry", "serve", "--address", address]
    with run_server(argv, {}, tmp_path / "registry", port):
        printed = _build(
            REGISTRY=f"{address}/project", BUILD_OUTPUT_TYPE="registry", INSECURE_REGISTRY="true", TAG_LATEST="true"
        )

        def read(tag: str) -> tuple[Any, str]:
            url = f"http://{address}/v2/project/node-agent/manifests/{tag}"
            with urllib.request.urlopen(urllib.request.Request(url, headers=_ACCEPT)) as answer:
                return json.load(answer), answer.headers["Docker-Content-Digest"]

        found = {tag: read(tag) for tag in (line.rpartition(":")[2] for line in printed)}
    tags = [_VERSION, "latest"]
    assert sorted(found) == sorted([*tags, *(f"{tag}-linux-{arch}" for tag in tags for arch in _ELF_MACHINES)])
    for tag in tags:
        digests = {each["platform"]["architecture"]: each["digest"] for each in found[tag][0]["manifests"]}
        assert digests == {arch: found[f"{tag}-linux-{arch}"][1] for arch in _ELF_MACHINES}

"""Archives of images: under other names, and of several architectures as one manifest list."""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.image.container import run_tool, tar_of

pytestmark = pytest.mark.processes

_ARCHES = ("amd64", "arm64")
_SHARED = b"a layer of both"


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _write(folder: Path, arch: str) -> Path:
    """An image of two layers, one of which is the same for every architecture."""
    layers = {"shared.tar": _SHARED, "own.tar": arch.encode()}
    config = {
        "architecture": arch,
        "os": "linux",
        "container_config": {"Image": "a field of Docker"},
        "config": {"User": "65532:65532"},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for layer in layers.values()]},
    }
    manifest = [{"Config": "config.json", "RepoTags": ["docker.io/library/old:dev"], "Layers": list(layers)}]
    files = {
        **layers,
        "config.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(manifest).encode(),
        "repositories": b'{"old": {"dev": "1"}}',
    }
    path = folder / f"{arch}.tar"
    path.write_bytes(tar_of(files))
    return path


def _read(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        members = {member.name: archive.extractfile(member) for member in archive}
        return {name: member.read() for name, member in members.items() if member is not None}


def _blob(files: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    content = files[f"blobs/{descriptor['digest'].replace(':', '/')}"]
    assert (_digest(content), len(content)) == (descriptor["digest"], descriptor["size"])
    return content


def test_an_archive_gets_other_names_and_keeps_its_content(tmp_path: Path) -> None:
    archive, output = _write(tmp_path, "amd64"), tmp_path / "out.tar"
    names = ["example.com/node-agent:v1-linux-amd64", "example.com/node-agent:latest-linux-amd64"]
    done = run_tool("archives.py", "rename", archive, output, *names)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    before, after = _read(archive), _read(output)
    assert json.loads(after.pop("manifest.json")) == [json.loads(before.pop("manifest.json"))[0] | {"RepoTags": names}]
    del before["repositories"]
    assert after == before


def test_a_manifest_list_has_the_images_of_all_archives(tmp_path: Path) -> None:
    archives = [_write(tmp_path, arch) for arch in _ARCHES]
    lists = []
    for output in (tmp_path / "list.tar", tmp_path / "again.tar"):
        done = run_tool("archives.py", "list", output, "example.com:5000/node-agent:v1", *archives)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        lists.append(_read(output))
    files, again = lists
    assert files == again
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (top,) = json.loads(files["index.json"])["manifests"]
    assert top["annotations"]["org.opencontainers.image.ref.name"] == "v1"
    described = json.loads(_blob(files, top))["manifests"]
    assert [each["platform"] for each in described] == [{"architecture": arch, "os": "linux"} for arch in _ARCHES]
    for arch, each in zip(_ARCHES, described, strict=True):
        manifest = json.loads(_blob(files, each))
        config = json.loads(_blob(files, manifest["config"]))
        layers = [gzip.decompress(_blob(files, layer)) for layer in manifest["layers"]]
        assert layers == [_SHARED, arch.encode()]
        assert config["rootfs"]["diff_ids"] == [_digest(layer) for layer in layers]
        assert (config["architecture"], config["config"], "container_config" in config) == (
            arch,
            {"User": "65532:65532"},
            False,
        )


def test_nothing_is_left_of_an_archive_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "broken.tar").write_bytes(b"no archive")
    done = run_tool("archives.py", "list", tmp_path / "out.tar", "node-agent:v1", tmp_path / "broken.tar")
    assert done.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["broken.tar"]


def test_the_size_is_that_of_all_files_by_what_they_belong_to(tmp_path: Path) -> None:
    files = {
        "./opt/venv/module.py": b"p" * 1_500_000,
        "usr/local/bin/kopia": b"k" * 3_000_000,
        "./etc/passwd": b"d" * 500_000,
        "usr/lib/python3.11/os.py": b"s" * 1_000_000,
    }
    archive = tmp_path / "image.tar"
    archive.write_bytes(tar_of({"manifest.json": b'[{"Layers": ["layer.tar"]}]', "layer.tar": tar_of(files)}))
    done = run_tool("archives.py", "size", archive)
    rows = {line[:24].strip(): line[24:].split()[0] for line in done.stdout.splitlines()[2:]}
    assert rows == {
        "node agent, data mover": "0.0",
        "Python packages": "1.5",
        "kopia": "3.0",
        "Python": "1.0",
        "Debian": "0.5",
        "all": "6.0",
    }


def test_a_wrong_command_line_prints_the_right_ones() -> None:
    for arguments in ((), ("list", "out.tar", "name"), ("rename", "in.tar", "out.tar"), ("push",)):
        done = run_tool("archives.py", *arguments)
        assert done.returncode == 2
        assert "tools/archives.py list OUTPUT NAME ARCHIVE" in done.stderr

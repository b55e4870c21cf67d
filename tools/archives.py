#!/usr/bin/env python3
"""Handles archives of images that were built before.

    tools/archives.py rename ARCHIVE OUTPUT NAME…      writes a docker-archive that is loaded as these names
    tools/archives.py list OUTPUT NAME ARCHIVE…        writes an OCI archive with the manifest list NAME of all archives
    tools/archives.py size ARCHIVE…                    prints what takes how much of an image, in MB, also compressed

An ARCHIVE is what `docker save` writes, of one image with uncompressed layers.
Source: https://github.com/moby/docker-image-spec/blob/main/v1.2.md and
https://github.com/opencontainers/image-spec/blob/v1.1.0/image-layout.md
"""

import gzip
import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

_OCI: Final = "application/vnd.oci.image"
_CONFIG_FIELDS: Final = ("architecture", "os", "variant", "created", "author", "config", "rootfs", "history")
_COMPRESSION_LEVEL: Final = 6

_PARTS: Final = {
    "node agent, data mover": ("opt/node-agent/",),
    "Python packages": ("opt/venv/",),
    "kopia": ("usr/local/bin/kopia",),
    "Python": ("usr/lib/python3", "usr/bin/python3"),
    "Debian": ("",),
}
"""What an image is made of, and where it is; the first that fits."""


def main(arguments: list[str]) -> int:
    """Write an archive; returns the exit code."""
    match arguments:
        case ["rename", archive, output, _, *_]:
            _rename(Path(archive), Path(output), arguments[3:])
        case ["list", output, name, _, *_]:
            _write_list(Path(output), name, [Path(archive) for archive in arguments[3:]])
        case ["size", _, *_]:
            for archive in arguments[1:]:
                _print_size(Path(archive))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def _rename(archive: Path, output: Path, names: list[str]) -> None:
    with tarfile.open(archive) as source, _complete(output) as part, tarfile.open(part, "w") as target:
        for member in source:
            if member.name == "manifest.json":
                manifest = json.load(_open(source, member.name))
                _add(target, member.name, json.dumps([manifest[0] | {"RepoTags": names}]).encode())
            elif member.name != "repositories":  # the names, for versions of Docker before 1.10
                target.addfile(member, source.extractfile(member) if member.isfile() else None)


def _write_list(output: Path, name: str, archives: list[Path]) -> None:
    with _complete(output) as part, tarfile.open(part, "w") as target:
        layout = _Layout(target, set())
        manifests = [layout.add_image(archive) for archive in archives]
        index = layout.add_json(f"{_OCI}.index.v1+json", {"manifests": manifests})
        index["annotations"] = {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        }
        top = {"schemaVersion": 2, "mediaType": f"{_OCI}.index.v1+json", "manifests": [index]}
        _add(target, "index.json", json.dumps(top).encode())
        _add(target, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')


@dataclass(frozen=True)
class _Layout:
    """An OCI image layout that is being written: the archive, and the digests of the blobs that it has."""

    target: tarfile.TarFile
    digests: set[str]

    def add_image(self, archive: Path) -> dict[str, Any]:
        """Add the image of a docker-archive; return its descriptor, which names its platform."""
        with tarfile.open(archive) as source:
            (manifest,) = json.load(_open(source, "manifest.json"))
            config = json.load(_open(source, manifest["Config"]))
            layers = [self._add_layer(_open(source, layer)) for layer in manifest["Layers"]]
        kept = {field: config[field] for field in _CONFIG_FIELDS if field in config}
        body = {"config": self._add_blob(f"{_OCI}.config.v1+json", _encode(kept)), "layers": layers}
        platform = {field: config[field] for field in ("architecture", "os") if field in config}
        return self.add_json(f"{_OCI}.manifest.v1+json", body) | {"platform": platform}

    def add_json(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Add a manifest or index; return its descriptor."""
        return self._add_blob(kind, _encode({"schemaVersion": 2, "mediaType": kind, **body}))

    def _add_layer(self, layer: IO[bytes]) -> dict[str, Any]:
        with tempfile.TemporaryFile() as compressed:
            # Without name and time the same layer has the same digest.
            with gzip.GzipFile("", "wb", _COMPRESSION_LEVEL, compressed, mtime=0) as stream:
                shutil.copyfileobj(layer, stream, 1 << 20)
            compressed.seek(0)
            return self._add_stream(f"{_OCI}.layer.v1.tar+gzip", compressed)

    def _add_blob(self, kind: str, content: bytes) -> dict[str, Any]:
        return self._add_stream(kind, io.BytesIO(content))

    def _add_stream(self, kind: str, stream: IO[bytes]) -> dict[str, Any]:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]  # any seekable stream
        size = stream.seek(0, io.SEEK_END)
        if digest not in self.digests:
            self.digests.add(digest)
            stream.seek(0)
            _add_stream(self.target, f"blobs/sha256/{digest}", stream, size)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}


def _print_size(archive: Path) -> None:
    sizes = {part: [0, 0] for part in _PARTS}
    with tarfile.open(archive) as source:
        (manifest,) = json.load(_open(source, "manifest.json"))
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=_open(source, layer)) as entries:
                for entry in entries:
                    name = entry.name.removeprefix("./")
                    part = next(part for part, paths in _PARTS.items() if name.startswith(paths))
                    content = _open(entries, entry.name).read() if entry.isreg() else b""
                    sizes[part][0] += len(content)
                    sizes[part][1] += len(gzip.compress(content, _COMPRESSION_LEVEL)) if content else 0
    print(f"{archive.name}\n{'':24}{'MB':>8}{'gzip':>8}")
    for part, found in {**sizes, "all": [sum(column) for column in zip(*sizes.values(), strict=True)]}.items():
        print(f"{part:24}{found[0] / 1e6:8.1f}{found[1] / 1e6:8.1f}")


def _encode(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _open(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    member = archive.extractfile(name)
    if member is None:
        raise ValueError(f"{name} of {archive.name!r} is no file")
    return member


def _add(target: tarfile.TarFile, name: str, content: bytes) -> None:
    _add_stream(target, name, io.BytesIO(content), len(content))


def _add_stream(target: tarfile.TarFile, name: str, stream: IO[bytes], size: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = size
    target.addfile(entry, stream)


@contextmanager
def _complete(output: Path) -> Iterator[Path]:
    """A path to write to, which becomes `output` if nothing fails."""
    part = output.with_name(f"{output.name}.part")
    try:
        yield part
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A repository with three snapshots as a set of blobs, to damage them one by one."""

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from tests.datamover.support.plainkopia import PlainKopia

Blobs: TypeAlias = MutableMapping[str, bytes]

_SUFFIX: Final = ".f"


@dataclass(frozen=True)
class _Place:
    """Where a content is: in this blob, from this byte on."""

    blob: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredSnapshots:
    """A repository with snapshots, by the names of what they are of: directories, and the device `device`.

    `folder` has both. `places` are the places of the directories' files as `one/own`, and of the directories as `one`.
    `indexes` are the blobs with the index of what each snapshot has added. `paths` are the paths of the `blobs`.
    """

    folder: Path
    blobs: Mapping[str, bytes]
    paths: Mapping[str, Path]
    ids: Mapping[str, str]
    places: Mapping[str, _Place]
    indexes: Mapping[str, str]

    @classmethod
    def make(cls, kopia: PlainKopia, repository: Path, folder: Path) -> "StoredSnapshots":
        """Back up two directories that have a file in common, and a device, into the repository."""
        _make_volumes(folder)
        ids, objects, indexes = dict[str, str](), dict[str, str](), dict[str, str]()
        before = set(_list_blobs(repository))
        for name in ("one", "two", "device"):
            flags = [f"--override-source=default@default:/{name}", "--json"]
            if name == "device":
                with (folder / name).open("rb") as content:
                    made = kopia.run("snapshot", "create", "/", "--stdin-file=device", *flags, stdin=content)
            else:
                made = kopia.run("snapshot", "create", str(folder / name), *flags)
            document = json.loads(made)
            ids[name], objects[name] = document["id"], document["rootEntry"]["obj"]
            after = set(_list_blobs(repository))
            (indexes[name],) = [blob for blob in after - before if blob.startswith("x")]
            before = after
        for name in ("one", "two"):
            entries = json.loads(kopia.run("show", objects[name]))["entries"]
            objects |= {f"{name}/{one['name']}": one["obj"] for one in entries}
        contents = {one["contentID"]: one for one in json.loads(kopia.run("content", "list", "--json"))}
        places = {
            name: _Place(found["packFile"], found.get("packOffset", 0), found["length"])
            for name, content in objects.items()
            if (found := contents.get(content))
        }
        paths = _list_blobs(repository)
        blobs = {blob: (repository / path).read_bytes() for blob, path in paths.items()}
        return cls(folder, blobs, paths, ids, places, indexes)

    def write(self, blobs: Mapping[str, bytes], directory: Path) -> None:
        """Write these blobs as a repository in a directory."""
        for blob, content in blobs.items():
            path = directory / self.paths[blob]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def flip(self, blobs: Blobs, content: str) -> None:
        """Flip a bit in the middle of a content."""
        place = self.places[content]
        flip(blobs, place.blob, place.start + place.length // 2)

    def pack(self, content: str) -> str:
        """Return the blob that a content is in."""
        return self.places[content].blob


def flip(blobs: Blobs, blob: str, at: int) -> None:
    """Flip a bit of a blob."""
    content = bytearray(blobs[blob])
    content[at] ^= 1
    blobs[blob] = bytes(content)


def swap(blobs: Blobs, one: str, other: str) -> None:
    """Exchange the contents of two blobs."""
    blobs[one], blobs[other] = blobs[other], blobs[one]


def _make_volumes(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
    shared = os.urandom(200_000)
    for name, content in (("own", os.urandom(200_000)), ("shared", shared), ("empty", b"")):
        (folder / "one" / name).write_bytes(content)
    for name, content in (("other", os.urandom(200_000)), ("shared", shared)):
        (folder / "two" / name).write_bytes(content)
    (folder / "one" / "link").symlink_to("own")
    (folder / "device").write_bytes(os.urandom(300_000))


def _list_blobs(repository: Path) -> dict[str, Path]:
    """Return the paths of all blobs, and of the file that says how they are arranged in folders."""
    files = [path.relative_to(repository) for path in repository.rglob("*") if path.is_file()]
    return {"".join(path.parts).removesuffix(_SUFFIX): path for path in files}

"""Unpacking what a tenant stored: nothing is written outside of the target, whatever the tar says."""

import errno
import io
import itertools
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from client.backups.unpack import Destination, Unpacker, UnpackError, choose_target
from core.snapshot_contract import FileEntry, FileType


@dataclass
class Tar:
    """A tar with any members."""

    members: list[tuple[tarfile.TarInfo, bytes]] = field(default_factory=list)

    def add(
        self, name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
    ) -> "Tar":
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.mode, info.size, info.mtime = kind, link, mode, len(data), 1_000_000_000
        self.members.append((info, data))
        return self

    def directory(self, name: str) -> "Tar":
        # As kopia writes it: the mode of Go has bits of the type.
        return self.add(name, kind=tarfile.DIRTYPE, mode=0o20000000755)

    def link(self, name: str, target: str) -> "Tar":
        return self.add(name, kind=tarfile.SYMTYPE, link=target, mode=0o1000000777)

    def stream(self) -> io.BytesIO:
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            for info, data in self.members:
                tar.addfile(info, io.BytesIO(data))
        content.seek(0)
        return content


@dataclass
class Place:
    """The target, a directory beside it that nothing may be written to, and what was refused."""

    root: Path
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def target(self) -> Path:
        return self.root / "target"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    def put(self, name: str) -> Path:
        """Store a file in the target."""
        self.target.mkdir(exist_ok=True)
        (self.target / name).write_bytes(b"old")
        return self.target / name

    def run(self, stream: io.BytesIO, *, overwrite: bool = False) -> Unpacker:
        unpacker = Unpacker(Destination(self.target), self.refused.__setitem__, overwrite=overwrite)
        unpacker.run(stream)
        return unpacker

    def unpack(self, tar: Tar, *, overwrite: bool = False) -> Unpacker:
        return self.run(tar.stream(), overwrite=overwrite)

    def tree(self) -> list[str]:
        return sorted(str(path.relative_to(self.target)) for path in self.target.rglob("*"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Nothing beside the target is changed, whatever is unpacked."""
    found = Place(tmp_path)
    found.outside.mkdir()
    (found.outside / "kept").write_bytes(b"kept")
    yield found
    assert {one.name: one.read_bytes() for one in found.outside.iterdir()} == {"kept": b"kept"}


def test_files_directories_and_links_arrive_with_their_modes_and_times(place: Place) -> None:
    tar = Tar().directory("d").add("d/run", b"#!", mode=0o40000755).link("d/up", "../a").add("\\", b"of Linux")
    data, odd = bytes(4 << 20) + b"end" + bytes(1 << 20), os.fsdecode(b"bad\xff")
    done = place.unpack(tar.add("a", b"content", mode=0o600).add("sparse", data).add(odd, b"1"))
    assert (place.tree(), place.refused, done.files) == (["\\", "a", odd, "d", "d/run", "d/up", "sparse"], {}, 6)
    assert done.size_bytes == len("#!of Linuxcontent1") + len(data)
    assert (place.target / "sparse").read_bytes() == data
    # Zeros become holes.
    assert (place.target / "sparse").stat().st_blocks * 512 < 1 << 20
    assert (place.target / "d/up").read_bytes() == b"content"
    assert (place.target / "d/run").stat().st_mode & 0o777 == 0o755
    assert (place.target / "a").stat().st_mode & 0o777 == 0o600
    assert (place.target / "a").stat().st_mtime == 1_000_000_000


_LONG = "n" * 300
_HOSTILE: dict[str, tuple[Callable[[Tar], Tar], str, str]] = {
    "absolute": (lambda tar: tar.add("/etc/x", b"1"), "/etc/x", "absolute path"),
    "dots": (lambda tar: tar.add("a/../../outside/x", b"1"), "a/../../outside/x", "leads out"),
    "dots-inside": (lambda tar: tar.add("d/../x", b"1"), "d/../x", "leads out"),
    "device": (lambda tar: tar.add("null", kind=tarfile.CHRTYPE), "null", "device"),
    "disk": (lambda tar: tar.add("sda", kind=tarfile.BLKTYPE), "sda", "device"),
    "pipe": (lambda tar: tar.add("p", kind=tarfile.FIFOTYPE), "p", "device or a pipe"),
    "hard-link": (lambda tar: tar.add("h", kind=tarfile.LNKTYPE, link="../outside/kept"), "h", "hard link"),
    "link-absolute": (lambda tar: tar.link("l", "/etc/passwd"), "l", "absolute path"),
    "link-out": (lambda tar: tar.link("l", "../outside"), "l", "leads out of the target"),
    "link-back": (lambda tar: tar.link("l", "./d/later/../../outside"), "l", "through a directory and back"),
    "no-directory": (lambda tar: tar.add("missing/x", b"1"), "missing/x", "directory was refused"),
    "huge-name": (lambda tar: tar.add("n" * 5000, b"1"), "n" * 5000, "File name too long"),
    "huge-directory": (lambda tar: tar.add(f"{_LONG}/x", b"1"), f"{_LONG}/x", "directory was refused: File name"),
    "huge-link": (lambda tar: tar.link("l", "n" * 5000), "l", "File name too long"),
    "long-path": (lambda tar: tar.add("/".join(["n" * 200] * 50), b"1"), "/".join(["n" * 200] * 50), ""),
}


@pytest.mark.parametrize("case", _HOSTILE)
def test_what_could_write_elsewhere_is_refused_by_name_and_the_rest_goes_on(place: Place, case: str) -> None:
    add, name, why = _HOSTILE[case]
    done = place.unpack(add(Tar().directory("d")).add("good", b"good"))
    assert why in place.refused[name]
    assert (done.refused, len(place.refused)) == (1, 1)
    assert place.tree() == ["d", "good"]


def test_nothing_is_written_through_a_link_of_the_tar_or_of_the_target(place: Place) -> None:
    place.target.mkdir()
    (place.target / "mine").symlink_to(place.outside)
    tar = Tar().directory("d").link("in", "d").add("in/x", b"1").add("mine/kept", b"2").directory("mine").add("good")
    place.unpack(tar, overwrite=True)
    assert place.refused.keys() == {"in/x", "mine/kept", "mine"}
    assert list((place.target / "d").iterdir()) == []


def test_a_link_cannot_be_led_out_by_one_that_comes_later(place: Place) -> None:
    place.unpack(Tar().link("0x", "a/b/../../outside").directory("a").link("a/b", "..").link("a/up", ".././/a/../c"))
    assert place.refused.keys() == {"0x", "a/up"}
    assert place.tree() == ["a", "a/b"]


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(place: Place) -> None:
    other = place.put("other")
    (place.target / "in").symlink_to("other")
    (place.target / "out").symlink_to(place.outside / "kept")
    place.unpack(Tar().add("in", b"new").add("out", b"new"), overwrite=True)
    assert place.refused == {"out": "it would be written outside of the target"}
    assert not (place.target / "in").is_symlink()
    assert other.read_bytes() == b"old"


def test_an_existing_file_stays_unless_overwritten_and_a_directory_is_none(place: Place) -> None:
    file = place.put("f")
    place.unpack(Tar().add("f", b"new"))
    assert (place.refused, file.read_bytes()) == ({"f": "it exists: --overwrite replaces it"}, b"old")
    place.unpack(Tar().add("f", b"new"), overwrite=True)
    assert file.read_bytes() == b"new"
    (place.target / "d").mkdir()
    place.unpack(Tar().add("d", b"1").directory("f"), overwrite=True)
    assert place.refused == {"d": "a directory of that name exists", "f": "a file of that name exists"}


def test_of_entries_with_one_name_each_is_in_its_place_or_refused(tmp_path: Path) -> None:
    cases = itertools.product(itertools.product("fld", repeat=3), " fd", (False, True))
    for case, (kinds, before, overwrite) in enumerate(cases):
        place = Place(tmp_path / str(case))
        place.target.mkdir(parents=True)
        if before != " ":
            place.put("a") if before == "f" else (place.target / "a").mkdir()
        tar = Tar()
        for number, kind in enumerate(kinds):
            if kind == "f":
                tar.add("a", str(number).encode())
            else:
                tar.directory("a") if kind == "d" else tar.link("a", str(number))
        done, there = place.unpack(tar, overwrite=overwrite), place.target / "a"
        merged = kinds.count("d") if there.is_dir() else 0
        assert done.files + merged + done.refused == len(kinds)
        content = str(there.readlink()) if there.is_symlink() else "" if there.is_dir() else there.read_text()
        first = next((str(at) for at, kind in enumerate(kinds) if kind != "d"), "")
        replaced = before == " " if not overwrite else before != "d"
        ours = replaced and first and not (before == " " and kinds[0] == "d")
        assert (done.files, content) == ((1, first) if ours else (0, "old" if before == "f" else ""))


def test_what_is_below_a_directory_that_was_refused_is_refused_too_and_the_rest_goes_on(place: Place) -> None:
    place.put("f")
    place.unpack(Tar().directory("f").directory("f/d").add("f/d/e/x", b"1").add("good", b"good"))
    assert place.refused.keys() == {"f", "f/d", "f/d/e/x"}
    assert place.refused["f/d/e/x"] == "its directory was refused: Not a directory"
    assert place.tree() == ["f", "good"]


@pytest.mark.parametrize("method", ["mkdir", "replace"])
def test_a_name_that_cannot_be_taken_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    original = getattr(Path, method)

    def refuse(self: Path, *args: Path, **options: bool) -> None:
        if "bad" in {self.name, *(path.name for path in args)}:
            raise OSError(errno.EILSEQ, os.strerror(errno.EILSEQ))
        original(self, *args, **options)

    monkeypatch.setattr(Path, method, refuse)
    tar = Tar().directory("bad") if method == "mkdir" else Tar().add("bad", b"1" * 9000)
    place.unpack(tar.add("good", b"good"))
    assert place.refused == {"bad": os.strerror(errno.EILSEQ)}
    assert place.tree() == ["good"]


def test_a_target_that_is_full_ends_the_copy(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UnpackError, match="No space left on device"):
        place.unpack(Tar().add("f", b"1"))
    assert place.tree() == []


def test_a_stream_that_ends_early_leaves_no_partial_file(place: Place) -> None:
    whole = Tar().add("first", b"1").add("second", bytes(range(256)) * 4096).stream().getvalue()
    with pytest.raises(UnpackError, match="not a complete tar"):
        place.run(io.BytesIO(whole[: len(whole) // 2]))
    assert place.tree() == ["first"]


@pytest.mark.parametrize("rest", [b"y" * 10_000, b"y" * 100, b""], ids=["invalid", "cut off", "missing"])
def test_a_stream_with_a_broken_header_is_not_complete(place: Place, rest: bytes) -> None:
    header = Tar().add("first").stream().getvalue()[: tarfile.BLOCKSIZE]
    with pytest.raises(UnpackError, match=r"not a complete tar: .* header"):
        place.run(io.BytesIO(header + rest))
    assert place.tree() == ["first"]


@pytest.mark.parametrize("kind", [FileType.FILE, FileType.DIRECTORY])
def test_the_destination_is_chosen_as_by_cp(tmp_path: Path, kind: FileType) -> None:
    """A volume, which has no name, goes into a directory under the name of its claim."""
    (tmp_path / "there").mkdir()
    for name, destination, expected in (("name", "there", "there/name"), ("name", "new", "new"), ("", "", "pvc")):
        target = choose_target(tmp_path / destination, FileEntry(name=name, type=kind), "pvc", overwrite=False)
        assert target.folder / target.name == tmp_path / expected


@pytest.mark.parametrize(
    ("entry", "destination", "message"),
    [
        (FileEntry(name="f", type=FileType.FILE), "file", "exists: --overwrite replaces it"),
        (FileEntry(name="d", type=FileType.DIRECTORY), "file", "is no directory"),
        (FileEntry(name="f", type=FileType.FILE), "missing/x", "missing is not a directory"),
        (FileEntry(name="sub", type=FileType.FILE), "", "sub is a directory"),
        (FileEntry(name="../x", type=FileType.FILE), "", "the name that was sent is none"),
    ],
)
def test_a_wrong_destination_is_an_error(tmp_path: Path, entry: FileEntry, destination: str, message: str) -> None:
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "sub").mkdir()
    with pytest.raises(UnpackError, match=message):
        choose_target(tmp_path / destination, entry, "pvc", overwrite=False)


def test_a_link_with_a_nul_and_a_time_that_no_file_has_are_refused_by_name(place: Place) -> None:
    tar = Tar().link("link", "a").add("late", b"x").add("good", b"y")
    tar.members[0][0].pax_headers = {"linkpath": "a\0b"}
    tar.members[1][0].pax_headers = {"mtime": "1e300"}
    place.unpack(tar)
    assert place.refused.keys() == {"link", "late"}
    assert place.tree() == ["good"]

"""Zeros become holes if the device supports them, and are written otherwise."""

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from datamover.data_path.block import HoleWriter, copy_stream
from datamover.runtime.cancellation import run_in_background

_PIECE = 64 * 1024


def _content(*pieces: str, tail: bytes = b"") -> bytes:
    """Return pieces of data `d` and of zeros `0`, each of the size of the smallest hole."""
    rng = random.Random(1)
    return b"".join(rng.randbytes(_PIECE) if one == "d" else bytes(_PIECE) for one in "".join(pieces)) + tail


def _old(path: Path, size: int) -> int:
    path.write_bytes(b"\xff" * size)
    return os.open(path, os.O_RDWR)


@pytest.mark.parametrize("holes", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        _content("d00d0", "0" * 40, "d"),
        _content("0" * 20),
        _content("d" * 20, tail=b"short"),
        _content("0d", tail=bytes(100)),
        b"\0" + b"x" * 10,
        b"",
    ],
    ids=["mixed", "zeros", "data with a short end", "a short hole at the end", "tiny", "nothing"],
)
def test_previous_data_of_the_device_is_overwritten(tmp_path: Path, content: bytes, holes: bool) -> None:
    size = len(content) + 5000
    fd = _old(tmp_path / "device", size)
    writer = HoleWriter(fd, holes=holes)
    for at in range(0, len(content), 16 * _PIECE):
        writer.write(memoryview(content)[at : at + 16 * _PIECE])
    assert writer.finish() == len(content)
    os.close(fd)
    assert (tmp_path / "device").read_bytes() == content + b"\xff" * 5000
    assert bool(writer.hole_bytes) is (holes and bytes(100) in content)


def test_kopia_never_waits_for_a_whole_hole(tmp_path: Path) -> None:
    """Zeros of some TiB that are written at once would take longer than a stall may."""
    writer, piece, waiting = HoleWriter(_old(tmp_path / "device", 1)), memoryview(bytes(1 << 20)), [0]
    for _ in range(520):
        writer.write(piece)
        waiting.append(writer.written_bytes)
    writer.close()
    assert max(now - before for before, now in pairwise(waiting)) == 256 << 20
    assert waiting[-1] == 512 << 20


def test_a_hole_that_is_rejected_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = _content("d000d0")
    fd = _old(tmp_path / "device", len(content))
    writer = HoleWriter(fd)

    def reject(*_: int) -> int:
        return -1

    monkeypatch.setattr(writer, "_fallocate", reject)
    writer.write(memoryview(content))
    assert writer.finish() == len(content)
    os.close(fd)
    assert (tmp_path / "device").read_bytes() == content
    assert writer.hole_bytes == 0


async def test_a_full_target_is_reported_and_the_writer_is_notified() -> None:
    ours, theirs = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    async with run_in_background(lambda stop: copy_stream(ours, HoleWriter(full), stop), name="copy") as copying:
        os.write(theirs, b"x" * 100)
        os.close(theirs)
        with pytest.raises(OSError, match="No space left on device"):
            await copying
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours)


@pytest.mark.parametrize("holes", [True, False])
def test_what_the_device_has_already_is_not_written_again(tmp_path: Path, holes: bool) -> None:
    content = _content("ddd0dd00", "d" * 20, tail=b"short")
    there = bytearray(content)
    # A byte in each of three pieces, one of them of zeros.
    for at in (_PIECE - 1, 3 * _PIECE, 20 * _PIECE + 5):
        there[at] ^= 0xFF
    (tmp_path / "device").write_bytes(there)
    fd = os.open(tmp_path / "device", os.O_RDWR)
    writer = HoleWriter(fd, holes=holes, compare=True)
    for at in range(0, len(content), 16 * _PIECE):
        writer.write(memoryview(content)[at : at + 16 * _PIECE])
    assert writer.finish() == len(content)
    os.close(fd)
    assert (tmp_path / "device").read_bytes() == content
    written = _PIECE * (2 if holes else 3)
    assert writer.kept_bytes + writer.hole_bytes == len(content) - written

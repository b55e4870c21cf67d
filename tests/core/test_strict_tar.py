"""Only the end marker ends a tar: what is broken in the middle is an error."""

import io
import tarfile

import pytest

from core.strict_tar import StrictTarInfo

_BLOCK = tarfile.BLOCKSIZE


def _tar(*names: str) -> bytes:
    """Return a tar of members with one block of data each."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = _BLOCK
            tar.addfile(info, io.BytesIO(b"x" * _BLOCK))
    return content.getvalue()


def _read(content: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r|", bufsize=_BLOCK, tarinfo=StrictTarInfo) as tar:
        return [member.name for member in tar]


@pytest.mark.parametrize("names", [(), ("a",), ("a", "n" * 300, "b")], ids=["empty", "one", "long name"])
def test_a_tar_is_read_to_its_end_marker(names: tuple[str, ...]) -> None:
    assert _read(_tar(*names)) == list(names)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (_tar("a")[: 2 * _BLOCK] + b"y" * 4 * _BLOCK + _tar("b"), "(bad checksum|invalid header) at byte 1024"),
        (_tar("a")[: 2 * _BLOCK] + _tar("b")[:100], "truncated header at byte 1024"),
        (_tar("a")[: 2 * _BLOCK], "empty header at byte 1024"),
        (_tar("n" * 300)[: 2 * _BLOCK] + bytes(4 * _BLOCK), "end of file header"),
        (b"", "empty header at byte 0"),
    ],
    ids=["invalid", "cut off", "missing", "after a long name", "nothing"],
)
def test_any_other_end_is_an_error(content: bytes, error: str) -> None:
    with pytest.raises(tarfile.ReadError, match=error):
        _read(content)

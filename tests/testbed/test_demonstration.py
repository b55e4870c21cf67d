"""The demonstration finds every difference, and reports progress as it was."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.testbed.demonstration import fill, survey
from tests.testbed.demonstration.compare import Survey, compare
from tests.testbed.demonstration.timeline import Timeline

pytestmark = pytest.mark.processes


def _survey(folder: Path, output: Path) -> Survey:
    survey.main(folder, output)
    described: Survey = json.loads(output.read_text())
    return described


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("content")
    (folder / "link").symlink_to("inner/file")
    return folder


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda v: (v / "inner" / "file").unlink(), "'inner/file' is missing"),
        (lambda v: (v / "more").touch(), "'more' was not there before"),
        (lambda v: (v / "inner" / "file").chmod(0o600), "'inner/file': mode was"),
        (lambda v: (v / "inner").chmod(0o700), "'inner': mode was"),
        (lambda v: os.utime(v / "inner" / "file", ns=(1, 1)), "'inner/file': mtime_ns was"),
        (lambda v: os.utime(v / "link", ns=(1, 5000), follow_symlinks=False), "'link': mtime_us was"),
        (lambda v: ((v / "link").unlink(), (v / "link").symlink_to("inner")), "'link': target was inner/file"),
        (lambda v: (v / "inner" / "file").write_text("CONTENT"), "'inner/file': content was"),
        (lambda v: (v / "inner" / "file").write_text("more content"), "'inner/file': size was 7, is 12"),
    ],
    ids=["missing", "new", "mode", "folder's mode", "time", "link's time", "link's target", "content", "size"],
)
def test_difference_is_found(volume: Path, tmp_path: Path, change: Callable[[Path], object], expected: str) -> None:
    before = _survey(volume, tmp_path / "before.json")
    change(volume)
    found = compare(before, _survey(volume, tmp_path / "after.json")).differences
    assert any(line.startswith(expected) for line in found), found


def test_same_volume_has_no_differences(volume: Path, tmp_path: Path) -> None:
    before = _survey(volume, tmp_path / "before.json")
    result = compare(before, _survey(volume, tmp_path / "after.json"))
    assert (result.files, result.folders, result.links, result.size_bytes) == (1, 2, 1, 7)
    assert result.differences == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_volume_is_filled_with_about_as_much_as_asked(tmp_path: Path) -> None:
    source, target = tmp_path / "usr", tmp_path / "volume"
    for folder in (source / "lib", target):
        folder.mkdir(parents=True)
    (source / "lib" / "file").write_bytes(b"x" * 300_000)
    fill.main(source, target, 5_000_000)
    size_bytes = sum(path.lstat().st_size for path in target.rglob("*") if path.is_file() and not path.is_symlink())
    assert size_bytes == pytest.approx(5_000_000, rel=0.02)
    assert (target / "sparse.img").stat().st_blocks * 512 < (target / "sparse.img").stat().st_size * 2
    assert (target / "trees" / "lib" / "file").exists()


def _version(phase: str, done: int = 0, total: int = 0) -> dict[str, object]:
    return {"status": {"phase": phase, "progress": {"bytesDone": done, "totalBytes": total}}}


def test_progress_has_rate_and_eta() -> None:
    timeline = Timeline()
    for seconds, version in enumerate(
        [
            {},
            _version("Accepted"),
            _version("InProgress"),
            _version("InProgress", 10 << 20, 100 << 20),
            _version("InProgress", 10 << 20, 100 << 20),
            _version("InProgress", 50 << 20, 100 << 20),
            _version("Completed", 100 << 20, 100 << 20),
        ]
    ):
        timeline.take(version, float(seconds))
    assert timeline.phases == [("New", 0.0), ("Accepted", 1.0), ("InProgress", 2.0), ("Completed", 6.0)]
    assert [reading.done_bytes for reading in timeline.readings] == [10 << 20, 50 << 20]
    assert timeline.readings[1].rate == (20 << 20)
    assert timeline.readings[1].eta_seconds == 2.5

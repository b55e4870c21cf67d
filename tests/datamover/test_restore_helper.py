"""The restore helper: what it waits for, prints and removes, and what it costs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datamover import restore_helper
from datamover.data_path.finished import take_done_file, write_done_file
from tests.datamover.support.loopdevice import fill, make_ext4, mounted_image

_UID = "5c1d6f0e-0b8e-4a38-9d0b-6a1f0c6f3b77"

_STARTED = """
import sys
sys.path.insert(0, sys.argv[1])
from datamover.restore_helper import main
sys.exit(main(sys.argv[3:], sys.argv[2]))
"""
"""Arguments: the folders of the project and of the volumes, then the helper's."""


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    """Two volumes, and a file beside them."""
    folder = tmp_path / "restores"
    for volume in ("data", "scratch"):
        (folder / volume).mkdir(parents=True)
    (folder / "file").touch()
    return folder


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """What happens during each wait, in this order; after the last one the helper must have ended."""
    steps: list[Callable[[], object]] = []
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(time, "sleep", lambda seconds: (seconds == 1 and steps.pop(0))())
    yield steps
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def started(volumes: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The helper as a process, with the options of the image, and the first line that it has printed."""
    argv = [sys.executable, "-ISuOO", "-c", _STARTED, str(Path(__file__).parents[2]), str(volumes), _UID]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.fixture
def restored(volumes: Path, waits: list[Callable[[], object]]) -> Path:
    """The volumes with a done file in each; the helper waits once."""
    for volume in ("data", "scratch"):
        write_done_file(volumes / volume, _UID, "transfer")
    waits.append(lambda: None)
    return volumes


@pytest.mark.parametrize("arguments", [[], [_UID, "another"]], ids=["none", "two"])
def test_any_other_number_of_arguments_ends_with_1(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert restore_helper.main(arguments) == 1
    assert capsys.readouterr() == ("", "ERROR: exactly one argument must be provided, the restore's UID\n")


def test_it_waits_for_the_done_file_in_each_volume_and_removes_it(
    volumes: Path, waits: list[Callable[[], object]], capsys: pytest.CaptureFixture[str]
) -> None:
    (volumes / "data" / "content").touch()
    waits += [
        lambda: None,
        lambda: write_done_file(volumes / "data", _UID, "transfer"),
        lambda: write_done_file(volumes / "scratch", "of-another-restore", "transfer"),
        lambda: write_done_file(volumes / "scratch", _UID, "transfer"),
    ]
    assert restore_helper.main([_UID], str(volumes)) == 0
    assert waits == []
    assert sorted(path.name for path in volumes.rglob("*")) == ["content", "data", "file", "scratch"]
    data, scratch = volumes / "data" / ".velero", volumes / "scratch" / ".velero"
    missing = f"The filesystem restore done file {scratch}/{_UID} is not found yet. Retry later.\n"
    skipped, found = "file is not a directory, skipping.\n", "Found the done file "
    assert capsys.readouterr() == (
        f"{skipped}The filesystem restore done file {data}/{_UID} is not found yet. Retry later.\n"
        + f"{skipped}{found}{data}/{_UID}\n{missing}" * 2
        + f"{skipped}{found}{data}/{_UID}\n{found}{scratch}/{_UID}\nAll PodVolumeRestores are done\n"
        + f"{skipped}Deleted {data}\nDeleted {scratch}\nDone cleanup .velero folder\n",
        "",
    )


def test_what_cannot_be_read_is_named(
    tmp_path: Path, waits: list[Callable[[], object]], capsys: pytest.CaptureFixture[str]
) -> None:
    volumes = tmp_path / "restores"
    done = volumes / "data" / ".velero"
    waits += [lambda: None, lambda: done.parent.mkdir(parents=True), done.touch, done.unlink]
    waits += [lambda: write_done_file(done.parent, _UID, "transfer")]
    assert restore_helper.main([_UID], str(volumes)) == 0
    assert capsys.readouterr().err == (
        f"ERROR reading {volumes} directory: {volumes}: No such file or directory\n"
        f"ERROR looking filesystem restore done file {done}/{_UID}: {done}/{_UID}: Not a directory\n"
    )


def test_links_are_removed_and_what_they_lead_to_stays(restored: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / _UID).touch()
    (restored / "data" / ".velero" / "folder").mkdir()
    (restored / "data" / ".velero" / "folder" / "link").symlink_to(kept)
    (restored / "scratch" / ".velero" / _UID).unlink()
    (restored / "scratch" / ".velero").rmdir()
    (restored / "scratch" / ".velero").symlink_to(kept)
    (restored / "elsewhere").symlink_to(kept)
    assert restore_helper.main([_UID], str(restored)) == 0
    assert sorted(path.name for path in restored.rglob("*")) == ["data", "elsewhere", "file", "scratch"]
    assert (kept / _UID).exists()


def test_a_done_file_that_cannot_be_removed_does_not_fail(
    restored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str, **_: object) -> None:
        raise PermissionError(1, "Operation not permitted", name)

    monkeypatch.setattr(os, "unlink", refuse)
    assert restore_helper.main([_UID], str(restored)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"{_UID}: Operation not permitted"
    assert "Done cleanup .velero folder" not in printed


@pytest.mark.processes
def test_a_full_volume_has_a_done_file_which_is_removed(tmp_path: Path, waits: list[Callable[[], object]]) -> None:
    image, volumes = tmp_path / "image", tmp_path / "restores"
    make_ext4(image, 1 << 20, "-m", "0")
    volumes.mkdir()
    waits.append(lambda: None)
    with mounted_image(image, volumes / "data") as volume:
        fill(volume / "full")
        before = sorted(path.name for path in volume.iterdir())
        for _ in range(2):
            write_done_file(volume, _UID, "transfer")
            assert (volume / ".velero" / _UID).stat().st_size == 0
        # Without room for the transfer's UID, another attempt writes all files again.
        assert not take_done_file(volume, _UID, "transfer")
        write_done_file(volume, _UID, "transfer")
        assert restore_helper.main([_UID], str(volumes)) == 0
        assert sorted(path.name for path in volume.iterdir()) == before


@pytest.mark.processes
def test_it_takes_little_memory_and_sigterm_ends_it_while_it_waits(started: tuple[subprocess.Popen[str], str]) -> None:
    """With an exit code of its own: a first process without a handler would not end at all."""
    process, line = started
    status = Path(f"/proc/{process.pid}/status").read_text()
    (peak_kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
    assert peak_kib < 15 * 1024
    assert line == "file is not a directory, skipping.\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert process.stderr is not None
    assert process.stderr.read() == ""

"""What a confined child can open, by each means and without any."""

import errno
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import DataPathError
from datamover.runtime.child import ChildCommand, run_child
from datamover.runtime.confinement import Bounds, Means, confine, find_means, report_means
from tests.datamover.support.confining import MEANS, try_in_child
from tests.datamover.support.mounts import need_root
from tests.support.seccomp import CHROOT, LANDLOCK, MOUNTS, deny

_ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("means", "description"),
    [
        (Means(abi=3), "Landlock ABI 3"),
        (Means(abi=3, chroot=True), "Landlock ABI 3"),
        (Means(abi=3, chroot=True, mounts=True), "Landlock ABI 3 and a chroot jail"),
        (Means(missing="x", chroot=True), "a chroot jail"),
        (Means(missing="x", chroot=True, mounts=True), "a chroot jail"),
        (Means(missing="x"), None),
    ],
)
def test_the_means_in_force_are_named(means: Means, description: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert means.description == description
    report_means(means)
    if description:
        assert caplog.messages == [f"kopia is confined to its volume by {description}"]
    else:
        assert caplog.messages == ["kopia cannot be confined to its volume: no Landlock (x), and no chroot"]


def test_without_means_root_fails_and_a_user_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Means(missing="Function not implemented")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    message = r"^cannot confine kopia to its volume: no Landlock \(Function not implemented\), and no chroot: "
    with pytest.raises(DataPathError, match=message), confine(Path("/bin/true"), Bounds(), nothing, tmp_path):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with confine(Path("/bin/true"), Bounds(), nothing, tmp_path) as confinement:
        assert confinement is None


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (tmp_path / "volume").mkdir()
    return tmp_path / "volume"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.mark.processes
@pytest.mark.parametrize("name", list(MEANS))
def test_a_child_that_need_not_flush_leaves_it_out_by_any_means(name: str, volume: Path, home: Path) -> None:
    bounds = Bounds(volume, read=(volume,), write=(home,), flushes=False)
    with confine(Path("/bin/true"), bounds, MEANS[name](), home) as confinement:
        assert confinement is not None
        assert [step for step, _ in confinement.steps][-1] == "seccomp"
        assert "no_new_privs" in [step for step, _ in confinement.steps]
        assert try_in_child(confinement.steps, [(home / "new").touch]) == [""]


@pytest.mark.processes
@pytest.mark.parametrize("name", list(MEANS))
async def test_a_confined_program_leaves_nothing(name: str, kopia_program: Path, volume: Path, home: Path) -> None:
    for _ in range(2):
        with confine(kopia_program, Bounds(volume, read=(volume,), write=(home,)), MEANS[name](), home) as confinement:
            command = ChildCommand([str(kopia_program), "--version"], {"HOME": str(home)}, confinement=confinement)
            end = await run_child(command, print)
        assert (end.exit_code, end.output[:6]) == (0, b"0.23.1")
    assert list(home.iterdir()) == list(volume.iterdir()) == []


@pytest.mark.processes
async def test_a_child_that_cannot_be_confined_ends_with_the_reason(kopia_program: Path, tmp_path: Path) -> None:
    need_root("jails")
    gone = tmp_path / "gone"
    gone.mkdir()
    means = Means(missing="x", mounts=True)
    lines: list[str] = []
    with confine(kopia_program, Bounds(read=(gone,)), means, tmp_path) as confinement:
        gone.rmdir()
        command = ChildCommand([str(kopia_program), "--version"], {}, confinement=confinement)
        end = await run_child(command, lines.append)
    assert (end.exit_code, end.output) == (126, b"")
    assert lines == [f"cannot confine mount {gone}: No such file or directory"]


@pytest.mark.processes
def test_no_device_can_be_opened_in_a_jail_and_nothing_written_where_it_may_only_read(volume: Path, home: Path) -> None:
    """A tenant may have device nodes in the volume, and a privileged mover has no other barrier."""
    need_root("jails")
    for folder in (volume, home):
        os.mknod(folder / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    (volume / "file").touch()
    read: list[Callable[[], object]] = [(volume / "zero").open, (home / "zero").open, (volume / "file").open]
    written: list[Callable[[], object]] = [(volume / "new").touch, (home / "new").touch]
    bounds = Bounds(volume, read=(volume,), write=(home,))
    with confine(Path("/bin/true"), bounds, Means(missing="x", mounts=True), home) as confinement:
        assert confinement is not None
        assert try_in_child(confinement.steps, [*read, *written]) == ["EACCES", "EACCES", "", "EROFS", ""]


_FIND = "from datamover.runtime.confinement import find_means; print(find_means())"


def _found(numbers: tuple[int, ...], error: int = errno.ENOSYS) -> str:
    command = [sys.executable, "-c", _FIND]
    return subprocess.run(
        command, cwd=_ROOT, preexec_fn=deny(numbers, error), stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


@pytest.mark.processes
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM], ids=errno.errorcode.get)
def test_a_kernel_without_landlock_leaves_the_jail(error: int) -> None:
    """As an old kernel and as a seccomp profile that does not know Landlock."""
    need_root("jails")
    mounts = find_means().mounts
    assert _found(LANDLOCK, error) == repr(Means(None, os.strerror(error), mounts=mounts, chroot=True))
    assert _found((*LANDLOCK, *MOUNTS), error) == repr(Means(None, os.strerror(error), mounts=False, chroot=True))
    assert _found((*LANDLOCK, *MOUNTS, *CHROOT), error) == repr(Means(None, os.strerror(error)))

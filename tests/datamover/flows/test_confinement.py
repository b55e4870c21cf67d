"""Whatever a tenant does to a volume, kopia and the mover neither read nor write anything outside of it."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from core.contract import VolumeMode
from core.errors import DataPathError
from datamover.data_path.backup import BackupParameters, back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.kopia.private_run import VolumeAccess
from datamover.kopia.process import KopiaFiles
from datamover.kopia.repository import Repository
from datamover.runtime.confinement import Means
from datamover.storage.providers import FileStorage
from tests.datamover.support.attacks import IN_CREATE, Swap, describe, swapping
from tests.datamover.support.confining import MEANS, use_means
from tests.datamover.support.data_paths import backup_data_path, restore_data_path
from tests.datamover.support.mounts import mounted, need_root
from tests.datamover.support.plainkopia import PASSWORD, PlainKopia
from tests.datamover.support.repositories import opened
from tests.datamover.support.seccomp import CHROOT, LANDLOCK, MOUNTS, deny
from tests.datamover.support.unconfined import leave_unconfined

pytestmark = pytest.mark.processes

_ROUNDS = int(os.environ.get("ATTACK_ROUNDS", "2"))
_FILES = 1000
_NAMES = [f"secret{number}" for number in range(50)]


@pytest.fixture(params=list(MEANS))
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Means:
    return use_means(request.param, monkeypatch)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "OUT"
    folder.mkdir(mode=0o750)
    (folder / "sync").write_text("a program of the system")
    os.utime(folder, ns=(1_000_000_000, 1_000_000_000))
    return folder


async def _snapshot(repository: Repository, volume: Path) -> str:
    parameters = BackupParameters(volume, VolumeMode.FILESYSTEM, "some/volume", parallel=2)
    return (await back_up(repository, parameters, backup_data_path())).snapshot_id


async def _restore(repository: Repository, snapshot_id: str, target: Path) -> bool:
    """Return whether the restore succeeded."""
    parameters = RestoreParameters(snapshot_id, target, VolumeMode.FILESYSTEM, workers=2)
    try:
        await restore(repository, parameters, restore_data_path())
    except DataPathError:
        return False
    return True


def _make(volume: Path, kind: str) -> Path:
    """Create a directory or file `a` with unusual attributes, and return it."""
    volume.mkdir()
    path = volume / "a"
    if kind == "file":
        path.write_text("content of the tenant")
    else:
        path.mkdir()
    if kind == "full":
        (path / "sync").write_text("a program of the tenant")
        (path / "sync").chmod(0o755)
    path.chmod(0o711)
    os.utime(path, ns=(2_000_000_000, 2_000_000_000))
    return path


_LINKS: dict[str, Callable[[Path], str]] = {
    "absolute": str,
    "relative": lambda out: f"../{out.name}",
    "dangling": lambda out: str(out / "missing"),
    "to a file": lambda out: str(out / "sync"),
}


@pytest.mark.parametrize("kind", ["full", "empty", "file"])
@pytest.mark.parametrize("link", list(_LINKS))
async def test_a_restore_replaces_a_link_out_of_the_target(
    mover_repository: Repository, tmp_path: Path, outside: Path, link: str, kind: str
) -> None:
    path = _make(tmp_path / "volume", kind)
    snapshot_id = await _snapshot(mover_repository, path.parent)
    path.rename(tmp_path / "away")
    path.symlink_to(_LINKS[link](outside))
    before = describe(outside)
    assert await _restore(mover_repository, snapshot_id, path.parent)
    assert describe(outside) == before
    assert not path.is_symlink()
    assert path.is_file() if kind == "file" else path.is_dir()


@pytest.mark.parametrize("kind", ["full", "empty", "file"])
async def test_a_link_that_is_not_found_in_time_is_not_followed(
    means: Means, mover_repository: Repository, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had been created right after the check; without a jail, mounts outside are read-only as in a pod."""
    monkeypatch.setattr("datamover.data_path.restore.remove_links", lambda *_: None)
    path = _make(tmp_path / "volume", kind)
    snapshot_id = await _snapshot(mover_repository, path.parent)
    path.rename(tmp_path / "away")
    with mounted(tmp_path / "OUT", "mode=750") as outside:
        (outside / "sync").write_text("a program of the system")
        if not means.jailed:
            subprocess.run(["mount", "-o", "remount,ro", outside], check=True)
        path.symlink_to(outside / "sync" if kind == "file" else outside)
        before = describe(outside)
        assert not await _restore(mover_repository, snapshot_id, path.parent)
        assert describe(outside) == before


@pytest.mark.parametrize("kind", ["full", "empty"])
async def test_a_link_that_is_swapped_in_during_a_restore_is_not_followed(
    means: Means, mover_repository: Repository, tmp_path: Path, kind: str
) -> None:
    path = _make(tmp_path / "volume", kind)
    for number in range(300 if kind == "full" else 0):
        (path / f"f{number}").write_text("of the tenant")
    snapshot_id = await _snapshot(mover_repository, path.parent)
    with mounted(tmp_path / "OUT", "mode=750") as outside:
        (outside / "sync").write_text("a program of the system")
        if not means.jailed:
            subprocess.run(["mount", "-o", "remount,ro", outside], check=True)
        before = describe(outside)
        for number in range(_ROUNDS):
            target = tmp_path / f"target-{number}"
            target.mkdir()
            with swapping(Swap(target / "a", outside, target, IN_CREATE, ignored=0)):
                succeeded = await _restore(mover_repository, snapshot_id, target)
            assert describe(outside) == before
            assert not succeeded or not (target / "a").is_symlink()


@pytest.mark.parametrize("kind", ["full", "file"])
async def test_a_link_to_the_repository_is_not_followed_by_a_restore(means: Means, tmp_path: Path, kind: str) -> None:
    """As if it had been created right after the check; kopia needs no access to write there."""
    storage, path = FileStorage(tmp_path / "r"), _make(tmp_path / "volume", kind)
    with opened(storage) as repository:
        await repository.ensure()
        snapshot_id = await _snapshot(repository, path.parent)
    path.rename(tmp_path / "away")
    path.symlink_to(storage.path / "kopia.repository.f" if kind == "file" else storage.path)
    before = {file: file.read_bytes() for file in storage.path.rglob("*") if file.is_file()}
    with opened(storage) as repository:
        await repository.connect(read_only=True)
        arguments = ("restore", snapshot_id, str(path.parent), "--mode=local")
        files = KopiaFiles(volume=VolumeAccess(path.parent, writable=True))
        answer = await restore_data_path().run(repository.kopia, "restore", *arguments, files=files)
    assert not answer.succeeded
    assert {file: file.read_bytes() for file in storage.path.rglob("*") if file.is_file()} == before


async def test_links_within_the_volume_are_kept(
    means: Means, mover_repository: Repository, tmp_path: Path, outside: Path
) -> None:
    volume = tmp_path / "volume"
    _make(volume, "full")
    for name, target in {"inner": "a", "outer": str(outside), "up": "../OUT"}.items():
        (volume / name).symlink_to(target)
    snapshot_id = await _snapshot(mover_repository, volume)
    for _ in range(2):
        assert await _restore(mover_repository, snapshot_id, tmp_path / "target")
        found = {path.name: str(path.readlink()) for path in (tmp_path / "target").iterdir() if path.is_symlink()}
        assert found == {"inner": "a", "outer": str(outside), "up": "../OUT"}


async def test_a_sync_that_is_first_on_the_path_is_not_run(
    mover_repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_id = await _snapshot(mover_repository, _make(tmp_path / "volume", "full").parent)
    program = tmp_path / "bin" / "sync"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert await _restore(mover_repository, snapshot_id, tmp_path / "target")
    assert not (tmp_path / "was-run").exists()


def _fill(volume: Path, names: list[str]) -> Path:
    """Create a directory with many files, some of them with these names; each contains its name."""
    folder = volume / "P"
    folder.mkdir(parents=True)
    for name in [*(f"f{number:04}" for number in range(_FILES)), *names]:
        (folder / name).write_text(name)
    return folder


@dataclass(frozen=True)
class _Attack:
    """Backups during which a directory is exchanged for a link to `target`, where files of these names are wanted."""

    folder: Path
    repository: Path
    kopia: PlainKopia
    target: Path
    names: list[str]

    async def run(self, number: int) -> list[bytes]:
        """Return the contents of files in a backup other than those of the volume."""
        volume, restored = (self.folder / f"{name}-{number}" for name in ("volume", "restored"))
        folder = _fill(volume, self.names)
        with opened(FileStorage(self.repository)) as mover:
            target = self.target if self.target.is_absolute() else mover._work_dir.path
            with swapping(Swap(folder, target, folder)):
                try:
                    snapshot_id = await _snapshot(mover, volume)
                except DataPathError:
                    return []
        self.kopia.run("restore", snapshot_id, str(restored))
        files = (path for path in (restored / "P").glob("*") if path.is_file() and not path.is_symlink())
        return [content for path in files if (content := path.read_bytes()) != path.name.encode()]


@pytest.fixture
def attack(repository: Path, kopia: PlainKopia, tmp_path: Path, outside: Path) -> _Attack:
    for name in _NAMES:
        (outside / name).write_text("a secret of another tenant")
    return _Attack(tmp_path, repository, kopia, outside, _NAMES)


_TARGETS: dict[str, tuple[str, list[str]]] = {
    "/proc/self": ("/proc/self", ["environ", "cmdline", "maps", "status"]),
    # Not 1 and 2: kopia would wait for its own output.
    "/proc/self/fd": ("/proc/self/fd", ["0", *map(str, range(3, 40))]),
    "configuration": (".", ["repository.config", "repository.config.kopia-password", "probe.config"]),
}


async def test_a_directory_that_is_swapped_during_a_backup_brings_nothing_from_outside(
    means: Means, attack: _Attack
) -> None:
    for number in range(_ROUNDS):
        assert await attack.run(number) == []


@pytest.mark.parametrize("name", list(_TARGETS))
async def test_a_directory_that_is_swapped_during_a_backup_brings_no_secret(
    means: Means, attack: _Attack, name: str
) -> None:
    """Through /proc/self/fd, Landlock alone permits kopia its own pipes, and its cache, which is encrypted."""
    target, names = _TARGETS[name]
    for number in range(_ROUNDS):
        found = await replace(attack, target=Path(target), names=names).run(number)
        assert found == [] or name == "/proc/self/fd"
        assert not any(secret in content for content in found for secret in (PASSWORD.encode(), b"KOPIA_", b"storage"))


async def test_the_attack_succeeds_without_confinement(attack: _Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would show nothing."""
    leave_unconfined(monkeypatch)
    leaks = [bool(await attack.run(number)) for number in range(_ROUNDS)]
    assert sum(leaks) >= _ROUNDS * 3 // 4


async def test_no_secret_can_be_opened_while_kopia_walks_a_volume(repository: Path, tmp_path: Path) -> None:
    """Its environment has none, and the files of its run are gone before it reads the volume."""
    seen: list[bytes] = []
    volume = tmp_path / "volume"
    _fill(volume, [])
    with opened(FileStorage(repository)) as mover:
        work = mover._work_dir.path

        def on_line(line: str) -> str:
            if line.startswith("starting "):
                # Of its metrics, before it reads password and configuration.
                return line
            seen.extend(bytes(file) for file in work.glob("kopia-run-*/*") if not file.is_dir())
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    if process.joinpath("comm").read_text() == "kopia\n" and os.fsencode(work) in (
                        environment := process.joinpath("environ").read_bytes()
                    ):
                        seen.append(environment)
            return line

        data_path = backup_data_path()
        data_path.take_progress = on_line  # type: ignore[method-assign]
        parameters = BackupParameters(volume, VolumeMode.FILESYSTEM, "some/volume", parallel=2)
        await back_up(mover, parameters, data_path)
    assert any(b"KOPIA_CONFIG_PATH" in one for one in seen)
    assert not any(PASSWORD.encode() in one or b"repository.config.kopia" in one for one in seen)


def _run(deny_before_exec: Callable[[], None], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "datamover", *arguments, "--json", "--log-level=info"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "KOPIA_PASSWORD": PASSWORD},
        preexec_fn=deny_before_exec,
        capture_output=True,
        text=True,
        check=False,
    )


def test_by_hand_on_a_kernel_without_landlock_a_jail_is_in_force(
    repository: Path, tmp_path: Path, outside: Path
) -> None:
    need_root("jails")
    path = _make(tmp_path / "volume", "full")
    there = f"--repository={repository}"
    backup = _run(deny(LANDLOCK), "backup", f"--source={path.parent}", there)
    assert "kopia is confined to its volume by a chroot jail" in backup.stderr.splitlines()[0]
    path.rename(tmp_path / "away")
    path.symlink_to(outside)
    before = describe(outside)
    snapshot = f"--snapshot={json.loads(backup.stdout)['snapshotID']}"
    restored = _run(deny(LANDLOCK), "restore", snapshot, f"--target={path.parent}", there)
    assert restored.returncode == 0, restored.stderr
    assert "replaced 1 links in the target by what the kopia snapshot has there, for example a" in restored.stderr
    assert describe(outside) == before
    assert (path / "sync").read_text() == "a program of the tenant"


def test_by_hand_root_without_any_means_fails_with_the_reason(repository: Path, tmp_path: Path) -> None:
    need_root("this")
    path = _make(tmp_path / "volume", "full")
    nothing = deny((*LANDLOCK, *MOUNTS, *CHROOT), errno.EPERM)
    failed = _run(nothing, "backup", f"--source={path.parent}", f"--repository={repository}")
    assert failed.returncode == DataPathError.exit_code
    assert "kopia cannot be confined to its volume: no Landlock (Operation not permitted)" in failed.stderr
    assert "error: cannot confine kopia to its volume: no Landlock (Operation not permitted)" in failed.stderr

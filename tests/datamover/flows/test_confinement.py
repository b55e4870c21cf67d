"""Whatever a tenant does to a volume, kopia and the mover neither read nor write anything outside of it."""

import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from core.contract import MoverMethod
from core.errors import DataPathError
from datamover.kopia.private_run import VolumeAccess
from datamover.kopia.process import KopiaFiles
from datamover.kopia.repository import Repository
from datamover.runtime.confinement import Means
from datamover.storage.providers import FileStorage, Storage
from datamover.storage.s3 import AwsRole, S3Storage
from tests.datamover.support.attack_matrix import UNCONFINED, record_rate
from tests.datamover.support.confining import MEANS, use_means
from tests.datamover.support.data_paths import back_up_volume, backup_data_path, restore_data_path, restore_volume
from tests.datamover.support.identities import serve_role
from tests.datamover.support.mounts import mounted
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.repositories import opened
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.trees import describe_tree
from tests.datamover.support.unconfined import leave_unconfined
from tests.support.attacks import IN_CREATE, Swap, describe, swapping

pytestmark = pytest.mark.processes

_MATRIX = "ATTACK_ROUNDS" in os.environ
_ROUNDS = int(os.environ.get("ATTACK_ROUNDS", "2"))
_CONTROL_ROUNDS = _ROUNDS if _MATRIX else 10
"""Without confinement; outside of the matrix they end with the first that succeeds."""
_FILES = 1000
_NAMES = [f"secret{number}" for number in range(50)]


@pytest.fixture(params=list(MEANS))
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Means:
    return use_means(request.param, monkeypatch)


@dataclass(frozen=True)
class _Trial:
    """An attack in several rounds, and what confines kopia meanwhile, if anything."""

    means: str
    jailed: bool
    record_property: Callable[[str, object], None]

    @property
    def confined(self) -> bool:
        return self.means != UNCONFINED

    async def run(self, attack: str, attempt: Callable[[int], Awaitable[bool]]) -> None:
        """Check that no attempt succeeds, or, without confinement, that in the matrix three of four do, else one."""
        leaks: list[bool] = []
        for number in range(_ROUNDS if self.confined else _CONTROL_ROUNDS):
            leaks.append(await attempt(number))
            if any(leaks) and not _MATRIX:
                break
        record_rate(self.record_property, attack, self.means, leaks)
        if self.confined:
            assert not any(leaks)
        else:
            assert sum(leaks) * 4 >= len(leaks) * 3 if _MATRIX else any(leaks)


@pytest.fixture(params=[*MEANS, UNCONFINED])
def trial(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> _Trial:
    """Each means of confinement, and none: an attack that fails without it would show nothing."""
    if request.param == UNCONFINED:
        leave_unconfined(monkeypatch)
        return _Trial(request.param, jailed=False, record_property=record_property)
    return _Trial(request.param, use_means(request.param, monkeypatch).jailed, record_property)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "OUT"
    folder.mkdir(mode=0o750)
    (folder / "sync").write_text("a program of the system")
    os.utime(folder, ns=(1_000_000_000, 1_000_000_000))
    return folder


async def _snapshot(repository: Repository, volume: Path) -> str:
    return (await back_up_volume(repository, volume)).snapshot_id


async def _restore(
    repository: Repository, snapshot_id: str, target: Path, method: MoverMethod = MoverMethod.PLAIN
) -> bool:
    """Return whether the restore succeeded."""
    try:
        await restore_volume(repository, snapshot_id, target, mover=method)
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


_KINDS = {"full": "a folder", "empty": "an empty folder", "file": "a file"}


@contextmanager
def _mounted_outside(tmp_path: Path, trial: _Trial) -> Iterator[Path]:
    """A file system outside of the volume; where only Landlock confines kopia, it is read-only as in a pod."""
    with mounted(tmp_path / "OUT", "mode=750") as outside:
        (outside / "sync").write_text("a program of the system")
        os.utime(outside, ns=(1_000_000_000, 1_000_000_000))
        if trial.confined and not trial.jailed:
            subprocess.run(["mount", "-o", "remount,ro", outside], check=True)
        yield outside
    outside.rmdir()


_LINKS: dict[str, Callable[[Path], str]] = {
    "absolute": str,
    "relative": lambda out: f"../{out.name}",
    "dangling": lambda out: str(out / "missing"),
    "to a file": lambda out: str(out / "sync"),
}


@pytest.mark.sample("absolute-full", "dangling-file")
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


@pytest.mark.sample("landlock-file", "jail-empty", "none-full")
@pytest.mark.parametrize("kind", ["full", "empty", "file"])
async def test_a_link_that_is_not_found_in_time_is_not_followed(
    trial: _Trial, mover_repository: Repository, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had been created right after the check."""
    monkeypatch.setattr("datamover.data_path.restore.remove_links", lambda *_: None)
    path = _make(tmp_path / "volume", kind)
    snapshot_id = await _snapshot(mover_repository, path.parent)
    path.rename(tmp_path / "away")

    async def attempt(number: int) -> bool:
        target = tmp_path / f"target-{number}"
        target.mkdir()
        with _mounted_outside(tmp_path, trial) as outside:
            (target / "a").symlink_to(outside / "sync" if kind == "file" else outside)
            before = describe(outside)
            assert not await _restore(mover_repository, snapshot_id, target)
            return describe(outside) != before

    await trial.run(f"restore: link in the place of {_KINDS[kind]}", attempt)


@pytest.mark.sample("default-full-plain", "default-full-one-open", "none-full-one-open")
@pytest.mark.parametrize("method", list(MoverMethod), ids=str)
@pytest.mark.parametrize("kind", ["full", "empty"])
async def test_a_link_that_is_swapped_in_during_a_restore_is_not_followed(
    trial: _Trial, mover_repository: Repository, tmp_path: Path, kind: str, method: MoverMethod
) -> None:
    path = _make(tmp_path / "volume", kind)
    for number in range(300):
        if kind == "full":
            (path / f"f{number}").write_text("of the tenant")
        else:
            # There is little time between the creation of one and the change of its mode.
            (path.parent / f"a{number}").mkdir()
    snapshot_id = await _snapshot(mover_repository, path.parent)

    async def attempt(number: int) -> bool:
        target = tmp_path / f"target-{number}"
        target.mkdir()
        with _mounted_outside(tmp_path, trial) as outside:
            before = describe(outside)
            with swapping(Swap(target / "a" if kind == "full" else None, outside, target, IN_CREATE, ignored=0)):
                succeeded = await _restore(mover_repository, snapshot_id, target, method)
            # On a busy machine one may come late: what kopia has restored before is whole.
            late = [one.name for one in target.iterdir() if one.is_symlink()] if succeeded else []
            assert all(describe_tree(target / f"{one}.away") == describe_tree(path.parent / one) for one in late)
            return describe(outside) != before

    await trial.run(f"restore ({method}): {_KINDS[kind]} exchanged for a link meanwhile", attempt)


@pytest.mark.sample("landlock-full", "jail-file")
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
    storage: Storage
    target: Path
    names: list[str]

    async def run(self, number: int) -> list[bytes]:
        """Return the contents of files in a backup that are not the volume's."""
        volume, restored = (self.folder / f"{name}-{number}" for name in ("volume", "restored"))
        folder = _fill(volume, self.names)
        with opened(self.storage) as mover:
            target = self.target if self.target.is_absolute() else mover.work_dir.path
            with swapping(Swap(folder, target, folder)):
                try:
                    snapshot_id = await _snapshot(mover, volume)
                except DataPathError:
                    return []
            assert await _restore(mover, snapshot_id, restored)
        files = (path for path in (restored / "P").glob("*") if path.is_file() and not path.is_symlink())
        return [content for path in files if (content := path.read_bytes()) != path.name.encode()]

    async def leaks(self, number: int) -> bool:
        """Return whether there are such files."""
        return bool(await self.run(number))


@pytest.fixture
def attack(repository: Path, tmp_path: Path, outside: Path) -> _Attack:
    for name in _NAMES:
        (outside / name).write_text("a secret of another tenant")
    return _Attack(tmp_path, FileStorage(repository), outside, _NAMES)


@pytest.fixture
async def role_storage(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[S3Storage]:
    """A repository to which the token of a service account gives access; the file is in a directory of its own."""
    async with serve_role(s3, tmp_path, monkeypatch) as role:
        storage = S3Storage(s3.make_bucket("attack"), "p/", s3.url, "us-east-1", role)
        with opened(storage) as repository:
            await repository.ensure()
        yield storage


_OWN = {
    "/proc/self": (Path("/proc/self"), ["environ", "cmdline", "maps", "status"]),
    "configuration": (Path(), ["repository.config", "repository.config.kopia-password", "probe.config"]),
}


@pytest.mark.sample("default-files", "none-files", "landlock-/proc/self", "jail-configuration", "none-/proc/self")
@pytest.mark.parametrize("name", ["files of another tenant", *_OWN], ids=["files", *_OWN])
async def test_a_directory_that_is_swapped_during_a_backup_brings_nothing_from_outside(
    trial: _Trial, attack: _Attack, name: str
) -> None:
    if name in _OWN:
        attack = replace(attack, target=_OWN[name][0], names=_OWN[name][1])
    await trial.run(f"backup: {name} of kopia" if name in _OWN else f"backup: {name}", attack.leaks)


@pytest.mark.sample("default", "none")
async def test_a_directory_that_is_swapped_during_a_backup_brings_no_token_of_a_cloud_identity(
    trial: _Trial, attack: _Attack, role_storage: S3Storage
) -> None:
    """kopia has access to the storage by it all the same."""
    assert isinstance(role_storage.keys, AwsRole)
    own = replace(attack, storage=role_storage, target=Path(role_storage.keys.token_file).parent, names=["token"])
    await trial.run("backup: token of a cloud identity", own.leaks)


@pytest.mark.sample("landlock")
async def test_a_directory_that_is_swapped_during_a_backup_brings_no_secret_from_open_files(
    means: Means, attack: _Attack
) -> None:
    """Landlock alone permits kopia its own pipes, and its cache, which is encrypted.

    There is no control: an unconfined kopia fails to read them, too.
    """
    # Not 1 and 2: kopia would wait for its own output.
    own = replace(attack, target=Path("/proc/self/fd"), names=["0", *map(str, range(3, 40))])
    for number in range(_ROUNDS):
        found = await own.run(number)
        assert not any(secret in content for content in found for secret in (PASSWORD.encode(), b"KOPIA_", b"storage"))


async def test_no_secret_can_be_opened_while_kopia_walks_a_volume(
    role_storage: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment has none, and the files of its run are gone before it reads the volume."""
    monkeypatch.setattr("datamover.storage.token_files.secrets.token_urlsafe", lambda _: "secret-of-loopback")
    seen: list[bytes] = []
    volume = tmp_path / "volume"
    _fill(volume, [])
    with opened(role_storage) as mover:
        work = mover.work_dir.path

        def on_line(line: str) -> str:
            if line.startswith("starting "):
                # For its metrics, before it reads password and configuration.
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
        await back_up_volume(mover, volume, data_path)
    assert any(b"KOPIA_CONFIG_PATH" in one for one in seen)
    hidden = (PASSWORD.encode(), b"repository.config.kopia", b"secret-of-loopback")
    assert not any(secret in one for one in seen for secret in hidden)

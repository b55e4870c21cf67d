"""Links that are in the target of a restore, in the place of what the kopia snapshot has there."""

import os
import shutil
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataPathError
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository
from tests.datamover.support.backup_movers import plain_only
from tests.datamover.support.data_paths import back_up_volume, restore_volume
from tests.datamover.support.trees import describe_tree
from tests.datamover.support.unconfined import put_program

pytestmark = pytest.mark.processes


async def _snapshot(repository: Repository, volume: Path) -> str:
    return (await back_up_volume(repository, volume)).snapshot_id


def _fill(volume: Path) -> Path:
    for name in ("a/x", "b/x", "f", "g", "h"):
        (volume / name).parent.mkdir(parents=True, exist_ok=True)
        (volume / name).write_text(f"of {name}")
    return volume


async def test_links_within_the_target_are_replaced_not_written_through(
    mover_repository: Repository, tmp_path: Path
) -> None:
    volume = _fill(tmp_path / "volume")
    before = describe_tree(volume)
    snapshot_id = await _snapshot(mover_repository, volume)
    shutil.rmtree(volume / "a")
    (volume / "a").symlink_to("b")
    (volume / "f").unlink()
    (volume / "f").symlink_to("g")
    (volume / "other").symlink_to("h")
    await restore_volume(mover_repository, snapshot_id, volume)
    assert (volume / "other").readlink() == Path("h")
    (volume / "other").unlink()
    assert describe_tree(volume) == before


async def test_files_that_share_an_inode_are_restored_apart_and_names_that_are_not_in_the_snapshot_stay(
    mover_repository: Repository, tmp_path: Path
) -> None:
    volume = _fill(tmp_path / "volume")
    before = describe_tree(volume)
    snapshot_id = await _snapshot(mover_repository, volume)
    (volume / "f").unlink()
    (volume / "f").hardlink_to(volume / "g")
    (volume / "h").write_text("of the tenant")
    (volume / "mine").hardlink_to(volume / "h")
    await restore_volume(mover_repository, snapshot_id, volume)
    assert (volume / "mine").read_text() == "of the tenant"
    (volume / "mine").unlink()
    assert describe_tree(volume) == before
    assert not (volume / "f").samefile(volume / "g")


async def test_names_that_were_of_one_file_in_the_backup_stay_so(mover_repository: Repository, tmp_path: Path) -> None:
    """As with Velero: the same is written through each of them, and the volume needs no more space."""
    volume = _fill(tmp_path / "volume")
    (volume / "a" / "g").hardlink_to(volume / "g")
    before = describe_tree(volume)
    snapshot_id = await _snapshot(mover_repository, volume)
    (volume / "g").write_text("changed since")
    await restore_volume(mover_repository, snapshot_id, volume)
    assert describe_tree(volume) == before
    assert (volume / "a" / "g").samefile(volume / "g")


def _after_kopia(repository: Repository, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the target once kopia has written it."""
    run = repository.run

    async def run_and_change(work: Callable[[], Coroutine[Any, Any, KopiaAnswer]]) -> KopiaAnswer:
        answer = await run(work)
        change()
        return answer

    monkeypatch.setattr(repository, "run", run_and_change)


async def test_a_link_that_appears_during_the_restore_is_found_whatever_its_time_is(
    mover_repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a file server may differ, and its owner sets the time of a link as he likes."""
    snapshot_id, target = await _snapshot(mover_repository, _fill(tmp_path / "volume")), tmp_path / "target"

    def swap() -> None:
        shutil.rmtree(target / "a")
        (target / "a").symlink_to("b")
        os.utime(target / "a", ns=(0, 0), follow_symlinks=False)

    _after_kopia(mover_repository, swap, monkeypatch)
    with pytest.raises(DataPathError, match=r"^a became a link during the restore, so it is not restored$"):
        await restore_volume(mover_repository, snapshot_id, target)


async def test_a_link_that_a_pod_creates_for_itself_during_the_restore_does_no_harm(
    mover_repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_id, target = await _snapshot(mover_repository, _fill(tmp_path / "volume")), tmp_path / "target"
    _after_kopia(mover_repository, partial(os.symlink, "b", target / "own"), monkeypatch)
    await restore_volume(mover_repository, snapshot_id, target)
    assert (target / "own").is_symlink()


async def test_restored_links_are_not_looked_up_in_the_snapshot(
    mover_repository: Repository, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be some in thousands of directories."""
    snapshot_id = await _snapshot(mover_repository, tree)
    calls: list[str] = []
    call = mover_repository.call

    async def count(attempted: str, *arguments: str) -> KopiaAnswer:
        calls.append(" ".join(arguments))
        return await call(attempted, *arguments)

    monkeypatch.setattr(mover_repository, "call", count)
    (tmp_path / "target").mkdir()
    await restore_volume(mover_repository, snapshot_id, tmp_path / "target")
    assert any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))
    assert calls == [f"manifest show {snapshot_id}"]


@plain_only
async def test_a_storage_that_does_not_answer_while_links_are_looked_up_is_waited_for(
    mover_repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = tmp_path / "volume"
    (volume / "a").mkdir(parents=True)
    snapshot_id = await _snapshot(mover_repository, volume)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "a").symlink_to("/etc")
    script = f"""
case " $* " in *" show k"*)
    if mkdir {tmp_path}/failed; then echo "dial tcp: connection refused" >&2; exit 1; fi
esac
exec PROGRAM "$@"
"""
    mover_repository.kopia._program = str(put_program(tmp_path, script, monkeypatch))
    await restore_volume(mover_repository, snapshot_id, tmp_path / "target")
    assert (tmp_path / "failed").exists()
    assert not (tmp_path / "target" / "a").is_symlink()

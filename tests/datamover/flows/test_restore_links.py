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
from tests.datamover.support.data_paths import VolumeBed
from tests.datamover.support.trees import describe_tree
from tests.datamover.support.unconfined import put_program

pytestmark = pytest.mark.processes


_NAMES = ("a/x", "b/x", "f", "g", "h")


async def test_links_within_the_target_are_replaced_not_written_through(bed: VolumeBed) -> None:
    volume = bed.write(*_NAMES)
    before = describe_tree(volume)
    snapshot_id = await bed.snapshot()
    shutil.rmtree(volume / "a")
    (volume / "a").symlink_to("b")
    (volume / "f").unlink()
    (volume / "f").symlink_to("g")
    (volume / "other").symlink_to("h")
    await bed.restore(snapshot_id, volume)
    assert (volume / "other").readlink() == Path("h")
    (volume / "other").unlink()
    assert describe_tree(volume) == before


async def test_files_that_share_an_inode_are_restored_apart_and_names_that_are_not_in_the_snapshot_stay(
    bed: VolumeBed,
) -> None:
    volume = bed.write(*_NAMES)
    before = describe_tree(volume)
    snapshot_id = await bed.snapshot()
    (volume / "f").unlink()
    (volume / "f").hardlink_to(volume / "g")
    (volume / "h").write_text("of the tenant")
    (volume / "mine").hardlink_to(volume / "h")
    await bed.restore(snapshot_id, volume)
    assert (volume / "mine").read_text() == "of the tenant"
    (volume / "mine").unlink()
    assert describe_tree(volume) == before
    assert not (volume / "f").samefile(volume / "g")


async def test_names_that_were_of_one_file_in_the_backup_stay_so(bed: VolumeBed) -> None:
    """As with Velero: the same is written through each of them, and the volume needs no more space."""
    volume = bed.write(*_NAMES)
    (volume / "a" / "g").hardlink_to(volume / "g")
    before = describe_tree(volume)
    snapshot_id = await bed.snapshot()
    (volume / "g").write_text("changed since")
    await bed.restore(snapshot_id, volume)
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
    bed: VolumeBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a file server may differ, and its owner sets the time of a link as he likes."""
    snapshot_id, target = await bed.snapshot(bed.write(*_NAMES)), bed.folder / "target"

    def swap() -> None:
        shutil.rmtree(target / "a")
        (target / "a").symlink_to("b")
        os.utime(target / "a", ns=(0, 0), follow_symlinks=False)

    _after_kopia(bed.movers, swap, monkeypatch)
    with pytest.raises(DataPathError, match=r"^a became a link during the restore, so it is not restored$"):
        await bed.restore(snapshot_id, target)


async def test_a_link_that_a_pod_creates_for_itself_during_the_restore_does_no_harm(
    bed: VolumeBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_id, target = await bed.snapshot(bed.write(*_NAMES)), bed.folder / "target"
    _after_kopia(bed.movers, partial(os.symlink, "b", target / "own"), monkeypatch)
    await bed.restore(snapshot_id, target)
    assert (target / "own").is_symlink()


@plain_only
async def test_a_storage_that_does_not_answer_while_links_are_looked_up_is_waited_for(
    bed: VolumeBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bed.volume / "a").mkdir(parents=True)
    snapshot_id, target, failed = await bed.snapshot(), bed.folder / "target", bed.folder / "failed"
    target.mkdir()
    (target / "a").symlink_to("/etc")
    fault = 'echo "dial tcp: connection refused" >&2; exit 1'
    script = f'case " $* " in *" show k"*) if mkdir {failed}; then {fault}; fi;; esac\nexec PROGRAM "$@"'
    bed.movers.kopia._program = str(put_program(bed.folder, script, monkeypatch))
    await bed.restore(snapshot_id, target)
    assert failed.exists()
    assert not (target / "a").is_symlink()

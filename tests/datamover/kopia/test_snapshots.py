import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import delete_snapshots, fit_checkpoint_interval, remove_own_incomplete
from tests.datamover.support.plainkopia import PlainKopia


@pytest.mark.parametrize(
    ("index_seconds", "interval"),
    [(3.0, timedelta(seconds=5)), (79.9, timedelta(seconds=79)), (math.inf, timedelta(minutes=10))],
)
def test_a_checkpoint_writes_the_index_before_the_memory_is_full(index_seconds: float, interval: timedelta) -> None:
    assert fit_checkpoint_interval(index_seconds) == interval


async def test_a_failed_backup_deletes_only_the_checkpoints_of_its_own_start() -> None:
    """Not the ones of a later attempt that has overtaken it, or of another transfer."""
    start, source = datetime(2026, 11, 30, 12, tzinfo=UTC), {"userName": "default", "host": "default", "path": "a/b"}
    seconds = {"earlier": -60, "own": 0.1, "second": 0.1, "later": 60}
    times = {name: (start + timedelta(seconds=after)).isoformat() for name, after in seconds.items()}
    listed = [
        {"id": name, "source": source, "incomplete": "checkpoint", "startTime": time, "endTime": time}
        for name, time in times.items()
    ]
    kopia = AsyncMock()
    kopia.call.return_value = KopiaAnswer("list", 0, json.dumps(listed).encode())
    await remove_own_incomplete(kopia, "default@default:a/b", start=start, within=timedelta(seconds=20))
    assert kopia.call.await_args.args[1:] == ("snapshot", "delete", "own", "second", "--delete")


@pytest.mark.processes
async def test_a_snapshot_that_is_gone_keeps_no_other_from_deletion(
    mover_repository: Repository, kopia: PlainKopia, tree: Path
) -> None:
    """Another mover may delete the same ones."""
    first, gone, last = (kopia.snapshot(tree, source=f"some/{number}") for number in range(3))
    kopia.run("snapshot", "delete", gone, "--delete")
    await mover_repository.connect()
    await delete_snapshots(mover_repository, "delete snapshots", [first, gone, last])
    assert kopia.snapshots() == []
    await delete_snapshots(mover_repository, "delete snapshots", [gone])

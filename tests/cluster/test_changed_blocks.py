"""A driver that says what has changed, by the released sidecar: backups by block read and store little more."""

from collections.abc import Iterator

import pytest

from tests.cluster.bed import Bed
from tests.cluster.changes import MIB, Tracked, announced_changes, open_tracked
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on

# In the lane of all other tests that back up by block: while the service is announced, their drivers are asked too.
pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="moving"), pytest.mark.timeout(WITH_LOCKS)]


@pytest.fixture
def service(agent: Bed, space: str) -> Iterator[None]:
    with relies_on(agent, Shared.AGENTS), announced_changes(agent, space):
        yield


@pytest.fixture
def tracked(agent: Bed, space: str, service: None) -> Iterator[Tracked]:
    with open_tracked(agent, space) as tracked:
        tracked.create(mib=128, filled_mib=64)
        yield tracked


def test_what_has_changed_is_read_and_stored_and_in_doubt_all_is_read(tracked: Tracked) -> None:
    first = tracked.back_up("first")
    assert "activities" not in first["status"]
    assert tracked.bases() == [first["metadata"]["name"]]
    places = (0, 30 * MIB, 100 * MIB)
    for at in places:
        tracked.write(at, MIB)
    touched, before = len(places) * MIB, tracked.stored_bytes()
    second = tracked.back_up("second")
    most = 1.1 * touched + 16 * MIB
    assert second["status"]["incrementalBytes"] == touched
    assert not second["status"].keys() & {"activities", "fallbackFull", "message"}
    assert touched <= tracked.hashed_bytes(second) <= most
    assert touched <= tracked.stored_bytes() - before <= most
    assert tracked.bases() == [second["metadata"]["name"]]
    tracked.write(50 * MIB, MIB)
    third = tracked.back_up("third", fault="break:1")
    cause = "what has changed is in doubt: Internal: the storage lost the rest"
    assert third["status"]["fallbackFull"] is True
    assert third["status"]["activities"] == [
        f"read more than has changed, since {cause}; stored the blocks that have changed"
    ]
    assert tracked.messages(third, "Data-Path-Warning") == [f"read more than has changed: {cause}"]
    assert third["status"]["incrementalBytes"] == MIB
    assert tracked.bases() == [third["metadata"]["name"]]
    assert tracked.restore(second) == tracked.content["second"]


def test_of_a_file_system_too_only_changed_blocks_are_read(agent: Bed, space: str, service: None) -> None:
    """Its device is read through a PVC of the other volume mode."""
    with open_tracked(agent, space, block=False) as tracked:
        tracked.create(mib=128, filled_mib=64)
        first = tracked.back_up("first")
        assert first["status"]["incrementalBytes"] > 64 * MIB
        for at in (0, 30 * MIB, 100 * MIB):
            tracked.write(at, MIB)
        second = tracked.back_up("second")
        assert not second["status"].keys() & {"activities", "fallbackFull", "message"}
        # Besides: the ends of blocks, bitmaps, inodes and the journal.
        assert 3 * MIB < second["status"]["incrementalBytes"] <= 16 * MIB
        assert tracked.hashed_bytes(second) <= 32 * MIB
        assert tracked.bases() == [second["metadata"]["name"]]
        assert tracked.restore(second) == tracked.content["second"]
        assert tracked.restore(first) == tracked.content["first"]

"""What a backup takes from the snapshots before it, and what of a device its storage is asked."""

from datetime import datetime
from typing import Any

import pytest

from core.models.names import CHANGES_TAG, CHECKPOINT_DEVICE_TAG, TRANSFER_UID_TAG
from datamover.data_path.parents import (
    BlockChanges,
    CheckpointChoice,
    build_checkpoint_tags,
    choose_blocks,
    choose_checkpoint,
    decide_parents,
    describe_device,
)

_NINE, _TEN, _ELEVEN, _NOON = (f"2026-11-28T{hour}:00:00.123456789Z" for hour in ("09", "10", "11", "12"))


def _listed(name: str, started: str, *, newest: str = "", tag: str = "", incomplete: bool = False) -> dict[str, Any]:
    return {
        "id": name,
        "startTime": started,
        "rootEntry": {"summ": {"maxTime": newest}},
        **({"tags": {f"tag:{CHANGES_TAG}": tag}} if tag else {}),
        **({"incomplete": "checkpoint"} if incomplete else {}),
    }


@pytest.mark.parametrize(
    ("listed", "in_use", "until"),
    [
        pytest.param(_listed("a", _ELEVEN, newest=_NINE, tag=_TEN), False, _TEN, id="a snapshot of ours"),
        pytest.param(_listed("a", _ELEVEN, newest=_NINE, tag=_TEN), True, _TEN, id="a snapshot of ours, in use"),
        pytest.param(_listed("a", _ELEVEN, newest=_NINE), False, _NINE, id="of a volume's snapshot"),
        pytest.param(_listed("a", _ELEVEN, newest=_NOON), False, _ELEVEN, id="a file from the future"),
        pytest.param(_listed("a", _ELEVEN, newest=_NINE), True, _ELEVEN, id="of a volume in use"),
        pytest.param(_listed("a", _ELEVEN), False, _ELEVEN, id="without a time"),
        pytest.param(_listed("a", _ELEVEN, tag="soon"), True, _ELEVEN, id="with another tag"),
    ],
)
def test_a_parent_has_all_changes_until_then(listed: dict[str, Any], in_use: bool, until: str) -> None:
    assert decide_parents([listed], frozenset(), in_use=in_use) == [{"id": "a", "until": until}]


def test_parents_are_the_last_complete_snapshot_and_own_checkpoints_after_it() -> None:
    listed = [
        _listed("early", _NINE, tag=_NINE, incomplete=True),
        _listed("old", _NINE),
        _listed("last", _TEN, newest=_NINE),
        _listed("own", _NOON, tag=_ELEVEN, incomplete=True),
        _listed("other", _NOON, tag=_ELEVEN, incomplete=True),
    ]
    found = decide_parents(listed, frozenset({"early", "own"}), in_use=False)
    assert found == [{"id": "last", "until": _NINE}, {"id": "own", "until": _ELEVEN}]
    # Nothing is taken from checkpoints by another way, and the first backup has no parent.
    assert decide_parents([_listed("own", _NINE, incomplete=True)], frozenset({"own"}), in_use=True) == []
    assert decide_parents([], frozenset(), in_use=False) == []


@pytest.mark.parametrize("in_use", [False, True], ids=["a volume's snapshot", "in use"])
def test_a_snapshot_by_another_way_has_the_changes_of_the_last_tagged_one(in_use: bool) -> None:
    older, tagged = _listed("older", _NINE, tag=_NINE), _listed("tagged", _TEN, tag=_TEN)
    listed = [older, tagged, _listed("plain", _ELEVEN, newest=_ELEVEN), _listed("last", _NOON, newest=_ELEVEN)]
    assert decide_parents(listed, frozenset(), in_use=in_use) == [{"id": "last", "until": _TEN}]


def test_what_was_begun_since_the_request_may_be_of_a_later_state() -> None:
    listed, at = [_listed("old", _NINE), _listed("last", _TEN), _listed("later", _ELEVEN)], datetime.fromisoformat(_TEN)
    found = [decide_parents(listed, frozenset(), in_use=in_use, requested_at=at) for in_use in (False, True)]
    assert [parents[0]["id"] for parents in found] == ["old", "later"]
    own = _listed("own", _NOON) | {"tags": {f"tag:{TRANSFER_UID_TAG}": "uid"}}
    again = decide_parents([*listed, own], frozenset(), in_use=False, requested_at=at, transfer_uid="uid")
    assert [one["id"] for one in again] == ["own"]


_OWN = BlockChanges("snap-2", "volume", lambda: {"address": "driver:443"})


def _made_from(change: str, volume: str, started: str = _TEN) -> dict[str, Any]:
    return {"id": "a", "tags": {"cbt-change-id": change, "cbt-volume-id": volume}, "startTime": started}


@pytest.mark.parametrize(
    ("parent", "base", "cause"),
    [
        pytest.param(None, "", "", id="first"),
        pytest.param(_made_from("snap-1", "volume"), "snap-1", "", id="of this volume"),
        pytest.param(_made_from("snap-1", "replaced"), "", "of the volume replaced, not volume", id="another volume"),
        pytest.param(_made_from("snap-1", ""), "", "of the volume unknown", id="of no known volume"),
        pytest.param(_made_from("", "volume"), "", "does not say from which snapshot", id="without a handle"),
        pytest.param({"id": "a"}, "", "does not say from which snapshot", id="without tags"),
        pytest.param(_made_from("snap-2", "volume"), "", "of the same snapshot of the storage", id="the same snapshot"),
        pytest.param(_made_from("snap-1", "volume", _NOON), "", "begun after this backup was created", id="later"),
    ],
)
def test_the_base_is_what_the_parent_was_made_from(parent: dict[str, Any] | None, base: str, cause: str) -> None:
    found = choose_blocks(parent, _OWN, datetime.fromisoformat(_ELEVEN))
    assert found.query == {"address": "driver:443", "base": base}
    assert (cause in (found.cause or ""), bool(found.cause), found.expected) == (True, bool(cause), True)


@pytest.mark.parametrize("own", [None, BlockChanges("snap-2", "volume")], ids=["no handles", "no service"])
def test_a_storage_that_says_nothing_is_not_asked(own: BlockChanges | None) -> None:
    found = choose_blocks(_made_from("snap-1", "volume"), own)
    assert (found.query, found.cause, found.expected) == (None, "the changed blocks are not known", False)


def test_a_checkpoint_has_no_tag_by_which_velero_knows_a_snapshot() -> None:
    """Source: Velero main at d2241adba, pkg/uploader/block/snapshot.go (findPreviousSnapshot)."""
    tags = {
        "snapshot-requester": "r",
        "snapshot-uploader": "velero-block",
        "velero.io/async-operation-id": "o",
        "a": "1",
    }
    device = describe_device(BlockChanges("snapshot", "volume"), 5)
    assert build_checkpoint_tags(tags, device) == {
        "tag:a": "1",
        "tag:nodeagent.io/checkpoint-device": '["volume", "snapshot", 5]',
    }


def _saved(name: str, uid: str, device: str, size: int) -> dict[str, Any]:
    tags = {f"tag:{TRANSFER_UID_TAG}": uid, f"tag:{CHECKPOINT_DEVICE_TAG}": device}
    return {"id": name, "tags": tags, "stats": {"totalSize": size}}


def test_another_attempt_continues_from_the_longest_checkpoint_of_the_same_device() -> None:
    saved = [
        _saved("first", "du", "device", 2),
        _saved("second", "du", "device", 3),
        _saved("grown", "du", "larger device", 9),
        _saved("foreign", "other du", "device", 8),
    ]
    own, every = ("first", "second", "grown"), ("first", "second", "grown", "foreign")
    assert choose_checkpoint(saved, "du", "device", alone=True) == CheckpointChoice("second", own, every)
    assert choose_checkpoint(saved, "du", "device", alone=False) == CheckpointChoice("second", own, own)
    other = choose_checkpoint(saved, "du", "other device", alone=False)
    assert other == CheckpointChoice(None, own, own, "it is of another device")
    assert choose_checkpoint(saved, "third du", "device", alone=False) == CheckpointChoice()

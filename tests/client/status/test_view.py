"""The document of `nodeagent status`: order of its lists, positions, rates."""

from datetime import timedelta
from typing import Any

import pytest

from client.status.follow import ProgressRates
from client.status.records import TransferRecord
from client.status.view import StatusView, average_rate, build_view
from core.models.names import ATTEMPTS_ANNOTATION
from core.models.phases import AttemptStage
from nodeagent.config.keys import NO_QUEUE_LENGTH
from tests.client.support.status_scene import StatusScene, transfer
from tests.nodeagent.support.hand_clock import NOON

_MIB = 2**20


async def _view(scene: StatusScene) -> StatusView:
    return build_view(await scene.reader.read())


async def test_without_the_leaders_page_positions_are_computed_and_a_note_says_so(scene: StatusScene) -> None:
    scene.kube.put(transfer("DataDownload", "restore", reason="Queued"))
    scene.kube.put(transfer("DataUpload", "blocked", reason="SnapshotNotReady"))
    scene.hush()
    view = await _view(scene)
    assert [(row.position, row.name) for row in view.pending[-2:]] == [(4, "third"), (None, "blocked")]
    assert view.positions_computed
    (note,) = view.notes
    assert note.startswith("the leader did not answer, so positions in the queue are computed here: get /status")
    scene.put_config('{"loadConcurrency": {"restoresFirst": true}}')
    assert (await _view(scene)).pending[0].name == "restore"


async def test_slots_of_single_nodes_follow_their_labels_and_are_unknown_without_nodes() -> None:
    scene = StatusScene()
    rule = '{"nodeSelector": {"matchLabels": {"size": "large"}}, "number": 7}'
    scene.put_config(f'{{"loadConcurrency": {{"globalConfig": 2, "perNodeConfig": [{rule}]}}}}')
    scene.kube.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "b", "labels": {"size": "large"}}})
    assert [row.slots for row in (await _view(scene)).nodes] == [2, 7]
    scene.kube.fail_next("GET", "/nodes", 403)
    view = await _view(scene)
    assert [row.slots for row in view.nodes] == [None, None]
    assert "nodes not read" in view.findings[-1].message


async def test_a_transfer_between_two_attempts_is_pending() -> None:
    scene = StatusScene()
    raw = transfer("DataUpload", "again", "InProgress", reason="Resuming", node="a")
    raw["metadata"]["annotations"][ATTEMPTS_ANNOTATION] = '{"number": 2, "stage": "Ready"}'
    scene.kube.put(raw)
    view = await _view(scene)
    assert [(row.name, row.attempt, row.position) for row in view.pending] == [("again", 2, None)]
    assert view.transfers == []


async def test_transfers_of_other_data_movers_are_counted_in_a_note() -> None:
    scene = StatusScene()
    raw = transfer("DataUpload", "other")
    raw["spec"]["datamover"] = "another"
    scene.kube.put(raw)
    view = await _view(scene)
    assert (view.pending, view.phases) == ([], {})
    assert view.notes == ["1 transfers are for other data movers or cannot be read, and are not listed"]


@pytest.mark.parametrize(
    ("definitions", "config", "notes"),
    [
        ({"message": "as of 1.18"}, "{}", ["as of 1.18"]),
        ({"message": "x", "warning": True}, "{}", []),
        ({"nextVelero": True}, "{}", [f"prepareQueueLength {NO_QUEUE_LENGTH}"]),
        ({"nextVelero": True}, '{"loadConcurrency": {"prepareQueueLength": 5}}', []),
        ({"nextVelero": True}, "{", []),
    ],
    ids=["of an older server", "a finding is no note", "beside 1.19, no queue length", "with one", "not known"],
)
async def test_what_the_definitions_say_is_a_note(definitions: dict[str, Any], config: str, notes: list[str]) -> None:
    scene = StatusScene()
    scene.put_config(config)
    scene.answer(definitions=definitions)
    assert (await _view(scene)).notes == notes


def _moving(done: int, **more: object) -> TransferRecord:
    fields = {"kind": "DataUpload", "namespace": "velero", "name": "m", "uid": "u", "phase": "InProgress"}
    return TransferRecord.from_wire(fields | {"bytesDone": done, "began": "2026-11-21T11:59:00Z"} | more)


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    rates = ProgressRates()
    for second, done in ((0, 0), (10, 1000), (20, 3000), (60, 7000)):
        rates.observe([_moving(done)], NOON + timedelta(seconds=second))
    assert rates.rate_of(_moving(7000), NOON + timedelta(seconds=60)) == 100.0


@pytest.mark.parametrize("seconds", [0, 40])
def test_a_transfer_that_stands_still_becomes_slower(seconds: int) -> None:
    rates = ProgressRates()
    rates.observe([_moving(0)], NOON)
    rates.observe([_moving(1000)], NOON + timedelta(seconds=10))
    later = NOON + timedelta(seconds=10 + seconds)
    rates.observe([_moving(1000)], later)
    assert rates.rate_of(_moving(1000), later) == pytest.approx(1000 / (10 + seconds))


def test_another_attempt_begins_without_a_rate_of_the_one_before() -> None:
    rates = ProgressRates()
    rates.observe([_moving(9000)], NOON)
    again = _moving(60)
    rates.observe([again], NOON + timedelta(seconds=10))
    assert rates.rate_of(again, NOON) == average_rate(again, NOON) == 1.0


def test_nothing_that_does_not_move_has_a_rate_nor_has_an_attempt_that_got_the_bytes_before_it() -> None:
    assert average_rate(_moving(0), NOON) is None
    assert average_rate(_moving(5, stage=str(AttemptStage.WAITING)), NOON) is None
    assert average_rate(_moving(5, began="2026-11-21T12:00:00Z"), NOON) is None
    assert average_rate(_moving(2**40, number=2), NOON) is None

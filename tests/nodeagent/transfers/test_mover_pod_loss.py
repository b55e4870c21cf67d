"""The losses of mover pods, as their annotation records them."""

from datetime import timedelta

import pytest

from core.models.names import MOVER_LOST_ANNOTATION
from nodeagent.transfers.mover_pod import LostPod, MoverLoss, count_loss
from tests.nodeagent.support.hand_clock import NOON


def read(text: str) -> MoverLoss | None:
    return MoverLoss.from_annotations({MOVER_LOST_ANNOTATION: text})


def test_recorded_loss_is_read_as_it_was_counted() -> None:
    loss = count_loss(None, LostPod("pod-1", "Evicted"), NOON)
    assert read(loss.to_json()) == loss


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 2000 + "]" * 2000,
        '{"since":"2026-11-21T12:00:00","last":"2026-11-21T12:00:00"}',
        '{"since":"2026-11-21T12:00:00Z","last":"2026-11-21T12:00:00Z","times":-5}',
        '{"since":"2026-11-21T12:00:00Z","last":"2026-11-21T12:00:00Z","times":1e400}',
        '{"since":"2026-11-21T12:00:00Z","last":"2026-11-21T12:00:00Z","killed":99999999999999999999}',
    ],
    ids=["absent", "no object", "deep", "no zone", "negative", "infinite", "huge"],
)
def test_an_invalid_loss_counts_as_absent(text: str) -> None:
    assert read(text) is None


@pytest.mark.parametrize(("times", "seconds"), [(1, 5), (2, 10), (7, 300), (2**31, 300)])
def test_pause_before_the_next_pod_doubles_up_to_a_limit(times: int, seconds: int) -> None:
    assert MoverLoss(since=NOON, last=NOON, times=times).pause == timedelta(seconds=seconds)


@pytest.mark.parametrize(("rejected", "fails"), [("", True), ("OutOfcpu", False)], ids=["evicted", "rejected"])
def test_only_pods_that_were_admitted_are_limited(rejected: str, *, fails: bool) -> None:
    loss = None
    for number in range(20):
        loss = count_loss(loss, LostPod(f"pod-{number}", "why", rejected=rejected), NOON)
    assert loss is not None
    text = "was lost 20 times before its data path started: why"
    assert (loss.times, loss.failure) == (20, text if fails else None)


def test_a_loss_that_a_previous_version_recorded_is_read() -> None:
    found = read('{"since":"2026-11-21T12:00:00Z","last":"2026-11-21T12:00:00Z","times":3,"killed":1}')
    assert found is not None
    assert (found.times, found.rejected) == (3, 0)

"""What a rejected request means for a transfer, what is reported of one that ends, and the slots of a node."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from msgspec import UNSET, UnsetType

from core.contract import BackupResult, VolumePath
from core.errors import ExposeError
from core.kube.errors import ForbiddenError, InvalidError, ServerError
from core.kube.resources import NODES
from core.models.names import ATTEMPTS_ANNOTATION
from core.models.phases import Phase
from core.models.transfers import DataUpload
from exposer.model import Pending
from nodeagent.config.current import resolve_slots
from nodeagent.config.keys import LoadConcurrency
from nodeagent.config.parse import parse_config
from nodeagent.leader.admission.quota import NodeSlots
from nodeagent.node.steps import OwnSlots, SlotRequest, Slots, classify_rejection, describe_activities
from nodeagent.transfers.outcome import Outcome
from tests.nodeagent.support.transfers import data_upload
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict, build_object
from tests.support.tasks import running, until

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ForbiddenError('pods "x" is forbidden: exceeded quota: q, requested: pods=1'), "QuotaExceeded"),
        (ForbiddenError('pods is forbidden: User "agent" cannot create resource "pods"'), "Forbidden"),
        (ForbiddenError('pods "x" is forbidden: error looking up service account velero/x'), "ServiceAccountMissing"),
        (ServerError('Internal error occurred: failed calling webhook "p": connection refused'), "ApiServerError"),
    ],
    ids=["quota", "permissions", "service account", "webhook"],
)
def test_a_rejection_that_may_end_is_pending(error: ForbiddenError | ServerError, reason: str) -> None:
    assert classify_rejection(error) == Pending(reason, str(error), blocked=True)


@pytest.mark.parametrize(
    "error",
    [
        InvalidError('Pod "x" is invalid: spec.containers[0].image: Required value', status=422),
        ForbiddenError('pods "x" is forbidden: violates PodSecurity "baseline:latest": privileged'),
        ForbiddenError('admission webhook "policy.example.com" denied the request: no hostPath'),
        ForbiddenError("ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no"),
        ForbiddenError('pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi'),
        ForbiddenError(
            'pods "x" is forbidden: cpu max limit to request ratio per Container is 4, but provided ratio is 40.000000'
        ),
    ],
    ids=["validation", "pod security", "webhook", "policy", "limit range", "ratio of a limit range"],
)
def test_a_rejection_of_the_object_itself_is_final(error: ForbiddenError | InvalidError) -> None:
    with pytest.raises(ExposeError, match=r"."):
        classify_rejection(error)


_WAITED = {"acceptedTimestamp": "2026-11-21T12:10:00Z", "startTimestamp": "2026-11-21T12:17:59Z"}


@pytest.mark.parametrize(
    ("status", "marks", "fell_back", "lines"),
    [
        pytest.param({}, "{}", False, [], id="nothing"),
        pytest.param(
            _WAITED,
            "{}",
            False,
            ["waited 10 min to be admitted", "waited 7 min for a data mover with a slot"],
            id="waits",
        ),
        pytest.param({"acceptedTimestamp": "2026-11-21T12:04:59Z"}, "{}", False, [], id="a short wait"),
        pytest.param({"acceptedTimestamp": "2026-11-21T11:00:00Z"}, "{}", False, [], id="another clock"),
        pytest.param(
            {},
            '{"number": 2, "interruptions": [{"at": "2026-11-21T12:01:00Z", "cause": "Evicted", "node": "a"}]}',
            True,
            [
                "attempt 1 was interrupted on node a: Evicted",
                "attempt 2 resumed with its volume exposed again",
                "fell back to a full backup",
            ],
            id="all else",
        ),
    ],
)
def test_what_was_done_for_a_transfer_is_listed(
    status: JsonDict, marks: str, fell_back: bool, lines: list[str]
) -> None:
    raw = data_upload()
    raw["metadata"] |= {"creationTimestamp": "2026-11-21T12:00:00Z", "annotations": {ATTEMPTS_ANNOTATION: marks}}
    cr = DataUpload.parse(raw | {"status": {"phase": "InProgress"} | status})
    assert describe_activities(cr, restores=False, fell_back=fell_back) == lines


@pytest.mark.parametrize(
    ("fell_back", "cause", "why"),
    [
        pytest.param(True, UNSET, "the changed blocks are not known", id="an earlier mover"),
        pytest.param(True, "what has changed is in doubt: gone", "what has changed is in doubt: gone", id="doubt"),
        pytest.param(False, "what is allocated is in doubt: gone", "what is allocated is in doubt: gone", id="first"),
        pytest.param(True, "Get https://a/?sig=c2VjcmV0c2VjcmV0: EOF", "Get https://a/?sig=***: EOF", id="a secret"),
    ],
)
def test_a_device_that_was_read_as_a_whole_is_listed(fell_back: bool, cause: str | UnsetType, why: str) -> None:
    raw = data_upload()
    raw["spec"]["datamover"] = "velero-block"
    cr = DataUpload.parse(raw | {"status": {"phase": "InProgress"}})
    result = BackupResult(
        snapshot_id="1", source=VolumePath(by_path="/x"), fallback_cause=cause, restart_cause="it is of another device"
    )
    assert describe_activities(cr, Outcome(Phase.COMPLETED, result=result), restores=False, fell_back=fell_back) == [
        f"read more than has changed, since {why}; stored the blocks that have changed",
        "read the device again from its start: it is of another device",
    ]


NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def request_of(uid: str, minute: int = 0) -> SlotRequest:
    return SlotRequest(NOON + timedelta(minutes=minute), ("DataUpload", "velero", uid), uid)


def test_the_first_accepted_transfer_starts_first_and_of_the_same_time_the_first_by_name() -> None:
    slots = Slots(1)
    for uid, minute in (("b", 2), ("a", 2), ("early", 1)):
        slots.observe(request_of(uid, minute), Phase.PREPARED)
    assert [slots.acquire("b"), slots.acquire("early")] == [False, True]
    slots.release("early")
    assert [request.uid for request in slots.next_requests()] == ["a"]
    # It was deleted.
    slots.release("a")
    assert [request.uid for request in slots.next_requests()] == ["b"]


def test_only_a_final_phase_or_a_deletion_frees_a_slot_and_no_outdated_observation() -> None:
    slots = Slots(1)
    slots.observe(request_of("a"), Phase.PREPARED)
    assert slots.acquire("a")
    for uid in ("a", "b"):
        slots.observe(request_of(uid), Phase.PREPARED)
    assert [slots.acquire("b"), slots.acquire("a"), slots.used, slots.pending] == [False, True, 1, 1]
    slots.observe(request_of("a"), Phase.FAILED)
    assert [slots.acquire("b"), slots.used] == [True, 1]
    # Also one that no process of this agent has started counts.
    slots.observe(request_of("c"), Phase.CANCELING)
    assert (slots.used, slots.next_requests()) == (2, [])


def test_a_request_before_all_pending_ones_gets_the_free_slot() -> None:
    slots = Slots(2)
    slots.observe(request_of("running"), Phase.IN_PROGRESS)
    slots.observe(request_of("pending", 2), Phase.PREPARED)
    full = [slots.is_full_for(request_of(uid, minute)) for uid, minute in (("early", 1), ("late", 3))]
    assert full == [False, True]
    slots.observe(request_of("running too"), Phase.IN_PROGRESS)
    assert slots.is_full_for(request_of("early", 1))


DOCUMENT = """{"loadConcurrency": {"globalConfig": 5, "perNodeConfig": [
    {"nodeSelector": {"matchLabels": {"size": "big"}}, "number": 8},
    {"nodeSelector": {"matchLabels": {"zone": "a"}}, "number": 3},
    {"nodeSelector": {"matchExpressions": [{"key": "spot", "operator": "Exists"}]}, "number": 6}
]}}"""
RULES = parse_config(DOCUMENT).config.load_concurrency


@pytest.mark.parametrize(
    ("labels", "number"),
    [
        pytest.param({}, 5, id="no rule matches: globalConfig"),
        pytest.param({"size": "small"}, 5, id="another value"),
        pytest.param({"size": "big"}, 8, id="one rule, more than globalConfig"),
        pytest.param({"size": "big", "zone": "a"}, 3, id="the smallest of two"),
        pytest.param({"size": "big", "spot": ""}, 6, id="an expression"),
        pytest.param({"size": "big", "spot": "", "zone": "a"}, 3, id="the smallest of three"),
    ],
)
def test_the_smallest_match_wins(labels: dict[str, str], number: int) -> None:
    assert resolve_slots(labels, RULES) == number


def node(name: str, **labels: str) -> JsonDict:
    return build_object(NODES, name, metadata={"labels": labels})


@dataclass
class Scene:
    """The number of an agent's own node, whose labels and configuration change."""

    kube: FakeKube = field(default_factory=FakeKube)
    concurrency: LoadConcurrency = RULES
    numbers: list[int] = field(default_factory=list)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[OwnSlots]:
        client, numbers = self.kube.client, self.numbers
        own = OwnSlots(client, LoopClock(), "node-a", concurrency=lambda: self.concurrency, on_number=numbers.append)
        async with running(own.run()):
            yield own


async def test_the_number_follows_the_labels_of_the_node() -> None:
    scene = Scene()
    scene.kube.put(node("node-a", size="big"))
    scene.kube.put(node("node-b", zone="a"))
    async with scene.following() as own:
        await own.wait_known()
        assert scene.numbers[-1] == 8
        scene.kube.put(node("node-a", size="big", zone="a"))
        await until(lambda: scene.numbers[-1] == 3)
        scene.kube.put(node("node-a"))
        await until(lambda: scene.numbers[-1] == 5)


async def test_without_rules_the_node_is_not_read() -> None:
    scene = Scene(concurrency=LoadConcurrency(global_config=4))
    async with scene.following() as own:
        await own.wait_known()
        await asyncio.sleep(100)
        assert scene.numbers == [4]
        assert scene.kube.requests == []
        scene.kube.put(node("node-a", size="big"))
        scene.concurrency = RULES
        own.refresh()
        await until(lambda: scene.numbers[-1] == 8)
        # The number does not change until the labels are known.
        assert scene.numbers == [4, 8]
        scene.concurrency = LoadConcurrency(global_config=2)
        own.refresh()
        assert scene.numbers[-1] == 2


async def test_a_node_whose_labels_are_forbidden_has_the_global_number() -> None:
    scene = Scene()
    scene.kube.fail_next("GET", "/nodes", 403)
    async with scene.following() as own:
        await own.wait_known()
        assert set(scene.numbers) == {5}
        scene.kube.put(node("node-a", size="big"))
        await until(lambda: scene.numbers[-1] == 8, seconds=100)


async def test_the_labels_of_other_nodes_are_read_once_a_minute_at_most() -> None:
    kube, clock = FakeKube(), LoopClock()
    kube.put(node("node-a", size="big"))
    slots = NodeSlots(kube.client, clock, lambda: RULES)
    assert [await slots.of("node-a") for _ in range(5)] == [8] * 5
    assert await slots.of("node-x") == 5
    assert len(kube.requests) == 2
    kube.put(node("node-a", zone="a"))
    await asyncio.sleep(61)
    assert await slots.of("node-a") == 3
    # What is kept of a node that is gone would stay as long as this leader.
    assert list(slots._labels) == ["node-a"]

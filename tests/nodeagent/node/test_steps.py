"""What a request that the API server rejects means for a transfer, and what is told of one that ends."""

import pytest
from msgspec import UNSET, UnsetType

from core.contract import BackupResult, VolumePath
from core.errors import ExposeError
from core.kube.errors import ForbiddenError, InvalidError, ServerError
from core.models.names import ATTEMPTS_ANNOTATION
from core.models.phases import Phase
from core.models.transfers import DataUpload
from exposer.model import Pending
from nodeagent.node.steps import classify_rejection, describe_activities
from nodeagent.transfers.outcome import Outcome
from tests.nodeagent.support.transfers import data_upload
from tests.support.objects import JsonDict


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ForbiddenError('pods "x" is forbidden: exceeded quota: q, requested: pods=1'), "QuotaExceeded"),
        (ForbiddenError('pods is forbidden: User "agent" cannot create resource "pods"'), "Forbidden"),
        (
            ForbiddenError('pods "x" is forbidden: error looking up service account velero/node-agent'),
            "ServiceAccountMissing",
        ),
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


_WAITED = {
    "acceptedTimestamp": "2026-11-21T12:10:00Z",
    "startTimestamp": "2026-11-21T12:17:59Z",
}


@pytest.mark.parametrize(
    ("status", "marks", "fell_back", "told"),
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
def test_what_was_done_for_a_transfer_is_told(status: JsonDict, marks: str, fell_back: bool, told: list[str]) -> None:
    raw = data_upload()
    raw["metadata"] |= {"creationTimestamp": "2026-11-21T12:00:00Z", "annotations": {ATTEMPTS_ANNOTATION: marks}}
    cr = DataUpload.parse(raw | {"status": {"phase": "InProgress"} | status})
    assert describe_activities(cr, restores=False, fell_back=fell_back) == told


@pytest.mark.parametrize(
    ("fell_back", "cause", "told"),
    [
        pytest.param(True, UNSET, "the changed blocks are not known", id="an earlier mover"),
        pytest.param(True, "what has changed is in doubt: gone", "what has changed is in doubt: gone", id="doubt"),
        pytest.param(False, "what is allocated is in doubt: gone", "what is allocated is in doubt: gone", id="first"),
    ],
)
def test_a_device_that_was_read_as_a_whole_is_told(fell_back: bool, cause: str | UnsetType, told: str) -> None:
    raw = data_upload()
    raw["spec"]["datamover"] = "velero-block"
    cr = DataUpload.parse(raw | {"status": {"phase": "InProgress"}})
    result = BackupResult(
        snapshot_id="1", source=VolumePath(by_path="/x"), fallback_cause=cause, restart_cause="it is of another device"
    )
    assert describe_activities(cr, Outcome(Phase.COMPLETED, result=result), restores=False, fell_back=fell_back) == [
        f"read all of the device, since {told}; stored the blocks that have changed",
        "read the device again from its start: it is of another device",
    ]

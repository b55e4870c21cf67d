"""What a request that the API server rejects means for a transfer."""

import pytest

from core.errors import ExposeError
from core.kube.errors import ForbiddenError, InvalidError, ServerError
from exposer.model import Pending
from nodeagent.node.steps import classify_rejection


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
    ],
    ids=["validation", "pod security", "webhook", "policy", "limit range"],
)
def test_a_rejection_of_the_object_itself_is_final(error: ForbiddenError | InvalidError) -> None:
    with pytest.raises(ExposeError, match=r"."):
        classify_rejection(error)

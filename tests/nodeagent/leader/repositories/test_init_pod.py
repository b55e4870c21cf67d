"""The resource requests of init pods."""

import pytest

from nodeagent.leader.repositories.init_pod import init_resources
from tests.support.objects import JsonDict


@pytest.mark.parametrize(
    ("movers", "requests"),
    [
        pytest.param({}, None, id="nothing configured"),
        pytest.param(
            {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"cpu": "8", "memory": "16Gi"}},
            {"cpu": "100m", "memory": "128Mi"},
            id="more than it needs",
        ),
        pytest.param({"limits": {"memory": "2Gi"}}, {"memory": "128Mi"}, id="a limit alone would be a request"),
        pytest.param({"requests": {"cpu": "10m", "memory": "64Mi"}}, {"cpu": "10m", "memory": "64Mi"}, id="less"),
        pytest.param({"limits": {"memory": "64Mi"}}, {"memory": "64Mi"}, id="no request beyond the limit"),
        pytest.param({"requests": {"ephemeral-storage": "50Gi"}}, {"ephemeral-storage": "128Mi"}, id="storage"),
    ],
)
def test_an_init_pod_requests_less_than_a_mover(movers: JsonDict, requests: JsonDict | None) -> None:
    found = init_resources(movers)
    assert found.get("requests") == requests
    assert found.get("limits") == movers.get("limits")

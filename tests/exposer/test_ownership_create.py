"""Creation of pods with a PriorityClass that may have been deleted."""

import json

import pytest

from core.kube.errors import ForbiddenError
from core.kube.resources import PODS
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from exposer.ownership import create_pod
from tests.support.scripted import answer, rejection, scripted_client, stored

_POD = stored(PODS, metadata={"name": "du-1"}, spec={"priorityClassName": "low", "x": 1})
_NO_CLASS = 'pods "du-1" is forbidden: no PriorityClass with name low was found'


async def test_each_pod_with_a_class_is_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    client = scripted_client(lambda request: answer(json.loads(request.body or b""), 201))
    assert await create_pod(client, _POD) == _POD
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("DEBUG", "created pod with PriorityClass low")
    assert vars(record)["fields"]["name"] == "du-1"


async def test_a_deleted_class_is_omitted(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[JsonDict] = []

    def script(request: Request) -> Response:
        pod = json.loads(request.body or b"")
        sent.append(pod["spec"])
        return rejection(403, _NO_CLASS, "Forbidden") if "priorityClassName" in pod["spec"] else answer(pod, 201)

    created = await create_pod(scripted_client(script), _POD)
    assert created["spec"] == {"x": 1}
    assert len(sent) == 2
    assert "PriorityClass low does not exist" in caplog.text


@pytest.mark.parametrize("message", ["exceeded quota", "no PriorityClass with name low was found"])
async def test_any_other_rejection_is_raised(message: str) -> None:
    pod = {"metadata": _POD["metadata"], "spec": {"x": 1}} if "Priority" in message else _POD
    with pytest.raises(ForbiddenError):
        await create_pod(scripted_client(lambda _: rejection(403, message, "Forbidden")), pod)

"""Events in Velero's format."""

import json
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError
from core.kube.events import EventRecorder, ObjectRef
from core.kube.resources import EVENTS
from core.kube.transport import Retry
from core.models.storage import BackupRepository
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

_RECORDED = Path(__file__).parents[2] / "recordings" / "velero-1.18.2" / "events-on-custom-resources.json"
_ABOUT = ObjectRef(
    api_version="velero.io/v2alpha1",
    kind="DataUpload",
    namespace="velero",
    name="b1",
    uid="uid-1",
    resource_version="7",
)


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube(SystemClock())


def _recorder(kube: FakeKube, *, attempts: int = 1) -> EventRecorder:
    client = KubeClient(kube, Retry(LoopClock(), attempts=attempts))
    return EventRecorder(client, SystemClock(), component="b1", host="node-a")


async def _record(kube: FakeKube, message: str = "{}", about: ObjectRef = _ABOUT) -> JsonDict:
    await _recorder(kube).record(about, "Data-Path-Progress", message)
    return kube.objects(EVENTS)[0]


async def test_event_has_the_fields_of_velero(kube: FakeKube) -> None:
    event = await _record(kube)
    recorded_event: JsonDict = json.loads(_RECORDED.read_text())[0]
    # The API server adds these itself.
    added = {"eventTime", "reportingComponent", "reportingInstance"}
    assert event.keys() == recorded_event.keys() - added
    assert event["involvedObject"].keys() == recorded_event["involvedObject"].keys()
    assert (event["source"], event["type"], event["count"]) == ({"component": "b1", "host": "node-a"}, "Normal", 1)
    assert event["metadata"]["name"].startswith("b1.")


async def test_events_of_one_moment_have_distinct_names(kube: FakeKube) -> None:
    recorder = _recorder(kube)
    for _ in range(50):
        await recorder.record(_ABOUT, "Data-Path-Progress", "{}")
    assert len(kube.objects(EVENTS)) == 50


async def test_texts_and_names_stay_within_their_limits(kube: FakeKube) -> None:
    message = (await _record(kube, "start " + "ü" * 2000))["message"]
    assert len(message.encode()) <= 1024
    assert message.startswith("start ü")
    kube = FakeKube()
    about = ObjectRef(api_version="v1", kind="Pod", namespace="velero", name="n" * 235 + "." + "m" * 17, uid="uid-1")
    name = (await _record(kube, about=about))["metadata"]["name"]
    assert len(name) <= 253
    assert ".." not in name


async def test_event_of_a_cluster_scoped_object_is_in_default(kube: FakeKube) -> None:
    event = await _record(kube, about=ObjectRef(api_version="v1", kind="Node", name="node-a", uid="uid-1"))
    assert event["metadata"]["namespace"] == "default"


async def test_lost_response_causes_no_second_event(kube: FakeKube) -> None:
    kube.fail_next("POST", "/events", "lost-applied")
    await _recorder(kube, attempts=3).record(_ABOUT, "Data-Path-Started", "started")
    assert len(kube.objects(EVENTS)) == 1


async def test_error_is_raised_to_the_caller(kube: FakeKube) -> None:
    kube.fail_next("POST", "/events", 403)
    with pytest.raises(ForbiddenError, match=r"create Event velero/b1\."):
        await _record(kube)


def test_reference_of_a_dict_and_of_a_model_agree() -> None:
    obj: JsonDict = {
        "apiVersion": "velero.io/v1",
        "kind": "BackupRepository",
        "metadata": {"namespace": "velero", "name": "r", "uid": "u", "resourceVersion": "3"},
        "spec": {"volumeNamespace": "shop", "backupStorageLocation": "default", "maintenanceFrequency": "1h0m0s"},
    }
    reference = ObjectRef.of(obj)
    assert reference == ObjectRef.of(BackupRepository.parse(obj))
    assert reference == ObjectRef(
        api_version="velero.io/v1", kind="BackupRepository", namespace="velero", name="r", uid="u", resource_version="3"
    )


async def test_what_has_the_form_of_a_secret_is_redacted(kube: FakeKube) -> None:
    message = (await _record(kube, 'Put "https://a.test/c?sig=0123456789abc&sp=r": EOF'))["message"]
    assert message == 'Put "https://a.test/c?sig=***&sp=r": EOF'

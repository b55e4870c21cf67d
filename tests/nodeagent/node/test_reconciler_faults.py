"""Faults of transfers are reported once, everywhere that works."""

import pytest

from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.events import EventRecorder
from core.kube.resources import DATA_UPLOADS, EVENTS
from core.kube.transport import Retry
from nodeagent.node.cache import TransferCache
from nodeagent.node.lifecycle import Site
from nodeagent.node.reconciler import TransferFaults
from nodeagent.transfers.kinds.csi_snapshot import DataUploadKind
from nodeagent.transfers.status import EventLog, StatusWriter
from tests.nodeagent.support.data_kinds import bare
from tests.nodeagent.support.harness import accepted
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_upload
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

KEY = ("DataUpload", NAMESPACE, "du-1")
UPLOADS = bare(DataUploadKind)


class StoredCache(TransferCache):
    """A cache that is always current."""

    def __init__(self, kube: FakeKube) -> None:
        super().__init__(KubeClient(kube, Retry(LoopClock())), LoopClock(), Site(NODE, NAMESPACE), kinds=[UPLOADS])
        self._kube = kube

    def raw(self, key: tuple[str, str, str]) -> JsonDict | None:
        return next(iter(self._kube.objects(DATA_UPLOADS)), None)


def faults_of(kube: FakeKube) -> TransferFaults:
    client = KubeClient(kube, Retry(LoopClock()))
    events = EventLog(EventRecorder(client, LoopClock(), component="node-agent", host=NODE))
    return TransferFaults(client, StatusWriter(client, LoopClock()), events, cache=StoredCache(kube))


def reasons(kube: FakeKube) -> list[str]:
    return [event["reason"] for event in kube.objects(EVENTS)]


def message(kube: FakeKube) -> str:
    return str(kube.objects(DATA_UPLOADS)[0]["status"].get("message", ""))


async def test_a_failed_step_is_reported_as_event_and_message_until_it_succeeds() -> None:
    kube = FakeKube()
    kube.put(accepted(data_upload()))
    faults = faults_of(kube)
    await faults.report_failed(UPLOADS, KEY, ExposeError("patch Pod: 403"))
    await faults.report_failed(UPLOADS, KEY, ExposeError("patch Pod: 403"))
    assert (reasons(kube), message(kube)) == (["StepFailed"], "patch Pod: 403")
    faults.clear(KEY)
    await faults.report_failed(UPLOADS, KEY, ExposeError("patch Pod: 404"))
    assert (len(reasons(kube)), message(kube)) == (2, "patch Pod: 404")


async def test_a_failed_step_of_a_final_transfer_leaves_its_status_alone() -> None:
    kube = FakeKube()
    kube.put(accepted(data_upload()) | {"status": {"phase": "Failed", "message": "no space left"}})
    await faults_of(kube).report_failed(UPLOADS, KEY, ExposeError("delete Pod: 403"))
    assert (reasons(kube), message(kube)) == (["StepFailed"], "no space left")


async def test_a_failed_step_is_reported_as_event_where_the_status_cannot_be_written() -> None:
    kube = FakeKube()
    kube.put(accepted(data_upload()))
    kube.fail_next("PATCH", "/datauploads", 403)
    await faults_of(kube).report_failed(UPLOADS, KEY, ExposeError("patch Pod: 403"))
    assert (reasons(kube), message(kube)) == (["StepFailed"], "")


async def test_an_invalid_transfer_is_reported_once_for_each_uid_and_cause() -> None:
    kube = FakeKube()
    kube.put(accepted(data_upload()))
    faults = faults_of(kube)
    await faults.report_invalid(KEY, "spec: missing")
    await faults.report_invalid(KEY, "spec: missing")
    assert reasons(kube) == ["Unreadable"]
    faults.forget(KEY, "uid-of-du-1")
    await faults.report_invalid(KEY, "spec: missing")
    assert len(reasons(kube)) == 2
    await faults.report_invalid(KEY, "spec: of another type")
    assert len(reasons(kube)) == 3

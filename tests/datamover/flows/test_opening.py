"""A storage that is slow or does not answer while a transfer opens its repository: a wait, then success or its end."""

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from core.kube.resources import EVENTS
from tests.datamover.support.pods import FLAGS, MoverPod
from tests.datamover.support.s3proxy import Answer, Fault, S3Proxy
from tests.datamover.support.trees import describe_tree
from tests.support.fakekube import FakeKube
from tests.support.tasks import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'
_FAULTS: dict[str, tuple[Fault | Answer, str]] = {
    "refused": (Fault.REFUSE, "the endpoint cannot be reached"),
    "503": (Answer(503, _ERROR.format("ServiceUnavailable", "Please try again.")), "the storage is unavailable"),
    "503 page": (Answer(503, "<html>\n" + "p { margin: 0 }\n" * 63), "the storage is unavailable"),
    "SlowDown": (Answer(503, _ERROR.format("SlowDown", "Please reduce your request rate.")), "the storage is busy"),
}


@pytest.fixture
def pod(tmp_path: Path, proxy: S3Proxy) -> MoverPod:
    """A pod whose location is behind the proxy."""
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_bucket(proxy.server, proxy.server.make_bucket("opening"), url=proxy.url)
    pod.put_repository()
    return pod


async def _put_transfer(pod: MoverPod, kind: str, tree: Path) -> None:
    """Create the repository and the transfer; a restore is one of a snapshot of the tree."""
    await pod.create_repository()
    spec = {}
    if kind == "DataDownload":
        spec = {"snapshotID": (await pod.transfer("DataUpload", tree))["snapshotID"]}
    pod.put_transfer(kind, **spec)


def _outages(pod: MoverPod) -> list[str]:
    """What was reported about the storage; on a busy machine, also that it takes long."""
    waits = [message for reason, message in pod.events() if reason == "Data-Path-Waiting"]
    return [wait for wait in waits if "does not answer" in wait]


async def _until_reported(pod: MoverPod, running: "asyncio.Task[int]") -> None:
    await until(lambda: bool(_outages(pod)) or running.done(), seconds=100)


_UPLOADS = [pytest.param("DataUpload", name, marks=pytest.mark.cause("storage-busy")) for name in _FAULTS]
_DOWNLOADS = [("DataDownload", "refused"), ("DataDownload", "503")]


@pytest.mark.sample("DataUpload-503")
@pytest.mark.parametrize(("kind", "fault"), [*_UPLOADS, *_DOWNLOADS])
async def test_a_transfer_waits_for_a_storage_that_does_not_answer(
    pod: MoverPod, proxy: S3Proxy, tree: Path, kind: str, fault: str
) -> None:
    await _put_transfer(pod, kind, tree)
    volume = tree if kind == "DataUpload" else tree.parent / "out"
    kopias, cause = _FAULTS[fault]
    proxy.fail(kopias)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pod.run(FLAGS[kind], volume))
        await _until_reported(pod, running)
        proxy.recover()
    assert running.result() == 0, pod.message
    name = f"backup repository app-default-kopia (s3://opening/kopia/app/ at {proxy.url})"
    assert _outages(pod) == [f"{name} does not answer, will retry: {cause}"]
    assert ("Data-Path-Ready", f"{name} answers") in pod.events()
    assert describe_tree(volume) == describe_tree(tree)


@pytest.mark.sample("refused")
@pytest.mark.parametrize("fault", ["refused", "503"])
async def test_a_storage_that_never_answers_fails_a_transfer_after_the_timeout(
    pod: MoverPod, proxy: S3Proxy, tree: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The timeout is longer than kopia itself retries, up to 8.4 s: an outage is what kopia reports."""
    await _put_transfer(pod, "DataUpload", tree)
    monkeypatch.setenv("DATA_MOVER_STALL_TIMEOUT", "12s")
    kopias, cause = _FAULTS[fault]
    proxy.fail(kopias)
    started = time.monotonic()
    assert await pod.run("data-upload", tree) == 16
    assert time.monotonic() - started >= 12
    assert re.search(rf"^backup repository .* did not answer for \d+s: {cause}: ", pod.message)
    assert len(_outages(pod)) == 1


@pytest.mark.cause("clock-rejected")
async def test_a_storage_that_rejects_the_clock_fails_a_transfer_with_its_message(
    pod: MoverPod, proxy: S3Proxy, tree: Path
) -> None:
    await _put_transfer(pod, "DataUpload", tree)
    words = "The difference between the request time and the current time is too large."
    proxy.fail(Answer(403, _ERROR.format("RequestTimeTooSkewed", words)))
    assert await pod.run("data-upload", tree) == 12
    assert "the node's clock differs too much from the storage's: " in pod.message
    assert words in pod.message
    assert _outages(pod) == []


def _cancel(pod: MoverPod) -> None:
    pod.put_transfer("DataUpload", cancel=True)


@pytest.mark.sample("refused-SIGTERM")
@pytest.mark.parametrize("end", [_cancel, MoverPod.signal], ids=["spec.cancel", "SIGTERM"])
@pytest.mark.parametrize("fault", ["refused", "503"])
async def test_a_cancel_ends_the_wait_for_a_storage(
    pod: MoverPod, proxy: S3Proxy, tree: Path, fault: str, end: Callable[[MoverPod], None]
) -> None:
    await _put_transfer(pod, "DataUpload", tree)
    proxy.fail(_FAULTS[fault][0])
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pod.run("data-upload", tree))
        await _until_reported(pod, running)
        end(pod)
        async with asyncio.timeout(2):
            await asyncio.shield(running)
    assert running.result() == 14, pod.message


@pytest.mark.sample("503")
@pytest.mark.parametrize("fault", ["refused", "503"])
async def test_an_init_pod_waits_for_a_storage_that_does_not_answer(pod: MoverPod, proxy: S3Proxy, fault: str) -> None:
    kopias, cause = _FAULTS[fault]
    proxy.fail(kopias)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pod.init())
        await _until_reported(pod, running)
        proxy.recover()
    assert running.result() == 0, pod.message
    (outage,) = _outages(pod)
    assert outage.endswith(f"does not answer, will retry: {cause}")
    about = {event["involvedObject"]["kind"] for event in pod.kube.objects(EVENTS)}
    assert about == {"BackupRepository"}

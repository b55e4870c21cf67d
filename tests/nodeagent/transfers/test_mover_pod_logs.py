"""The log of a mover: copied into the agent's log, its end in the message of a transfer whose mover left none."""

import asyncio
from typing import Any

import pytest

from core.kube.client import KubeClient
from core.kube.resources import PODS
from core.kube.transport import Retry
from core.models.transfers import DataUpload
from nodeagent.transfers.mover_pod import MoverLogs, add_log_end
from tests.nodeagent.support.dispatching import Gate
from tests.nodeagent.support.harness import accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NAMESPACE, TRANSFERS, data_upload
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

LOG_LIMIT_BYTES = 4 * 1024 * 1024


@pytest.mark.parametrize(
    ("message", "tail", "together"),
    [
        pytest.param("OOMKilled", "", "OOMKilled", id="no log"),
        pytest.param("OOMKilled", "one\ntwo\n", "OOMKilled; its log ends: one\ntwo", id="a log with more"),
        pytest.param("wrong password for it", "E wrong password for it", "wrong password for it", id="repeated"),
        pytest.param(
            "the pod is gone; cannot read /x/y",
            "I begin\nE cannot read /x/y at all",
            "the pod is gone; cannot read /x/y; its log ends: I begin",
            id="partly repeated",
        ),
        pytest.param("a: line one", "line one", "a: line one", id="the line is in the message"),
        pytest.param("Error", "an Error came\n\n", "Error; its log ends: an Error came", id="too short to compare"),
    ],
)
def test_the_lines_that_the_message_lacks_are_added(message: str, tail: str, together: str) -> None:
    assert add_log_end(message, tail) == together


def copied(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Return the mover's lines in the agent's log, each with its fields."""
    found = [record for record in caplog.records if record.getMessage().startswith("mover: ")]
    return [(record.getMessage().removeprefix("mover: "), record.__dict__["fields"]) for record in found]


@pytest.mark.looptime
@pytest.mark.parametrize("exit_code", [0, 11, 137], ids=["completed", "failed", "killed"])
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_the_log_of_a_mover_is_copied_before_its_pod_is_deleted(
    kind: str, exit_code: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    transfer = accepted(TRANSFERS[kind]())
    name = transfer["metadata"]["name"]
    message = "no space left on device" if exit_code else None
    async with open_world(transfer, mover=Mover(exit_code=exit_code, message=message)) as world:
        world.kube.logs[NAMESPACE, name] = "first line\nE no space left on device\nlast line"
        async with world.agent():
            await world.until(lambda: world.done(kind))
    lines = copied(caplog)
    assert [line for line, _ in lines] == ["first line", "E no space left on device", "last line"]
    assert {(extra["kind"], extra["name"], extra["uid"]) for _, extra in lines} == {
        (kind, name, transfer["metadata"]["uid"])
    }
    status = world.transfer(kind)["status"]
    assert (
        status.get("message")
        == {
            0: None,
            11: "no space left on device",
            137: "data mover pod ended: killed by signal 9 (exit code 137): no space left on device; "
            "its log ends: first line\nE no space left on device\nlast line",
        }[exit_code]
    )


@pytest.mark.looptime
async def test_the_end_of_a_long_log_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    text = [f"{number:07d} {'x' * 200}" for number in range(40_000)]
    async with open_world(accepted(data_upload()), mover=Mover(exit_code=11, message="")) as world:
        world.kube.logs[NAMESPACE, "du-1"] = "\n".join(text) + "\n"
        async with world.agent():
            await world.until(world.done)
    lines = [line for line, _ in copied(caplog)]
    assert lines == text[-len(lines) :]
    assert LOG_LIMIT_BYTES / 2 < sum(map(len, lines)) <= LOG_LIMIT_BYTES
    assert text[-1] in world.transfer()["status"]["message"]
    assert len(world.transfer()["status"]["message"]) < 2000


@pytest.mark.looptime
async def test_the_end_of_the_log_is_kept_if_the_outcome_is_written_twice() -> None:
    async with open_world(accepted(data_upload()), mover=Mover(exit_code=11, message="")) as world:
        world.kube.logs[NAMESPACE, "du-1"] = "kopia said why\n"
        async with world.agent():
            await world.until(lambda: world.phase() == "InProgress")
            await world.until(lambda: world.kube.objects(PODS)[0]["status"]["phase"] == "Running")
            world.kube.fail_next("PATCH", "/datauploads/", 409, times=2)
            await world.until(world.done)
    assert "its log ends: kopia said why" in world.transfer()["status"]["message"]


@pytest.mark.looptime
async def test_a_log_that_cannot_be_read_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with open_world(accepted(data_upload()), mover=Mover(exit_code=11, message="")) as world:
        world.kube.fail_next("GET", "/pods/du-1/log", 500, times=1000)
        async with world.agent():
            await world.until(lambda: world.phase() == "Failed", seconds=200)
            await asyncio.sleep(0)
    assert "cannot copy the log" in caplog.text


def ended_pods(count: int) -> list[tuple[DataUpload, JsonDict]]:
    """Return transfers, each with its mover pod, which has ended."""
    status = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 1}}}]}
    crs = [DataUpload.parse(data_upload(f"du-{number}")) for number in range(count)]
    metas = [{"name": cr.name, "namespace": NAMESPACE, "uid": f"uid-of-pod-{cr.name}"} for cr in crs]
    return [(cr, {"metadata": meta, "status": status}) for cr, meta in zip(crs, metas, strict=True)]


@pytest.mark.looptime
async def test_kubelets_that_do_not_answer_delay_each_transfer_once_and_hold_two_requests() -> None:
    kube = FakeKube()
    gate = Gate(kube, holds=lambda request: request.path.endswith("/log"))
    logs = MoverLogs(KubeClient(gate, Retry(LoopClock(), attempts=1)))
    pairs = ended_pods(20)
    loop = asyncio.get_running_loop()
    for expected_seconds in (30.0, 0.0):
        began = loop.time()
        reads = [asyncio.create_task(logs.copy(cr, pod), name=cr.name) for cr, pod in pairs]
        await asyncio.sleep(0)
        assert set(await asyncio.gather(*reads)) == {""}
        assert loop.time() - began == pytest.approx(expected_seconds, abs=0.1)
        assert gate.waiting == 2
    # Another pod of the transfer has a log of its own.
    gate.open.set()
    cr, pod = pairs[0]
    kube.put({"apiVersion": "v1", "kind": "Pod"} | pod)
    kube.logs[NAMESPACE, cr.name] = "it says why"
    assert await logs.copy(cr, pod | {"metadata": pod["metadata"] | {"uid": "another"}}) == "it says why"


@pytest.mark.looptime
async def test_the_log_of_a_pod_that_never_ran_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    mover = Mover(rejected="OutOfcpu", rejections=1, seconds=100)
    async with open_world(accepted(data_upload()), mover=mover) as world, world.agent():
        await world.until(lambda: "OutOfcpu" in world.reasons())
        await world.until(lambda: world.phase() == "InProgress")
        assert [request.path for request in world.kube.requests if request.path.endswith("/log")] == []
    assert "cannot copy the log" not in caplog.text

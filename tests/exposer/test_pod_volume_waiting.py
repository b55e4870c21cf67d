"""Workload pods of restores that cannot wait for their data, or no longer do."""

from datetime import timedelta

import pytest

from core.models.base import JsonDict
from exposer.model import LocatedVolume, Pending
from tests.exposer.test_pod_volume import DONE_STATE, RESTORE, WAITING_STATE, Scene, init_status


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"])
@pytest.mark.cause("workload-not-starting")
async def test_a_restore_has_two_minutes_where_its_init_container_cannot_start(reason: str) -> None:
    scene = Scene("podvolumerestore")
    found = []
    for message in ("", "no such image"):
        scene.put_pod(init_status({"waiting": {"reason": reason, "message": message}}))
        found.append(await scene.locate())
    text = f"init container restore-wait of workload pod app3/writer cannot start: {reason}"
    operation, timeout = f"start of restore-wait in {scene.request.workload.uid}", timedelta(minutes=2)
    assert found == [
        Pending("WorkloadNotStarting", shown, blocked=True, operation=operation, timeout=timeout)
        for shown in (text, f"{text}: no such image")
    ]


@pytest.mark.parametrize(
    ("containers", "status", "message"),
    [
        ([], {"phase": "Running"}, "has no init container restore-wait"),
        (None, init_status(DONE_STATE, "Running"), "has terminated (exit code 0): the pod no longer waits"),
        (None, init_status(WAITING_STATE, "Unknown"), "state of workload pod app3/writer is unknown"),
        (None, init_status(WAITING_STATE, "Failed"), "workload pod app3/writer is not available: phase Failed"),
    ],
    ids=["none", "over", "unknown", "pod failed"],
)
@pytest.mark.cause("restore-wait-over")
async def test_a_pod_that_does_not_wait_for_its_data_is_rejected(
    containers: list[JsonDict] | None, status: JsonDict, message: str
) -> None:
    scene = Scene("podvolumerestore")
    if containers is not None:
        scene.spec["initContainers"] = containers
    scene.put_pod(status)
    assert message in await scene.rejection()


OTHER = "5c1d6f0e-0b8e-4a38-9d0b-6a1f0c6f3b77"


@pytest.mark.parametrize(
    ("args", "restore", "said"),
    [
        ([OTHER], RESTORE, f"waits for the data of Restore {OTHER}, and not of {RESTORE}: the PodVolumeRestore names"),
        ([OTHER], None, f"waits for the data of Restore {OTHER}, and not of none: the PodVolumeRestore names"),
        ([RESTORE], RESTORE, None),
        (["-ec", "sleep infinity"], RESTORE, None),
        (["sleep infinity"], None, None),
        ([], RESTORE, None),
    ],
)
@pytest.mark.cause("restore-wait-over")
async def test_a_pod_that_waits_for_another_restore_is_rejected(
    args: list[str], restore: str | None, said: str | None
) -> None:
    """It would wait for ever for a done file of another name."""
    scene = Scene("podvolumerestore", restore=restore)
    scene.spec["initContainers"][0]["args"] = args
    scene.put_pod(init_status(WAITING_STATE))
    if said is None:
        assert isinstance(await scene.locate(), LocatedVolume)
    else:
        assert said in await scene.rejection()


@pytest.mark.parametrize(
    ("code", "reason"), [(255, "Unknown"), (137, "OOMKilled"), (1, "Error")], ids=["node restarted", "memory", "failed"]
)
async def test_a_pod_whose_init_container_starts_again_will_wait_again(code: int, reason: str) -> None:
    """The kubelet starts one that has failed again, except in a pod with restartPolicy Never."""
    scene = Scene("podvolumerestore")
    scene.put_pod(init_status({"terminated": {"exitCode": code, "reason": reason}}))
    found = await scene.locate()
    assert isinstance(found, Pending)
    assert found.reason == "WorkloadNotWaiting"
    assert found.message.endswith(f"has ended (exit code {code}), and starts again")
    scene.spec["restartPolicy"] = "Never"
    scene.put_pod(init_status({"terminated": {"exitCode": code, "reason": reason}}))
    assert f"has terminated (exit code {code})" in await scene.rejection()

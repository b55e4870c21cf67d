"""Cancels a restore, and deletes the pods of `--method restore-wait` once their data has arrived or will not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

from client.collections.collection import Restores
from client.collections.models import Volume
from core.clock import Clock, Deadline
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import POD_VOLUME_RESTORES, PODS
from core.kube.types import Pod
from core.models.names import RESTORE_ANNOTATION
from core.models.phases import FINAL_PHASES, Phase

__all__ = ["RestoreTools", "WaitingPod", "cancel_restore", "delete_waiting_pods"]

_END_TIMEOUT: Final = timedelta(minutes=1)
_POLL_SECONDS: Final = 1.0
_ENDED: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True)
class RestoreTools:
    """What a command works with; `on_note` gets what the user should know beside the answer."""

    client: KubeClient
    clock: Clock
    on_note: Callable[[str], None]


class WaitingPod(NamedTuple):
    """A pod in the namespace of its PVC; its PodVolumeRestore, in the agents' namespace, has the same name."""

    namespace: str
    name: str


async def cancel_restore(tools: RestoreTools, namespace: str, name: str) -> list[Volume]:
    """Request the cancellation of all transfers of the restore that have not ended, and return their volumes.

    The pods that waited for data are deleted once their transfers have ended, which is waited for.

    Raises:
        NotFoundError: there is no restore of that name.
        KubeError: the API server rejected a request.
    """
    restore, canceled = await Restores(tools.client, namespace).cancel(name)
    pods = [WaitingPod(one.namespace, one.transfer) for one in restore.volumes if one.kind == POD_VOLUME_RESTORES.kind]
    await delete_waiting_pods(tools, namespace, pods)
    return canceled


async def delete_waiting_pods(
    tools: RestoreTools,
    namespace: str,
    pods: Iterable[WaitingPod],
    timeout: timedelta = _END_TIMEOUT,  # noqa: ASYNC109 - of all
) -> None:
    """Delete the pods whose PodVolumeRestores, in `namespace`, have ended or are gone.

    One whose data has arrived still removes the done file, and ends: it gets the time for that. One whose
    PodVolumeRestore has not ended by then stays, since a data mover may still write to its volume: a note says so. A
    pod that no restore of ours made is never deleted.
    """
    deadline = Deadline.after(tools.clock, timeout)
    for pod in pods:
        command = f"kubectl -n {pod.namespace} delete pod {pod.name}"
        try:
            if await _is_over(tools, namespace, pod, deadline):
                await tools.client.delete(PODS, pod.namespace, pod.name)
            elif await _read_own(tools, pod) is not None:
                text = f"its PodVolumeRestore has not ended: delete it afterward ({command})"
                tools.on_note(f"Pod {pod.namespace}/{pod.name} stays: {text}")
        except KubeError as e:
            tools.on_note(f"Pod {pod.namespace}/{pod.name} could not be deleted ({command}): {e}")


async def _is_over(tools: RestoreTools, namespace: str, pod: WaitingPod, deadline: Deadline) -> bool:
    """Return whether the pod is to be deleted, at the latest at the deadline."""
    while True:
        found = await _read_own(tools, pod)
        if found is None:
            return False
        transfer = await tools.client.read(POD_VOLUME_RESTORES, namespace, pod.name)
        phase = "" if transfer is None else (transfer.get("status") or {}).get("phase")
        if transfer is None or (phase in FINAL_PHASES and phase != Phase.COMPLETED):
            return True
        if phase == Phase.COMPLETED and ((found.get("status") or {}).get("phase") in _ENDED or deadline.expired):
            return True
        if deadline.expired:
            return False
        await tools.clock.sleep(_POLL_SECONDS)


async def _read_own(tools: RestoreTools, pod: WaitingPod) -> Pod | None:
    """Return the pod, if a restore of ours made it."""
    found = await tools.client.read(PODS, pod.namespace, pod.name)
    if found is None or RESTORE_ANNOTATION not in (found["metadata"].get("annotations") or {}):
        return None
    return found

"""The result of a mover that is done, before the kubelet reports its end.

The kubelet looks at its containers once a second (PLEG), and a pod's status follows. What a mover leaves as termination
message is in a file of the kubelet before. Knows that only a valid result counts: every other end is what the kubelet
reports. Does not know when to look (`nodeagent.node.progress` sees the mover's last Event).
"""

from typing import Any

from core.errors import ResultError
from core.kube.types import Pod
from exposer.pod_status import mover_status
from exposer.workload import read_termination_message
from nodeagent.transfers.kinds.base import NodeKind
from nodeagent.transfers.mover_pod import PodState, is_own, pod_state

__all__ = ["add_result"]


def add_result(pod: Pod, kind: NodeKind[Any], host_pods: str) -> Pod | None:
    """Return `pod`, a trimmed v1 Pod, as the kubelet will report it; None if its mover has not left a result.

    Args:
        pod: the mover pod of a transfer of `kind`.
        kind: parses the result.
        host_pods: the kubelet's pods directory, as the agent has it mounted; empty: it has not.
    """
    mover = mover_status(pod)
    # A mover of Velero may have more to do, and a pod that is being deleted may have been interrupted.
    if not host_pods or not mover or pod_state(pod) is not PodState.RUNNING or not is_own(pod):
        return None
    message = read_termination_message(host_pods, pod["metadata"]["uid"], mover["name"])
    try:
        kind.parse_result(message)
    except ResultError:
        return None
    ended = mover | {"state": {"terminated": {"exitCode": 0, "reason": "Completed", "message": message}}}
    statuses = [ended if each is mover else each for each in pod["status"]["containerStatuses"]]
    return pod | {"status": pod["status"] | {"containerStatuses": statuses}}

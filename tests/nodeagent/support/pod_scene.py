"""A fake API server in which a controller of the leader runs one pod."""

from typing import ClassVar

from core.kube.client import KubeClient
from core.kube.resources import PODS
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.tasks import until


class PodScene:
    """The pod, and what its kubelet does; a scene has `kube` and the name of the pod's container."""

    kube: FakeKube
    container: ClassVar[str]

    @property
    def client(self) -> KubeClient:
        return self.kube.client

    @property
    def pod(self) -> JsonDict | None:
        return next(iter(self.kube.objects(PODS)), None)

    def set_pod(self, **status: object) -> None:
        assert self.pod is not None
        self.kube.put(self.pod | {"status": status})

    def block_pod(self) -> None:
        """Let no node have room for the pod."""
        blocked = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: full"}
        self.set_pod(phase="Pending", conditions=[blocked])

    def end_pod(self, exit_code: int, message: str) -> None:
        state = {"terminated": {"exitCode": exit_code, "message": message}}
        phase = "Failed" if exit_code else "Succeeded"
        self.set_pod(phase=phase, containerStatuses=[{"name": self.container, "state": state}])

    async def until_pod(self, *, seconds: float = 30.0) -> JsonDict:
        await until(lambda: self.pod is not None, seconds=seconds)
        return self.pod

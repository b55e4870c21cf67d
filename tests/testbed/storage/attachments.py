"""VolumeAttachments of volumes that every node reaches, as a driver has that attaches them.

Objects only: the kubelets mount a volume without one. So nothing here keeps two nodes from writing to a volume,
and a test that watches the writers (`tests.cluster.writers`) judges the product alone.
Source: Kubernetes v1.34, pkg/controller/volume/attachdetach (a pod that ended, or no longer exists, uses no volume;
a volume of one writer is attached to one node at a time).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.testbed.demonstration.user import PODS
from tests.testbed.storage.objects import ATTACHMENTS, CLAIMS, SHARED, STORAGE_CLASSES, VOLUMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed.api import Api, Json
    from tests.testbed.storage.cache import Cache

__all__ = ["Attachments"]

_ATTACHER = "attacher.bed.node-agent.test"
_ENDED = ("Succeeded", "Failed")
_CLAIM = "bed.node-agent.test/claim"
_LABEL_CHARACTERS = 63


class Attachments:
    """Creates and deletes VolumeAttachments, as pods come and go."""

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api = api
        self._cache = cache

    def reconcile(self) -> None:
        """Delete attachments that no pod needs, and create those of volumes that have none."""
        volumes = [volume for volume in self._cache.all(VOLUMES) if self._is_shared(volume)]
        users = {volume["metadata"]["name"]: sorted(set(self._users(volume))) for volume in volumes}
        attached = set()
        for attachment in self._cache.all(ATTACHMENTS):
            spec = attachment["spec"]
            name = spec["source"].get("persistentVolumeName", "")
            attached.add(name)
            if spec["attacher"] == _ATTACHER and spec["nodeName"] not in users.get(name, ()):
                self._api.delete(ATTACHMENTS, "", attachment["metadata"]["name"])
        for volume in volumes:
            name = volume["metadata"]["name"]
            if users[name] and name not in attached:
                self._attach(volume, users[name][0])

    def _attach(self, volume: Json, node: str) -> None:
        name, reference = volume["metadata"]["name"], volume["spec"]["claimRef"]
        claim = f"{reference['namespace']}.{reference['name']}"
        body = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "VolumeAttachment",
            # A list of objects shows by the claim to which test it belongs.
            "metadata": {"name": f"{name}-{node}", "labels": {_CLAIM: claim[:_LABEL_CHARACTERS].rstrip(".-")}},
            "spec": {"attacher": _ATTACHER, "nodeName": node, "source": {"persistentVolumeName": name}},
        }
        self._api.create(ATTACHMENTS, body)
        self._api.patch(ATTACHMENTS, {"status": {"attached": True}}, name=f"{name}-{node}", sub="status")

    def _is_shared(self, volume: Json) -> bool:
        storage_class = self._cache.get(STORAGE_CLASSES, "", volume["spec"].get("storageClassName", "")) or {}
        return bool((storage_class.get("parameters") or {}).get(SHARED) == "true")

    def _users(self, volume: Json) -> Iterator[str]:
        """The nodes of the pods that use a volume."""
        reference = volume["spec"].get("claimRef") or {}
        namespace, claim_name = reference.get("namespace", ""), reference.get("name", "")
        claim = self._cache.get(CLAIMS, namespace, claim_name) or {"spec": {}}
        if claim["spec"].get("volumeName") != volume["metadata"]["name"]:
            return
        for pod in self._cache.all(PODS):
            node, ended = pod["spec"].get("nodeName"), pod.get("status", {}).get("phase") in _ENDED
            if node and not ended and pod["metadata"]["namespace"] == namespace and claim_name in _claims(pod):
                yield node


def _claims(pod: Json) -> set[str]:
    volumes = pod["spec"].get("volumes") or []
    return {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each}

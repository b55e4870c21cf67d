"""Placement of a backup, derived from its source volume."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from core.errors import ExposeError
from core.kube.resources import NODES, PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, STORAGE_CLASSES, VOLUME_ATTACHMENTS
from core.models.base import JsonDict
from exposer.pod_manifest import Placement
from exposer.settings import BackupPVCSettings, PlacementRule, PlacementRules
from exposer.sources import needs_windows, place_backup
from exposer.template import AgentTemplate
from tests.exposer.support.cuts import Cut
from tests.exposer.support.inputs import snapshot_request
from tests.exposer.support.world import World

ZONES = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
FAST = "csi.vsphere.volume/fast-provisioning"
LINUX_ONLY = AgentTemplate("mover")
BOTH = replace(LINUX_ONLY, windows=True)


class Source:
    """A PVC of the class `hostpath` with its volume in two zones, and two nodes."""

    def __init__(self, *, binding: str = "WaitForFirstConsumer", fs_type: str = "", **claim: Any) -> None:
        self.world = World()
        parameters = {"csi.storage.k8s.io/fstype": fs_type} if fs_type else {}
        self.world.put(STORAGE_CLASSES, "hostpath", volumeBindingMode=binding, parameters=parameters)
        spec = {"volumeName": "pv-1", "storageClassName": "hostpath"} | claim.pop("spec", {})
        self.world.put(PERSISTENT_VOLUME_CLAIMS, "data", namespace="app", spec=spec, **claim)
        affinity = {"required": {"nodeSelectorTerms": ZONES}}
        self.world.put(PERSISTENT_VOLUMES, "pv-1", spec={"nodeAffinity": affinity})
        for name in ("linux", "windows"):
            self.world.put(NODES, f"{name}-1", labels={"kubernetes.io/os": name})

    def attach(self, node: str, volume: str = "pv-1") -> None:
        spec = {"nodeName": node, "source": {"persistentVolumeName": volume}}
        self.world.put(VOLUME_ATTACHMENTS, f"{volume}-{node}", spec=spec)

    async def place(self, **request: Any) -> Placement:
        return await place_backup(self.world.client, snapshot_request(**({"template": LINUX_ONLY} | request)))


LATE, AT_ONCE = "WaitForFirstConsumer", "Immediate"


@pytest.mark.parametrize(
    ("binding", "mapped", "topology"),
    [
        pytest.param(LATE, None, tuple(ZONES), id="late"),
        pytest.param(AT_ONCE, None, (), id="at once"),
        pytest.param(LATE, AT_ONCE, (), id="late, the backup PVC at once"),
        pytest.param(AT_ONCE, LATE, (), id="at once, the backup PVC late"),
    ],
)
async def test_the_topology_of_the_source_restricts_the_pod_of_a_late_binding_pvc(
    binding: str, mapped: str | None, topology: tuple[JsonDict, ...]
) -> None:
    """As by Velero; the scheduler follows a volume that is provisioned immediately, which may be in another zone."""
    source = Source(binding=binding)
    source.world.put(STORAGE_CLASSES, "mapped", volumeBindingMode=mapped)
    settings = BackupPVCSettings(storage_class="mapped" if mapped else None)
    assert (await source.place(backup_pvcs={"hostpath": settings})).topology == topology


@pytest.mark.parametrize(
    "remove",
    [(PERSISTENT_VOLUME_CLAIMS, "app/data"), (PERSISTENT_VOLUMES, "pv-1"), (STORAGE_CLASSES, "hostpath"), None],
    ids=["claim", "volume", "class", "topology"],
)
async def test_deleted_objects_add_no_restriction(remove: tuple[Any, str] | None) -> None:
    source = Source()
    if remove:
        await source.world.delete(*remove)
    else:
        source.world.put(PERSISTENT_VOLUMES, "pv-1", spec={})
    assert await source.place() == Placement()


@pytest.mark.parametrize(
    ("backup_class", "chosen"), [("", "source"), ("shallow", "shallow"), ("other", "all")], ids=str
)
async def test_rules_are_selected_by_the_class_of_the_backup_pvc(backup_class: str, chosen: str) -> None:
    wanted = {"source": "hostpath", "shallow": "shallow", "all": ""}
    rules = {name: PlacementRule(({"key": name, "operator": "Exists"},), of) for name, of in wanted.items()}
    backup_pvc = BackupPVCSettings(storage_class=backup_class)
    found = await Source().place(nodes=PlacementRules(tuple(rules.values())), backup_pvcs={"hostpath": backup_pvc})
    assert found.alternatives == (rules[chosen].requirements,)


@pytest.mark.parametrize("where", ["source", "backup PVC"])
async def test_a_linked_clone_avoids_the_nodes_of_its_source(where: str) -> None:
    annotations = {FAST: "true"}
    source = Source(annotations=annotations if where == "source" else {})
    for node, volume in (("linux-1", "pv-1"), ("linux-2", "pv-1"), ("linux-3", "other")):
        source.attach(node, volume)
    settings = BackupPVCSettings(annotations=annotations if where != "source" else {})
    found = await source.place(backup_pvcs={"hostpath": settings})
    assert found.avoid_nodes == ("linux-1", "linux-2")


NODE = "volume.kubernetes.io/selected-node"


@pytest.mark.parametrize(
    ("needed", "template", "attached", "source"),
    [
        pytest.param(False, BOTH, "", {}, id="nothing known"),
        pytest.param(True, BOTH, "windows-1", {}, id="attached"),
        pytest.param(False, BOTH, "linux-1", {"annotations": {NODE: "windows-1"}}, id="attached first"),
        pytest.param(True, BOTH, "", {"annotations": {NODE: "windows-1"}}, id="selected"),
        pytest.param(False, BOTH, "", {"annotations": {NODE: "linux-1"}, "fs_type": "ntfs"}, id="node first"),
        pytest.param(True, BOTH, "", {"annotations": {NODE: "gone"}, "fs_type": "NTFS"}, id="file system"),
        pytest.param(False, BOTH, "", {"fs_type": "ext4"}, id="another file system"),
        pytest.param(False, BOTH, "windows-1", {"spec": {"volumeMode": "Block"}}, id="a device"),
        pytest.param(True, LINUX_ONLY, "", {"fs_type": "ntfs"}, id="file system, no agent for it"),
        pytest.param(False, LINUX_ONLY, "windows-1", {}, id="nodes are not read"),
    ],
)
async def test_the_operating_system_follows_the_node_and_then_the_file_system(
    template: AgentTemplate, attached: str, source: dict[str, Any], *, needed: bool
) -> None:
    scene = Source(**source)
    if attached:
        scene.attach(attached)
    assert await needs_windows(scene.world.client, snapshot_request(template=template)) is needed
    with pytest.raises(ExposeError, match="requires a Windows node") if needed else nullcontext():
        await scene.place(template=template)


async def test_only_required_objects_are_read() -> None:
    """Without Windows and linked clones the attachments of the cluster are not listed."""
    source = Source()
    recorder = Cut(source.world.kube)
    await place_backup(World.client_over(recorder), snapshot_request(template=LINUX_ONLY))
    kinds = [call.rsplit("/", 2)[-2] for call in recorder.calls]
    assert kinds == ["persistentvolumeclaims", "storageclasses", "persistentvolumes"]

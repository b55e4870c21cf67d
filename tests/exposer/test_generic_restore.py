"""Expose of a new volume, its rebind to the target PVC, and the cleanup."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from core.errors import ExposeError
from core.kube.errors import ForbiddenError
from core.kube.resources import NODES, PERSISTENT_VOLUME_CLAIMS, PODS, STORAGE_CLASSES, VOLUME_SNAPSHOTS
from core.kube.transport import Request, Response
from core.kube.types import NodeRequirement
from core.models.base import JsonDict
from core.models.names import ATTEMPT_LABEL, SELECTED_NODE_ANNOTATION
from core.models.reasons import PendingReason
from exposer.model import NotOwnerError, Pending
from exposer.settings import CacheVolume, PlacementRule, PlacementRules
from tests.exposer.support.cuts import CUTS, Cut, interruptions
from tests.exposer.support.inputs import expose_settings, restore_request, template
from tests.exposer.support.restore_steps import (
    assert_clean,
    assert_handed_over,
    bind_target_elsewhere,
    claim,
    clean_up,
    expose,
    rebind,
    remove_target,
    replace_target,
)
from tests.exposer.support.scenes import RestoreScene
from tests.exposer.support.world import no_guard
from tests.exposer.test_csi_snapshot_guard import Guard


@pytest.mark.parametrize(
    ("mode", "reclaim", "binding", "node"),
    [
        ("Filesystem", "Delete", "Immediate", ""),
        ("Block", "Delete", "Immediate", ""),
        ("Filesystem", "Retain", "Immediate", ""),
        ("Filesystem", "Delete", "WaitForFirstConsumer", "node-b"),
    ],
)
async def test_a_new_volume_is_exposed_and_bound_to_the_target(
    mode: str, reclaim: str, binding: str, node: str
) -> None:
    scene = RestoreScene(mode=mode, reclaim=reclaim, binding=binding, node=node)

    exposed = await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    restored = claim(scene, "velero", "r2-9nft8")
    await rebind(scene, kept)
    await clean_up(scene)

    assert exposed.pod["status"]["phase"] == "Running"
    assert restored["spec"]["volumeMode"] == mode
    assert restored["metadata"].get("annotations", {}).get("volume.kubernetes.io/selected-node", "") == node
    assert kept.reclaim_policy == reclaim
    assert_handed_over(scene, kept)


@pytest.mark.parametrize(
    ("created", "left"), [("11:00", set()), ("13:00", {"VolumeSnapshot app3/base"})], ids=["before", "later"]
)
async def test_a_snapshot_that_was_taken_for_the_restore_alone_is_deleted(created: str, left: set[str]) -> None:
    scene = RestoreScene()
    scene.world.put(
        VOLUME_SNAPSHOTS, "base", namespace="app3", creationTimestamp=f"2026-11-21T{created}:00Z", spec={"source": {}}
    )
    before = scene.world.names() - {"VolumeSnapshot app3/base"}
    asked = datetime(2026, 11, 21, 12, tzinfo=UTC)
    scene.request = replace(scene.request, base_snapshot=("app3", "base"), requested_at=asked)

    await clean_up(scene)

    assert scene.world.names() == before | left


async def test_a_cache_has_its_own_pvc() -> None:
    scene = RestoreScene()
    scene.request = replace(scene.request, cache=CacheVolume("fast", 5000))

    exposed = await expose(scene)

    cache = claim(scene, "velero", "r2-9nft8-cache")
    assert cache["spec"]["resources"]["requests"]["storage"] == "6Gi"
    assert "--cache-volume-path=/scratch/cache" in exposed.pod["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("cache", [None, CacheVolume("fast", 5000)], ids=["no cache", "cache"])
@CUTS
async def test_a_restore_interrupted_before_its_data_path_is_cleaned_up(
    applied: bool, cache: CacheVolume | None
) -> None:
    def build() -> RestoreScene:
        scene = RestoreScene(reclaim="Retain")
        scene.request = replace(scene.request, cache=cache)
        return scene

    async for scene in interruptions(build, expose, applied=applied, least=5):
        await clean_up(scene)
        assert_clean(scene)


@pytest.mark.parametrize(
    ("binding", "node", "ignore", "reason"),
    [
        ("Immediate", "", False, None),
        ("WaitForFirstConsumer", "", False, "TargetClaimUnconsumed"),
        ("WaitForFirstConsumer", "", True, None),
        ("WaitForFirstConsumer", "node-a", False, None),
    ],
)
async def test_an_unused_target_is_pending(binding: str, node: str, ignore: bool, reason: str | None) -> None:
    scene = RestoreScene(binding=binding, node=node)
    scene.request = replace(scene.request, settings=expose_settings(ignore_delay_binding=ignore))

    found = await scene.exposer().check(scene.request, scene.world.client)

    assert (found.reason if found else None) == reason


POOL: NodeRequirement = {"key": "pool", "operator": "In", "values": ["movers"]}
NOT_WINDOWS = {"key": "kubernetes.io/os", "operator": "NotIn", "values": ["windows"]}


@pytest.mark.parametrize(
    ("binding", "ignore", "node", "rule"),
    [
        pytest.param("Immediate", False, "", True, id="provisioned immediately: the rule"),
        pytest.param("Immediate", True, "", True, id="provisioned immediately, nothing to ignore: the rule"),
        pytest.param("WaitForFirstConsumer", False, "node-b", False, id="provisioned late: the consumer's node alone"),
        pytest.param("WaitForFirstConsumer", True, "", True, id="provisioned late, which is ignored: the rule"),
    ],
)
async def test_the_consumers_node_is_used_with_late_binding_and_the_rule_otherwise(
    binding: str, ignore: bool, node: str, rule: bool
) -> None:
    """The target has its consumer's node in every case."""
    scene = RestoreScene(binding=binding, node="node-b")
    rules = PlacementRules((PlacementRule((POOL,), "hostpath"),))
    cache = CacheVolume("fast", 5000)
    scene.request = replace(
        scene.request, settings=expose_settings(ignore_delay_binding=ignore, nodes=rules), cache=cache
    )

    exposed = await expose(scene)

    affinity = exposed.pod["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == ([POOL, NOT_WINDOWS] if rule else [NOT_WINDOWS])
    assert [field["values"] for field in term.get("matchFields", [])] == ([[node]] if node else [])
    for name in ("r2-9nft8", "r2-9nft8-cache"):
        annotations = claim(scene, "velero", name)["metadata"].get("annotations", {})
        assert annotations.get("volume.kubernetes.io/selected-node", "") == node


async def test_a_mover_on_the_consumers_node_tolerates_what_the_consumer_does() -> None:
    """A user who edits the target PVC can name any node: its taints keep the mover off like a pod of theirs."""
    scene = RestoreScene(binding="WaitForFirstConsumer", node="node-b")
    for name, used in (("app", "data"), ("other", "logs")):
        keyed = {"key": name, "operator": "Exists"}
        spec = {
            "tolerations": [keyed, keyed | {"effect": "NoExecute"}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": used}}],
        }
        scene.world.put(PODS, name, namespace="app3", uid=f"uid-{name}", spec=spec, status={"phase": "Pending"})

    exposed = await expose(scene)

    added = [one for one in exposed.pod["spec"]["tolerations"] if one.get("effect") == "NoSchedule"]
    assert added == [
        {"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "app", "operator": "Exists", "effect": "NoSchedule"},
    ]


async def select_node(scene: RestoreScene, node: str) -> None:
    moved = {"metadata": {"annotations": {SELECTED_NODE_ANNOTATION: node}}}
    await scene.world.client.patch(PERSISTENT_VOLUME_CLAIMS, "app3", "data", moved)


@pytest.mark.parametrize(("removed", "nodes"), [(False, [["node-a"]]), (True, [])], ids=["it exists", "it was removed"])
async def test_a_mover_follows_its_pvc_when_the_consumer_was_rescheduled(
    *, removed: bool, nodes: list[list[str]]
) -> None:
    """The scheduler knows where the volume can be reached, if the first node was removed."""
    scene = RestoreScene(binding="WaitForFirstConsumer", node="node-a")
    scene.world.kube.fail_next("POST", "/pods", 403)
    with pytest.raises(ForbiddenError):
        await expose(scene)
    await select_node(scene, "node-b")
    if removed:
        await scene.world.client.delete(NODES, "", "node-a")

    exposed = await expose(scene)

    selected = claim(scene, "velero", "r2-9nft8")["metadata"]["annotations"][SELECTED_NODE_ANNOTATION]
    affinity = exposed.pod["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert selected == "node-a"
    assert [field["values"] for field in term.get("matchFields", [])] == nodes


async def test_the_next_attempt_follows_the_volume_if_the_node_was_removed() -> None:
    scene = RestoreScene(binding="WaitForFirstConsumer", node="node-b")
    await expose(scene)
    await scene.world.client.delete(NODES, "", "node-b")
    scene.request = replace(scene.request, owner=replace(scene.request.owner, attempt=2))

    exposed = await expose(scene)

    assert exposed.pod["metadata"]["labels"][ATTEMPT_LABEL] == "2"
    assert "node-b" not in json.dumps(exposed.pod["spec"]["affinity"])


async def test_another_node_is_selected_for_a_consumer_whose_node_was_removed() -> None:
    """No provisioner does that for a target with a selector, and the mover would fit on no node."""
    scene = RestoreScene(binding="WaitForFirstConsumer", node="node-c")

    found = await scene.exposer().ensure(scene.request, no_guard)

    text = "node node-c, which was selected for target PVC app3/data, no longer exists: another one is being selected"
    assert found == Pending("TargetClaimUnconsumed", text)
    assert SELECTED_NODE_ANNOTATION not in claim(scene, "app3", "data")["metadata"].get("annotations", {})
    await select_node(scene, "node-b")
    await expose(scene)
    selected = claim(scene, "velero", "r2-9nft8")["metadata"]["annotations"][SELECTED_NODE_ANNOTATION]
    assert selected == "node-b"


async def test_a_target_without_a_class_follows_the_rule_for_all() -> None:
    scene = RestoreScene()
    scene.put_target("data", storageClassName="")
    rules = PlacementRules((PlacementRule((POOL,), "hostpath"), PlacementRule((POOL | {"values": ["all"]},))))
    scene.request = replace(scene.request, settings=expose_settings(nodes=rules))

    assert await scene.exposer().check(scene.request, scene.world.client) is None
    await scene.exposer().ensure(scene.request, no_guard)

    assert '"all"' in json.dumps(scene.world.kube.objects(PODS))


async def test_a_restore_for_windows_is_left_to_veleros_agent_there() -> None:
    scene = RestoreScene()
    settings = expose_settings(template=replace(template(), windows=True))
    scene.request = replace(scene.request, for_windows=True, settings=settings)

    pending = await scene.exposer().check(scene.request, scene.world.client)
    assert pending == Pending(
        PendingReason.LEFT_TO_VELERO, "the volume requires a Windows node: left to Velero's node agent there"
    )
    # Velero's agent accepted it, and is gone.
    with pytest.raises(ExposeError, match=r"^the volume requires a Windows node$"):
        await scene.exposer().ensure(scene.request, no_guard)


async def test_a_restore_for_windows_is_rejected_where_velero_has_no_agent_there() -> None:
    scene = RestoreScene()
    scene.request = replace(scene.request, for_windows=True)

    with pytest.raises(ExposeError, match="there is no DaemonSet node-agent-windows of Velero's agents"):
        await scene.exposer().check(scene.request, scene.world.client)


async def test_an_absent_target_is_pending() -> None:
    scene = RestoreScene()
    await remove_target(scene)

    assert await scene.exposer().check(scene.request, scene.world.client) == Pending(
        "TargetClaimAbsent", "target PVC app3/data does not exist yet"
    )


async def test_a_missing_storage_class_is_waited_for_where_it_is_read() -> None:
    """Its parameters cannot be changed: a tool deletes it, and creates it again."""
    scene = RestoreScene()
    storage_class = await scene.world.client.get(STORAGE_CLASSES, "", "hostpath")
    await scene.world.client.delete(STORAGE_CLASSES, "", "hostpath")
    exposer, client = scene.exposer(), scene.world.client

    found = Pending("TargetClassMissing", "StorageClass hostpath of target PVC app3/data does not exist", blocked=True)
    assert await exposer.check(scene.request, client) == found
    assert await exposer.ensure(scene.request, no_guard) == found
    assert await exposer.check(restore_request(ignore_delay_binding=True), client) is None
    scene.world.kube.put(storage_class)
    await expose(scene)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bind_target_elsewhere, "target PVC app3/data: it is already bound to"),
        (replace_target, "target PVC app3/data was made by restore r3 meanwhile"),
    ],
    ids=["bound", "another restore's"],
)
async def test_a_target_with_another_volume_to_come_is_rejected(
    change: Callable[[RestoreScene], Awaitable[None]], message: str
) -> None:
    scene = RestoreScene()
    await change(scene)

    exposer, client = scene.exposer(), scene.world.client
    for step in (exposer.check(scene.request, client), exposer.ensure(scene.request, no_guard)):
        with pytest.raises(ExposeError, match=message):
            await step


@pytest.mark.parametrize(
    "meta",
    [
        # An update of what exists by another restore.
        {"creationTimestamp": "2026-11-21T11:15:03Z"},
        {"labels": {"velero.io/restore-name": "r2"}},
        {"annotations": {"nodeagent.io/restore": "r2"}},
        {"labels": {}},
    ],
    ids=["its own, marked later", "its own", "its own by command", "a user's"],
)
async def test_a_target_of_no_other_restore_is_restored_into(meta: JsonDict) -> None:
    scene = RestoreScene()
    await replace_target(scene, meta)

    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    await rebind(scene, kept)
    await clean_up(scene)

    assert_handed_over(scene, kept)


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_objects_of_a_finished_transfer_are_deleted(at: int) -> None:
    scene = RestoreScene()
    guard = Guard(at, ended=True)

    with pytest.raises(NotOwnerError):
        await scene.world.until_exposed(lambda: scene.exposer().ensure(scene.request, guard))
    await scene.world.settle()

    assert_clean(scene)


class NoPriorityClasses(Cut):
    """A cluster whose PriorityClasses were deleted."""

    async def request(self, request: Request) -> Response:
        if request.method == "POST" and "priorityClassName" in str(request.body):
            words = 'pods "r2-9nft8" is forbidden: no PriorityClass with name data-mover-low was found'
            return Response(403, json.dumps({"kind": "Status", "reason": "Forbidden", "message": words}).encode())
        return await super().request(request)


async def test_a_pod_is_created_without_a_deleted_priority_class(caplog: pytest.LogCaptureFixture) -> None:
    scene = RestoreScene()

    exposed = await expose(scene, NoPriorityClasses(scene.world.kube))

    assert "priorityClassName" not in exposed.pod["spec"]
    assert "creating the pod without it" in caplog.text

"""Expose of a new volume, its nodes, and the cleanup."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from core.errors import ExposeError
from core.kube.errors import ForbiddenError
from core.kube.resources import NODES, PERSISTENT_VOLUME_CLAIMS, PODS, STORAGE_CLASSES, VOLUME_SNAPSHOTS
from core.kube.types import NodeRequirement
from core.models.base import JsonDict
from core.models.names import ATTEMPT_LABEL, SELECTED_NODE_ANNOTATION
from core.models.reasons import PendingReason
from exposer.model import Pending
from exposer.settings import CacheVolume, PlacementRule, PlacementRules
from tests.exposer.support.cuts import CUTS, interruptions
from tests.exposer.support.inputs import expose_settings, restore_request, template
from tests.exposer.support.scenes import RestoreScene
from tests.exposer.support.steps import (
    assert_clean,
    assert_handed_over,
    begun,
    bind_target_elsewhere,
    check,
    claim,
    clean_up,
    ensure,
    expose,
    remove_target,
    replace_target,
)


def late(node: str) -> RestoreScene:
    """Return a target that is provisioned late, whose consumer was placed on a node, unless that is empty."""
    return RestoreScene(binding="WaitForFirstConsumer", node=node)


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
    exposed, one = await expose(scene), await begun(scene)
    restored = claim(scene, "velero", "r2-9nft8")
    await one.carry()
    assert exposed.pod["status"]["phase"] == "Running"
    assert restored["spec"]["volumeMode"] == mode
    assert restored["metadata"].get("annotations", {}).get(SELECTED_NODE_ANNOTATION, "") == node
    assert one.kept.reclaim_policy == reclaim
    assert_handed_over(scene, one.kept)


@pytest.mark.parametrize(
    ("created", "left"), [("11:00", set()), ("13:00", {"VolumeSnapshot app3/base"})], ids=["before", "later"]
)
async def test_a_snapshot_that_was_taken_for_the_restore_alone_is_deleted(created: str, left: set[str]) -> None:
    scene = RestoreScene()
    before, stamp = scene.world.names(), f"2026-11-21T{created}:00Z"
    scene.world.put(VOLUME_SNAPSHOTS, "base", namespace="app3", creationTimestamp=stamp, spec={"source": {}})
    asked = datetime(2026, 11, 21, 12, tzinfo=UTC)
    scene.request = replace(scene.request, base_snapshot=("app3", "base"), requested_at=asked)
    await clean_up(scene)
    assert scene.world.names() == before | left


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


async def test_an_unused_target_is_pending() -> None:
    text = "target PVC app3/data is not used by a pod yet"
    assert await check(late("")) == Pending("TargetClaimUnconsumed", text)
    assert await check(late("node-a")) is None


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
    settings = expose_settings(ignore_delay_binding=ignore, nodes=rules)
    scene.request = replace(scene.request, settings=settings, cache=CacheVolume("fast", 5000))
    term = await term_of(scene)
    assert term["matchExpressions"] == ([POOL, NOT_WINDOWS] if rule else [NOT_WINDOWS])
    assert nodes_in(term) == ([[node]] if node else [])
    for name in ("r2-9nft8", "r2-9nft8-cache"):
        annotations = claim(scene, "velero", name)["metadata"].get("annotations", {})
        assert annotations.get(SELECTED_NODE_ANNOTATION, "") == node


async def term_of(scene: RestoreScene) -> JsonDict:
    """Return the only term of the affinity of the mover pod."""
    affinity = (await expose(scene)).pod["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return dict(term)


def nodes_in(term: JsonDict) -> list[list[str]]:
    return [field["values"] for field in term.get("matchFields", [])]


@pytest.mark.parametrize(("attempt", "nodes"), [(1, [["node-b"]]), (2, [])])
async def test_a_mover_tolerates_what_the_consumer_does(attempt: int, nodes: list[list[str]]) -> None:
    """A user who edits the target PVC can name any node: its taints keep the mover off like a pod of theirs.

    The next attempt follows the volume if the node was removed; others that reach it are likely to have its taints.
    """
    scene = late("node-b")
    if attempt > 1:
        await expose(scene)
        await scene.world.delete(PODS, "velero/r2-9nft8", settle=True)
        await scene.world.delete(NODES, "node-b")
        scene.request = replace(scene.request, owner=replace(scene.request.owner, attempt=attempt))
    for name, used in (("app", "data"), ("other", "logs")):
        keyed = {"key": name, "operator": "Exists"}
        spec = {
            "tolerations": [keyed, keyed | {"effect": "NoExecute"}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": used}}],
        }
        scene.world.put(PODS, name, namespace="app3", uid=f"uid-{name}", spec=spec, status={"phase": "Pending"})
    assert nodes_in(await term_of(scene)) == nodes
    pod = scene.world.find(PODS, "r2-9nft8")
    assert pod["metadata"]["labels"][ATTEMPT_LABEL] == str(attempt)
    cordoned = {"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}
    assert [one for one in pod["spec"]["tolerations"] if one.get("effect") == "NoSchedule"] == [
        *([cordoned] if attempt == 1 else []),
        {"key": "app", "operator": "Exists", "effect": "NoSchedule"},
    ]


async def select_node(scene: RestoreScene, node: str) -> None:
    await scene.world.patch(PERSISTENT_VOLUME_CLAIMS, "app3/data", annotations={SELECTED_NODE_ANNOTATION: node})


def selected(scene: RestoreScene) -> str:
    """Return the node for which the restore PVC was created."""
    return str(claim(scene, "velero", "r2-9nft8")["metadata"]["annotations"][SELECTED_NODE_ANNOTATION])


@pytest.mark.parametrize(("removed", "nodes"), [(False, [["node-a"]]), (True, [])], ids=["it exists", "it was removed"])
async def test_a_mover_follows_its_pvc_when_the_consumer_was_rescheduled(
    *, removed: bool, nodes: list[list[str]]
) -> None:
    """The scheduler knows where the volume can be reached, if the first node was removed."""
    scene = late("node-a")
    scene.world.kube.fail_next("POST", "/pods", 403)
    with pytest.raises(ForbiddenError):
        await expose(scene)
    await select_node(scene, "node-b")
    if removed:
        await scene.world.delete(NODES, "node-a")
    assert nodes_in(await term_of(scene)) == nodes
    assert selected(scene) == "node-a"


async def test_another_node_is_selected_for_a_consumer_whose_node_was_removed() -> None:
    """No provisioner does that for a target with a selector, and the mover would fit on no node."""
    scene = late("node-c")
    text = "node node-c, which was selected for target PVC app3/data, no longer exists: another one is being selected"
    assert await ensure(scene) == Pending("TargetClaimUnconsumed", text)
    assert SELECTED_NODE_ANNOTATION not in claim(scene, "app3", "data")["metadata"].get("annotations", {})
    await select_node(scene, "node-b")
    await expose(scene)
    assert selected(scene) == "node-b"


async def test_a_target_without_a_class_follows_the_rule_for_all() -> None:
    scene = RestoreScene()
    scene.put_target("data", storageClassName="")
    rules = PlacementRules((PlacementRule((POOL,), "hostpath"), PlacementRule((POOL | {"values": ["all"]},))))
    scene.request = replace(scene.request, settings=expose_settings(nodes=rules))
    assert await check(scene) is None
    await ensure(scene)
    assert '"all"' in json.dumps(scene.world.kube.objects(PODS))


async def test_a_restore_for_windows_is_left_to_veleros_agent_there_if_there_is_one() -> None:
    scene = RestoreScene()
    scene.request = replace(scene.request, for_windows=True)
    with pytest.raises(ExposeError, match="there is no DaemonSet node-agent-windows of Velero's agents"):
        await check(scene)
    settings = expose_settings(template=replace(template(), windows=True))
    scene.request = replace(scene.request, settings=settings)
    text = "the volume requires a Windows node: left to Velero's node agent there"
    assert await check(scene) == Pending(PendingReason.LEFT_TO_VELERO, text)
    # Velero's agent accepted it, and is gone.
    with pytest.raises(ExposeError, match=r"^the volume requires a Windows node$"):
        await ensure(scene)


async def test_an_absent_target_is_pending() -> None:
    scene = RestoreScene()
    await remove_target(scene)
    text = "PersistentVolumeClaim app3/data to restore into does not exist"
    assert await check(scene) == Pending("TargetClaimMissing", text, timeout=timedelta(minutes=2))


async def test_a_missing_storage_class_is_waited_for_where_it_is_read() -> None:
    """Its parameters cannot be changed: a tool deletes it, and creates it again."""
    scene = RestoreScene()
    storage_class = scene.world.find(STORAGE_CLASSES, "hostpath")
    await scene.world.delete(STORAGE_CLASSES, "hostpath")
    found = Pending("TargetClassMissing", "StorageClass hostpath of target PVC app3/data does not exist", blocked=True)
    assert await check(scene) == await ensure(scene) == found
    assert await scene.exposer().check(restore_request(ignore_delay_binding=True), scene.world.client) is None
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
    for step in (check, ensure):
        with pytest.raises(ExposeError, match=message):
            await step(scene)


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
    one = await begun(scene)
    await one.carry()
    assert_handed_over(scene, one.kept)


async def test_a_pod_is_created_without_a_deleted_priority_class(caplog: pytest.LogCaptureFixture) -> None:
    scene, words = RestoreScene(), "no PriorityClass with name data-mover-low was found"
    scene.world.kube.fail_next("POST", "/pods", 403, message=words)
    exposed = await expose(scene)
    assert "priorityClassName" not in exposed.pod["spec"]
    assert "PriorityClass data-mover-low does not exist, creating the pod without it: " in caplog.text

"""Removal of an installation beside agents, servers and transfers of others, in a cluster that is only in memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from client.install.options import place_of
from client.install.uninstall import RemovalPlan, UninstallError, plan_removal, remove
from core.kube import resources as kube
from core.kube.client import KubeClient
from core.kube.resources import Resource
from core.kube.transport import Retry
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

_OURS = {"app.kubernetes.io/part-of": "node-agent"}
_AGENT = {"role": "node-agent"}
_SPEC: JsonDict = {"selector": {}, "template": {"spec": {"containers": []}}}


@dataclass
class _World(HandClock):
    """A cluster in which `while_asleep` happens during each sleep."""

    while_asleep: Callable[[], None] = lambda: None
    removed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kube = FakeKube(self)
        self.client = KubeClient(self.kube, Retry(self, attempts=1))

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.while_asleep()

    def put(self, resource: Resource, name: str, labels: dict[str, str], **more: Any) -> JsonDict:
        meta: JsonDict = {"name": name, "labels": labels}
        if resource.namespaced:
            meta["namespace"] = more.pop("namespace", "velero")
        return self.kube.put({"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta, **more})

    def put_shared(self) -> None:
        """What agents create."""
        self.put(kube.LEASES, "node-agent-dispatcher", {}, spec={})
        self.put(kube.LEASES, "node-agent-backup-deletions", {})
        self.put(kube.CONFIG_MAPS, "node-agent-admissions", {})
        self.put(kube.CONFIG_MAPS, "node-agent-history-2", {})
        labels = {"velero.io/repo-name": "a", "nodeagent.io/owner-uid": "u"}
        self.put(kube.JOBS, "job", labels, spec={"template": {}})

    async def plan(self) -> RemovalPlan:
        return await plan_removal(self.client, "velero")

    async def remove(self, plan: RemovalPlan, *, force: bool = False) -> None:
        await remove(self.client, self, plan, self.removed.append, force=force)


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> dict[object, str]:
        return {}

    monkeypatch.setattr("client.install.uninstall.missing_permissions", nothing)


@pytest.fixture
def world() -> _World:
    return _World()


def _names(plan: RemovalPlan) -> list[str]:
    return [place_of(one) for one in plan.removed]


_SHARED = (
    "Job velero/job",
    "Lease velero/node-agent-dispatcher",
    "Lease velero/node-agent-backup-deletions",
    "ConfigMap velero/node-agent-admissions",
    "ConfigMap velero/node-agent-history-2",
)


@pytest.mark.parametrize(
    ("resource", "name", "labels"),
    [
        (kube.DAEMON_SETS, "node-agent", {}),
        (kube.DAEMON_SETS, "node-agent-windows", {}),
        (kube.PODS, "node-agent-x", _AGENT),
    ],
)
async def test_what_agents_share_stays_for_others(
    world: _World, resource: Resource, name: str, labels: dict[str, str]
) -> None:
    world.put_shared()
    world.put(resource, name, labels, spec=_SPEC)
    plan = await world.plan()
    assert _names(plan) == []
    reason = f"{resource.kind} velero/{name} is not ours and needs it"
    assert [one for one in plan.kept if ": " in one] == [f"{place}: {reason}" for place in _SHARED]


async def test_what_agents_shared_is_removed_once_none_is_left(world: _World) -> None:
    world.put_shared()
    world.put(kube.DAEMON_SETS, "other", {}, spec=_SPEC)
    plan = await world.plan()
    assert _names(plan) == list(_SHARED)
    await world.remove(plan)
    assert world.removed == list(_SHARED)


async def test_schedules_and_what_is_still_to_be_deleted_in_buckets_stay(world: _World) -> None:
    for name in ("node-agent-config", "node-agent-backup-deletions"):
        world.put(kube.CONFIG_MAPS, name, _OURS)
    world.put(kube.CRON_JOBS, "night", {"nodeagent.io/schedule": "night"}, spec={})
    plan = await world.plan()
    assert _names(plan) == ["ConfigMap velero/node-agent-config"]
    schedule = "CronJob velero/night: its runs will fail (nodeagent schedule delete)"
    assert plan.kept == [schedule, "ConfigMap velero/node-agent-backup-deletions"]
    world.kube.fail_next("GET", "/cronjobs", 403)
    assert schedule not in (await world.plan()).kept


async def test_a_second_run_waits_for_agents_that_have_not_ended(world: _World) -> None:
    world.put(kube.SERVICE_ACCOUNTS, "node-agent", _OURS)
    world.put(kube.PODS, "node-agent-x", _AGENT | _OURS, spec=_SPEC)
    plan = await world.plan()
    with pytest.raises(UninstallError, match="agents do not end, and what they need stays: node-agent-x: run"):
        await world.remove(plan)
    assert world.removed == []
    assert len(world.kube.objects(kube.SERVICE_ACCOUNTS)) == 1


async def test_an_api_server_that_restarts_does_not_end_the_wait_for_agents(world: _World) -> None:
    world.put(kube.DAEMON_SETS, "node-agent", _OURS, spec=_SPEC)

    def restart(_: str) -> None:
        world.kube.fail_next("GET", "/pods", "lost", times=9)

    await remove(world.client, world, await world.plan(), restart, force=False)
    assert world.seconds > 0


async def test_pods_of_other_daemonsets_are_not_waited_for(world: _World) -> None:
    world.put(kube.DAEMON_SETS, "node-agent", _OURS, spec=_SPEC)
    world.put(kube.SERVICE_ACCOUNTS, "node-agent", _OURS)
    world.put(kube.PODS, "node-agent-windows-x", _AGENT, spec=_SPEC)
    await world.remove(await world.plan())
    assert world.removed == ["DaemonSet velero/node-agent", "ServiceAccount velero/node-agent"]
    assert world.seconds == 0
    world.put(kube.DAEMON_SETS, "node-agent-windows", _OURS, spec=_SPEC)  # of an earlier version
    await world.remove(await world.plan())
    assert world.removed[2:] == ["DaemonSet velero/node-agent-windows"]


async def test_transfers_that_start_before_the_answer_are_interrupted_only_by_force(world: _World) -> None:
    world.put(kube.DAEMON_SETS, "node-agent", _OURS, spec=_SPEC)
    plan = await world.plan()
    assert plan.unfinished == []
    world.put(kube.DATA_UPLOADS, "late", {}, spec={}, status={"phase": "InProgress"})
    with pytest.raises(UninstallError, match=r"^nothing was removed: transfers .* DataUpload late \(InProgress\)$"):
        await world.remove(plan)
    assert world.removed == []
    await world.remove(plan, force=True)
    assert world.removed == ["DaemonSet velero/node-agent"]


async def test_agents_of_others_that_start_before_the_answer_keep_what_they_need(world: _World) -> None:
    world.put_shared()
    plan = await world.plan()
    world.put(kube.DAEMON_SETS, "node-agent", {}, spec=_SPEC)
    with pytest.raises(UninstallError, match=r"^nothing was removed: DaemonSet velero/node-agent is new and not ours"):
        await world.remove(plan, force=True)
    assert world.removed == []


_USER: JsonDict = {"priorityClassName": "velero-server"}


@pytest.mark.parametrize(
    ("resource", "spec"),
    [(kube.DEPLOYMENTS, {"template": {"spec": _USER}}), (kube.PODS, _USER)],
    ids=["deployment", "pod"],
)
async def test_the_class_of_the_server_stays_if_named(world: _World, resource: Resource, spec: JsonDict) -> None:
    for name in ("velero-server", "velero-node-agent"):
        world.put(kube.PRIORITY_CLASSES, name, _OURS)
    world.put(resource, "user", {}, spec=spec)
    plan = await world.plan()
    assert _names(plan) == ["PriorityClass velero-node-agent"]
    assert f"PriorityClass velero-server: {resource.kind} velero/user names it" in plan.kept
    world.put(resource, "user", {}, spec={"template": {"spec": {}}})
    assert set(_names(await world.plan())) == {"PriorityClass velero-node-agent", "PriorityClass velero-server"}


async def test_nobody_loses_anything_where_an_installation_is_alone(world: _World) -> None:
    world.put(kube.DAEMON_SETS, "node-agent", _OURS, spec=_SPEC)
    world.put(kube.DATA_UPLOADS, "done", {}, spec={}, status={"phase": "Completed"})
    world.put(kube.DAEMON_SETS, "node-agent", {}, namespace="other", spec=_SPEC)
    dependents = (await world.plan()).dependents
    assert (dependents.namespace, dependents.definitions) == ([], [])


async def test_what_others_in_the_namespace_lose_is_named(world: _World) -> None:
    world.put(kube.DEPLOYMENTS, "velero", {}, spec={"template": {"spec": {}}})
    world.put(kube.BACKUPS, "nightly", {}, spec={})
    world.put(kube.DAEMON_SETS, "node-agent-windows", {}, spec=_SPEC)
    dependents = (await world.plan()).dependents
    lost = ["DaemonSet velero/node-agent-windows", "the Velero server", "1 Backups of Velero"]
    assert (dependents.namespace, dependents.definitions) == (lost, lost)
    world.put(kube.DAEMON_SETS, "node-agent", _OURS, namespace="other", spec=_SPEC)
    world.put(kube.DATA_UPLOADS, "done", {}, namespace="other", spec={}, status={"phase": "Completed"})
    dependents = (await world.plan()).dependents
    others = ["DaemonSet other/node-agent", "1 DataUploads of other namespaces"]
    assert (dependents.namespace, dependents.definitions) == (lost, [*lost, *others])


async def test_other_namespaces_that_may_not_be_read_count_as_losing_something(world: _World) -> None:
    world.kube.fail_next("GET", "/apis/apps/v1/daemonsets", 403)
    dependents = (await world.plan()).dependents
    assert dependents.namespace == []
    assert dependents.definitions == ["unknown objects of other namespaces (no permission to list daemonsets in them)"]


@pytest.mark.parametrize("status", [None, 403], ids=["listed", "forbidden"])
async def test_base_snapshots_of_the_namespace_are_named(world: _World, status: int | None) -> None:
    for number, namespace in enumerate(["velero"] * 6 + ["other"]):
        spec = {"volumeSnapshotRef": {"namespace": namespace, "name": "s"}}
        labels = {"nodeagent.io/base-snapshot": f"uid-{number}"}
        world.put(kube.VOLUME_SNAPSHOT_CONTENTS, f"b-{number}", labels, spec=spec)
    if status is not None:
        world.kube.fail_next("GET", "/volumesnapshotcontents", status)
    (named,) = [one for one in (await world.plan()).kept if "base snapshots" in one]
    if status is None:
        assert named == "6 base snapshots: VolumeSnapshotContent b-0, b-1, b-2, b-3, b-4 and 1 more"
    else:
        assert named.startswith("base snapshots of backups by block, if there are any: ")

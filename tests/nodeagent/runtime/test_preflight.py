"""Checks of the cluster before the agent starts: one line names what is missing."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest.mock import Mock

import pytest

from core.errors import ConfigError
from core.kube.resources import (
    BACKUP_REPOSITORIES,
    BACKUP_STORAGE_LOCATIONS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
)
from core.kube.transport import Request, Response
from nodeagent.runtime.permissions import MOVER_PERMISSIONS, Permission, Scope, agent_permissions, copy_permissions
from nodeagent.runtime.preflight import check_cluster, check_host_pods, check_permissions, missing_permissions
from tests.support.clock import LoopClock
from tests.support.objects import JsonDict
from tests.support.scripted import answer, rejection, scripted_client, stored

pytestmark = pytest.mark.looptime

KINDS = (
    DATA_UPLOADS,
    DATA_DOWNLOADS,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    BACKUP_REPOSITORIES,
    BACKUP_STORAGE_LOCATIONS,
    VOLUME_SNAPSHOTS,
    VOLUME_SNAPSHOT_CONTENTS,
)
AGENT = agent_permissions("agent-config")


class _Cluster:
    """Allows and serves everything that a test does not remove; `rules` are those that its authorizer lists."""

    def __init__(self) -> None:
        self.denied: set[tuple[str, str, str]] = set()
        self.absent: set[str] = set()
        self.rules: dict[str, list[JsonDict]] = {}
        self.asked: list[tuple[str, str, str]] = []

    def __call__(self, request: Request) -> Response:
        if request.path.endswith("/selfsubjectrulesreviews"):
            namespace = json.loads(request.body or b"")["spec"]["namespace"]
            return answer({"status": {"resourceRules": self.rules.get(namespace), "incomplete": True}}, 201)
        if request.path.endswith("/selfsubjectaccessreviews"):
            asked = json.loads(request.body or b"")["spec"]["resourceAttributes"]
            assert None not in asked.values()
            key = (asked["verb"], asked["resource"], asked["namespace"])
            self.asked.append(key)
            return answer({"status": {"allowed": key not in self.denied}}, 201)
        if not request.path.endswith("/preflight"):
            return self._discover(request.path)
        if any(kind in request.path for kind in self.absent):
            return Response(404, b"404 page not found\n")
        return rejection(404, 'datauploads "preflight" not found', "NotFound")

    def _discover(self, path: str) -> Response:
        served = [kind for kind in KINDS if kind.group not in self.absent]
        if path == "/apis":
            versions = {kind.api_version for kind in served}
            return answer({"kind": "APIGroupList", "groups": [{"versions": [{"groupVersion": v}]} for v in versions]})
        plurals = [kind.plural for kind in served if kind.plural not in self.absent]
        return answer({"kind": "APIResourceList", "resources": [{"name": plural} for plural in plurals]})


async def test_a_cluster_with_everything_passes(caplog: pytest.LogCaptureFixture) -> None:
    await check_cluster(scripted_client(_Cluster()), "velero", AGENT)
    assert caplog.records == []


async def test_missing_permissions_are_named_with_verb_resource_and_scope() -> None:
    cluster = _Cluster()
    cluster.denied = {
        ("patch", "datauploads", "velero"),
        ("watch", "datauploads", "velero"),
        ("patch", "persistentvolumes", ""),
        ("patch", "persistentvolumeclaims", ""),
    }
    with pytest.raises(ConfigError) as caught:
        await check_cluster(scripted_client(cluster), "velero", AGENT)
    message = str(caught.value)
    assert "watch,patch datauploads in its namespace" in message
    assert "patch persistentvolumes in the cluster" in message
    assert "patch persistentvolumeclaims in every namespace" in message
    assert "\n" not in message


_EVERYTHING = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}


async def test_what_the_rules_of_the_account_show_is_not_asked() -> None:
    cluster = _Cluster()
    cluster.rules = {"velero": [_EVERYTHING], "no.namespace": [_EVERYTHING]}
    await check_cluster(scripted_client(cluster), "velero", AGENT)
    assert cluster.asked == []


@pytest.mark.parametrize(
    ("rule", "shown"),
    [
        ({"verbs": ["get"], "apiGroups": [""], "resources": ["pods", "pods/log"]}, True),
        ({"verbs": ["get"], "apiGroups": [""], "resources": ["*/log"]}, True),
        ({"verbs": ["get"], "apiGroups": [""], "resources": ["pods/log"], "resourceNames": ["a", "b"]}, True),
        ({"verbs": ["get"], "apiGroups": [""], "resources": ["pods/log"], "resourceNames": ["b"]}, False),
        ({"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}, False),
        ({"verbs": ["list"], "apiGroups": [""], "resources": ["pods/log"]}, False),
        ({"verbs": ["get"], "apiGroups": ["apps"], "resources": ["pods/log"]}, False),
    ],
    ids=["exact", "subresource", "named", "another name", "another resource", "another verb", "another group"],
)
async def test_a_rule_shows_what_it_allows(rule: JsonDict, *, shown: bool) -> None:
    cluster = _Cluster()
    cluster.rules = {"no.namespace": [rule]}
    log = Permission(Scope.CLUSTER, PODS, ("get",), "a log", subresource="log", names=("a",))
    await check_permissions(scripted_client(cluster), "velero", [log])
    assert cluster.asked == ([] if shown else [("get", "pods", "")])


async def test_who_must_not_be_denied_halfway_asks_about_each_verb() -> None:
    """An authorizer before RBAC may deny what the rules show."""
    cluster = _Cluster()
    cluster.rules = {"velero": [_EVERYTHING], "no.namespace": [_EVERYTHING]}
    needed = Permission(Scope.OWN_NAMESPACE, PODS, ("get", "delete"), "remove them")
    cluster.denied = {("delete", "pods", "velero")}
    found = await missing_permissions(scripted_client(cluster), "velero", [needed])
    assert found == {needed: "delete pods in its namespace"}


async def test_the_line_stays_short_if_all_permissions_are_missing() -> None:
    def script(_: Request) -> Response:
        return answer({"status": {"allowed": False}}, 201)

    with pytest.raises(ConfigError, match=r"and \d+ more: compare") as caught:
        await check_cluster(scripted_client(script), "velero", AGENT)
    assert len(str(caught.value)) < 600


async def test_a_missing_optional_permission_is_a_warning_only(caplog: pytest.LogCaptureFixture) -> None:
    cluster = _Cluster()
    cluster.denied = {("list", "priorityclasses", ""), ("watch", "priorityclasses", "")}
    await check_cluster(scripted_client(cluster), "velero", AGENT)
    (warning,) = caplog.messages
    assert warning.startswith("no permission to list,watch priorityclasses in the cluster: cannot check")


async def test_only_permissions_for_configured_copies_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    cluster = _Cluster()
    cluster.denied = {("get", "secrets", ""), ("delete", "secrets", "velero"), ("get", "configmaps", "")}
    await check_permissions(scripted_client(cluster), "velero", copy_permissions((), ()))
    assert caplog.messages == []
    await check_permissions(scripted_client(cluster), "velero", copy_permissions(("token", "key"), ()))
    without = "transfers that copy them for a volume fail, or are not cleaned up"
    assert caplog.messages == [
        f"no permission to delete secrets in its namespace: {without}",
        f"no permission to get secrets (only token, key) in every namespace: {without}",
    ]


async def test_the_permissions_of_movers_are_missing_where_they_share_the_agents_account() -> None:
    cluster = _Cluster()
    cluster.denied = {("create", "backuprepositories", "velero")}
    await check_permissions(scripted_client(cluster), "velero", AGENT)
    with pytest.raises(ConfigError, match="permissions missing: create backuprepositories in its namespace"):
        await check_permissions(scripted_client(cluster), "velero", MOVER_PERMISSIONS)


async def test_a_page_of_a_proxy_does_not_pass_for_a_missing_definition() -> None:
    cluster = _Cluster()

    def script(request: Request) -> Response:
        page = request.path.endswith("/datauploads/preflight")
        return Response(404, b"404 page not found\n") if page else cluster(request)

    with pytest.raises(ConfigError, match="cannot check the cluster: get DataUpload velero/preflight: 404"):
        await check_cluster(scripted_client(script), "velero", AGENT)


async def test_missing_definitions_are_named_with_the_command_that_installs_them() -> None:
    cluster = _Cluster()
    cluster.absent = {"datauploads", "backuprepositories"}
    with pytest.raises(ConfigError) as caught:
        await check_cluster(scripted_client(cluster), "velero", AGENT)
    assert "datauploads.velero.io/v2alpha1, backuprepositories.velero.io/v1" in str(caught.value)
    assert "nodeagent install --crds-only" in str(caught.value)


async def test_a_cluster_without_the_snapshot_api_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    cluster = _Cluster()
    cluster.absent = {"snapshot.storage.k8s.io"}
    await check_cluster(scripted_client(cluster), "velero", AGENT)
    assert "no snapshot API" in caplog.text


async def test_rules_of_one_namespace_are_none_of_every_namespace() -> None:
    cluster = _Cluster()
    cluster.rules = {"velero": [_EVERYTHING]}
    await check_cluster(scripted_client(cluster), "velero", AGENT)
    assert ("patch", "persistentvolumeclaims", "") in cluster.asked
    assert ("patch", "datauploads", "velero") not in cluster.asked


@pytest.mark.parametrize(
    ("response", "review"),
    [
        (rejection(401, "Unauthorized"), "SelfSubjectRulesReview"),
        (rejection(403, "no reviews for you"), "SelfSubjectAccessReview"),
        (rejection(503, "not now"), "SelfSubjectRulesReview"),
    ],
    ids=["unauthorized", "forbidden", "unavailable"],
)
async def test_a_rejected_check_is_an_error(response: Response, review: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot check the cluster: .*{review}.*: (401|403|503)"):
        await check_cluster(scripted_client(lambda _: response), "velero", AGENT)


def _pod(name: str, **meta: object) -> JsonDict:
    return stored(PODS, metadata={"namespace": "app", "name": name, "uid": f"uid-{name}"} | meta, spec={}, status={})


_MIRROR = _pod("static", annotations={"kubernetes.io/config.mirror": "hash"})
_ENDING = _pod("ending", deletionTimestamp="2026-11-21T12:00:00Z")


class _Node:
    """A node with Running pods, which change at each look, and the directory that its agent has mounted."""

    def __init__(
        self, directory: Path, *looks: Iterable[JsonDict], at_look: Callable[[int], None] | None = None
    ) -> None:
        self.directory = directory
        self.looks = [list(pods) for pods in looks]
        self.asked: list[dict[str, str]] = []
        self._at_look = at_look

    def _answer(self, request: Request) -> Response:
        self.asked.append(dict(request.query))
        number = len(self.asked)
        if self._at_look is not None:
            self._at_look(number)
        return answer({"metadata": {}, "items": self.looks[min(number, len(self.looks)) - 1]})

    async def check(self) -> None:
        await check_host_pods(scripted_client(self._answer), LoopClock(), "node-a", str(self.directory))


def _add(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).mkdir()


async def test_a_directory_with_entries_for_all_pods_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pod that is being deleted may have none any more, and pods that ended may still have theirs."""
    _add(tmp_path, "uid-web", "hash", "uid-that-ended")
    node = _Node(tmp_path, [_pod("web"), _MIRROR, _ENDING])
    await node.check()
    assert [asked["fieldSelector"] for asked in node.asked] == ["spec.nodeName=node-a,status.phase=Running"]
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


@pytest.mark.parametrize("entries", [(), ("uid-web", "uid-static")], ids=["empty", "one missing"])
async def test_a_wrong_directory_ends_the_agent_with_what_to_do(tmp_path: Path, entries: tuple[str, ...]) -> None:
    _add(tmp_path, *entries)
    with pytest.raises(ConfigError) as caught:
        await _Node(tmp_path, [_MIRROR, _pod("web")]).check()
    missing = 1 if entries else 2
    assert str(caught.value) == (
        f"the volume host-pods is not the kubelet's pods directory: {tmp_path} has no entry for {missing} of 2 Running "
        "pods of node node-a, such as app/static: its hostPath in the DaemonSet must be the directory pods in the "
        "kubelet's root directory"
    )
    assert caught.value.exit_code == 2


async def test_pods_that_start_or_end_during_the_check_do_not_end_the_agent(tmp_path: Path) -> None:
    """Its directory may appear after the API server shows it as Running: a node that has just booted."""
    _add(tmp_path, "uid-web")
    node = _Node(
        tmp_path,
        [_pod("web"), _pod("new"), _pod("job")],
        [_pod("web"), _pod("new")],
        at_look=lambda number: _add(tmp_path, "uid-new") if number == 3 else None,
    )
    await node.check()
    assert len(node.asked) == 3


async def test_pods_that_come_and_go_without_end_do_not_hold_the_check(tmp_path: Path) -> None:
    node = _Node(tmp_path, *([_pod(f"job-{number}")] for number in range(1000)))
    with pytest.raises(ConfigError, match="no entry for 1 of 1 Running pods"):
        await node.check()
    assert 3 <= len(node.asked) <= 20


async def test_an_agent_without_the_mount_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    await check_host_pods(scripted_client(lambda _: rejection(500, "not asked")), LoopClock(), "node-a", None)
    assert caplog.messages == [
        "the DaemonSet does not mount the volume host-pods: PodVolumeBackups and PodVolumeRestores will fail"
    ]


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), FileNotFoundError(2, "no such directory")], ids=str)
async def test_an_agent_that_cannot_read_the_directory_warns_once(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its supplemental groups are missing, SELinux denies it, or it runs outside of its pod: movers do not need it."""
    monkeypatch.setattr("nodeagent.runtime.preflight.list_pods", Mock(side_effect=error))
    await _Node(tmp_path, [_pod("web")]).check()
    (message,) = caplog.messages
    assert message.startswith(f"directory {tmp_path} cannot be read: {error.strerror}: ")
    assert message.endswith("deploy/agent/daemonset.yaml has the mount and the group for it")


async def test_a_file_in_place_of_the_directory_ends_the_agent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"directory .*/file cannot be read: Not a directory"):
        await _Node(tmp_path / "file", [_pod("web")]).check()


async def test_pods_that_cannot_be_listed_end_the_agent(tmp_path: Path) -> None:
    client = scripted_client(lambda _: rejection(403, "no pods for you", "Forbidden"))
    with pytest.raises(ConfigError, match=r"cannot list the pods of node node-a: .*no pods for you"):
        await check_host_pods(client, LoopClock(), "node-a", str(tmp_path))

"""Checks of the cluster before the agent starts: one line names what is missing."""

import json

import pytest

from core.errors import ConfigError
from core.kube.errors import UnreachableError
from core.kube.resources import (
    BACKUP_REPOSITORIES,
    BACKUP_STORAGE_LOCATIONS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
)
from core.kube.transport import Request, Response
from nodeagent.runtime.permissions import MOVER_PERMISSIONS, agent_permissions
from nodeagent.runtime.preflight import check_cluster, check_permissions
from tests.support.scripted import answer, rejection, scripted_client

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
    """Allows and serves everything that a test does not remove."""

    def __init__(self) -> None:
        self.denied: set[tuple[str, str, str]] = set()
        self.absent: set[str] = set()

    def __call__(self, request: Request) -> Response:
        if request.path.endswith("/selfsubjectaccessreviews"):
            asked = json.loads(request.body or b"")["spec"]["resourceAttributes"]
            key = (asked["verb"], asked["resource"], asked["namespace"])
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


async def test_a_permission_for_single_objects_is_named_with_them() -> None:
    cluster = _Cluster()
    cluster.denied = {("watch", "configmaps", "velero"), ("create", "backuprepositories", "velero")}
    with pytest.raises(ConfigError, match=r"missing: watch configmaps \(only agent-config\) in its namespace: compare"):
        await check_permissions(scripted_client(cluster), "velero", AGENT)


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
    assert "kubectl apply -f deploy/crds" in str(caught.value)


async def test_a_cluster_without_the_snapshot_api_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    cluster = _Cluster()
    cluster.absent = {"snapshot.storage.k8s.io"}
    await check_cluster(scripted_client(cluster), "velero", AGENT)
    assert "no snapshot API" in caplog.text


@pytest.mark.parametrize(
    "response",
    [rejection(401, "Unauthorized"), rejection(403, "no reviews for you"), rejection(503, "not now")],
    ids=["unauthorized", "forbidden", "unavailable"],
)
async def test_a_rejected_check_is_an_error(response: Response) -> None:
    with pytest.raises(ConfigError, match=r"cannot check the cluster: .*SelfSubjectAccessReview.*: (401|403|503)"):
        await check_cluster(scripted_client(lambda _: response), "velero", AGENT)


async def test_an_unreachable_api_server_is_an_error() -> None:
    def script(_: Request) -> Response:
        raise UnreachableError("connection refused")

    with pytest.raises(ConfigError, match="cannot check the cluster: connection refused"):
        await check_cluster(scripted_client(script), "velero", AGENT)

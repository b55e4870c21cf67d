"""The controller of BackupRepositories: Ready through an init pod, or NotReady with the cause; and its requests."""

import asyncio
import base64
import json

import pytest

from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, PODS, SECRETS
from core.models.names import OWNER_UID_LABEL
from exposer.workload import ONTO_ANY_NODE
from nodeagent.leader.repositories.init_pod import init_resources
from nodeagent.runtime.settings import RepositoryControllerMode
from tests.nodeagent.support.repository_scene import GOOD, RECORDED, SERVER, build_controller, open_scene, put_secret
from tests.support.objects import JsonDict
from tests.support.tasks import until

pytestmark = pytest.mark.looptime


async def test_a_new_repository_becomes_ready_with_the_status_that_velero_writes() -> None:
    async with open_scene().running() as scene:
        pod = await scene.until_pod()
        assert pod["metadata"]["name"] == "app-default-kopia-init"
        assert pod["metadata"]["ownerReferences"][0]["uid"] == scene.repository["metadata"]["uid"]
        assert "--backup-repository=app-default-kopia" in pod["spec"]["containers"][0]["args"]
        assert "--block-hash=HMAC-SHA256-128" in pod["spec"]["containers"][0]["args"]
        scene.set_pod(phase="Running")
        await asyncio.sleep(30)
        assert scene.phase == ""
        await scene.succeed()
        await asyncio.sleep(1)
    assert scene.pod is None
    assert scene.repository["spec"] == json.loads(RECORDED.read_text())[-1]["object"]["spec"]
    assert scene.repository["status"] == {"phase": "Ready", "lastMaintenanceTime": "2026-11-21T12:00:30Z"}
    assert scene.reasons() == ["Ready"]


@pytest.mark.parametrize(("case", "passwords"), [("absent", [b"static-passw0rd"]), ("set", [b"mine"]), ("lost", [])])
async def test_the_password_secret_is_created_before_the_first_repository(case: str, passwords: list[bytes]) -> None:
    scene, name = open_scene(), "velero-repo-credentials"
    if case == "set":
        put_secret(scene.kube, name, **{"repository-password": "mine"})
    if case == "lost":
        # The default would open no other repository, and encrypt new ones with what is published.
        meta = scene.repository["metadata"] | {"name": "shop-default-kopia", "uid": "shop"}
        ready = {"phase": "Ready", "lastMaintenanceTime": "2026-11-21T12:00:30Z"}
        scene.kube.put(scene.repository | {"metadata": meta, "status": ready})
    async with scene.running():
        await scene.until_pod()
    found = [one["data"] for one in scene.kube.objects(SECRETS) if one["metadata"]["name"] == name]
    assert [base64.b64decode(one["repository-password"]) for one in found] == passwords


@pytest.mark.parametrize(
    ("exit_code", "pod_message", "message"),
    [
        (12, "the bucket does not exist", "the bucket does not exist"),
        (137, "", "Pod velero/app-default-kopia-init failed: exit code 137"),
        (0, "nonsense", "its result is invalid: nonsense"),
        (12, "GET https://a.test/b?sig=0123456789abc: 403", "GET https://a.test/b?sig=***: 403"),
    ],
)
async def test_a_failure_is_reported_with_the_init_pods_message(exit_code: int, pod_message: str, message: str) -> None:
    async with open_scene().running() as scene:
        await scene.until_pod()
        scene.end_pod(exit_code, pod_message)
        await scene.until_phase("NotReady", seconds=2)
        await asyncio.sleep(1)
        assert scene.message.endswith(message)
        assert scene.pod is None
        assert scene.reasons() == ["NotReady"]
        # It is retried after five minutes, and reported once.
        await asyncio.sleep(290)
        assert scene.pod is None
        await scene.until_pod()
        assert (scene.phase, scene.message) == ("New", "")


_KEYS = "the secret access key is not accepted"


async def test_a_pod_that_does_not_start_does_not_hide_the_cause_that_is_known() -> None:
    async with open_scene().running() as scene:
        await scene.fail_once(_KEYS)
        assert scene.message == _KEYS
        await asyncio.sleep(310)
        await scene.until_pod()
        scene.block_pod()
        await asyncio.sleep(20)
        assert scene.phase == "New"
        assert scene.message.startswith(f"{_KEYS}; next attempt: ")
        assert "0/1 nodes: full" in scene.message
        await scene.until_phase("NotReady", seconds=120)
        assert scene.message.startswith(f"{_KEYS}; next attempt: ")
        assert "0/1 nodes: full" in scene.message
        assert scene.message.count(_KEYS) == 1
        # A newer answer of the storage replaces both, and success all of it.
        await asyncio.sleep(310)
        await scene.fail_once("the bucket does not exist")
        assert scene.message == "the bucket does not exist"
        await asyncio.sleep(310)
        await scene.succeed()
        assert scene.message == ""


async def test_a_pod_that_starts_slowly_fails_no_transfer_for_minutes() -> None:
    async with open_scene().running() as scene:
        pod = await scene.until_pod()
        scene.kube.put(pod | {"spec": pod["spec"] | {"nodeName": "node-a"}})
        creating = {"name": "init", "state": {"waiting": {"reason": "ContainerCreating"}}}
        scene.set_pod(phase="Pending", containerStatuses=[creating])
        await asyncio.sleep(290)
        assert (scene.phase, scene.message) == ("", "")
        await scene.until_phase("NotReady", seconds=20)
        assert scene.message == "Pod velero/app-default-kopia-init is starting on node node-a"


@pytest.mark.parametrize("fixed", ["secret", "password", "location", "authority"])
async def test_a_fixed_cause_is_retried_at_once(fixed: str) -> None:
    scene = open_scene()
    location = next(o for o in scene.kube.objects(BACKUP_STORAGE_LOCATIONS) if o["metadata"]["name"] == "default")
    if fixed == "authority":
        reference = {"caCertRef": {"name": "authority", "key": "ca.crt"}}
        scene.kube.put(location | {"spec": location["spec"] | {"objectStorage": {"bucket": "b"} | reference}})
    secrets = {"secret": "keys", "password": "velero-repo-credentials", "authority": "authority"}
    async with scene.running():
        await scene.fail_once()
        await asyncio.sleep(60)
        assert scene.pod is None
        if fixed == "location":
            scene.kube.put(location | {"spec": location["spec"] | {"objectStorage": {"bucket": "right"}}})
        else:
            put_secret(scene.kube, secrets[fixed], cloud="right")
        await scene.until_pod(seconds=6)
        await scene.succeed()
        assert scene.message == ""


@pytest.mark.cause("repository-not-ready")
async def test_a_blocked_init_pod_is_reported_on_the_repository_within_ten_seconds() -> None:
    async with open_scene().running() as scene:
        pod = await scene.until_pod()
        scene.kube.put(pod | {"spec": pod["spec"] | {"nodeName": "node-a"}, "status": {"phase": "Pending"}})
        began = asyncio.get_running_loop().time()
        scene.kube.put(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"namespace": "velero", "name": "mount"},
                "involvedObject": {"uid": pod["metadata"]["uid"]},
                "type": "Warning",
                "reason": "FailedMount",
                "message": "no such secret",
            }
        )
        await until(lambda: scene.message != "", seconds=30)
        name = f"velero/{pod['metadata']['name']}"
        assert scene.message == f"Pod {name} cannot start on node node-a yet: FailedMount: no such secret"
        assert asyncio.get_running_loop().time() - began <= 10.5
        assert scene.phase != "NotReady"
        assert scene.reasons()[-1] == "FailedMount"


async def test_an_unschedulable_pod_tolerates_cordoned_nodes_after_a_while_and_fails_after_ninety_seconds() -> None:
    async with open_scene().running() as scene:
        await scene.until_pod()
        scene.block_pod()
        await asyncio.sleep(5)
        assert scene.pod is not None
        before = scene.pod["spec"].get("tolerations", [])
        assert ONTO_ANY_NODE not in before
        await asyncio.sleep(16)
        assert scene.pod["spec"]["tolerations"] == [*before, ONTO_ANY_NODE]
        version = scene.pod["metadata"]["resourceVersion"]
        await asyncio.sleep(64)
        assert (scene.pod["metadata"]["resourceVersion"], scene.phase) == (version, "")
        await scene.until_phase("NotReady", seconds=20)
        assert scene.message == "Pod velero/app-default-kopia-init cannot be scheduled: 0/1 nodes: full"
        await asyncio.sleep(1)
        assert scene.pod is None


async def test_a_missing_account_is_waited_for_and_another_rejection_reported_at_once() -> None:
    """The repository would be NotReady otherwise, and fail the transfers that wait for the same account."""
    scene = open_scene()
    missing = 'error looking up service account velero/movers: serviceaccount "movers" not found'
    scene.kube.fail_next("POST", "pods", 403, times=2, message=missing)
    async with scene.running():
        await asyncio.sleep(5)
        assert (scene.phase, scene.pod) == ("", None)
        assert missing in scene.message
        scene.kube.fulfill()
        scene.kube.fail_next("POST", "pods", 403)
        await scene.until_phase("NotReady", seconds=30)
        assert "create Pod velero/app-default-kopia-init: 403" in scene.message
        await scene.until_pod(seconds=310)
        await scene.succeed()
    assert scene.message == ""


async def test_a_second_pod_is_created_only_after_the_first_is_deleted() -> None:
    async with open_scene().running() as scene:
        pod = await scene.until_pod()
        meta = pod["metadata"] | {"finalizers": ["x/y"], "deletionTimestamp": "2026-11-21T12:00:00Z"}
        scene.kube.put(pod | {"metadata": meta})
        await asyncio.sleep(80)
        assert (scene.phase, scene.message) == ("", "")
        await asyncio.sleep(30)
        # Such as on a lost node: what waits for the repository says why.
        assert (scene.phase, scene.reasons().count("CleaningUp")) == ("", 1)
        assert scene.message == "Pod velero/app-default-kopia-init is being deleted (finalizers: x/y)"
        assert [pod["metadata"]["uid"] for pod in scene.kube.objects(PODS)] == [pod["metadata"]["uid"]]
        await scene.client.patch(PODS, "velero", pod["metadata"]["name"], {"metadata": {"finalizers": []}})
        await until(lambda: (scene.pod or pod)["metadata"]["uid"] != pod["metadata"]["uid"], seconds=12)


@pytest.mark.parametrize("what", ["lost-applied", "lost", 500])
async def test_a_create_whose_response_is_lost_creates_no_second_pod(what: str) -> None:
    scene = open_scene()
    scene.kube.fail_next("POST", "pods", what)  # type: ignore[arg-type] # a table of faults
    async with scene.running():
        await scene.until_pod()
        scene.set_pod(phase="Running")
        await asyncio.sleep(20)
        await scene.succeed()


@pytest.mark.parametrize("written", [True, False])
async def test_a_restarted_controller_continues_with_the_pod_and_writes_its_result_once(written: bool) -> None:
    async with open_scene().running() as scene:
        await scene.until_pod()
        if written:
            scene.kube.fail_next("DELETE", "pods", 403)
            scene.end_pod(12, "wrong key")
            await scene.until_phase("NotReady")
    version = scene.repository["metadata"]["resourceVersion"]
    if not written:
        scene.end_pod(0, GOOD)
    scene.controller = build_controller(scene.kube, RepositoryControllerMode.AUTO)
    async with scene.running():
        await until(lambda: scene.pod is None, seconds=5)
        assert (scene.repository["metadata"]["resourceVersion"] == version) is written
        assert scene.phase == ("NotReady" if written else "Ready")
    assert [request.method for request in scene.kube.requests if request.path.endswith("/pods")].count("POST") == 1


@pytest.mark.parametrize("labels", [{}, {OWNER_UID_LABEL: "uid-of-another"}])
async def test_a_foreign_pod_of_that_name_is_reported_after_a_while_and_left_alone(labels: dict[str, str]) -> None:
    scene = open_scene()
    meta = {"name": "app-default-kopia-init", "namespace": "velero", "labels": labels}
    scene.kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}})
    async with scene.running():
        await scene.until_phase("NotReady", seconds=120)
        await asyncio.sleep(10)
    assert "velero/app-default-kopia-init belongs to another object" in scene.message
    assert scene.pod is not None


@pytest.mark.parametrize(
    ("mode", "server", "kind", "ours"),
    [
        (RepositoryControllerMode.AUTO, True, "kopia", False),
        (RepositoryControllerMode.ON, True, "kopia", True),
        (RepositoryControllerMode.OFF, False, "kopia", False),
        (RepositoryControllerMode.AUTO, False, "restic", False),
    ],
)
async def test_mode_server_and_kind_decide_who_acts(
    mode: RepositoryControllerMode, server: bool, kind: str, ours: bool
) -> None:
    scene = open_scene(mode)
    scene.kube.put(scene.repository | {"spec": scene.repository["spec"] | {"repositoryType": kind}})
    if server:
        scene.kube.put(SERVER)
    async with scene.running():
        await asyncio.sleep(70)
    assert ((scene.pod is not None), scene.phase) == (ours, "")
    secrets = {secret["metadata"]["name"] for secret in scene.kube.objects(SECRETS)}
    assert ("velero-repo-credentials" in secrets) is (ours or kind == "restic")


async def test_a_server_that_is_installed_later_is_observed_before_anything_is_created() -> None:
    async with open_scene().running() as scene:
        await scene.fail_once()
        await asyncio.sleep(1)
        scene.kube.put(SERVER)
        put_secret(scene.kube, "keys", cloud="right")
        await asyncio.sleep(400)
        scene.kube.put(scene.repository | {"status": {"phase": "Ready"}})
        await asyncio.sleep(1)
        shown = 'nodeagent_repository_ready{node="node-a",repository_name="app-default-kopia"} 1.0'
        assert shown in scene.controller.cluster.metrics.render().decode()
    assert scene.pod is None


async def test_a_deleted_repository_is_forgotten() -> None:
    scene = open_scene()
    cluster, retries = scene.controller.cluster, scene.controller._retries
    async with scene.running():
        await scene.fail_once()
        await asyncio.sleep(1)
        assert b'repository_name="app-default-kopia"' in cluster.metrics.render()
        assert len(retries._attempts) == 1
        await scene.client.delete(BACKUP_REPOSITORIES, "velero", "app-default-kopia")
        await asyncio.sleep(1)
        assert b"repository_name=" not in cluster.metrics.render()
        assert retries._attempts == {}


@pytest.mark.parametrize(
    ("movers", "requests"),
    [
        pytest.param({}, None, id="nothing configured"),
        pytest.param(
            {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"cpu": "8", "memory": "16Gi"}},
            {"cpu": "100m", "memory": "128Mi"},
            id="more than it needs",
        ),
        pytest.param({"limits": {"memory": "2Gi"}}, {"memory": "128Mi"}, id="a limit alone would be a request"),
        pytest.param({"requests": {"cpu": "10m", "memory": "64Mi"}}, {"cpu": "10m", "memory": "64Mi"}, id="less"),
        pytest.param({"limits": {"memory": "64Mi"}}, {"memory": "64Mi"}, id="no request beyond the limit"),
        pytest.param({"requests": {"ephemeral-storage": "50Gi"}}, {"ephemeral-storage": "128Mi"}, id="storage"),
    ],
)
def test_an_init_pod_requests_less_than_a_mover(movers: JsonDict, requests: JsonDict | None) -> None:
    found = init_resources(movers)
    assert found.get("requests") == requests
    assert found.get("limits") == movers.get("limits")

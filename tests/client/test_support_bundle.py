"""What a support bundle collects, and what it says about the rest."""

import io
import json
import tarfile
from collections.abc import Iterator

import pytest

from client.bundle_fields import COLLECTED
from client.session import Session
from client.support_bundle import Bundle, BundleReader, pack
from core.models.base import JsonDict
from core.models.names import OWNER_UID_LABEL
from core.redact import redact
from tests.client.support.status_scene import LEADER_POD, StatusScene
from tests.core.test_redact import SECRETS as CORPUS
from tests.nodeagent.support.hand_clock import NOON, HandClock

_ELSEWHERE = {
    name for name, (_, secret) in CORPUS.items() if any(secret in redact(text) for text, _ in CORPUS.values())
}
"""Those whose secret is none in another text: the ID of a key is one in a signature only."""
_TEXTS = "\n".join(text for text, _ in CORPUS.values())


@pytest.fixture
def scene() -> Iterator[StatusScene]:
    """Return a cluster with secrets in logs, pages and the configuration."""
    scene = StatusScene()
    scene.put_transfers()
    scene.put("Pod", "moving", "v1", metadata={"labels": {OWNER_UID_LABEL: "u"}})
    scene.put("ConfigMap", "node-agent-admissions", "v1", data={"uids": "u"})
    for pod in ("agent-a", "agent-b", "moving"):
        scene.kube.logs["velero", pod] = _TEXTS
    scene.kube.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"k": "aGlkZGVu"}})
    scene.answer(odd=_TEXTS)
    yield scene
    assert not [one for one in scene.kube.requests if "/secrets" in one.path]


async def _read(scene: StatusScene) -> Bundle:
    return await BundleReader(Session(scene.client, HandClock(), "velero", lambda _: None, now=lambda: NOON)).read()


def _content(bundle: Bundle, name: str) -> str:
    return next(one.content.decode() for one in bundle.files if one.name == name)


async def test_it_has_objects_configuration_logs_and_pages(scene: StatusScene) -> None:
    bundle = await _read(scene)
    names = {one.name for one in bundle.files}
    assert names >= {one.file for one in COLLECTED}
    assert names >= {"objects/configmap-node-agent-config.json", "objects/lease-node-agent-dispatcher.json"}
    assert names >= {"logs/agent-a.log", "logs/moving.log", f"pages/{LEADER_POD}-status.json", "manifest.json"}
    uploads = json.loads(_content(bundle, "objects/datauploads.json"))
    assert {one["metadata"]["name"] for one in uploads} == {"moving", "first", "second", "third"}
    manifest = json.loads(_content(bundle, "manifest.json"))
    assert [one["name"] for one in manifest["files"]] == [one.name for one in bundle.files[:-1]]
    assert manifest["missing"] == bundle.missing


async def test_workloads_of_others_and_their_events_are_left_out(scene: StatusScene) -> None:
    scene.put("DaemonSet", "other", "apps/v1")
    for name, involved in {"ours": {"kind": "DataUpload"}, "theirs": {"kind": "Deployment"}, "odd": None}.items():
        scene.put("Event", name, "v1", **({"involvedObject": involved} if involved else {}))
    bundle = await _read(scene)
    daemon_sets, events = (json.loads(_content(bundle, f"objects/{kind}.json")) for kind in ("daemonsets", "events"))
    assert {one["metadata"]["name"] for one in daemon_sets} == {"node-agent"}
    assert {one["metadata"]["name"] for one in events} == {"ours"}


async def test_no_secret_of_the_corpus_is_in_any_file(scene: StatusScene) -> None:
    shown = "".join(one.content.decode() for one in (await _read(scene)).files)
    assert {name for name, (_, secret) in CORPUS.items() if secret in shown} <= _ELSEWHERE
    assert "aGlkZGVu" not in shown


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("/events", "objects/events.json: events: list Event velero: 403"),
        ("/nodes", "objects/nodes.json: nodes: list Node all namespaces: 403"),
        ("/daemonsets/", "configuration and pages: the flags of the agents: DaemonSet velero/node-agent"),
        ("/configmaps/node-agent-config", "ConfigMap node-agent-config: get ConfigMap"),
        ("/log", "log of Pod agent-"),
        ("/proxy/status", "/status of Pod agent-"),
    ],
)
async def test_what_may_not_be_read_is_named_beside_the_rest(scene: StatusScene, path: str, missing: str) -> None:
    whole = {one.name for one in (await _read(scene)).files}
    scene.kube.fail_next("GET", path, 403, times=99)
    bundle = await _read(scene)
    assert any(one.startswith(missing) for one in bundle.missing)
    assert len(whole - {one.name for one in bundle.files}) <= 4


async def test_an_object_without_the_form_of_its_kind_is_named(scene: StatusScene) -> None:
    scene.put("BackupRepository", "odd", spec={"volumeNamespace": 5})
    missing = (await _read(scene)).missing
    assert missing[0] == "objects/backuprepositories.json: odd does not have the form of its kind"


async def test_logs_are_limited_in_number_and_agents_that_are_not_ready_come_first(scene: StatusScene) -> None:
    for number in range(30):
        scene.put_agent(f"n-{number}")
    scene.put_agent("odd", ready=False)
    bundle = await _read(scene)
    logs = [one.name for one in bundle.files if one.name.startswith("logs/agent-")]
    assert len(logs) == 20
    assert "logs/agent-odd.log" in logs
    assert "logs of 13 more pods of kind agent: at most 20" in bundle.missing


@pytest.mark.parametrize(
    ("pod", "label", "own"),
    [("agent-a", {"role": "node-agent"}, "node-agent"), ("moving", {OWNER_UID_LABEL: "u"}, "u")],
)
async def test_of_a_pod_its_own_log_is_collected(scene: StatusScene, pod: str, label: JsonDict, own: str) -> None:
    spec = {"containers": [{"name": "istio-proxy"}, {"name": own}]}
    scene.put("Pod", pod, "v1", metadata={"labels": label}, spec=spec)
    bundle = await _read(scene)
    asked = [one.query["container"] for one in scene.kube.requests if one.path.endswith(f"/pods/{pod}/log")]
    assert asked == [own]
    assert f"log of Pod {pod}: the other containers' logs are left out: istio-proxy" in bundle.missing


async def test_an_archive_has_each_file_for_its_owner_alone(scene: StatusScene) -> None:
    bundle = await _read(scene)
    with tarfile.open(fileobj=io.BytesIO(pack(bundle, "folder", NOON))) as archive:
        members = archive.getmembers()
        manifest: JsonDict = json.load(archive.extractfile("folder/manifest.json"))  # type: ignore[arg-type] # it is there
    assert [one.name for one in members] == [f"folder/{one.name}" for one in bundle.files]
    assert {(one.mode, one.mtime) for one in members} == {(0o600, int(NOON.timestamp()))}
    assert manifest["namespace"] == "velero"

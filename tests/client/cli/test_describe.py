"""`nodeagent describe`: what it prints, its errors, and the names that it completes."""

import json
import re

import msgspec
import pytest
from click.shell_completion import ShellComplete

from client.cli.user_commands import _root
from client.status.describe import TransferDetails
from core.kube.resources import PODS
from core.models.base import JsonDict
from core.models.names import ATTEMPTS_ANNOTATION, BANDWIDTH_ANNOTATION, BASE_SNAPSHOT_LABEL, OWNER_UID_LABEL
from tests.client.support.commands import Shell
from tests.client.support.status_scene import StatusScene, transfer
from tests.nodeagent.support.transfers import mover_pod
from tests.support.golden import assert_golden, assert_golden_text

_SECRET = "AKIAsecretsecret"
_INTERRUPTION = {"at": "2026-11-21T11:40:00Z", "cause": "OOMKilled", "message": "out of memory\x1b[2J", "node": "a"}
_ATTEMPTS: JsonDict = {"number": 2, "stage": "Running", "interruptions": [_INTERRUPTION]}
_ATTEMPTS["starts"] = ["2026-11-21T11:31:00Z"]


@pytest.fixture
def scene() -> StatusScene:
    """Return a cluster with a transfer in its second attempt, its pod, a log, and an Event."""
    scene = StatusScene()
    scene.put_transfers()
    times = {"acceptedTimestamp": "2026-11-21T11:30:00Z", "startTimestamp": "2026-11-21T11:30:30Z"}
    progress = {"totalBytes": 2**30, "bytesDone": 2**28}
    raw = transfer("DataUpload", "long", "InProgress", node="a", acceptedByNode="a", progress=progress, **times)
    raw["metadata"]["creationTimestamp"] = "2026-11-21T11:00:00Z"
    raw["metadata"]["annotations"][ATTEMPTS_ANNOTATION] = json.dumps(_ATTEMPTS)
    raw["metadata"]["annotations"][BANDWIDTH_ANNOTATION] = '{"uploadBytesPerSecond": 50000000}'
    stored = scene.kube.put(raw)
    pod = mover_pod(stored, node="a", phase="Running", containerStatuses=[{"name": "mover", "state": {"running": {}}}])
    pod["metadata"]["labels"]["nodeagent.io/attempt"] = "2"
    scene.kube.put(pod)
    scene.kube.logs["velero", "long"] = f"began\nsecret_access_key={_SECRET}\nred \x1b[31m\n"
    event = {"type": "Warning", "reason": "Interrupted", "message": "attempt 1\x07", "count": 2}
    about = {"involvedObject": {"uid": stored["metadata"]["uid"]}, "lastTimestamp": "2026-11-21T11:40:01Z"}
    scene.put("Event", "e", "v1", **event, **about)
    said = '{"totalBytes":1073741824,"doneBytes":268435456,"bytesPerSecond":1048576}'
    moved = {"type": "Normal", "reason": "Data-Path-Progress", "message": said, "count": 7}
    scene.put("Event", "p", "v1", **moved, **about)
    return scene


def test_everything_about_a_transfer(shell: Shell) -> None:
    done = shell.run("describe", "du/long")
    assert (done.code, done.err) == (0, "")
    assert_golden_text("cli/describe", done.out)
    assert "Events:" not in done.out
    wide = shell.run("describe", "du/long", "-o", "wide")
    assert_golden_text("cli/describe-wide", wide.out)
    assert done.out.replace("\n", "").isprintable()
    assert _SECRET not in done.out


def test_programs_get_a_document_of_the_schema(shell: Shell) -> None:
    text = shell.run("describe", "dataupload", "long", "-o", "json").out
    found: JsonDict = json.loads(text)
    assert_golden("cli/describe-schema", json.loads(json.dumps(msgspec.json.schema(TransferDetails))))
    assert json.loads(TransferDetails.from_json(text).to_json()) == found
    for part in (found, *found["pods"], *found["events"]):
        part.pop("uid", None)
    assert_golden("cli/describe", found)


def test_a_limit_of_the_bandwidth_is_shown_while_it_holds(scene: StatusScene, shell: Shell) -> None:
    assert re.search(r"(?m)^Limited to: +47\.7 MiB/s sent$", shell.run("describe", "du/long").out)
    limit = '{"uploadBytesPerSecond": 50000000}'
    for name, phase, limits in (
        ("ended", "Completed", limit),
        ("free", "InProgress", "{}"),
        ("odd", "InProgress", "?"),
    ):
        raw = transfer("DataUpload", name, phase)
        raw["metadata"]["annotations"][BANDWIDTH_ANNOTATION] = limits
        scene.kube.put(raw)
        done = shell.run("describe", f"du/{name}")
        assert (done.code, "Limited to" in done.out) == (0, False)


@pytest.mark.parametrize(("uid", "shown"), [("uid-of-blocks", True), ("another", False)], ids=["its own", "another's"])
def test_the_snapshot_that_the_storage_keeps_is_shown(scene: StatusScene, shell: Shell, uid: str, shown: bool) -> None:
    raw = transfer("DataUpload", "blocks", "Completed")
    raw["metadata"]["uid"], raw["spec"]["datamover"] = "uid-of-blocks", "velero-block"
    scene.kube.put(raw)
    meta = {"name": "blocks", "labels": {BASE_SNAPSHOT_LABEL: uid}}
    content = {"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent", "metadata": meta}
    scene.kube.put(content | {"spec": {"source": {"snapshotHandle": "snap-7"}}})
    assert bool(re.search(r"(?m)^Base snapshot: +snap-7$", shell.run("describe", "du/blocks").out)) is shown


@pytest.mark.parametrize("word", ["dd/done", "DataDownload/done", "datadownloads done", "datadownloads.velero.io/done"])
def test_a_transfer_that_ended_has_no_pods_and_advice(shell: Shell, word: str) -> None:
    done = shell.run("describe", *word.split())
    assert done.code == 0
    assert re.search(r"(?m)^Phase: +Completed$", done.out)
    assert done.out.endswith("What to do next: nothing: it is complete\n")


def test_the_log_is_the_data_mover_s_whatever_else_is_in_its_pod(scene: StatusScene, shell: Shell) -> None:
    (pod,) = (one for one in scene.kube.objects(PODS) if one["metadata"]["name"] == "long")
    names = ("istio-proxy", pod["metadata"]["labels"][OWNER_UID_LABEL])
    states: list[JsonDict] = [{"name": name, "state": {"running": {}}} for name in names]
    scene.kube.put(pod | {"status": pod["status"] | {"containerStatuses": states}})
    assert "End of the log:" in shell.run("describe", "du/long").out
    asked = [one.query.get("container") for one in scene.kube.requests if one.path.endswith("/log")]
    assert asked == [names[1]]


@pytest.mark.parametrize(("path", "missing"), [("events", "Events"), ("pods", "pods"), ("log", "the log of its pod")])
def test_a_missing_permission_is_a_note_beside_the_rest(
    scene: StatusScene, shell: Shell, path: str, missing: str
) -> None:
    scene.kube.fail_next("GET", f"/{path}", 403)
    done = shell.run("describe", "du/long")
    assert done.code == 0
    assert "It was interrupted 20m ago on node a: OOMKilled." in done.out
    assert re.fullmatch(rf"note: {missing} could not be read: .*403.*\n", done.err)


def test_an_invalid_transfer_is_shown_with_its_fault(scene: StatusScene, shell: Shell) -> None:
    scene.kube.put(transfer("DataUpload", "odd", "Odd"))
    done = shell.run("describe", "du/odd")
    assert done.code == 0
    assert re.search(r"(?m)^Invalid: +invalid DataUpload velero/odd: status.phase", done.out)
    assert done.out.endswith("see docs/troubleshooting.md#unreadable\n")


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize(
    ("begun", "expected"),
    [("d", ["du/", "dd/"]), ("du/lo", ["du/long"]), ("datadownloads/", ["datadownloads/done"]), ("odd/x", [])],
)
def test_a_shell_completes_kinds_and_names(begun: str, expected: list[str]) -> None:
    complete = ShellComplete(_root, {}, "nodeagent", "_NODEAGENT_COMPLETE")
    assert [item.value for item in complete.get_completions(["describe"], begun)] == expected

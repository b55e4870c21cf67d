"""The objects of `examples/`, used with kubectl and kopia: a volume is backed up, inspected and restored."""

import filecmp
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.kube.resources import EVENTS, PERSISTENT_VOLUME_CLAIMS
from tests.cluster.bed import Bed
from tests.cluster.handkopia import open_kopia
from tests.cluster.listing import everything
from tests.cluster.scenes import Volume, wait_released
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.layout import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="waiting"), pytest.mark.timeout(WITH_LOCKS)]

_EXAMPLES = ROOT / "examples"
_APP, _EXAMPLE = "app", "example"
"""Names in the examples: a namespace, and objects in the agents' namespace."""
_SOURCE = "snapshot-data-upload-download/kopia/app/data"
_BY_MOVER = "Data-Path-"
_SLOW = {"ContainerCreating", "ClaimUnbound", "Scheduling", "SnapshotNotReady"}
"""Pending reasons of every transfer, which are reported where they last for seconds."""
_POLICIES = ROOT / "tests" / "recordings" / "velero-1.18.2" / "kopia-policies.json"


def _apply(bed: Bed, *names: str) -> None:
    for name in names:
        bed.user.kubectl("apply", "-f", str(_EXAMPLES / name))


def _apply_transfer(bed: Bed, name: str, snapshot_id: str = "") -> Json:
    text = (_EXAMPLES / f"{name}.yaml").read_text().replace("SNAPSHOT_ID", snapshot_id)
    item: Json = json.loads(bed.user.kubectl("apply", "-o", "json", "-f", "-", stdin=text))
    return item


@pytest.fixture(scope="module")
def uploaded(agent: Bed) -> Iterator[Json]:
    """The DataUpload of the examples, completed."""
    _apply(agent, "credentials.yaml", "location.yaml", "source.yaml")
    agent.user.wait("pod/writer", "condition=Ready", namespace=_APP)
    _apply(agent, "snapshot.yaml")
    agent.user.wait("volumesnapshot/data", "jsonpath={.status.readyToUse}=true", namespace=_APP)
    # Others give movers more to request, and their downloads cache volumes.
    with relies_on(agent, Shared.AGENTS), relies_on(agent, Shared.GROUND):
        yield wait_released(agent, _apply_transfer(agent, "dataupload"))
    agent.user.kubectl("delete", "dataupload/example", "backuprepository/app-default-kopia", "-n", NAMESPACE)
    agent.user.kubectl("delete", "namespace", _APP, "--wait=false")


def test_it_completes(uploaded: Json) -> None:
    status = uploaded["status"]
    assert status["phase"] == "Completed", status
    assert status["progress"] == {"totalBytes": 200_000_000, "bytesDone": 200_000_000}
    assert status["snapshotID"]


def test_get_shows_its_columns(agent: Bed, uploaded: Json) -> None:
    shown = _columns(agent.user.kubectl("get", "datauploads", "-n", NAMESPACE), "example")
    assert shown.pop("STARTED").endswith(("s", "m"))
    assert shown.pop("AGE").endswith(("s", "m"))
    assert shown == {
        "NAME": "example",
        "STATUS": "Completed",
        "BYTES DONE": "200000000",
        "TOTAL BYTES": "200000000",
        "STORAGE LOCATION": "default",
        "NODE": agent.env["BED_NODE"],
    }


def _columns(table: str, name: str) -> dict[str, str]:
    """The row of one object of what `kubectl get` printed, by the heads of its columns."""
    head, *rows = table.splitlines()
    row = next(row for row in rows if row.split()[0] == name)
    heads = list(re.finditer(r"\S+(?: \S+)*", head))
    ends = [*(one.start() for one in heads[1:]), None]
    return {one[0]: row[one.start() : end].strip() for one, end in zip(heads, ends, strict=True)}


def test_describe_shows_its_events(agent: Bed, uploaded: Json) -> None:
    described = agent.user.kubectl("describe", "dataupload", "example", "-n", NAMESPACE).partition("Events:")[2]
    # Events have whole seconds only, and describe shows those of one second in any order.
    uid, found = uploaded["metadata"]["uid"], agent.api.objects(EVENTS, NAMESPACE)
    events = [one for one in found if one["involvedObject"]["uid"] == uid]
    events.sort(key=lambda event: int(event["metadata"]["resourceVersion"]))
    reasons = list(dict.fromkeys(event["reason"] for event in events))
    # Agent and mover record Events at the same time; the mover waits only for a repository that is not ready.
    waiting = {f"{_BY_MOVER}Waiting", f"{_BY_MOVER}Ready"}
    by_mover = [reason for reason in reasons if reason.startswith(_BY_MOVER) and reason not in waiting]
    by_agent = [reason for reason in reasons if not reason.startswith(_BY_MOVER) and reason not in _SLOW]
    assert by_agent == ["Accepted", "Prepared", "Started", "Completed"]
    assert by_mover == [f"{_BY_MOVER}{reason}" for reason in ("Started", "Progress", "Completed", "Stopped")]
    assert {line.split()[1] for line in described.splitlines()[3:]} == set(reasons)
    assert "Warning" not in described
    assert uploaded["status"]["snapshotID"] in described


def test_kopia_finds_the_snapshot_and_restores_it(agent: Bed, uploaded: Json, tmp_path: Path) -> None:
    snapshot_id = uploaded["status"]["snapshotID"]
    with open_kopia(agent, _APP) as kopia:
        (snapshot,) = [one for one in kopia.json("snapshot", "list", "--all") if one["source"]["path"] == _SOURCE]
        policy = kopia.json("policy", "show", f"default@default:{_SOURCE}")
        kopia.run("restore", snapshot_id, str(tmp_path / "restored"))
    assert snapshot["id"] == snapshot_id
    assert snapshot["source"] == {"userName": "default", "host": "default", "path": _SOURCE}
    assert snapshot["pins"] == ["velero-pin"]
    assert "incomplete" not in snapshot
    for part, recorded in _recorded_policy().items():
        assert policy[part] | recorded == policy[part]
    _assert_same(_folder(agent, "data"), tmp_path / "restored")


def _recorded_policy() -> dict[str, Any]:
    policies = json.loads(_POLICIES.read_text())
    recorded = next(policy for policy in policies if policy["target"]["path"] == _SOURCE)
    return {key: recorded[key] for key in ("retention", "compression", "errorHandling", "scheduling")}


def test_the_example_of_a_datadownload_restores_it(agent: Bed, uploaded: Json) -> None:
    before = everything(agent, _APP, _EXAMPLE)
    _apply(agent, "target.yaml")
    wait_released(agent, _apply_transfer(agent, "datadownload", uploaded["status"]["snapshotID"]), "Completed")
    volume = (agent.api.get(PERSISTENT_VOLUME_CLAIMS, _APP, "restored") or {})["spec"]["volumeName"]
    claim = f"{_APP} persistentvolumeclaim/restored"
    created = {f"persistentvolume/{volume}", claim, f"{NAMESPACE} datadownload.velero.io/example"}
    assert everything(agent, _APP, _EXAMPLE) - before == created
    _assert_same(_folder(agent, "data"), _folder(agent, "restored"))
    agent.user.kubectl("delete", "datadownload/example", "-n", NAMESPACE)


def test_the_three_commands_of_the_readme_bring_a_lost_volume_back(agent: Bed, uploaded: Json, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(_folder(agent, "data"), copy)
    backup, loss, restore = _readme_commands()
    for line in (backup, loss, restore):
        done = subprocess.run(line, shell=True, env=dict(agent.env), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if line == loss:
            assert agent.api.get(PERSISTENT_VOLUME_CLAIMS, _APP, "data") is None
    _assert_same(_folder(agent, "data"), copy)
    for kind in ("datauploads", "datadownloads"):
        agent.user.kubectl("delete", kind, "-n", NAMESPACE, "-l", "nodeagent.io/backup=first")


def _readme_commands() -> list[str]:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Back up a volume, and bring it back\n")[2]
    block = section.partition("```sh\n")[2].partition("```")[0]
    return [line.partition("#")[0].strip() for line in block.splitlines()]


def _folder(bed: Bed, claim: str) -> Path:
    return Volume(bed, _APP, claim).path()


def _assert_same(source: Path, copy: Path) -> None:
    names = sorted(path.name for path in source.iterdir())
    assert names == sorted(path.name for path in copy.iterdir())
    files = [name for name in names if (source / name).is_file()]
    assert filecmp.cmpfiles(source, copy, files, shallow=False) == (files, [], [])

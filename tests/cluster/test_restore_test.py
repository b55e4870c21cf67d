"""Restore tests of the leader on a real kubelet: a volume comes back, and what a killed test has left goes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from client.install.manifests import build_restore_test_account
from client.install.options import InstallOptions
from core.kube.resources import CONFIG_MAPS
from tests.cluster.apart import CALM_NODE, installed_apart
from tests.cluster.bed import Bed, new_namespace
from tests.cluster.scenes import Volume
from tests.cluster.upkeep import Upkeep
from tests.support.objects import build_object

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="apart"), pytest.mark.timeout(1800)]

_CONFIG = {"nodeagent.io": {"verification": {"period": "24h", "restoreTest": True}}}
_FILL = """\
import os
for number in range(4):
    with open(f"/data/file-{number}", "wb") as file:
        file.write(os.urandom(300_000))
    os.chown(f"/data/file-{number}", number, 100 + number)
"""
_SCRATCH = "persistentvolumeclaims,datadownloads"


@pytest.fixture
def upkeep(agent: Bed, space: str) -> Iterator[Upkeep]:
    """A namespace with an agent that tests restores, and a backup of one volume."""
    account = build_restore_test_account(InstallOptions(namespace=space))
    with installed_apart(agent, space, node=CALM_NODE) as own, new_namespace(agent) as volumes:
        config = build_object(CONFIG_MAPS, "agents", space, data={"c": json.dumps(_CONFIG)})
        agent.user.apply(*account, config)
        # The account of restore tests has only its own permissions.
        agents = [f"--serviceaccount={space}:{name}" for name in ("node-agent", "node-agent-mover")]
        agent.user.kubectl("delete", "clusterrolebinding", space)
        agent.user.kubectl("create", "clusterrolebinding", space, "--clusterrole=cluster-admin", *agents)
        upkeep = Upkeep(own, volumes)
        own.run(arguments=["--repo-maintenance=off", "--node-agent-configmap=agents", *upkeep.keep_calm()])
        own.ready_log()
        Volume(agent, volumes).fill(_FILL)
        agent.said("backup", "create", "night", f"--pvc={volumes}/data", "--wait", f"--agent-namespace={space}")
        yield upkeep
    of_cluster = [f"{one['kind']}/{one['metadata']['name']}" for one in account if "namespace" not in one["metadata"]]
    agent.user.kubectl("delete", *of_cluster)


def _tests(upkeep: Upkeep) -> dict[str, Any]:
    annotations = upkeep.annotations.get("nodeagent.io/verification", "{}")
    found: dict[str, Any] = json.loads(annotations).get("restoreTests", {})
    return found


def _scratch(upkeep: Upkeep) -> list[str]:
    return [name for name in upkeep.own.kubectl("get", _SCRATCH, "-o", "name").split() if "/nodeagent-verify-" in name]


def _job(upkeep: Upkeep) -> str:
    (name,) = (one["metadata"]["name"] for one in upkeep.jobs if "-restore-test-" in one["metadata"]["name"])
    return str(name)


def test_a_volume_is_restored_and_a_test_that_is_killed_leaves_nothing(upkeep: Upkeep) -> None:
    own = upkeep.own
    # The transfer has a PVC of its own too while it goes on.
    upkeep.wait("a scratch volume and its transfer", lambda: len(_scratch(upkeep)) >= 2)
    job = _job(upkeep)
    own.kubectl("delete", "pod", "-l", f"job-name={job}", "--grace-period=0", "--force")
    upkeep.wait("the failure", lambda: _tests(upkeep).get("failures") == 1)
    assert (_tests(upkeep)["tried"], len(_scratch(upkeep)) >= 2) == ("data", True)
    assert f"Job {job}: PVC data: " in "\n".join(upkeep.events("VerificationIncomplete"))
    # As Kubernetes does it after an hour.
    own.kubectl("delete", "job", job)
    upkeep.wait("what it has left to go", lambda: not _scratch(upkeep))
    own.kubectl("annotate", "backuprepository", upkeep.name, "nodeagent.io/verification-")
    upkeep.wait("a test that passes", lambda: _tests(upkeep).get("outcome") == "passed")
    assert (_tests(upkeep)["claim"], _scratch(upkeep)) == ("data", [])
    text = "PVC data was restored and compared: 4 files with 1200000 bytes are right"
    assert text in upkeep.events("Verified")
    pod = upkeep.pod_of({"metadata": {"name": _job(upkeep)}})
    assert pod is not None
    assert pod["spec"]["serviceAccountName"] == "node-agent-restore-test"
    (upload,) = json.loads(own.kubectl("get", "datauploads", "-o", "json"))["items"]
    assert json.loads(upload["metadata"]["annotations"]["nodeagent.io/verification"])["outcome"] == "passed"
    proof = own.bed.document("repo", "describe", upkeep.name, f"--namespace={own.space}")["verification"]
    assert (proof["restored"], proof["restoreOutcome"], proof["damaged"]) == ("data", "passed", [])

"""The commands that install, check and remove agents, beside the test bed's own installation."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.listing import applied_versions
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.demonstration.manifests import build_location
from tests.testbed.settings import AGENT_IMAGE

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="apart"), pytest.mark.timeout(WITH_LOCKS)]

_KINDS = "daemonsets,pods,serviceaccounts,roles,rolebindings,networkpolicies,configmaps,secrets,leases,jobs"
_CLUSTER_KINDS = "clusterroles,clusterrolebindings,priorityclasses"


class _Shell:
    """Runs commands for the namespace, as a user on a workstation does."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        # Other tests of the tier leave out objects with such a name.
        self.space = f"test-{secrets.token_hex(4)}"

    def run(self, *words: str) -> str:
        return self.bed.said(*words, "-n", self.space)

    def install(self) -> str:
        env = self.bed.env
        secret = self.folder / "credentials"
        secret.write_text(build_location(env)[0]["stringData"]["cloud"])
        config = f"region=us-east-1,s3ForcePathStyle=true,s3Url={env['BED_S3_URL']}"
        location = (
            "--provider=aws",
            f"--bucket={env['BED_S3_BUCKET']}",
            "--prefix=installed",
            f"--secret-file={secret}",
        )
        more = (f"--image={AGENT_IMAGE}", "--priority-classes", "--wait", "--timeout=10m")
        return self.run("install", *location, f"--backup-location-config={config}", *more)

    def objects(self) -> set[str]:
        """Everything that an installation could have created, by kind and name."""
        own = self.bed.user.names(_KINDS.split(","), "-n", self.space)
        common = self.bed.user.names(_CLUSTER_KINDS.split(","))
        return {*own, *(name for name in common if f"/{self.space}-" in name)}

    def versions(self) -> list[str]:
        """The versions of what was applied, definitions included."""
        columns = "custom-columns=N:.metadata.name,V:.metadata.resourceVersion"
        chosen = ("-l", "app.kubernetes.io/part-of=node-agent", "--no-headers", "-o", columns)
        definitions = self.bed.user.kubectl("get", "crd", *chosen).splitlines()
        return [*applied_versions(self.bed, self.space), *definitions]


@pytest.fixture
def shell(agent: Bed, tmp_path: Path) -> Iterator[_Shell]:
    shell = _Shell(agent, tmp_path)
    # Others taint a node, whose agent is not waited for then.
    with relies_on(agent, Shared.AGENTS):
        yield shell
    agent.user.kubectl("delete", "namespace", shell.space, "--ignore-not-found", "--wait=false")


def test_one_command_installs_and_another_leaves_nothing_that_it_does_not_list(shell: _Shell) -> None:
    shell.install()
    versions = shell.versions()
    assert "created" not in shell.install()
    assert shell.versions() == versions
    found = json.loads(shell.run("version", "-o", "json"))
    assert {one["version"] for one in found["agents"]} == {found["client"]}
    assert len(found["agents"]) == len(shell.bed.user.names(["nodes"]))
    checked = json.loads(shell.run("preflight", "--storage-class=bed", "--volume-snapshot-class=bed", "-o", "json"))
    assert [step["error"] for step in checked["steps"]] == [""] * 7
    assert checked["snapshotId"]
    left = ["pods,pvc,volumesnapshots,datauploads.velero.io,datadownloads.velero.io"]
    assert shell.bed.user.names(left, "-A", "-l", "nodeagent.io/preflight") == []
    removed, _, kept = shell.run("uninstall", "--yes").partition("Kept:\n")
    assert f"  DaemonSet {shell.space}/node-agent\n" in removed
    rest = {name for name in shell.objects() if not name.endswith(("/default", "/kube-root-ca.crt"))}
    assert rest == {"secret/cloud-credentials", "secret/velero-repo-credentials"}
    for name in ("cloud-credentials", "velero-repo-credentials"):
        assert f"  Secret {shell.space}/{name}\n" in kept
    assert f"  BackupRepository {shell.space}/nodeagent-preflight-default-kopia\n" in kept

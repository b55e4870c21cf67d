"""`nodeagent status`, `describe` and `support-bundle` before a real API server, with the documented permissions."""

import re
import tarfile
from pathlib import Path

import pytest

from client.permissions import DESCRIBE_PERMISSIONS, STATUS_PERMISSIONS, SUPPORT_BUNDLE_PERMISSIONS
from core.kube.resources import DATA_UPLOADS, LEASES, PODS
from tests.client.support.status_scene import transfer
from tests.integration.person import Done, Person
from tests.support.apiserver import ApiServer
from tests.support.golden import assert_golden_text
from tests.support.terminal import open_terminal

pytestmark = pytest.mark.integration

_ALL = (*STATUS_PERMISSIONS, *DESCRIBE_PERMISSIONS, *SUPPORT_BUNDLE_PERMISSIONS)


class _Cluster(Person):
    """A namespace with an agent, its Lease and a transfer, and a person with some permissions."""

    def prepare(self) -> None:
        spec = {"nodeName": "node-a", "containers": [{"name": "c", "image": "i"}]}
        self.create(PODS, "agent", metadata={"labels": {"role": "node-agent"}}, spec=spec)
        self.set_status(PODS, "agent", conditions=[{"type": "Ready", "status": "True"}])
        renewed = {"renewTime": "2026-11-21T12:00:00.000000Z", "leaseDurationSeconds": 2_000_000_000}
        self.create(LEASES, "node-agent-dispatcher", spec={"holderIdentity": "node-a_1"} | renewed)
        self.put_transfer("du-1")

    def put_transfer(self, name: str) -> None:
        raw = transfer(
            "DataUpload", name, "Accepted", reason="Unschedulable", message="0/3 nodes\x1b[2J", node="node-a"
        )
        raw["metadata"]["namespace"] = self.namespace
        del raw["metadata"]["creationTimestamp"]
        self.api.create(DATA_UPLOADS, raw)

    def words(self, *words: str) -> list[str]:
        return [*words, "-n", self.namespace, "--kubeconfig", str(self.kubeconfig)]

    def ask(self, *words: str) -> Done:
        return self.run(*words, "-n", self.namespace)


@pytest.fixture
def cluster(apiserver: ApiServer, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> _Cluster:
    return _Cluster(apiserver, namespace, tmp_path, capsys)


def test_without_any_permission_everything_is_unknown_and_named(cluster: _Cluster) -> None:
    code, out, _ = cluster.ask("status")
    assert code == 0
    assert out.startswith("UNKNOWN: agents unknown; transfers: unknown\n")
    assert re.search(r"(?m)^Leader: +unknown\nQueue: +0 queued, computed here\nConfiguration: +unknown$", out)
    denied = re.findall(r'User "system:serviceaccount:\S+:user" cannot (\w+) resource "(\w+)" in API group', out)
    assert ("list", "datauploads") in denied
    assert ("get", "leases") in denied
    assert ("list", "backuprepositories") in denied
    code, out, err = cluster.ask("describe", "du/du-1")
    assert (code, out) == (1, "")
    assert re.fullmatch(r'error: get DataUpload \S+/du-1: 403 Forbidden: .*cannot get resource "datauploads".*\n', err)


def test_a_bundle_has_what_may_be_read_and_names_the_rest(cluster: _Cluster, tmp_path: Path) -> None:
    cluster.grant(STATUS_PERMISSIONS)
    path = tmp_path / "b.tar.gz"
    code, _, err = cluster.ask("support-bundle", "--output", str(path))
    assert code == 0
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert "objects/datauploads.json" in names
    assert "objects/events.json" not in names
    assert re.search(r'note: not in the bundle: objects/events.json: .* cannot list resource "events"', err)


@pytest.mark.processes
def test_a_page_in_a_terminal_follows_changes_and_ctrl_c_ends_it(cluster: _Cluster) -> None:
    cluster.grant(_ALL)
    with open_terminal(cluster.words("status", "-w")) as terminal:
        terminal.read_until("du/du-1")
        cluster.put_transfer("du-2")
        terminal.read_until("du/du-2")
        terminal.interrupt()
        code, text = terminal.finish()
    assert code == 130
    assert "Unschedulable: 0/3 nodes\\x1b[2J" in text
    assert "Traceback" not in text
    # The cursor is shown again.
    assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l")


@pytest.mark.processes
def test_pages_in_a_terminal_are_those_of_the_golden_files(cluster: _Cluster) -> None:
    cluster.grant(_ALL)
    for words, name in ((["status"], "cli/terminal-status"), (["describe", "du/du-1"], "cli/terminal-describe")):
        with open_terminal(cluster.words(*words)) as terminal:
            code, text = terminal.finish()
        text = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "TIME", text).replace(cluster.namespace, "NAMESPACE")
        text = re.sub(" {2,}", "  ", re.sub(r"\b\d+[smhd]( ago)?\b", "AGE", text)).replace(" \n", "\n")
        # Other tests leave PVCs on the API server.
        text = re.sub(r"(?m)^(Volumes: +).*", r"\1ALL", text)
        assert code == 0
        assert "\x1b[1m" in terminal.raw, "headings are bold"
        assert_golden_text(name, text)

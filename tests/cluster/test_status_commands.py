"""`nodeagent status` and `support-bundle` beside a real agent, its leader's page and a failed transfer."""

import base64
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.kube.resources import DATA_UPLOADS, SECRETS
from core.models.names import PENDING_REASON_ANNOTATION
from core.version import VERSION
from tests.cluster.bed import Bed
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.nodeagent.support.transfers import data_upload
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.processes import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="failing"), pytest.mark.timeout(WITH_LOCKS)]


@pytest.fixture
def pending(agent: Bed, space: str) -> Iterator[str]:
    """A DataUpload that names a location which does not exist, once the leader has said so."""
    raw = data_upload(space)
    raw["metadata"] = {"name": space, "namespace": NAMESPACE}
    raw["spec"] |= {"backupStorageLocation": f"{space}-none", "sourceNamespace": space}
    # It fails two minutes after its creation, so the test does not wait for others meanwhile.
    with relies_on(agent, Shared.AGENTS):
        agent.api.create(DATA_UPLOADS, raw)
        try:
            wait_for("the reason", lambda: _reason(agent, space) == "LocationMissing")
            yield space
        finally:
            agent.api.delete(DATA_UPLOADS, NAMESPACE, space)


def _reason(agent: Bed, name: str) -> str:
    found = agent.api.get(DATA_UPLOADS, NAMESPACE, name) or {"metadata": {}}
    annotations = found["metadata"].get("annotations") or {}
    return str(annotations.get(PENDING_REASON_ANNOTATION, ""))


def test_status_asks_the_leader_and_names_what_is_blocked(agent: Bed, pending: str) -> None:
    found = agent.document("status")
    assert found["leader"]["page"], found["notes"]
    assert found["leader"]["version"] == VERSION
    assert {row["slots"] is not None and row["config"] != "" for row in found["nodes"]} == {True}
    (row,) = [row for row in found["pending"] if row["name"] == pending]
    assert (row["reason"], row["position"]) == ("LocationMissing", None)
    blocked = [one["message"] for one in found["findings"] if one["rule"] == "transfers-blocked"]
    assert any("LocationMissing" in message for message in blocked)
    assert found["health"] != "healthy"


def test_a_bundle_has_logs_and_pages_of_agents_and_no_secret(agent: Bed, pending: str, tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    agent.said("support-bundle", "--output", str(path))
    with tarfile.open(path) as archive:
        content = {
            member.name.partition("/")[2]: file.read().decode()
            for member in archive.getmembers()
            if (file := archive.extractfile(member)) is not None
        }
    assert json.loads(content["manifest.json"])["files"]
    assert any(name.startswith("logs/") and text for name, text in content.items())
    assert any(name.endswith("-status.json") and VERSION in text for name, text in content.items())
    assert any(name.endswith("-metrics.txt") and "nodeagent_" in text for name, text in content.items())
    assert pending in content["objects/datauploads.json"]
    everything = "".join(content.values())
    for secret in agent.api.objects(SECRETS, NAMESPACE):
        for value in (secret.get("data") or {}).values():
            assert value not in everything
            assert base64.b64decode(value).decode(errors="replace") not in everything

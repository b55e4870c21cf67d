"""Custom resource definitions that are not ours: `nodeagent install` leaves them, and says what they lack."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from client.install.apply import find_lacking
from client.install.manifests import read_definitions
from core.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, DAEMON_SETS, NAMESPACES
from tests.integration.installer import ALONE, Installer
from tests.support.apiserver import ApiServer, run_apiserver
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.integration

_OLD = Path(__file__).parents[1] / "recordings" / "velero-1.17.2" / "crds"


@pytest.fixture(scope="module")
def apiserver() -> Iterator[ApiServer]:
    """A server with the definitions of Velero 1.17 and no others."""
    with run_apiserver(_OLD) as server:
        yield server


def test_definitions_of_velero_stay_and_what_they_lack_is_named(installer: Installer) -> None:
    names = [one["metadata"]["name"] for one in read_definitions()]
    before = [installer.get(CUSTOM_RESOURCE_DEFINITIONS, name) for name in names]
    done = installer.run(*ALONE)
    assert done.code == 0, done.err
    assert [installer.get(CUSTOM_RESOURCE_DEFINITIONS, name) for name in names] == before
    assert installer.get(DAEMON_SETS, "node-agent") is not None
    notes = [line for line in done.err.splitlines() if "is not ours" in line]
    assert len(notes) == len(names)
    upload = next(line for line in notes if "datauploads" in line)
    prefix = "note: CustomResourceDefinition datauploads.velero.io is not ours, and stays as it is: it lacks v2alpha1 ."
    assert upload.startswith(prefix)


def test_a_definition_that_is_missing_is_created_and_waited_for(installer: Installer) -> None:
    name = "backuprepositories.velero.io"
    installer.server.api.request("DELETE", CUSTOM_RESOURCE_DEFINITIONS.path("", name))
    # An API server that still serves the old one may never establish a new one.
    wait_for("the end of the old one", lambda: not _is_served(installer, "backuprepositories"))
    done = installer.run(*ALONE)
    assert done.code == 0, done.err
    assert f"CustomResourceDefinition {name}: " in done.out
    stored = installer.get(CUSTOM_RESOURCE_DEFINITIONS, name) or {}
    established = [one["status"] for one in stored["status"]["conditions"] if one["type"] == "Established"]
    assert established == ["True"]


_OURS = {"app.kubernetes.io/part-of": "node-agent"}


def test_a_definition_of_ours_that_is_older_is_updated(installer: Installer) -> None:
    name = "podvolumebackups.velero.io"
    before = installer.change(CUSTOM_RESOURCE_DEFINITIONS, name, {"metadata": {"labels": _OURS}})
    done = installer.run("--crds-only", "--bucket=-x")
    assert f"CustomResourceDefinition {name}: configured\n" in done.out
    assert {line.split()[0] for line in done.out.splitlines()} == {"CustomResourceDefinition"}
    assert installer.get(NAMESPACES, installer.namespace) is None
    after = installer.get(CUSTOM_RESOURCE_DEFINITIONS, name) or {}
    assert find_lacking(after, before)
    assert not find_lacking(before, after)


def test_a_definition_that_a_release_of_helm_manages_stays(installer: Installer) -> None:
    name = "podvolumerestores.velero.io"
    meta = {"labels": _OURS, "annotations": {"meta.helm.sh/release-name": "agents"}}
    before = installer.change(CUSTOM_RESOURCE_DEFINITIONS, name, {"metadata": meta})
    done = installer.run("--crds-only")
    assert done.code == 0, done.err
    text = f"CustomResourceDefinition {name} belongs to the release agents of Helm, and stays as it is: it lacks v1 ."
    assert f"note: {text}" in done.err
    assert (installer.get(CUSTOM_RESOURCE_DEFINITIONS, name) or {})["spec"] == before["spec"]


def test_a_definition_of_ours_that_is_newer_stays(installer: Installer) -> None:
    name = "datadownloads.velero.io"
    stored = installer.get(CUSTOM_RESOURCE_DEFINITIONS, name) or {}
    schema = stored["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"]["properties"]["later"] = {"type": "string"}
    patch = {"metadata": {"labels": _OURS}, "spec": {"versions": stored["spec"]["versions"]}}
    before = installer.change(CUSTOM_RESOURCE_DEFINITIONS, name, patch)
    done = installer.run("--crds-only")
    assert done.code == 0, done.err
    text = f"CustomResourceDefinition {name} is newer, and stays as it is: it also has v2alpha1 .spec.later; it "
    assert f"note: {text}" in done.err
    assert (installer.get(CUSTOM_RESOURCE_DEFINITIONS, name) or {})["spec"] == before["spec"]


def _is_served(installer: Installer, plural: str) -> bool:
    served = installer.server.api.request("GET", "/apis/velero.io/v1")["resources"]
    return plural in {one["name"] for one in served}

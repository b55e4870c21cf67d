"""Releases of the chart on a real API server: install, upgrade, uninstall, and two side by side."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from client.install.manifests import build_installation, read_definitions
from client.install.options import InstallOptions
from core.kube.resources import CUSTOM_RESOURCE_DEFINITIONS
from core.kube.transport import MERGE_PATCH
from tests.deploy.install_cases import EVERYTHING
from tests.support.apiserver import ApiServer, apply_crds, run_apiserver
from tests.support.helm import CHART, Helm, values_of
from tests.support.objects import build_object
from tests.testbed.api import Json

# On a busy machine an API server needs a while for each new definition.
pytestmark = pytest.mark.integration

_DEPLOY = CHART.parent
_SNAPSHOTS = Path(__file__).parents[1] / "testbed" / "crds"
_SCHEMA = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
_CONSTRAINTS = build_object(
    CUSTOM_RESOURCE_DEFINITIONS,
    "securitycontextconstraints.security.openshift.io",
    spec={
        "group": "security.openshift.io",
        "scope": "Cluster",
        "names": {"kind": "SecurityContextConstraints", "plural": "securitycontextconstraints"},
        "versions": [{"name": "v1", "served": True, "storage": True, "schema": _SCHEMA}],
    },
)
"""In place of OpenShift's, whose API server is another one."""

_OURS = {definition["metadata"]["name"] for definition in read_definitions()}
_PART_OF = "app.kubernetes.io/part-of=node-agent"
_HELM_4 = pytest.param("helm4", marks=pytest.mark.slow, id="Helm 4")


@dataclass(frozen=True)
class _Release:
    """Everything that can be chosen, in a namespace of its own."""

    server: ApiServer
    helm: Helm
    namespace: str

    @property
    def options(self) -> InstallOptions:
        return replace(EVERYTHING, namespace=self.namespace)

    def run(self, command: str, *, chart: Path = CHART, options: InstallOptions | None = None) -> str:
        values = values_of(options or self.options)
        return self.helm.run(command, "agents", str(chart), f"--namespace={self.namespace}", values=values)

    def uninstall(self) -> str:
        return self.helm.run("uninstall", "agents", f"--namespace={self.namespace}")

    def objects(self) -> dict[str, Json]:
        """What the chart has written into the namespace and outside of any, by kind and name."""
        kinds = sorted({item["kind"].lower() for item in build_installation(self.options)} - {"namespace"})
        argv = ["get", ",".join([*kinds, "crd"]), "-A", f"-l{_PART_OF}", "-o", "json"]
        return {
            f"{item['kind']} {item['metadata']['name']}": item
            for item in json.loads(self.server.kubectl(*argv))["items"]
            if item["metadata"].get("namespace", "") == self.namespace or _is_shared(item, self.namespace)
        }

    def versions(self) -> dict[str, str]:
        return {key: item["metadata"]["resourceVersion"] for key, item in self.objects().items()}


def _is_shared(item: Json, namespace: str) -> bool:
    """Whether an object without a namespace is a definition, or has the name of the namespace."""
    meta = item["metadata"]
    return "namespace" not in meta and (meta["name"] in _OURS or meta["name"].startswith(namespace))


def _everything(server: ApiServer) -> set[str]:
    """All objects of the cluster that no controller of the API server writes."""
    return {
        f"{resource.kind} {item['metadata'].get('namespace', '')}/{item['metadata']['name']}"
        for resource in server.api.served()
        if resource.plural not in {"apiservices", "events", "leases", "componentstatuses"}
        for item in server.api.objects(resource)
    }


@pytest.fixture(scope="module")
def fresh() -> Iterator[ApiServer]:
    """A cluster without our definitions."""
    with run_apiserver(_SNAPSHOTS) as server:
        server.api.create(CUSTOM_RESOURCE_DEFINITIONS, _CONSTRAINTS)
        yield server


@pytest.fixture(scope="module", params=[pytest.param("helm", id="Helm 3"), _HELM_4])
def helm(fresh: ApiServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Helm:
    """A version of Helm, with the administrator's permissions."""
    return Helm(tmp_path_factory.mktemp("helm"), request.param, fresh.kubeconfig)


@pytest.fixture
def release(fresh: ApiServer, helm: Helm) -> Iterator[_Release]:
    """A release that is not installed yet, in a cluster without our definitions."""
    yield _Release(fresh, helm, fresh.create_namespace())
    _delete_definitions(fresh)


def _delete_definitions(server: ApiServer) -> None:
    # One whose storage is still initialized after a change is deleted after minutes: each failure doubles the pause.
    _everything(server)
    server.kubectl("delete", "crd", "--ignore-not-found", *_OURS)


def test_two_releases_upgrade_beside_each_other_and_leave_only_the_definitions(fresh: ApiServer, helm: Helm) -> None:
    """The first one creates the definitions, and takes them again when it is back."""
    first, second = (_Release(fresh, helm, fresh.create_namespace()) for _ in range(2))
    before = _everything(fresh)
    first.run("install")
    # The location comes with the second revision (Helm 3), or is no hook any more (Helm 4).
    first.run("upgrade")
    settled = first.versions()
    # The namespace is not the chart's.
    assert len(settled) == len(build_installation(EVERYTHING)) - 1 + len(_OURS)
    first.run("upgrade")
    assert first.versions() == settled
    second.run("install")
    installed = second.versions()
    assert len(installed) == len(settled)
    said = first.uninstall()
    assert all(name in said for name in _OURS)
    assert second.versions() == installed
    second.run("upgrade")
    assert second.versions() == installed
    second.uninstall()
    assert _everything(fresh) - before == {f"CustomResourceDefinition /{name}" for name in _OURS}
    assert "Left alone" not in first.run("install")
    first.uninstall()
    _delete_definitions(fresh)


def _older(folder: Path) -> Path:
    """A chart of an earlier version: its DataUploads have no short name, and one permission is absent."""
    chart = Path(shutil.copytree(CHART, folder / "older"))
    for name, present, absent in (
        ("Chart.yaml", "version: ", "version: 0.0.1-"),
        ("files/crds/datauploads.velero.io.yaml", "    shortNames: [du]\n", ""),
        (
            "templates/agent-rbac.yaml",
            "    resources: [volumeattachments]\n    verbs: [list]",
            "    resources: [csinodes]\n    verbs: [get]",
        ),
    ):
        text = (chart / name).read_text(encoding="utf-8")
        assert present in text
        (chart / name).write_text(text.replace(present, absent), encoding="utf-8")
    return chart


def test_an_upgrade_brings_the_new_version_and_the_new_values(release: _Release, tmp_path: Path) -> None:
    release.run("install", chart=_older(tmp_path))
    changed = replace(release.options, image="registry.example.com/node-agent:next", volume_secrets=False)
    release.run("upgrade", options=changed)
    found = release.objects()
    upload = found["CustomResourceDefinition datauploads.velero.io"]
    role, daemonset = found[f"ClusterRole {release.namespace}-node-agent"], found["DaemonSet node-agent"]
    assert upload["spec"]["names"]["shortNames"] == ["du"]
    assert ["volumeattachments"] in [rule["resources"] for rule in role["rules"]]
    assert daemonset["spec"]["template"]["spec"]["containers"][0]["image"] == changed.image
    assert f"ClusterRole {release.namespace}-node-agent-volume-secrets" not in found
    (location,) = [item for item in build_installation(changed) if item["kind"] == "BackupStorageLocation"]
    # The API server drops a field that the definition does not have.
    assert found["BackupStorageLocation default"]["spec"] == location["spec"]


def test_a_definition_that_is_newer_is_left_alone(release: _Release) -> None:
    release.run("install")
    path = CUSTOM_RESOURCE_DEFINITIONS.path("", "datadownloads.velero.io")
    stored = release.server.api.request("GET", path)
    schema = stored["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"]["properties"]["targetVolume"]["properties"]["later"] = {"type": "string"}
    patch = {"spec": {"versions": stored["spec"]["versions"]}}
    newer = release.server.api.request("PATCH", path, body=patch, content_type=MERGE_PATCH)
    said = release.run("upgrade")
    release.run("upgrade")
    assert "or they are newer: datadownloads.velero.io\n" in said
    assert release.server.api.request("GET", path)["spec"] == newer["spec"]


def test_definitions_of_others_are_left_alone(release: _Release) -> None:
    apply_crds(release.server.kubeconfig, _DEPLOY / "crds")
    before = release.versions()
    said = release.run("install")
    release.run("upgrade")
    release.uninstall()
    assert "Left alone" in said
    assert all(name in said for name in _OURS)
    assert release.versions() == before
    assert before.keys() == {f"CustomResourceDefinition {name}" for name in _OURS}

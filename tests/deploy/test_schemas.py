"""Manifests against the schemas of each supported minor version of Kubernetes."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.schemas import MINORS, find_faults, validate
from tools.schemas import KINDS, PINS, build_schemas

_ROOT = Path(__file__).parents[2]
_EXAMPLES = ("credentials", "dataupload", "datadownload", "location", "podvolumebackup", "podvolumerestore", "source")


def _load(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


@cache
def _deployed() -> list[dict[str, Any]]:
    deploy = _ROOT / "deploy"
    paths = [path for path in deploy.rglob("*.yaml") if path.name != "kustomization.yaml"]
    # A chart's files are templates.
    chosen = [
        path for path in sorted(paths) if "chart" not in path.relative_to(deploy).parts and path.name != "rules.yaml"
    ]
    return [each for path in chosen for each in _load(path)]


@pytest.mark.processes
@pytest.mark.parametrize("minor", MINORS)
def test_everything_that_is_deployed_fits(minor: str) -> None:
    manifests = _deployed()
    assert {"CustomResourceDefinition", "DaemonSet", "SecurityContextConstraints"} <= {
        each["kind"] for each in manifests
    }
    validate(manifests, [minor])


@pytest.mark.processes
def test_examples_fit() -> None:
    validate([each for name in _EXAMPLES for each in _load(_ROOT / "examples" / f"{name}.yaml")])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("was", "now", "fault"),
    [
        ("containerPort:", "containerport:", "additional properties 'containerport' not allowed"),
        ("terminationGracePeriodSeconds: 30", "terminationGracePeriodSeconds: '30'", "got string, want integer"),
        ("prometheus.io/port: '8085'", "prometheus.io/port: 8085", "got number, want string"),
        ("  selector:", "  selectors:", "missing property 'selector'"),
        ("apiVersion: apps/v1", "apiVersion: apps/v1beta1", "could not find schema"),
    ],
)
def test_a_fault_is_found(was: str, now: str, fault: str) -> None:
    text = (_ROOT / "deploy" / "agent" / "daemonset.yaml").read_text(encoding="utf-8")
    assert was in text
    (found,) = find_faults([yaml.safe_load(text.replace(was, now, 1))], MINORS[-1])
    assert found.startswith("DaemonSet node-agent: ")
    assert fault in found


@pytest.mark.processes
def test_a_fault_of_a_custom_resource_is_found() -> None:
    (upload,) = _load(_ROOT / "examples" / "dataupload.yaml")
    upload["spec"]["csiSnapshot"]["volumesnapshot"] = "data"
    with pytest.raises(AssertionError, match=r"Kubernetes 1\.\d+: DataUpload .*additional properties 'volumesnapshot'"):
        validate([upload])


def test_there_is_a_file_for_each_version_that_the_script_writes() -> None:
    sources = {f"k8s.io/kubernetes v{version} {pinned}": version.rpartition(".")[0] for version, pinned in PINS.items()}
    for source, minor in sources.items():
        assert source in (_ROOT / "tests" / "data" / "schemas" / f"kubernetes-{minor}.json").read_text(encoding="utf-8")
    assert set(sources.values()) == set(MINORS)


def test_the_versions_are_those_that_the_documentation_names() -> None:
    rows = (_ROOT / "docs" / "versions.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if f"| {MINORS[0]} to {MINORS[-1]} |" in row]


def _document(**definitions: Any) -> dict[str, Any]:
    kinds = {
        kind: {"x-kubernetes-group-version-kind": [{"group": "", "version": "v1", "kind": kind}]} for kind in KINDS
    }
    return {"definitions": kinds | definitions}


def test_a_schema_has_what_is_checked_and_what_it_refers_to_and_no_other() -> None:
    port = {"description": "text", "type": "object", "properties": {"name": {"type": "string", "default": ""}}}
    pod = _document()["definitions"]["Pod"] | {
        "properties": {"ports": {"items": {"$ref": "#/definitions/Port"}}, "status": {"$ref": "#/definitions/Other"}}
    }
    built = build_schemas(_document(Pod=pod, Port=port, Other={}))
    assert built["kinds"]["/v1/pod"] == "Pod"
    assert built["definitions"]["Pod"]["properties"] == {"ports": {"items": {"$ref": "#/definitions/Port"}}}
    assert built["definitions"]["Port"] == {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "additionalProperties": False,
    }
    assert "Other" not in built["definitions"]
    document = _document()
    del document["definitions"]["Pod"]
    with pytest.raises(ValueError, match="the document has no pod"):
        build_schemas(document)

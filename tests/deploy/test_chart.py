"""The chart and `deploy/`, object by object, against the builders of the installer."""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from client.install.manifests import build_installation, read_definitions
from client.install.options import DEFAULT_IMAGE, AgentOptions, InstallOptions
from tests.deploy.install_cases import CASES, COMBINED, EVERYTHING
from tests.support.helm import CHART, Helm, values_of
from tests.support.schemas import validate
from tests.support.tools import tool
from tests.testbed.processes import BedError
from tools.chart import build_schema
from tools.manifests import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.testbed.api import Json

pytestmark = pytest.mark.processes

_KEPT = {"helm.sh/resource-policy": "keep"}
_WITHOUT_DEFINITIONS = {"crds": {"install": False}}


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    return Helm(tmp_path)


def _by_key(objects: Iterable[Json]) -> dict[str, Json]:
    """Objects by kind, namespace and name; the document of a ConfigMap is parsed, as its layout does not matter."""
    found: dict[str, Json] = {}
    for item in objects:
        meta = item["metadata"]
        key = f"{item['kind']} {meta.get('namespace', '')}/{meta['name']}"
        assert key not in found
        is_document = item["kind"] == "ConfigMap"
        found[key] = (
            item | {"data": {name: json.loads(text) for name, text in item["data"].items()}} if is_document else item
        )
    return found


def _without_namespace(objects: Iterable[Json]) -> list[Json]:
    """What a chart has: Helm keeps the record of a release in its namespace, so that it must be there before."""
    return [item for item in objects if item["kind"] != "Namespace"]


@pytest.mark.sample(*COMBINED)
@pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in CASES.items()])
def test_the_chart_is_what_the_builders_build(helm: Helm, options: InstallOptions) -> None:
    rendered = helm.template(options.namespace, values_of(options) | _WITHOUT_DEFINITIONS)
    assert _by_key(rendered) == _by_key(_without_namespace(build_installation(options)))


def test_objects_with_any_option_fit_every_minor_version_of_kubernetes() -> None:
    """Those of the chart are the same."""
    validate([item for options in CASES.values() for item in build_installation(options)])


def test_the_values_are_the_defaults_of_the_options(helm: Helm) -> None:
    """An empty image is that of the chart's own version; an absent option is an empty value."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    defaults = {"crds": {"install": True}, **values_of(InstallOptions()), "image": ""}
    for others in ("credentials", "configuration", "location", "monitoring"):
        values.pop(others, None)
        defaults.pop(others, None)
    assert values == defaults
    rendered = helm.template("velero", _WITHOUT_DEFINITIONS)
    assert _by_key(rendered) == _by_key(_without_namespace(build_installation(InstallOptions(image=DEFAULT_IMAGE))))


def test_every_option_has_a_case_that_differs_from_its_default() -> None:
    """As the cases are made of the options, a new one is in them; it must also be given another value."""
    for options, prefix in ((InstallOptions(), ""), (AgentOptions(), "agent.")):
        for member in fields(options):
            assert CASES[prefix + member.name] != CASES["defaults"], member.name


def test_the_definitions_are_kept_on_uninstall(helm: Helm) -> None:
    rendered = [item for item in helm.template("velero", {}) if item["kind"] == "CustomResourceDefinition"]
    expected = [item | {"metadata": item["metadata"] | {"annotations": _KEPT}} for item in read_definitions()]
    assert _by_key(rendered) == _by_key(expected)


def _location(**config: str) -> Json:
    return {"location": {"provider": "aws", "bucket": "b", "config": config}}


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"agents": {}}, id="a name"),
        pytest.param({"agent": {"hostpath": False}}, id="a name of the agents"),
        pytest.param({"agent": {"hostPath": "no"}}, id="a text for a truth value"),
        pytest.param({"agent": {"linux": False}}, id="no agents"),
        pytest.param({"pullSecrets": "regcred"}, id="a text for a list"),
        pytest.param({"location": {"bucket": "backups"}}, id="a location without a provider"),
        pytest.param({"location": {"provider": "aws", "bucket": "b", "config": {"a": 1}}}, id="a number for a text"),
        pytest.param({"agent": {"extraArgs": ["--metrics-address=:9999"]}}, id="another port than that of the probes"),
        pytest.param(_location(prefix="a"), id="a prefix in the config"),
        pytest.param(_location(s3Url="https://s3.example.com/a"), id="a path in the URL"),
        pytest.param(_location(s3Url="http://::1:9000"), id="an address without brackets"),
        pytest.param(_location(s3ForcePathStyle="“true”"), id="typographic quotes"),
        pytest.param({**_location(), "credentials": "aws_access_key_id=a"}, id="credentials without a section"),
        pytest.param({"credentials": "[default]\naws_access_key_id=“a”"}, id="quoted credentials"),
    ],
)
def test_a_value_that_is_no_option_is_an_error(helm: Helm, values: Json) -> None:
    with pytest.raises(BedError, match="values don't meet the specifications of the schema"):
        helm.template("velero", values)


def test_values_of_an_earlier_version_are_answered(helm: Helm) -> None:
    assert helm.template("velero", {"agent": {"linux": True, "windows": False}}) == helm.template("velero", {})
    with pytest.raises(BedError, match=r"agent\.windows is not supported any more: there is no agent for Windows"):
        helm.template("velero", {"agent": {"windows": True}})


def test_null_takes_a_default_away(helm: Helm) -> None:
    without, zero = (helm.template("velero", {"agent": {"resources": {"memoryLimit": one}}}) for one in (None, "0"))
    assert without == zero


def test_the_schema_has_every_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert build_schema()["properties"].keys() == values.keys() | {"global"}


@pytest.mark.integration
def test_kustomize_builds_what_the_builders_build() -> None:
    """The tag of the image is that of a build of this checkout."""
    argv: list[str | Path] = [tool("kubernetes", "kubectl"), "kustomize", CHART.parent]
    built = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    objects: list[Any] = list(yaml.safe_load_all(built.replace("image: node-agent:dev", "image: node-agent")))
    assert _by_key(objects) == _by_key(build_installation(DEFAULTS))


def test_the_suites_of_the_chart_pass() -> None:
    """What a chart says and does depends on the cluster, which helm-unittest pretends."""
    done = subprocess.run([tool("helm", "helm-unittest"), CHART], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("values", [pytest.param(values_of(EVERYTHING), id="everything"), pytest.param({}, id="none")])
def test_helm_4_renders_the_same(tmp_path: Path, values: Json) -> None:
    first, second = (Helm(tmp_path, binary=binary).template("velero", values) for binary in ("helm", "helm4"))
    assert _by_key(first) == _by_key(second)

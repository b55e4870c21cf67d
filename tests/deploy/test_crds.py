"""Our custom resource definitions against those of the newest Velero, field by field."""

from pathlib import Path
from typing import Any

import pytest
import yaml

_ROOT = Path(__file__).parents[2]
_OURS = _ROOT / "deploy" / "crds"
_VELEROS = _ROOT / "tests" / "recordings" / "velero-main" / "crds"
_NAMES = sorted(path.name for path in _VELEROS.glob("*.yaml"))


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _nodes(schema: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """Return the schema of every field by its path."""
    nodes = {path or ".": schema}
    for name, child in schema.get("properties", {}).items():
        nodes |= _nodes(child, f"{path}.{name}")
    return nodes | (_nodes(schema["items"], f"{path}[]") if "items" in schema else {})


def _rules(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is required of every field, without descriptions and order."""
    return {
        path: {
            key: sorted(value) if key in {"required", "enum"} else value
            for key, value in node.items()
            if key not in {"properties", "items", "description"}
        }
        for path, node in _nodes(schema).items()
    }


def test_there_is_one_definition_for_each_of_veleros() -> None:
    assert sorted(path.name for path in _OURS.glob("*.yaml")) == _NAMES


@pytest.mark.parametrize("name", _NAMES)
def test_fields_are_veleros(name: str) -> None:
    for ours, veleros in zip(
        _load(_OURS / name)["spec"]["versions"], _load(_VELEROS / name)["spec"]["versions"], strict=True
    ):
        expected = _rules(veleros["schema"]["openAPIV3Schema"])
        if "restoreType" in (required := expected[".spec"]["required"]):
            # A server of an earlier version does not set it.
            required.remove("restoreType")
        assert _rules(ours["schema"]["openAPIV3Schema"]) == expected


@pytest.mark.parametrize("name", _NAMES)
def test_names_versions_columns_and_subresources_are_veleros(name: str) -> None:
    ours, veleros = _load(_OURS / name), _load(_VELEROS / name)
    for crd in (ours, veleros):
        for version in crd["spec"]["versions"]:
            del version["schema"]
            # An empty one means the same as none: no status subresource.
            version.setdefault("subresources", {})
    assert ours["metadata"]["name"] == veleros["metadata"]["name"]
    assert ours["spec"] == veleros["spec"]


@pytest.mark.parametrize("name", _NAMES)
def test_every_field_is_described(name: str) -> None:
    """`kubectl explain` then answers for all of them; `metadata` is described by Kubernetes."""
    schema = _load(_OURS / name)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    bare = [path for path, node in _nodes(schema).items() if not node.get("description")]
    assert bare == [".metadata"]

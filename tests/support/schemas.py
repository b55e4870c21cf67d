"""Validates manifests offline with kubeconform, against the schemas of each supported minor version of Kubernetes.

The schemas are those of `tests/data/schemas`, which `make schemas` writes, of our custom resource definitions, and of
the definitions of others that are kept there.
"""

import atexit
import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.objects import JsonDict
from tests.support.tools import tool

_ROOT = Path(__file__).parents[2]
_SCHEMAS = _ROOT / "tests" / "data" / "schemas"
_DEFINITIONS = (_ROOT / "deploy" / "crds", _SCHEMAS)

MINORS = tuple(sorted(path.stem.partition("-")[2] for path in _SCHEMAS.glob("kubernetes-*.json")))
"""Minor versions of Kubernetes, such as 1.34."""


def validate(manifests: Sequence[JsonDict], minors: Iterable[str] = MINORS) -> None:
    """Check manifests, as JSON dicts, as an API server of each minor version would: unknown fields are faults too.

    Raises:
        AssertionError: One has a fault, or is of a kind without a schema; the message has all of them.
    """
    faults = {minor: found for minor in minors if (found := find_faults(manifests, minor))}
    assert not faults, "\n".join(f"Kubernetes {minor}: {fault}" for minor in faults for fault in faults[minor])


def find_faults(manifests: Sequence[JsonDict], minor: str) -> list[str]:
    """Return what is wrong with manifests for one minor version of Kubernetes, a line for each object."""
    location = f"{_write_schemas(minor)}/{{{{.Group}}}}-{{{{.ResourceAPIVersion}}}}-{{{{.ResourceKind}}}}.json"
    argv = [str(tool("helm", "kubeconform")), "-strict", "-summary", "-output=json", f"-schema-location={location}"]
    # JSON is YAML, and written faster.
    text = "\n---\n".join(map(json.dumps, manifests))
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout)
    summary = answer["summary"]
    assert sum(summary.values()) == len(manifests), (summary, done.stderr)
    assert summary["skipped"] == 0, summary
    return [f"{each['kind']} {each['name']}: {each['msg']}" for each in answer["resources"]]


@cache
def _write_schemas(minor: str) -> Path:
    """Write a file for each kind, as kubeconform reads them; return their directory, which is deleted at the end."""
    # For the life of the process: a fixture would tie every caller to one.
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    schemas = json.loads((_SCHEMAS / f"kubernetes-{minor}.json").read_text(encoding="utf-8"))
    for key, name in schemas["kinds"].items():
        group, version, kind = key.split("/")
        schema = {"$ref": f"#/definitions/{name}", "definitions": schemas["definitions"]}
        _write(Path(folder.name), (group or version, version, kind), schema)
    for path in (path for definitions in _DEFINITIONS for path in definitions.glob("*.yaml")):
        for key, schema in _read_definition(yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]):
            _write(Path(folder.name), key, schema)
    return Path(folder.name)


def _write(folder: Path, key: tuple[str, str, str], schema: JsonDict) -> None:
    (folder / f"{'-'.join(key)}.json").write_text(json.dumps(schema), encoding="utf-8")


def _read_definition(spec: JsonDict) -> Iterator[tuple[tuple[str, str, str], JsonDict]]:
    for version in spec["versions"]:
        key = (spec["group"], version["name"], spec["names"]["kind"].lower())
        yield key, _make_strict(version["schema"]["openAPIV3Schema"])


def _make_strict(schema: Any) -> Any:
    """Return a schema of a custom resource definition as JSON schema that allows no unknown fields."""
    if isinstance(schema, list):
        return [_make_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _make_strict(value) for key, value in schema.items() if key != "description"}
    if isinstance(schema.get("properties"), dict):
        # A property may have the name of a keyword.
        strict["properties"] = {name: _make_strict(each) for name, each in schema["properties"].items()}
        strict.setdefault("additionalProperties", False)
    if schema.get("nullable") is True:
        strict["type"] = [schema["type"], "null"]
    return strict

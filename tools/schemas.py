#!/usr/bin/env python3
"""Writes the JSON schemas by which tests validate manifests offline: a file for each minor version of Kubernetes.

    tools/schemas.py [DIRECTORY]

Without DIRECTORY, tests/data/schemas of this checkout. The source is the OpenAPI document in the Go module of
Kubernetes, which `go` downloads and whose hash is pinned here. For another version, change the pins, and run
`make schemas`.
Source: https://github.com/kubernetes/kubernetes/tree/master/api/openapi-spec
"""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

PINS: Final = {
    "1.31.14": "h1:UtjLfqvXLuSVDdJ4+NpQCIfFkKkLnAAVmxAEMsnkhjk=",
    "1.32.13": "h1:5TGYdZ6YZqdp6h/Rp1vX/4TIoybMPdgv97LCZCtPuNQ=",
    "1.33.13": "h1:bmH31xUdSzeA5vk0wZAK9MZp11mdLuzUSeKk0qN3hPQ=",
    "1.34.4": "h1:Yy6R4QB8C9kJPp25GFqEvX5XQwY5qzKeqD0Xx6oAcmk=",
    "1.35.4": "h1:o/8dBC/pHVpYoGV4OAIytAlNPZbdYVTXJHoYvXC4qzM=",
}
"""Versions, each with the hash of its module as in a go.sum."""

KINDS: Final = (
    "ClusterRole",
    "ClusterRoleBinding",
    "ConfigMap",
    "CustomResourceDefinition",
    "DaemonSet",
    "Job",
    "Namespace",
    "NetworkPolicy",
    "PersistentVolumeClaim",
    "Pod",
    "PriorityClass",
    "Role",
    "RoleBinding",
    "Secret",
    "ServiceAccount",
)
"""Kinds in our manifests and examples."""

_ROOT = Path(__file__).parents[1]
_REFERENCE: Final = "#/definitions/"
_OTHER_TYPES: Final = {
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"type": ["integer", "string"]},
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {"type": ["number", "string"]},
}
"""What may also be a number; the document says string. Source: UnmarshalJSON of both in k8s.io/apimachinery."""

_SERVERS: Final = {"managedFields", "status"}
"""What the API server or a controller writes, and a manifest must not have."""


def build_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of `KINDS` and of all that they refer to, strict and without descriptions.

    Args:
        document: An OpenAPI 2 document of Kubernetes.

    Returns:
        `kinds`, the name of a definition by `group/version/Kind` in lower case, and `definitions`.

    Raises:
        ValueError: The document lacks a kind.
    """
    definitions = document["definitions"]
    kinds = dict(sorted(_find_kinds(definitions)))
    if lacking := {kind.lower() for kind in KINDS} - {name.rpartition("/")[2] for name in kinds}:
        raise ValueError(f"the document has no {', '.join(sorted(lacking))}")
    found: dict[str, Any] = {}
    left = list(kinds.values())
    while left:
        name = left.pop()
        if name in found:
            continue
        found[name] = _OTHER_TYPES.get(name) or _compact(definitions[name], top=name in kinds.values())
        left += _references(found[name])
    return {"kinds": kinds, "definitions": dict(sorted(found.items()))}


def _find_kinds(definitions: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for name, schema in definitions.items():
        for each in schema.get("x-kubernetes-group-version-kind", []):
            if each["kind"] in KINDS and each["version"] == "v1":
                yield f"{each['group']}/{each['version']}/{each['kind']}".lower(), name


def _compact(schema: dict[str, Any], *, top: bool = False) -> dict[str, Any]:
    """Return what is checked of a schema: types, required fields, and that there are no others."""
    compact: dict[str, Any] = {key: schema[key] for key in ("$ref", "type", "required", "enum") if key in schema}
    if "properties" in schema:
        omitted = _SERVERS if top else {"managedFields"}
        properties = {name: each for name, each in schema["properties"].items() if name not in omitted}
        compact["properties"] = {name: _compact(each) for name, each in properties.items()}
        compact["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        compact["additionalProperties"] = _compact(schema["additionalProperties"])
    if "items" in schema:
        compact["items"] = _compact(schema["items"])
    return compact


def _references(schema: dict[str, Any]) -> Iterable[str]:
    if "$ref" in schema:
        yield schema["$ref"].removeprefix(_REFERENCE)
    nested = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for each in nested:
        if isinstance(each, dict):
            yield from _references(each)


def _read_document(version: str, pinned: str) -> dict[str, Any]:
    """Return the OpenAPI document of a version of Kubernetes.

    Raises:
        ValueError: The module has another hash.
        OSError, subprocess.CalledProcessError: It could not be downloaded or read.
    """
    argv = [str(_ROOT / "tools" / "go.sh"), "mod", "download", "-json", f"k8s.io/kubernetes@v{version}"]
    module = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)  # noqa: S603 - all of it is written here
    if module["Sum"] != pinned:
        raise ValueError(f"k8s.io/kubernetes v{version} has the hash {module['Sum']}, not {pinned}")
    with zipfile.ZipFile(module["Zip"]) as archive:
        document: dict[str, Any] = json.loads(
            archive.read(f"k8s.io/kubernetes@v{version}/api/openapi-spec/swagger.json")
        )
    return document


def _format(schemas: dict[str, Any], source: str) -> str:
    """Return a JSON text with a line for each definition, so that two versions can be compared."""
    lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in schemas["definitions"].items()]
    head = f'"source": {json.dumps(source)},\n"kinds": {json.dumps(schemas["kinds"], indent=1)},\n"definitions": '
    return "{\n" + head + "{\n" + ",\n".join(lines) + "\n}\n}\n"


def main(arguments: Sequence[str]) -> int:
    """Write all files; return the exit code."""
    folder = Path(arguments[0]) if arguments else _ROOT / "tests" / "data" / "schemas"
    for version, pinned in PINS.items():
        minor = version.rpartition(".")[0]
        try:
            schemas = build_schemas(_read_document(version, pinned))
            text = _format(schemas, f"k8s.io/kubernetes v{version} {pinned}")
            (folder / f"kubernetes-{minor}.json").write_text(text, encoding="utf-8")
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            print(f"error: schemas of Kubernetes {version}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

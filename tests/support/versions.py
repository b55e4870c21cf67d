"""The versions of Velero whose custom resources are recorded, and what their definitions keep of an object."""

import json
from functools import cache
from pathlib import Path

import yaml

from tests.support.fakeobjects import prune_by
from tests.support.golden import recorded
from tests.support.objects import JsonDict

VERSIONS = ("1.17.2", "1.18.3", "main")
"""The oldest first; the last two are without descriptions, of the module v1.18.3 and at d2241adba.

Of the last one, the data mover's kinds are at 4a7db86f17d3, and the pod volumes at 2a31c14daea5. Those of 1.18.3 are
equal to 1.18.2's.
"""

_ADDED: dict[str, JsonDict] = {
    "dataupload": {"parentSnapshot": "none", "sourceFSType": "ext4"},
    "datadownload": {"targetVolume": {"fsType": "xfs"}, "restoreType": ""},
    "podvolumebackup": {"parentSnapshot": "none"},
    "podvolumerestore": {"restoreType": ""},
    "backuprepository": {},
}
"""The fields of a spec that only the last version has. Source: tests/recordings/velero-main/crds."""

KINDS = tuple(_ADDED)

_RECORDINGS = Path(__file__).parents[1] / "recordings"


def definitions_of(version: str) -> Path:
    """Return the folder with the custom resource definitions of a version."""
    return _RECORDINGS / f"velero-{version}" / "crds"


def load_definitions(version: str, **labels: str) -> dict[str, JsonDict]:
    """Return the definitions of a version by their names, with these labels and no other metadata."""
    found = [yaml.safe_load(path.read_text()) for path in definitions_of(version).glob("*.yaml")]
    assert found, f"no definitions of version {version}"
    names = [one["metadata"]["name"] for one in found]
    return {name: one | {"metadata": {"name": name, "labels": labels}} for name, one in zip(names, found, strict=True)}


def golden(version: str, kind: str) -> JsonDict:
    """Return the last recorded object of a kind, with every field that a server of `version` may set."""
    obj = recorded(kind, -1)
    for key, value in _ADDED[kind].items():
        obj["spec"][key] = obj["spec"][key] | value if isinstance(value, dict) else value
    if kind == "backuprepository":
        # Velero keeps 3, the last version 25.
        run = {"startTimestamp": "2026-11-21T11:00:00Z", "completeTimestamp": "2026-11-21T11:01:00Z"}
        obj["status"]["recentMaintenance"] = [run | {"result": "Succeeded"}] * (25 if version == "main" else 3)
    return prune(version, obj)


def built(name: str, index: int = 0) -> JsonDict:
    """Return an object of a restore in place as the code of Velero's main builds it, from the values of a recording.

    `name` is a file in tests/recordings/velero-main: each of its entries names repository, commit, file and function.
    """
    entries = json.loads((_RECORDINGS / "velero-main" / f"{name}-in-place.json").read_text())
    obj: JsonDict = entries[index]["object"]
    return obj


def prune(version: str, obj: JsonDict) -> JsonDict:
    """Return `obj` as an API server with the definitions of `version` stores it: without fields that they lack."""
    kept: JsonDict = prune_by(obj, _schemas(version)[obj["kind"]])
    return kept | {"metadata": obj["metadata"]}


@cache
def _schemas(version: str) -> dict[str, JsonDict]:
    found = load_definitions(version).values()
    return {one["spec"]["names"]["kind"]: one["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for one in found}

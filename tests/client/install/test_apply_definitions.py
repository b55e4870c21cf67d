"""What the definitions of others lack."""

from copy import deepcopy

from client.install.apply import find_lacking
from client.install.manifests import read_definitions
from core.models.base import JsonDict


def _ours() -> JsonDict:
    found = next(one for one in read_definitions() if one["metadata"]["name"] == "datauploads.velero.io")
    return deepcopy(found)


def _fields(definition: JsonDict, *path: str) -> JsonDict:
    node: JsonDict = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path:
        node = node["properties"][name]
    return node


def test_fields_are_named_by_their_path_and_not_those_below_them() -> None:
    theirs = _ours()
    del _fields(theirs, "spec", "csiSnapshot")["properties"]["driver"]
    del _fields(theirs, "status")["properties"]["progress"]
    assert find_lacking(_ours(), theirs) == ["v2alpha1 .spec.csiSnapshot.driver", "v2alpha1 .status.progress"]


def test_a_version_that_is_not_served_is_lacking_and_a_schema_that_keeps_unknown_fields_lacks_none() -> None:
    theirs = _ours()
    _fields(theirs)["properties"]["spec"] = {"x-kubernetes-preserve-unknown-fields": True}
    assert find_lacking(_ours(), theirs) == []
    theirs["spec"]["versions"][0]["served"] = False
    assert find_lacking(_ours(), theirs) == ["v2alpha1"]

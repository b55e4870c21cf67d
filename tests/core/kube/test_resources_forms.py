"""The form of each kind: recorded objects have it, and every field that is read is checked."""

import pytest

from core.kube import resources
from core.kube.errors import MalformedObjectError
from core.kube.resources import PODS, Resource, check_form
from core.models.base import JsonDict, without_nulls
from tests.support.golden import recorded_objects
from tests.support.scripted import stored

_RESOURCES = resources.BY_KIND


_RECORDED = [obj for obj in recorded_objects() if obj.get("kind") in _RESOURCES]


def test_recorded_objects_have_the_form_of_their_kind() -> None:
    assert {obj["kind"] for obj in _RECORDED} >= {"Pod", "Event", "PersistentVolumeClaim", "VolumeSnapshotContent"}
    for obj in _RECORDED:
        clean = without_nulls(obj)
        assert isinstance(clean, dict)
        check_form(_RESOURCES[obj["kind"]], clean)


@pytest.mark.parametrize("resource", _RESOURCES.values(), ids=lambda resource: resource.kind)
def test_every_kind_requires_the_identity_of_a_stored_object(resource: Resource) -> None:
    whole = stored(resource, spec={})
    if resource.kind == "VolumeAttachment":
        whole["spec"] = {"nodeName": "a", "source": {}}
    if resource.kind == "SnapshotMetadataService":
        whole["spec"] = {"address": "a:1", "audience": "a", "caCert": ""}
    check_form(resource, whole)
    for key in ("name", "uid", "resourceVersion", "creationTimestamp", *(["namespace"] if resource.namespaced else [])):
        meta = {name: value for name, value in whole["metadata"].items() if name != key}
        with pytest.raises(MalformedObjectError, match=f"metadata: Object missing required field `{key}`"):
            check_form(resource, whole | {"metadata": meta})


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"spec": []}, "spec: Expected `object`, got `array`"),
        ({"spec": {"nodeName": 5}}, "spec.nodeName: Expected `str`, got `int`"),
        ({"spec": {"volumes": [{"name": "x"}, {}]}}, r"spec.volumes\[1\]: Object missing required field `name`"),
        ({"spec": {}, "status": {"conditions": "none"}}, "status.conditions: Expected `array`, got `str`"),
        (
            {
                "spec": {},
                "status": {"containerStatuses": [{"name": "", "state": {"terminated": {"exitCode": 2**40}}}]},
            },
            "exitCode: Expected `int` <= 2147483647",
        ),
        ({"spec": {}, "metadata": {"deletionTimestamp": "2026-11-21T12:00:00"}}, "deletionTimestamp: .* timezone"),
        ({"spec": {}, "metadata": {"labels": {"a": None}}}, "metadata.labels"),
    ],
    ids=["spec", "type", "list", "status", "number", "zone", "null"],
)
def test_fault_names_the_object_and_the_field(fields: JsonDict, fault: str) -> None:
    with pytest.raises(MalformedObjectError, match=f"malformed Pod velero/x: .*{fault}"):
        check_form(PODS, stored(PODS, **fields))


def test_of_a_deleted_object_the_metadata_alone_is_checked() -> None:
    check_form(PODS, stored(PODS, spec=[]), identity=True)
    with pytest.raises(MalformedObjectError):
        check_form(PODS, stored(PODS, metadata={"name": 1}), identity=True)


def test_what_is_not_stored_has_no_form() -> None:
    check_form(Resource("SelfSubjectAccessReview", "selfsubjectaccessreviews", "authorization.k8s.io"), {"spec": 1})

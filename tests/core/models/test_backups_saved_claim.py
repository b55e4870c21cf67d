"""The PVC that annotations of transfers and tags of snapshots keep."""

import json
from typing import Any

import pytest

from core.errors import ContractError
from core.models.backups import SavedClaim
from core.models.names import CLAIM_ANNOTATION

_CLAIM: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"namespace": "app", "name": "data", "uid": "u", "labels": {"app": "web", "tier/x": "a_b.c"}},
    "spec": {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}},
        "storageClassName": "fast",
        "volumeMode": "Block",
        "volumeName": "pv-1",
    },
}
_SAVED = SavedClaim(
    namespace="app",
    name="data",
    size="10Gi",
    storage_class="fast",
    access_modes=("ReadWriteOnce",),
    volume_mode="Block",
    labels={"app": "web", "tier/x": "a_b.c"},
)


def test_a_claim_is_kept_with_its_spec_and_labels() -> None:
    assert SavedClaim.from_claim(_CLAIM) == _SAVED
    assert json.loads(_SAVED.text) == {
        "namespace": "app",
        "name": "data",
        "size": "10Gi",
        "storageClass": "fast",
        "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Block",
        "labels": {"app": "web", "tier/x": "a_b.c"},
    }


def test_what_is_kept_is_read_back() -> None:
    assert SavedClaim.of({CLAIM_ANNOTATION: _SAVED.text}) == _SAVED


def test_a_claim_without_fields_has_those_of_a_file_system() -> None:
    saved = SavedClaim.from_claim({"metadata": {"namespace": "app", "name": "data"}, "spec": {}})
    assert saved == SavedClaim(namespace="app", name="data")
    assert (saved.volume_mode, saved.text) == ("Filesystem", '{"namespace":"app","name":"data"}')


def test_unknown_keys_are_not_kept() -> None:
    saved = SavedClaim.parse('{"namespace": "app", "name": "data", "more": {"a": 1}}')
    assert saved is not None
    assert "more" not in saved.text


@pytest.mark.parametrize(("spec", "kept"), [({}, None), ({"storageClassName": ""}, "")])
def test_no_class_and_the_empty_one_are_kept_apart(spec: dict[str, str], kept: str | None) -> None:
    claim = SavedClaim.from_claim({"metadata": {"namespace": "app", "name": "data"}, "spec": spec})
    again = SavedClaim.parse(claim.text)
    assert again is not None
    assert (claim.storage_class, again.storage_class) == (kept, kept)


def test_the_capacity_of_the_volume_is_kept_beside_the_request() -> None:
    spec = {"resources": {"requests": {"storage": "1Gi"}}}
    raw = {"metadata": {"namespace": "app", "name": "data"}, "spec": spec, "status": {"capacity": {"storage": "5Gi"}}}
    claim = SavedClaim.from_claim(raw)
    assert (claim.size, claim.capacity) == ("1Gi", "5Gi")
    assert SavedClaim.parse(claim.text) == claim


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="absent"),
        pytest.param("{", id="no JSON"),
        pytest.param("[]", id="list"),
        pytest.param('{"name": "data"}', id="no namespace"),
        pytest.param('{"namespace": "app", "name": "../other"}', id="no name of an object"),
        pytest.param('{"namespace": "app", "name": "data", "storageClass": "a/b"}', id="no class"),
        pytest.param('{"namespace": "app", "name": "data", "size": "much"}', id="no quantity"),
        pytest.param('{"namespace": "app", "name": "data", "volumeMode": "Tape"}', id="no mode"),
        pytest.param('{"namespace": "app", "name": "data", "labels": {"a": 1}}', id="label of another type"),
        pytest.param("[" * 3000, id="nested too deeply"),
    ],
)
def test_what_no_claim_could_be_reads_as_absent(text: str) -> None:
    assert SavedClaim.of({CLAIM_ANNOTATION: text}) is None


def test_a_claim_that_is_invalid_is_an_error_that_names_the_field() -> None:
    with pytest.raises(ContractError, match=r"^labels: Expected `object`, got `array`$"):
        SavedClaim.from_claim({"metadata": {"namespace": "app", "name": "data", "labels": []}, "spec": {}})


def test_labels_that_are_too_long_are_left_out() -> None:
    many = {f"label-{number}": "x" * 63 for number in range(300)}
    saved = SavedClaim(namespace="app", name="data", size="1Gi", labels=many)
    assert SavedClaim.parse(saved.text) == SavedClaim(namespace="app", name="data", size="1Gi")

"""The allow-list of a support bundle: a secret in any field of any kind does not get into it."""

import json
from collections.abc import Iterator
from itertools import cycle, islice

import pytest

from client.bundle_fields import COLLECTED, CONFIG_MAP_FIELDS, Collected, select_fields
from core.kube.resources import SECRETS
from core.models.base import JsonDict
from tests.core.test_redact import SECRETS as CORPUS

_each = pytest.mark.parametrize("one", COLLECTED, ids=lambda one: one.file)


def _fill(fields: object, texts: Iterator[str]) -> object:
    """Return a value with every field of the allow-list, as a text of the corpus, in each form that it may have."""
    if not isinstance(fields, dict):
        return next(texts)
    value: JsonDict = {}
    for name, part in fields.items():
        key = name.replace("*", "any")
        value[key] = [_fill(part, texts)] if len(value) % 2 else _fill(part, texts)
    if fields == {"*": True}:
        value[next(texts)] = next(texts)
    return value


def _whole(fields: object, texts: Iterator[str]) -> JsonDict:
    filled = _fill(fields, texts)
    assert isinstance(filled, dict)
    meta = {
        "name": next(texts),
        "labels": {"a": next(texts), next(texts): "b"},
        "annotations": {"nodeagent.io/a": next(texts), "velero.io/b": next(texts)},
        "ownerReferences": [{"name": next(texts)}],
    }
    return {"kind": next(texts), "metadata": meta} | filled


@pytest.mark.parametrize("name", CORPUS)
def test_no_secret_of_the_corpus_is_in_any_field(name: str) -> None:
    """A text is tried in a quarter of the kinds: `tests/core/test_redact.py` has it, and each kind has 21 texts."""
    text, secret = CORPUS[name]
    for one in COLLECTED[list(CORPUS).index(name) % 4 :: 4]:
        shown = json.dumps(select_fields(_whole(one.fields, cycle([text])), one.fields))
        assert len(shown) > 200
        assert secret not in shown
        assert json.dumps(secret)[1:-1] not in shown
    assert secret not in json.dumps(select_fields({"data": {"config.json": text}}, CONFIG_MAP_FIELDS))


_KEYS = ("secretAccessKey", "token", "password", "velero.io/api-token", "AZURE_STORAGE_KEY", "KOPIA_PASSWORD")


def _pair(fields: object, key: str, secret: str) -> object:
    """Return a value with the secret under `key` in each map of any texts, and after such a flag in each list."""
    if not isinstance(fields, dict):
        return ["--verbose", f"--{key.rpartition(chr(47))[2]}", secret]
    values = {name.replace("*", "any"): _pair(part, key, secret) for name, part in fields.items()}
    return values | {key: secret, f"{key}s": {key: [secret]}}


@pytest.mark.parametrize("name", CORPUS)
def test_no_secret_is_shown_whose_key_is_apart_from_it(name: str) -> None:
    secret = CORPUS[name][1]
    for key in _KEYS:
        texts = {key: secret, "config.yaml": f"user: a\ns3:\n  - {key}: {secret}\n  {key}: {secret}\n"}
        kept = json.dumps(select_fields({"data": texts}, CONFIG_MAP_FIELDS))
        assert json.dumps(secret)[1:-1] not in kept
        assert "user: a" in kept
    # A quarter of the kinds, each with another key here; the other texts give it the other keys.
    number = list(CORPUS).index(name)
    for key, one in zip(islice(cycle(_KEYS), number // 4, None), COLLECTED[number % 4 :: 4], strict=False):
        filled = _pair(one.fields, key, secret)
        assert isinstance(filled, dict)
        meta = {"labels": {key: secret}, "annotations": {f"velero.io/{key}": secret}}
        shown = json.dumps(select_fields({"metadata": meta} | filled, one.fields))
        assert json.dumps(secret)[1:-1] not in shown
        assert "***" in shown


def _poison(value: object) -> object:
    """Return the value with a field that no allow-list has in each object."""
    if isinstance(value, dict):
        return {key: _poison(part) for key, part in value.items()} | {"unlisted": {"secretRef": "hidden"}}
    return [_poison(part) for part in value] if isinstance(value, list) else value


@_each
def test_a_field_that_is_not_listed_is_left_out_at_any_depth(one: Collected) -> None:
    poisoned = _poison(_whole(one.fields, cycle(["kept"])))
    assert isinstance(poisoned, dict)
    shown = json.dumps(select_fields(poisoned, one.fields))
    assert "kept" in shown
    assert "hidden" not in shown


def test_values_of_environment_variables_and_foreign_annotations_are_left_out() -> None:
    applied = {"kubectl.kubernetes.io/last-applied-configuration": "hidden", "velero.io/x": "kept"}
    container = {"name": "c", "env": [{"name": "PASSWORD", "value": "hidden"}], "envFrom": [{"secretRef": "hidden"}]}
    volumes = [{"name": "v", "secret": {"secretName": "hidden"}}]
    pod = {"metadata": {"name": "p", "annotations": applied}, "spec": {"containers": [container], "volumes": volumes}}
    fields = next(one.fields for one in COLLECTED if one.name == "pods-of-agents")
    assert select_fields(pod, fields) == {
        "metadata": {"name": "p", "annotations": {"velero.io/x": "kept"}},
        "spec": {"containers": [{"name": "c", "env": [{"name": "PASSWORD"}]}], "volumes": [{"name": "v"}]},
    }


def test_no_kind_is_collected_that_holds_secrets() -> None:
    assert SECRETS not in {one.resource for one in COLLECTED}
    assert len({one.file for one in COLLECTED}) == len(COLLECTED)


@pytest.mark.parametrize("raw", [{"metadata": 5}, {"metadata": ["x"], "spec": "y"}, {"status": {"phase": {"z": 1}}}])
def test_an_object_of_another_form_has_no_more_than_the_list_allows(raw: JsonDict) -> None:
    assert json.dumps(select_fields(raw, COLLECTED[0].fields)) in {"{}", '{"metadata": []}', '{"status": {}}'}

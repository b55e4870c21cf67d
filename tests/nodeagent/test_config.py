"""What a configuration document becomes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from nodeagent.config import AgentConfig, LoadConcurrency, parse_config


def _config(*, slots: int = 1, length: int | None = None, priority: str = "") -> AgentConfig:
    return AgentConfig(LoadConcurrency(slots, length), priority)


def test_keys_in_force_are_taken_without_a_word() -> None:
    parsed = parse_config(
        '{"loadConcurrency": {"globalConfig": 3, "prepareQueueLength": 20}, "priorityClassName": "low"}'
    )
    assert parsed.config == _config(slots=3, length=20, priority="low")
    assert parsed.warnings == []


def test_nothing_said_is_the_peers_defaults() -> None:
    assert parse_config("{}").config == _config()


@pytest.mark.parametrize(
    ("document", "warning"),
    [
        ({"loadConcurrency": {"globalConfig": 0}}, "loadConcurrency.globalConfig: 0 is not positive"),
        ({"loadConcurrency": {"globalConfig": -1}}, "loadConcurrency.globalConfig: -1 is not positive"),
        ({"loadConcurrency": {"globalConfig": "3"}}, 'globalConfig: expected a whole number, found the string "3"'),
        ({"loadConcurrency": {"globalConfig": True}}, "globalConfig: expected a whole number, found the value true"),
        ({"loadConcurrency": {"globalConfig": 1.5}}, "globalConfig: expected a whole number, found the number 1.5"),
        ({"loadConcurrency": {"prepareQueueLength": 0}}, "prepareQueueLength: 0 is not positive"),
        ({"loadConcurrency": {"prepareQueueLength": 20_001}}, "20001 is more than 20000"),
        ({"loadConcurrency": [3]}, "loadConcurrency: expected an object, found a list [3]"),
        ({"priorityClassName": 7}, "priorityClassName: expected a string, found the number 7"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_bad_value_is_told_and_takes_its_default(document: dict[str, object], warning: str) -> None:
    parsed = parse_config(json.dumps(document))
    assert parsed.config == _config()
    assert len(parsed.mistakes) == 1
    assert parsed.notes == []
    assert warning in parsed.mistakes[0]


def test_a_bad_value_leaves_the_other_keys_in_force() -> None:
    parsed = parse_config(
        '{"loadConcurrency": {"globalConfig": "x", "prepareQueueLength": 5}, "priorityClassName": "a"}'
    )
    assert parsed.config == _config(length=5, priority="a")


@pytest.mark.parametrize(
    "document",
    [
        {"loadAffinity": [{"nodeSelector": {"matchLabels": {"a": "b"}}}]},
        {"loadAffinityMode": "any"},
        {"backupPVC": {"fast": {"readOnly": True}}},
        {"restorePVC": {"ignoreDelayBinding": True}},
        {"podResources": {"cpuLimit": "1"}},
        {"privilegedFsBackup": True},
        {"cachePVC": {"storageClass": "fast", "residentThresholdInMB": 1024}},
        {"cacheVolume": {"storageClass": "fast"}},
        {"podLabels": {"a": "b"}},
        {"podAnnotations": {"a": "b"}},
        {"tolerations": "inherit"},
        {"loadConcurrency": {"perNodeConfig": [{"nodeSelector": {}, "number": 2}]}},
        {"loadConcurrency": {"restoresFirst": True}},
    ],
    ids=json.dumps,
)
def test_a_known_key_without_effect_is_told(document: dict[str, object]) -> None:
    warnings = parse_config(json.dumps(document)).warnings
    assert len(warnings) == 1
    assert "not yet in force" in warnings[0]


def test_a_misshapen_key_without_effect_is_told_as_such() -> None:
    warnings = parse_config('{"podLabels": ["a"]}').warnings
    assert 'podLabels: expected an object, found a list ["a"]' in warnings


@pytest.mark.parametrize(
    ("document", "warning"),
    [
        ({"priorityClass": "x"}, "priorityClass: unknown key; it changes nothing (did you mean priorityClassName?)"),
        ({"loadconcurrency": {}}, "loadconcurrency: unknown key; it changes nothing (did you mean loadConcurrency?)"),
        (
            {"loadConcurrency": {"globalconfig": 3}},
            "loadConcurrency.globalconfig: unknown key; it changes nothing (did you mean globalConfig?)",
        ),
        ({"zzz": 1}, "zzz: unknown key; it changes nothing"),
    ],
    ids=["near", "case", "nested", "far"],
)
def test_an_unknown_key_is_told_with_a_hint(document: dict[str, object], warning: str) -> None:
    parsed = parse_config(json.dumps(document))
    assert parsed.notes == [warning]
    assert parsed.mistakes == []


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', "[" * 100_000], ids=lambda text: text[:6] or "empty")
def test_what_is_no_json_object_cannot_be_used(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not (JSON|a JSON object)"):
        parse_config(text)


def test_the_digest_follows_the_text() -> None:
    assert parse_config("{}").digest == parse_config("{}").digest != parse_config("{ }").digest


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
_KEYS = st.sampled_from(["loadConcurrency", "priorityClassName", "podLabels", "globalConfig", "prepareQueueLength"])


@given(st.dictionaries(_KEYS, _JSON | st.dictionaries(_KEYS, _JSON)))
def test_no_document_breaks_the_agent(document: dict[str, object]) -> None:
    config = parse_config(json.dumps(document)).config
    assert config.load_concurrency.global_config >= 1
    assert isinstance(config.priority_class_name, str)

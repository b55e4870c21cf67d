"""What a configuration document becomes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from nodeagent.config.keys import AgentConfig, LoadConcurrency
from nodeagent.config.parse import parse_config
from nodeagent.config.value_types import LabelSelector


def _config(*, slots: int = 1, length: int | None = None, priority: str = "") -> AgentConfig:
    concurrency = LoadConcurrency(global_config=slots, prepare_queue_length=length)
    return AgentConfig(load_concurrency=concurrency, priority_class_name=priority)


def _parsed(document: object) -> AgentConfig:
    """The configuration of a document that nothing is wrong with."""
    parsed = parse_config(json.dumps(document))
    assert parsed.errors == ()
    return parsed.config


def test_keys_in_force_are_taken_without_a_word() -> None:
    parsed = parse_config(
        '{"loadConcurrency": {"globalConfig": 3, "prepareQueueLength": 20}, "priorityClassName": "low"}'
    )
    assert parsed.config == _config(slots=3, length=20, priority="low")
    assert parsed.warnings == []


@pytest.mark.parametrize(
    "document",
    [
        {},
        None,
        {"loadConcurrency": None, "backupPVC": None},
        {"priorityClassName": "", "backupPVC": {"a": None}},
        {"podResources": {"cpuLimit": ""}},
    ],
    ids=json.dumps,
)
def test_unset_keys_have_veleros_defaults(document: object) -> None:
    assert _parsed(document).model_dump() | {"backup_pvc": {}} == _config().model_dump()


def test_every_key_of_velero_and_of_ours_is_read() -> None:
    selector = {
        "matchLabels": {"disk": "ssd"},
        "matchExpressions": [{"key": "example.com/cores", "operator": "Gt", "values": ["4"]}],
    }
    config = _parsed(
        {
            "loadConcurrency": {
                "globalConfig": 2,
                "perNodeConfig": [{"nodeSelector": {"matchLabels": {"a": "b"}}, "number": 3}],
                "restoresFirst": True,
            },
            "loadAffinity": [{"nodeSelector": selector, "storageClass": "fast"}],
            "loadAffinityMode": "any",
            "backupPVC": {
                "fast.ssd": {
                    "storageClass": "slow",
                    "readOnly": True,
                    "spcNoRelabeling": True,
                    "annotations": {"example.com/Clone": "any text, even ''"},
                }
            },
            "restorePVC": {"ignoreDelayBinding": True},
            "cachePVC": {"storageClass": "local", "residentThresholdInMB": 1024},
            "podResources": {"cpuRequest": "500m", "cpuLimit": "2", "memoryLimit": "2Gi", "ephemeralStorageLimit": "0"},
            "podLabels": {"team": "storage"},
            "podAnnotations": {"sidecar.istio.io/inject": "false"},
            "privilegedFsBackup": True,
            "tolerations": [{"key": "dedicated", "value": "backup", "effect": "NoExecute", "tolerationSeconds": 60}],
        }
    )
    assert config.load_concurrency.per_node_config[0].number == 3
    assert config.load_concurrency.restores_first
    assert config.load_affinity[0].storage_class == "fast"
    assert config.load_affinity[0].node_selector.matches({"disk": "ssd", "example.com/cores": "8"})
    assert config.load_affinity_mode == "any"
    assert config.backup_pvc["fast.ssd"].read_only
    assert config.backup_pvc["fast.ssd"].spc_no_relabeling
    assert config.backup_pvc["fast.ssd"].annotations == {"example.com/Clone": "any text, even ''"}
    assert config.restore_pvc.ignore_delay_binding
    assert (config.cache_pvc.storage_class, config.cache_pvc.resident_threshold_in_mb) == ("local", 1024)
    assert config.pod_resources.to_wire() == {"requests": {"cpu": "500m"}, "limits": {"cpu": "2", "memory": "2Gi"}}
    assert config.pod_labels == {"team": "storage"}
    assert config.pod_annotations == {"sidecar.istio.io/inject": "false"}
    assert config.privileged_fs_backup
    assert isinstance(config.tolerations, tuple)
    assert [toleration.to_wire() for toleration in config.tolerations] == [
        {"key": "dedicated", "value": "backup", "effect": "NoExecute", "tolerationSeconds": 60}
    ]


def test_the_cache_volume_has_two_names() -> None:
    config = _parsed({"cacheVolume": {"storageClass": "local", "residentThresholdMB": 5}})
    assert (config.cache_pvc.storage_class, config.cache_pvc.resident_threshold_in_mb) == ("local", 5)


def test_all_tolerations_of_the_agent_can_be_asked_for() -> None:
    assert _parsed({"tolerations": "inherit"}).tolerations == "inherit"


def _concurrency(**keys: Any) -> dict[str, Any]:
    return {"loadConcurrency": keys}


def _affinity(**requirement: Any) -> dict[str, Any]:
    return {"loadAffinity": [{"nodeSelector": {"matchExpressions": [requirement]}}]}


_WHERE = "loadAffinity[0].nodeSelector.matchExpressions[0]"

_ERRORS = [
    (_concurrency(globalConfig=0), "loadConcurrency.globalConfig: expected a number of at least 1, found the number 0"),
    (_concurrency(globalConfig=-1), "loadConcurrency.globalConfig: expected a number of at least 1"),
    (_concurrency(globalConfig="3"), 'globalConfig: expected a whole number, found the string "3" (did you mean 3?)'),
    (_concurrency(globalConfig=True), "globalConfig: expected a whole number, found the value true"),
    (_concurrency(globalConfig=1.5), "globalConfig: expected a whole number, found the number 1.5"),
    (_concurrency(prepareQueueLength=0), "prepareQueueLength: expected a number of at least 1"),
    (_concurrency(prepareQueueLength=20_001), "expected a number of at most 20000, found the number 20001"),
    (_concurrency(restoresFirst="yes"), 'expected true or false, found the string "yes" (did you mean true?)'),
    (_concurrency(perNodeConfig={}), "loadConcurrency.perNodeConfig: expected a list, found an object {}"),
    (_concurrency(perNodeConfig=[{"number": 0}]), "perNodeConfig[0].number: expected a number of at least 1"),
    (_concurrency(perNodeConfig=[{}]), "loadConcurrency.perNodeConfig[0].number: required key is missing"),
    (
        _concurrency(
            perNodeConfig=[
                {"number": 1, "nodeSelector": {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}}
            ]
        ),
        "perNodeConfig[0].nodeSelector: expected no Gt",
    ),
    ({"loadConcurrency": [3]}, "loadConcurrency: expected an object, found a list [3]"),
    ({"priorityClassName": 7}, "priorityClassName: expected a string, found the number 7"),
    ({"priorityClassName": "Low Priority"}, "(did you mean low-priority?)"),
    ({"loadAffinity": {}}, "loadAffinity: expected a list, found an object {}"),
    (_affinity(key="a", operator="Is", values=["b"]), f"{_WHERE}.operator: expected 'In', 'NotIn'"),
    (_affinity(key="a", operator="In"), f"{_WHERE}.values: expected at least one value, as In requires"),
    (_affinity(key="a", operator="Gt", values=["x"]), f"{_WHERE}.values: expected one whole number in quotes"),
    (_affinity(key="a", operator="Exists", values=["x"]), f"{_WHERE}.values: expected no values"),
    (_affinity(key="a b", operator="Exists"), f"{_WHERE}.key: expected a key such as"),
    (_affinity(operator="Exists"), f"{_WHERE}.key: required key is missing"),
    ({"loadAffinity": [{"storageClass": "A_B"}]}, "loadAffinity[0].storageClass: expected a name"),
    ({"loadAffinityMode": "all"}, "loadAffinityMode: expected 'first' or 'any', found the string \"all\""),
    ({"backupPVC": {"fast": {"readOnly": "true"}}}, "backupPVC.fast.readOnly: expected true or false"),
    ({"backupPVC": {"fast.x": {"storageClass": 1}}}, 'backupPVC["fast.x"].storageClass: expected a string'),
    ({"backupPVC": {"fast": {"annotations": {"a": 1}}}}, "backupPVC.fast.annotations.a: expected a string"),
    ({"backupPVC": {"fast": {"secretNames": "a"}}}, "backupPVC.fast.secretNames: expected a list"),
    ({"backupPVC": {"fast": {"secretNames": ["A_b"]}}}, "backupPVC.fast.secretNames[0]: expected a name"),
    (
        {"backupPVC": {"fast": {"configMapNames": [""]}}},
        "backupPVC.fast.configMapNames[0]: expected the name of an object",
    ),
    (
        {"backupPVC": {"fast": {"secretNames": ["velero-repo-credentials"]}}},
        "backupPVC.fast.secretNames[0]: expected the name of an object that the agent does not use itself",
    ),
    (
        {"restorePVC": {"configMapNames": ["node-agent-admissions"]}},
        "restorePVC.configMapNames[0]: expected the name of an object that the agent does not use itself",
    ),
    ({"restorePVC": {"ignoreDelayBinding": 1}}, "restorePVC.ignoreDelayBinding: expected true or false"),
    ({"cachePVC": {"residentThresholdInMB": -1}}, "cachePVC.residentThresholdInMB: expected a number of at least 0"),
    ({"cacheVolume": {"residentThresholdMB": "1"}}, "cacheVolume.residentThresholdMB: expected a whole number"),
    (
        {"podResources": {"cpuLimit": 2}},
        'podResources.cpuLimit: expected a string, found the number 2 (did you mean "2',
    ),
    ({"podResources": {"memoryLimit": "500MB"}}, 'memoryLimit: expected a quantity such as "500m", "2" or "4Gi"'),
    ({"podResources": {"cpuRequest": "-1"}}, "podResources.cpuRequest: expected a quantity"),
    ({"podResources": {"cpuRequest": "1e999999999"}}, "podResources.cpuRequest: expected a quantity"),
    (
        {"podResources": {"cpuRequest": "2", "cpuLimit": "1500m"}},
        'podResources.cpuLimit: expected at least the request, 2, found the string "1500m"',
    ),
    ({"podLabels": ["a"]}, 'podLabels: expected an object, found a list ["a"]'),
    ({"podLabels": {"a": "x y"}}, "podLabels.a: expected a label value"),
    ({"podLabels": {"a/b/c": "x"}}, 'podLabels["a/b/c"]: expected a key such as'),
    ({"podLabels": {"role": "node-agent"}}, "podLabels: expected labels other than"),
    ({"podAnnotations": {"a": "x" * 300_000}}, "podAnnotations: expected annotations of at most 256 KiB in total"),
    ({"podAnnotations": {"": "x"}}, 'podAnnotations[""]: expected a key'),
    ({"podAnnotations": {"a": "\ud800"}}, "podAnnotations.a: expected text"),
    ({"privilegedFsBackup": "yes"}, 'privilegedFsBackup: expected true or false, found the string "yes"'),
    ({"tolerations": "all"}, 'tolerations: expected a list of tolerations, or "inherit"'),
    ({"tolerations": [{"key": "a", "operator": "Is"}]}, "tolerations[0].operator: expected 'Equal', 'Exists' or ''"),
    ({"tolerations": [{"value": "a"}]}, "tolerations[0].key: expected a key; only the operator Exists"),
    ({"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "tolerations[0].value: expected no value"),
    ({"tolerations": [{"key": "a", "tolerationSeconds": 1}]}, "tolerations[0].tolerationSeconds: expected none"),
    ({"tolerations": [{"key": "a", "effect": "noschedule"}]}, "(did you mean NoSchedule?)"),
]


@pytest.mark.parametrize(("document", "expected"), _ERRORS, ids=[expected.split(":")[0] for _, expected in _ERRORS])
def test_an_invalid_value_is_reported_and_takes_its_default(document: dict[str, Any], expected: str) -> None:
    parsed = parse_config(json.dumps(document))
    assert [error for error in map(str, parsed.errors) if expected not in error] == []
    assert len(parsed.errors) == 1
    (key,) = document
    empty: dict[str, Any] = {"backupPVC": {name: {} for name in document["backupPVC"]}} if key == "backupPVC" else {}
    assert parsed.config == _parsed(empty)


@pytest.mark.parametrize(
    ("document", "kept"),
    [
        (
            _concurrency(globalConfig="x", prepareQueueLength=5) | {"priorityClassName": "a"},
            _concurrency(prepareQueueLength=5) | {"priorityClassName": "a"},
        ),
        (
            _concurrency(perNodeConfig=[{"number": 0}, {"number": 2}, {}, {"number": 3}]),
            _concurrency(perNodeConfig=[{"number": 2}, {"number": 3}]),
        ),
        (
            {"backupPVC": {"a": {"readOnly": 1, "storageClass": "b"}, "c": {"readOnly": True}}},
            {"backupPVC": {"a": {"storageClass": "b"}, "c": {"readOnly": True}}},
        ),
        ({"podLabels": {"a": 1, "b": "c"}}, {"podLabels": {"b": "c"}}),
        ({"podResources": {"cpuLimit": 1, "memoryLimit": "1Gi"}, "podLabels": {"b": "c"}}, {"podLabels": {"b": "c"}}),
        ({"loadAffinity": [{}, {"storageClass": 1}], "loadAffinityMode": "any"}, {"loadAffinityMode": "any"}),
        ({"tolerations": [{"key": "a"}, 5]}, {}),
    ],
    ids=["number", "rules", "claim", "label", "resources whole", "affinity whole", "tolerations whole"],
)
def test_an_invalid_value_leaves_the_other_keys_active(document: dict[str, Any], kept: dict[str, Any]) -> None:
    parsed = parse_config(json.dumps(document))
    assert parsed.config == _parsed(kept)
    assert parsed.errors != ()


@pytest.mark.parametrize(
    ("selector", "labels", "selected"),
    [
        ({}, {}, True),
        ({"matchLabels": {"a": "b"}}, {"a": "b", "c": "d"}, True),
        ({"matchLabels": {"a": "b"}}, {"a": "c"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["x", "y"]}]}, {"a": "y"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["x"]}]}, {}, False),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["x"]}]}, {}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["x"]}]}, {"a": "x"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"a": ""}, True),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {"a": ""}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["4"]}]}, {"a": "5"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["4"]}]}, {"a": "4"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Lt", "values": ["4"]}]}, {"a": "3"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Lt", "values": ["4"]}]}, {"a": "x"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Lt", "values": ["4"]}]}, {}, False),
    ],
    ids=json.dumps,
)
def test_a_selector_selects_as_kubernetes_does(selector: object, labels: dict[str, str], selected: bool) -> None:
    assert LabelSelector.model_validate(selector).matches(labels) is selected


_SAMPLES: dict[str, object] = {
    "backupPVC": {"fast": {"readOnly": True}},
    "cachePVC": {"storageClass": "fast"},
    "loadAffinity": [{"nodeSelector": {"matchLabels": {"a": "b"}}}],
    "loadAffinityMode": "any",
    "loadConcurrency.perNodeConfig": [{"nodeSelector": {"matchLabels": {"a": "b"}}, "number": 2}],
    "loadConcurrency.restoresFirst": True,
    "podAnnotations": {"a": "b"},
    "podLabels": {"a": "b"},
    "podResources": {"cpuLimit": "1"},
    "privilegedFsBackup": True,
    "restorePVC": {"ignoreDelayBinding": True},
    "tolerations": "inherit",
}


@pytest.mark.parametrize("path", _SAMPLES)
def test_a_known_key_causes_no_warning(path: str) -> None:
    section, dot, key = path.rpartition(".")
    document = {section: {key: _SAMPLES[path]}} if dot else {path: _SAMPLES[path]}
    assert parse_config(json.dumps(document)).warnings == []


_NOTES = [
    ({"priorityClass": "x"}, "priorityClass: unknown key; ignored (did you mean priorityClassName?)"),
    (
        {"loadConcurrency": {"globalConf": 3}},
        "loadConcurrency.globalConf: unknown key; ignored (did you mean globalConfig?)",
    ),
    ({"zzz": 1}, "zzz: unknown key; ignored"),
    (
        {"prepareQueueLength": 10},
        "prepareQueueLength: unknown key; ignored (did you mean loadConcurrency.prepareQueueLength?)",
    ),
    (
        {"cachePVC": {"storageClass": "a", "thresholdInGB": 1}},
        "cachePVC.thresholdInGB: unknown key; ignored (did you mean residentThresholdInMB?)",
    ),
    ({"loadconcurrency": {}}, "loadconcurrency: read as loadConcurrency (keys are case-sensitive elsewhere)"),
    (
        {"cachePVC": {"storageClass": "a"}, "cacheVolume": {}},
        "cacheVolume: cachePVC is set as well; this one is ignored",
    ),
    (
        {"backupPVC": {"a": {"spcNoRelabeling": True}}},
        "backupPVC.a.spcNoRelabeling: has no effect without readOnly",
    ),
    (
        {"backupPVC": {"a": {"readWriteOncePod": True, "readOnly": True}}},
        "backupPVC.a.readWriteOncePod: has no effect with readOnly",
    ),
    ({"cachePVC": {"residentThresholdInMB": 1}}, "cachePVC: no cache volume without storageClass"),
    (
        {"loadAffinity": [{}, {"storageClass": "a"}, {}]},
        (
            "loadAffinity[2]: only the first entry without a storage class applies; this one is ignored "
            '("loadAffinityMode": "any" makes them alternatives)'
        ),
    ),
    (
        {"loadConcurrency": {"perNodeConfig": [{"number": 4}]}},
        "loadConcurrency.perNodeConfig: the rule with number 4 has no nodeSelector: every node matches",
    ),
]


@pytest.mark.parametrize(("document", "note"), _NOTES, ids=[note.split(":")[0] for _, note in _NOTES])
def test_a_tolerated_setting_is_reported_with_a_hint(document: dict[str, Any], note: str) -> None:
    parsed = parse_config(json.dumps(document))
    assert list(map(str, parsed.notes)) == [note]
    assert parsed.errors == ()


def test_keys_are_not_case_sensitive_as_in_velero() -> None:
    assert parse_config('{"LOADCONCURRENCY": {"globalconfig": 3}}').config == _config(slots=3)


def test_a_repeated_key_is_reported() -> None:
    parsed = parse_config('{"loadConcurrency": {"globalConfig": 3, "globalConfig": 4}}')
    assert parsed.warnings == ["loadConcurrency.globalConfig: repeated key; the last one applies"]
    assert parsed.config == _config(slots=4)


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", '"text"', "[" * 100_000], ids=lambda text: text[:6] or "empty")
def test_a_document_that_is_no_json_object_is_rejected(text: str) -> None:
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

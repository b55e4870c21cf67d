"""What a configuration document becomes, with which values an agent starts, and which ConfigMaps are valid."""

import json
from typing import Any

import pytest

from core.errors import ConfigError
from core.kube.resources import CONFIG_MAPS
from core.kube.transport import Request, Response
from nodeagent.config.keys import AgentConfig, LoadConcurrency, NodeRule
from nodeagent.config.parse import parse_config, read_config
from nodeagent.config.value_types import LabelSelector
from tests.support.scripted import answer, rejection, scripted_client, stored


def _parsed(document: object) -> AgentConfig:
    """The configuration of a document that nothing is wrong with."""
    parsed = parse_config(json.dumps(document))
    assert parsed.errors == ()
    return parsed.config


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
    assert _parsed(document).model_dump() == AgentConfig().model_dump()


def test_keys_are_read_without_a_word() -> None:
    """`test_expose_settings.py` has those of mover pods and PVCs."""
    rule = {"nodeSelector": {"matchLabels": {"a": "b"}}, "number": 3}
    keys = {"globalConfig": 2, "perNodeConfig": [rule], "prepareQueueLength": 20, "restoresFirst": True}
    rules = (NodeRule(node_selector=LabelSelector(match_labels={"a": "b"}), number=3),)
    parsed = parse_config(json.dumps({"loadConcurrency": keys, "priorityClassName": "low"}))
    assert parsed.warnings == []
    assert parsed.config == AgentConfig(
        load_concurrency=LoadConcurrency(
            global_config=2, per_node_config=rules, prepare_queue_length=20, restores_first=True
        ),
        priority_class_name="low",
    )


def _concurrency(**keys: Any) -> dict[str, Any]:
    return {"loadConcurrency": keys}


def _affinity(**requirement: Any) -> dict[str, Any]:
    return {"loadAffinity": [{"nodeSelector": {"matchExpressions": [requirement]}}]}


_WHERE = "loadAffinity[0].nodeSelector.matchExpressions[0]"
_GT = {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}


def _own(**keys: Any) -> dict[str, Any]:
    return {"nodeagent.io": keys}


_WIDER_RULES = [
    {"patterns": ["/a/"], "namespaces": "build"},
    {"patterns": ["/a/"], "namespaces": [None]},
    {"patterns": ["/a/"], "storageClasses": ["Fast"]},
    {"patterns": ["/a/"], "namespace": ["build"]},
]
"""Without what is wrong in them, they would leave files of all volumes out."""

_TAKEN = "[0]: expected the name of an object that the agent does not use itself"

_FATAL = [
    (_concurrency(globalConfig="3"), 'globalConfig: expected a whole number, found the string "3" (did you mean 3?)'),
    (_concurrency(globalConfig=1.5), "globalConfig: expected a whole number, found the number 1.5"),
    (_concurrency(prepareQueueLength=True), "prepareQueueLength: expected a whole number, found the value true"),
    (_concurrency(restoresFirst="yes"), 'expected true or false, found the string "yes" (did you mean true?)'),
    (_concurrency(perNodeConfig={}), "loadConcurrency.perNodeConfig: expected a list, found an object {}"),
    ({"loadConcurrency": [3]}, "loadConcurrency: expected an object, found a list [3]"),
    ({"priorityClassName": 7}, "priorityClassName: expected a string, found the number 7"),
    ({"loadAffinity": {}}, "loadAffinity: expected a list, found an object {}"),
    (_affinity(key="a", operator="Is", values=["b"]), f"{_WHERE}.operator: expected 'In', 'NotIn'"),
    (_affinity(key="a", operator="In"), f"{_WHERE}.values: expected at least one value, as In requires"),
    (_affinity(key="a", operator="Gt", values=["x"]), f"{_WHERE}.values: expected one whole number in quotes"),
    (_affinity(key="a", operator="Exists", values=["x"]), f"{_WHERE}.values: expected no values"),
    (_affinity(key="a b", operator="Exists"), f"{_WHERE}.key: expected a key such as"),
    (_affinity(operator="Exists"), f"{_WHERE}.key: required key is missing"),
    ({"loadAffinity": [{"nodeSelector": {"matchLabels": {"a": "b c"}}}]}, "matchLabels.a: expected a label value"),
    ({"loadAffinityMode": 1}, "loadAffinityMode: expected 'first' or 'any', found the number 1"),
    ({"backupPVC": {"fast.x": {"storageClass": 1}}}, 'backupPVC["fast.x"].storageClass: expected a string'),
    ({"backupPVC": {"fast": {"annotations": {"a": 1}}}}, "backupPVC.fast.annotations.a: expected a string"),
    ({"cacheVolume": {"residentThresholdMB": "1"}}, "cacheVolume.residentThresholdMB: expected a whole number"),
    ({"podResources": {"cpuLimit": 2}}, 'cpuLimit: expected a string, found the number 2 (did you mean "2'),
    ({"podLabels": ["a"]}, 'podLabels: expected an object, found a list ["a"]'),
    ({"podLabels": {"": 1}}, 'podLabels[""]: expected a key such as'),
    ({"tolerations": 5}, 'tolerations: expected a list of tolerations, or "inherit", found the number 5'),
    ({"tolerations": [{"key": 5}]}, "tolerations[0].key: expected a string"),
]
"""With these, no agent starts: Velero's would exit, or could create no mover pod."""

_TOLERATED = [
    (_concurrency(globalConfig=0), "loadConcurrency.globalConfig: expected a number of at least 1, found the number 0"),
    (_concurrency(prepareQueueLength=0), "prepareQueueLength: expected a number of at least 1"),
    (_concurrency(prepareQueueLength=20_001), "expected a number of at most 20000, found the number 20001"),
    (_concurrency(perNodeConfig=[{"number": 0}]), "perNodeConfig[0].number: expected a number of at least 1"),
    (_concurrency(perNodeConfig=[{}]), "loadConcurrency.perNodeConfig[0].number: required key is missing"),
    (_concurrency(perNodeConfig=[None]), "perNodeConfig[0]: expected an object, found the value null"),
    (_concurrency(perNodeConfig=[{"number": 1, "nodeSelector": _GT}]), "[0].nodeSelector: expected no Gt"),
    ({"priorityClassName": "Low Priority"}, "(did you mean low-priority?)"),
    ({"loadAffinityMode": "all"}, "loadAffinityMode: expected 'first' or 'any', found the string \"all\""),
    ({"backupPVC": {"fast": {"secretNames": ["A_b"]}}}, "backupPVC.fast.secretNames[0]: expected a name"),
    ({"restorePVC": {"secretNames": [None]}}, "restorePVC.secretNames[0]: expected a string, found the value null"),
    ({"backupPVC": {"fast": {"configMapNames": [""]}}}, "configMapNames[0]: expected the name of an object"),
    ({"backupPVC": {"a": {"secretNames": ["velero-repo-credentials"]}}}, f"backupPVC.a.secretNames{_TAKEN}"),
    ({"restorePVC": {"secretNames": ["cloud-credentials"]}}, f"restorePVC.secretNames{_TAKEN}"),
    *(
        ({"restorePVC": {"configMapNames": [name]}}, f"restorePVC.configMapNames{_TAKEN}")
        for name in ("node-agent-admissions", "node-agent-backup-deletions")
    ),
    ({"cachePVC": {"residentThresholdInMB": -1}}, "cachePVC.residentThresholdInMB: expected a number of at least 0"),
    ({"podResources": {"memoryLimit": "500MB"}}, 'memoryLimit: expected a quantity such as "500m", "2" or "4Gi"'),
    ({"podResources": {"cpuRequest": "-1"}}, "podResources.cpuRequest: expected a quantity"),
    ({"podResources": {"cpuRequest": "1e999999999"}}, "podResources.cpuRequest: expected a quantity"),
    (
        {"podResources": {"cpuRequest": "2", "cpuLimit": "1500m"}},
        "podResources.cpuLimit: expected at least the request, 2",
    ),
    ({"podLabels": {"a": "x y"}}, "podLabels.a: expected a label value"),
    ({"podLabels": {"a/b/c": "x"}}, 'podLabels["a/b/c"]: expected a key such as'),
    ({"podLabels": {"role": "node-agent"}}, "podLabels: expected labels other than"),
    ({"podAnnotations": {"a": "x" * 300_000}}, "podAnnotations: expected annotations of at most 256 KiB in total"),
    ({"podAnnotations": {"": "x"}}, 'podAnnotations[""]: expected a key'),
    (
        {"tolerations": [{"key": "a", "effect": "NoExecute", "tolerationSeconds": 2**63}]},
        "tolerations[0].tolerationSeconds: expected a number of at most 9223372036854775807",
    ),
    ({"tolerations": "all"}, 'tolerations: expected a list of tolerations, or "inherit"'),
    ({"tolerations": [{"key": "a", "operator": "Is"}]}, "tolerations[0].operator: expected 'Equal', 'Exists' or ''"),
    ({"tolerations": [{"value": "a"}]}, "tolerations[0].key: expected a key; only the operator Exists"),
    ({"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "tolerations[0].value: expected no value"),
    ({"tolerations": [{"key": "a", "tolerationSeconds": 1}]}, "tolerations[0].tolerationSeconds: expected none"),
    ({"tolerations": [{"key": "a", "effect": "noschedule"}]}, "(did you mean NoSchedule?)"),
]
_INVALID = [(*row, True) for row in _FATAL] + [(*row, False) for row in _TOLERATED]


@pytest.mark.parametrize(
    ("document", "expected", "fatal"), _INVALID, ids=[expected.split(":")[0] for _, expected, _ in _INVALID]
)
def test_an_invalid_value_is_reported_and_defaulted(document: dict[str, Any], expected: str, fatal: bool) -> None:
    parsed = parse_config(json.dumps(document))
    (error,) = parsed.errors
    assert expected in str(error)
    assert parsed.fatal == ((error,) if fatal else ())
    assert parsed.warnings == [f"{error}; the default is used"]
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
        (
            _own(exclude={"rules": [*_WIDER_RULES, {"patterns": ["/b/"]}]}),
            _own(exclude={"rules": [{"patterns": ["/b/"]}]}),
        ),
        (_own(excludedMetadata=["a/", "b/*"]), {}),
    ],
    ids=[
        *("number", "rules", "claim", "label", "resources whole", "affinity whole", "tolerations whole"),
        *("exclusion whole", "metadata whole"),
    ],
)
def test_an_invalid_value_leaves_the_other_keys_active(document: dict[str, Any], kept: dict[str, Any]) -> None:
    parsed = parse_config(json.dumps(document))
    assert parsed.config == _parsed(kept)
    assert parsed.errors != ()


@pytest.mark.parametrize(
    ("keys", "paths"),
    [
        ({"exclude": {"rules": [{}, "x", {"patterns": ["!a"]}]}}, ["exclude.rules[1]", "exclude.rules[2].patterns[0]"]),
        (
            {"retry": {"perKind": {f"X{n}": {"maxRetries": -1} for n in range(9)}}},
            [f"retry.perKind.X{n}{key}" for n in range(9) for key in ("", ".maxRetries")],
        ),
    ],
    ids=["in later entries", "below invalid keys"],
)
def test_invalid_values_in_other_invalid_ones_are_all_found(keys: dict[str, Any], paths: list[str]) -> None:
    parsed = parse_config(json.dumps({"nodeagent.io": keys, "priorityClassName": "low"}))
    assert [error.path for error in parsed.errors] == [f'["nodeagent.io"].{path}' for path in paths]
    assert parsed.config.priority_class_name == "low"


@pytest.mark.parametrize(
    ("selector", "labels", "selected"),
    [
        ({}, {}, True),
        ({"matchLabels": {"a": "b"}}, {"a": "b", "c": "d"}, True),
        ({"matchLabels": {"a": "b"}}, {"a": "c"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["x", "y"]}]}, {"a": "y"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["x"]}]}, {}, False),
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


_UNKNOWN = "{}: unknown key; ignored (did you mean {}?)"
_CACHE = {"storageClass": "a"}
_ONCE = {"readWriteOncePod": True, "readOnly": True}
_NOTES = [
    ({"priorityClass": "x"}, _UNKNOWN.format("priorityClass", "priorityClassName")),
    ({"loadConcurrency": {"globalConf": 3}}, _UNKNOWN.format("loadConcurrency.globalConf", "globalConfig")),
    ({"zzz": 1}, "zzz: unknown key; ignored"),
    ({"prepareQueueLength": 10}, _UNKNOWN.format("prepareQueueLength", "loadConcurrency.prepareQueueLength")),
    ({"cachePVC": _CACHE | {"thresholdInGB": 1}}, _UNKNOWN.format("cachePVC.thresholdInGB", "residentThresholdInMB")),
    ({"loadconcurrency": {}}, "loadconcurrency: read as loadConcurrency (keys are case-sensitive elsewhere)"),
    ({"cachePVC": _CACHE, "cacheVolume": {}}, "cacheVolume: cachePVC is set as well; this one is ignored"),
    ({"backupPVC": {"a": {"spcNoRelabeling": True}}}, "backupPVC.a.spcNoRelabeling: has no effect without readOnly"),
    ({"backupPVC": {"a": _ONCE}}, "backupPVC.a.readWriteOncePod: has no effect with readOnly"),
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
    assert (parsed.errors, parsed.fatal) == ((), ())


def test_what_applies_to_no_volume_is_kept_as_in_velero() -> None:
    config = _parsed({"loadAffinity": [{"storageClass": "A_B"}, {}], "cachePVC": {"residentThresholdInMB": 2**43 - 1}})
    assert (config.load_affinity[0].storage_class, config.cache_pvc.resident_threshold_in_mb) == ("A_B", 2**43 - 1)


def test_null_in_a_map_of_texts_is_an_empty_text_as_in_velero() -> None:
    config = _parsed({"podLabels": {"a": None}, "loadAffinity": [{"nodeSelector": {"matchLabels": {"b": None}}}]})
    assert (config.pod_labels, config.load_affinity[0].node_selector.match_labels) == ({"a": ""}, {"b": ""})


def test_a_repeated_key_is_reported() -> None:
    parsed = parse_config('{"loadConcurrency": {"globalConfig": 3, "globalConfig": 4}}')
    problem = "repeated key; objects are merged, any other value is replaced"
    assert parsed.warnings == [f"loadConcurrency.globalConfig: {problem}"]


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ('{"priorityClassName": "a", "priorityClassName": "b"}', {"priorityClassName": "b"}),
        ('{"priorityClassName": "a", "PRIORITYCLASSNAME": "b"}', {"priorityClassName": "b"}),
        ('{"priorityclassname": "a", "priorityClassName": "b"}', {"priorityClassName": "b"}),
        ('{"priorityClassName": "a", "priorityClassName": null}', {"priorityClassName": "a"}),
        ('{"podLabels": {"a": "b"}, "podLabels": {"c": "d"}}', {"podLabels": {"a": "b", "c": "d"}}),
        ('{"podLabels": {"a": "b"}, "podLabels": null}', {}),
        # As Go, of half of a surrogate pair.
        (
            '{"podAnnotations": {"a": "\\ud800\\\\\\uDC00\ud800"}, "backupPVC": {"\\ud800": {}, "\\ud83d\\ude00": {}}}',
            {"podAnnotations": {"a": "\ufffd\\\ufffd\ufffd"}, "backupPVC": {"\ufffd": {}, "\U0001f600": {}}},
        ),
        (
            '{"restorePVC": {"ignoreDelayBinding": true}, "restorepvc": {"secretNames": ["a"]}}',
            {"restorePVC": {"ignoreDelayBinding": True, "secretNames": ["a"]}},
        ),
        (
            '{"backupPVC": {"a": {"readOnly": true}, "b": {}}, "backupPVC": {"a": {}}}',
            {"backupPVC": {"a": {}, "b": {}}},
        ),
    ],
)
def test_a_repeated_key_means_the_same_as_in_velero(text: str, same: dict[str, Any]) -> None:
    assert parse_config(text).config == _parsed(same)


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", '"text"', "[" * 100_000], ids=lambda text: text[:6] or "empty")
def test_a_document_that_is_no_json_object_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not (JSON|a JSON object)"):
        parse_config(text)


def test_the_digest_follows_the_text() -> None:
    assert parse_config("{}").digest == parse_config("{}").digest != parse_config("{ }").digest


def _config_map(**fields: object) -> Response:
    return answer(stored(CONFIG_MAPS, metadata={"name": "agent-config"}, **fields))


async def _read(response: Response) -> str:
    seen: list[Request] = []

    def script(request: Request) -> Response:
        seen.append(request)
        return response

    parsed = await read_config(scripted_client(script), "velero", "agent-config")
    assert [request.path for request in seen] == ["/api/v1/namespaces/velero/configmaps/agent-config"]
    return parsed.config.priority_class_name


async def test_the_only_key_of_the_config_map_is_read_whatever_its_name() -> None:
    assert await _read(_config_map(data={"any.json": '{"priorityClassName": "low"}'})) == "low"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (rejection(404, "not found"), "ConfigMap velero/agent-config does not exist"),
        (rejection(403, "may not"), "cannot be read.*403"),
        (_config_map(), "exactly one key.*found: none"),
        (_config_map(data={"b": "{}", "a": "{}"}), "exactly one key.*found: a, b"),
        (_config_map(data={"a": "[1]"}), "ConfigMap velero/agent-config: .*not a JSON object"),
    ],
    ids=["missing", "forbidden", "empty", "two keys", "list"],
)
async def test_an_unusable_config_map_is_rejected(response: Response, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        await _read(response)

"""With which values an agent starts: it exits where Velero's would, or where Velero's could create no mover pod."""

import json
from typing import Any

import pytest

from nodeagent.config.parse import parse_config


def _concurrency(**keys: Any) -> dict[str, Any]:
    return {"loadConcurrency": keys}


def _affinity(**requirement: Any) -> dict[str, Any]:
    return {"loadAffinity": [{"nodeSelector": {"matchExpressions": [requirement]}}]}


_FATAL = [
    (_concurrency(globalConfig="3"), "loadConcurrency.globalConfig"),
    (_concurrency(globalConfig=1.5), "loadConcurrency.globalConfig"),
    (_concurrency(prepareQueueLength=True), "loadConcurrency.prepareQueueLength"),
    (_concurrency(restoresFirst="yes"), "loadConcurrency.restoresFirst"),
    (_concurrency(perNodeConfig={}), "loadConcurrency.perNodeConfig"),
    (_concurrency(perNodeConfig=[{"number": "3"}]), "loadConcurrency.perNodeConfig[0].number"),
    ({"loadConcurrency": [3]}, "loadConcurrency"),
    ({"loadAffinity": {}}, "loadAffinity"),
    ({"loadAffinity": [{"storageClass": 1}]}, "loadAffinity[0].storageClass"),
    ({"loadAffinityMode": 1}, "loadAffinityMode"),
    (_affinity(key="a", operator="Is", values=["b"]), "loadAffinity[0].nodeSelector.matchExpressions[0].operator"),
    (_affinity(key="a", operator="In"), "loadAffinity[0].nodeSelector.matchExpressions[0].values"),
    (_affinity(key="a b", operator="Exists"), "loadAffinity[0].nodeSelector.matchExpressions[0].key"),
    (_affinity(operator="Exists"), "loadAffinity[0].nodeSelector.matchExpressions[0].key"),
    ({"loadAffinity": [{"nodeSelector": {"matchLabels": {"a": "b c"}}}]}, "loadAffinity[0].nodeSelector.matchLabels.a"),
    ({"backupPVC": {"fast": {"readOnly": "true"}}}, "backupPVC.fast.readOnly"),
    ({"backupPVC": {"fast": {"annotations": {"a": 1}}}}, "backupPVC.fast.annotations.a"),
    ({"restorePVC": {"ignoreDelayBinding": 1}}, "restorePVC.ignoreDelayBinding"),
    ({"restorePVC": []}, "restorePVC"),
    ({"cachePVC": {"residentThresholdInMB": "1"}}, "cachePVC.residentThresholdInMB"),
    ({"podResources": {"cpuLimit": 2}}, "podResources.cpuLimit"),
    ({"podLabels": ["a"]}, "podLabels"),
    ({"podLabels": {"a": 1}}, "podLabels.a"),
    ({"priorityClassName": 7}, "priorityClassName"),
    ({"privilegedFsBackup": "yes"}, "privilegedFsBackup"),
    ({"tolerations": 5}, "tolerations"),
    ({"tolerations": [{"key": 5}]}, "tolerations[0].key"),
]

_TOLERATED = [
    _concurrency(globalConfig=0),
    _concurrency(globalConfig=-1),
    _concurrency(prepareQueueLength=0),
    _concurrency(perNodeConfig=[{"number": 0}]),
    _concurrency(perNodeConfig=[{}]),
    _concurrency(perNodeConfig=[{"number": 1, "nodeSelector": {"matchExpressions": [{"key": "a", "operator": "Gt"}]}}]),
    {"cachePVC": {"residentThresholdInMB": -1}},
    {"cachePVC": {"storageClass": "No Name"}},
    {"podResources": {"memoryLimit": "500MB"}},
    {"podResources": {"cpuRequest": "2", "cpuLimit": "1500m"}},
    {"podLabels": {"a": "x y"}},
    {"priorityClassName": "Low Priority"},
    {"backupPVC": {"fast": {"storageClass": "A_B"}}},
    {"tolerations": "all"},
    {"tolerations": [{"key": "a", "operator": "Is"}]},
    {"loadAffinityMode": "all"},
    {"zzz": 1},
    {"loadConcurrency": None},
]


@pytest.mark.parametrize(("document", "path"), _FATAL, ids=[json.dumps(document) for document, _ in _FATAL])
def test_no_agent_starts_with_this_value(document: dict[str, Any], path: str) -> None:
    parsed = parse_config(json.dumps(document | {"podAnnotations": {"": "x"}}))
    assert [finding.path for finding in parsed.fatal] == [path]
    assert {finding.path for finding in parsed.errors} == {path, 'podAnnotations[""]'}


@pytest.mark.parametrize("document", _TOLERATED, ids=json.dumps)
def test_an_agent_starts_with_this_value_and_warns(document: dict[str, Any]) -> None:
    parsed = parse_config(json.dumps(document))
    assert parsed.fatal == ()
    assert bool(parsed.warnings) is (document != {"loadConcurrency": None})


def test_all_values_with_which_no_agent_starts_are_reported() -> None:
    parsed = parse_config(json.dumps(_concurrency(globalConfig="3", prepareQueueLength="4") | {"podLabels": []}))
    assert {finding.path for finding in parsed.fatal} == {
        "loadConcurrency.globalConfig",
        "loadConcurrency.prepareQueueLength",
        "podLabels",
    }

"""The keys below `nodeagent.io`, and the rules of retries for each kind."""

import json
from datetime import timedelta
from typing import Any

import pytest

from core.models.base import JsonDict
from core.models.phases import RetryRules
from core.models.transfer_settings import BandwidthLimits
from exposer.settings import DEFAULT_EXCLUDED
from nodeagent.config.own_keys import BandwidthBudget, BandwidthKeys, OwnKeys, rules_of_kind
from nodeagent.config.parse import parse_config
from nodeagent.config.windows import VerificationPlan
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.transfers import TRANSFERS


def _parse(**own: object) -> OwnKeys:
    """The keys of a document that nothing is wrong with."""
    parsed = parse_config(json.dumps({"nodeagent.io": own}))
    assert parsed.warnings == []
    return parsed.config.own


def test_what_is_absent_differs_from_what_is_empty() -> None:
    """`test_expose_settings.py` has the keys of mover pods and PVCs."""
    day = timedelta(hours=24)
    assert _parse(verification={"period": "24h"}).verification_plan == VerificationPlan(day)
    tested = _parse(verification={"period": "24h", "restoreTest": True, "restoreTestStorageClass": "scratch"})
    assert tested.verification_plan == VerificationPlan(day, restore_test=True, restore_test_class="scratch")
    absent = _parse()
    assert (absent.verification_plan, absent.budgets) == (None, None)
    assert _parse(bandwidth={}).budgets == BandwidthKeys()
    assert _parse(bandwidth={"perNode": {"uploadBytesPerSecond": 0}}).budgets == BandwidthKeys()
    assert absent.excluded_metadata == list(DEFAULT_EXCLUDED)
    assert _parse(excludedMetadata=["cdi.kubevirt.io/"]).excluded_metadata == ["cdi.kubevirt.io/"]


def test_a_shared_volume_is_a_claim_or_a_directory_of_a_server() -> None:
    volumes = [
        {"mountPath": "/backups", "persistentVolumeClaim": "shared"},
        {"mountPath": "/far/away", "nfs": {"server": "10.0.0.1", "path": "/export/backups"}},
        {"mountPath": "/root-of-a-service", "nfs": {"server": "fs-1.example.com", "path": "/"}},
    ]
    assert [volume.to_wire() for volume in _parse(repositoryVolumes=volumes).repository_volumes] == [
        {"persistentVolumeClaim": {"claimName": "shared"}},
        {"nfs": {"server": "10.0.0.1", "path": "/export/backups"}},
        {"nfs": {"server": "fs-1.example.com", "path": "/"}},
    ]


def test_a_budget_with_windows_holds_in_these_alone() -> None:
    window = {"schedule": "0 8 * * *", "timeZone": "UTC", "duration": "10h"}
    budget = BandwidthBudget.model_validate({"uploadBytesPerSecond": 1_000_000, "windows": [window]})
    assert budget.at(NOON) == BandwidthLimits(upload_bytes_per_second=1_000_000)
    assert budget.at(NOON + timedelta(hours=7)) == BandwidthLimits()
    always = BandwidthBudget.model_validate({"downloadBytesPerSecond": 200_000})
    assert always.at(NOON) == BandwidthLimits(download_bytes_per_second=200_000)


_CLAIM = {"mountPath": "/backups", "persistentVolumeClaim": "shared"}
_NFS = {"server": "nfs", "path": "/export"}
_EITHER = "repositoryVolumes[0]: expected either persistentVolumeClaim or nfs, found "
_PATH = "repositoryVolumes[0].mountPath: expected"
_SIZE = "exclude.rules[0]: expected valid exclusions: the largest size must be at"
_WINDOW = {"schedule": "x", "duration": "1h"}


def _volume(**keys: object) -> JsonDict:
    return {"repositoryVolumes": [{"mountPath": "/backups"} | keys]}


def _rule(**keys: object) -> JsonDict:
    return {"exclude": {"rules": [keys]}}


@pytest.mark.parametrize(
    ("own", "beginning"),
    [
        ({"moverServiceAccount": "Movers"}, "moverServiceAccount: expected a name of lower-case letters, digits, '-'"),
        ({"serviceAccount": "movers"}, "serviceAccount: unknown key; ignored (did you mean moverServiceAccount?)"),
        ({"excludedMetadata": [""]}, 'excludedMetadata[0]: expected the beginning of a key such as "example.com/" or'),
        ({"ignoreFilesNamespaces": ["*"]}, "ignoreFilesNamespaces[0]: expected a name of lower-case letters"),
        ({"ignoreFilesNamespaces": "app"}, 'ignoreFilesNamespaces: expected a list, found the string "app"'),
        (_rule(patterns=["!a"]), 'exclude.rules[0].patterns[0]: expected a pattern that kopia takes (pattern "!a"'),
        (_rule(namespace=["build"], sets=["caches"]), "exclude.rules[0].namespace: unknown key"),
        (_rule(sets=["tapes"]), "exclude.rules[0].sets[0]: expected"),
        (_rule(largestSize="1Ki"), f"{_SIZE} least 4096"),
        (_rule(largestSize="16Ei"), f"{_SIZE} most 9223372036854775807"),
        (_rule(patterns=[f"a{number}" for number in range(201)]), "exclude.rules: expected at most 200 patterns"),
        (_volume(persistentVolumeClaim="shared", nfs=_NFS), _EITHER),
        (_volume(), _EITHER),
        ({"repositoryVolumes": [_CLAIM, _CLAIM]}, "repositoryVolumes: expected a mountPath that no other"),
        *(
            ({"repositoryVolumes": [_CLAIM | {"mountPath": path}]}, f"{_PATH} an absolute")
            for path in ("a", "/a/../b", "/")
        ),
        *(
            ({"repositoryVolumes": [_CLAIM | {"mountPath": path}]}, f"{_PATH} a path")
            for path in ("/scratch/a", "/mover-events")
        ),
        (_volume(nfs=_NFS | {"server": "a b"}), "repositoryVolumes[0].nfs.server: expected a host name"),
        (_volume(nfs={"server": "nfs"}), "repositoryVolumes[0].nfs: expected server and path"),
        (_volume(nfs=_NFS | {"path": "export"}), "repositoryVolumes[0].nfs.path: expected an absolute path"),
        ({"bandwidth": {"perNode": {"uploadBytesPerSecond": 1000}}}, "bandwidth.perNode.uploadBytesPerSecond: "),
        ({"bandwidth": {"perMover": {"downloadBytesPerSecond": "5M"}}}, "bandwidth.perMover.downloadBytesPerSecond: "),
        (
            {"bandwidth": {"perLocation": {"a": {"windows": [_WINDOW]}}}},
            "bandwidth.perLocation.a.windows[0].schedule: ",
        ),
        ({"compression": {"perStorageClass": {"fast": "zst"}}}, "compression.perStorageClass.fast: expected 'none', "),
        # kopia deprecated these.
        ({"compression": {"default": "lz4"}}, "compression.default: expected 'none', 'zstd-fastest', "),
    ],
)
def test_a_wrong_key_or_value_is_explained(own: JsonDict, beginning: str) -> None:
    parsed = parse_config(json.dumps({"nodeagent.io": own}))
    (finding,) = [*map(str, parsed.errors), *map(str, parsed.notes)]
    assert finding.startswith(f'["nodeagent.io"].{beginning}')


@pytest.mark.parametrize(
    ("document", "finding"),
    [
        ({"nodeagent.io": "a"}, '["nodeagent.io"]: expected an object, found the string "a"; the default is used'),
        ({"bandwidth": {}}, "bandwidth: unknown key; ignored (did you mean nodeagent.io.bandwidth?)"),
    ],
    ids=["no object", "outside"],
)
def test_keys_that_are_not_below_ours_have_no_effect(document: JsonDict, finding: str) -> None:
    parsed = parse_config(json.dumps(document))
    assert parsed.warnings == [finding]
    assert parsed.config.own == OwnKeys()


_PLACE = '["nodeagent.io"].retry'
_DURATION = 'expected a positive duration such as "30m" or "6h"'
_ANY_DURATION = 'expected a duration such as "30m" or "6h", or "0"'
_KINDS = "expected 'DataUpload', 'DataDownload', 'PodVolumeBackup' or 'PodVolumeRestore'"
_NAME = 'found the string "DataUploads" (did you mean DataUpload?)'
_COUNT = "maxRetries: expected a whole number, found the number 1.5"
_UNKNOWN = "maxRetry: unknown key; ignored (did you mean maxRetries?)"


def _rules(*, velero_server: bool = True, **retry: Any) -> dict[str, RetryRules]:
    parsed = parse_config(json.dumps({"nodeagent.io": {"retry": retry}}))
    assert (parsed.errors, parsed.notes) == ((), ())
    return {kind: rules_of_kind(parsed.config.own.retry, kind, velero_server=velero_server) for kind in TRANSFERS}


def test_every_key_has_its_effect_on_every_kind() -> None:
    assert _rules() == dict.fromkeys(TRANSFERS, RetryRules())
    rules = _rules(
        enabled=False,
        maxRetries=7,
        initialBackoff="1m",
        maxBackoff="1h30m",
        deadline="8h",
        oomMemoryFactor=2,
        oomMemoryLimitMax="8Gi",
    )
    expected = RetryRules(
        enabled=False,
        max_retries=7,
        initial_backoff=timedelta(minutes=1),
        max_backoff=timedelta(minutes=90),
        deadline=timedelta(hours=8),
        oom_memory_factor=2,
        oom_memory_limit_max="8Gi",
    )
    assert rules == dict.fromkeys(TRANSFERS, expected)


@pytest.mark.parametrize(
    ("deadline", "beside_server", "alone"),
    [("", timedelta(hours=4), None), ("0", None, None), ("0s", None, None), ("90m", *[timedelta(minutes=90)] * 2)],
)
def test_the_deadline_without_configuration_is_the_servers(
    deadline: str, beside_server: timedelta | None, alone: timedelta | None
) -> None:
    assert _rules(deadline=deadline)["DataUpload"].deadline == beside_server
    assert _rules(velero_server=False, deadline=deadline)["DataUpload"].deadline == alone


def test_an_entry_of_a_kind_replaces_only_the_values_that_it_has() -> None:
    per_kind = {"DataUpload": {"maxRetries": 0, "deadline": "0"}, "PodVolumeRestore": {"enabled": False}}
    rules = _rules(maxRetries=5, maxBackoff="1m", perKind=per_kind)
    others = RetryRules(max_retries=5, max_backoff=timedelta(minutes=1))
    assert rules == {
        "DataUpload": RetryRules(max_retries=0, max_backoff=timedelta(minutes=1), deadline=None),
        "DataDownload": others,
        "PodVolumeBackup": others,
        "PodVolumeRestore": RetryRules(enabled=False, max_retries=5, max_backoff=timedelta(minutes=1)),
    }


@pytest.mark.parametrize(
    ("retry", "finding"),
    [
        ({"maxRetries": -1}, "maxRetries: expected a number of at least 0, found the number -1"),
        ({"maxRetries": 101}, "maxRetries: expected a number of at most 100, found the number 101"),
        ({"initialBackoff": "30"}, f'initialBackoff: {_DURATION}, found the string "30"'),
        ({"initialBackoff": "0"}, f'initialBackoff: {_DURATION}, found the string "0"'),
        ({"deadline": "-4h"}, f'deadline: {_ANY_DURATION}, found the string "-4h"'),
        ({"deadline": "never"}, f'deadline: {_ANY_DURATION}, found the string "never"'),
        ({"oomMemoryFactor": 0.5}, "oomMemoryFactor: expected a number of at least 1.0, found the number 0.5"),
        ({"oomMemoryFactor": "2"}, 'oomMemoryFactor: expected a number, found the string "2"'),
        ({"oomMemoryFactor": True}, "oomMemoryFactor: expected a number, found the value true"),
        ({"oomMemoryLimitMax": "0"}, 'oomMemoryLimitMax: expected more than 0, such as "8Gi", found the string "0"'),
        ({"perKind": {"DataUploads": {}}}, f"perKind.DataUploads: {_KINDS}, {_NAME}"),
        ({"perKind": {"DataUpload": {"maxRetry": 1}}}, f"perKind.DataUpload.{_UNKNOWN}"),
        ({"perKind": {"DataUpload": {"maxRetries": 1.5}}}, f"perKind.DataUpload.{_COUNT}"),
    ],
    ids=lambda value: json.dumps(value) if not isinstance(value, str) else "",
)
def test_a_wrong_value_is_explained_and_costs_its_own_key_only(retry: Any, finding: str) -> None:
    parsed = parse_config(json.dumps({"nodeagent.io": {"retry": retry, "moverServiceAccount": "movers"}}))
    assert [*map(str, parsed.errors), *map(str, parsed.notes)] == [f"{_PLACE}.{finding}"]
    assert rules_of_kind(parsed.config.own.retry, "DataUpload", velero_server=True) == RetryRules()
    assert parsed.config.own.mover_service_account == "movers"


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_a_factor_that_is_no_number_is_invalid(text: str) -> None:
    parsed = parse_config('{"nodeagent.io": {"retry": {"oomMemoryFactor": X}}}'.replace("X", text))
    assert [error.path for error in parsed.errors] == [f"{_PLACE}.oomMemoryFactor"]

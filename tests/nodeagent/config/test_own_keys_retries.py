"""The key `nodeagent.io.retry`, and the rules for each kind."""

import json
from datetime import timedelta
from typing import Any

import pytest

from core.models.phases import RetryRules
from nodeagent.config.own_keys import build_retry_rules
from nodeagent.config.parse import parse_config
from tests.nodeagent.support.transfers import TRANSFERS

_PLACE = '["nodeagent.io"].retry'
_DURATION = 'expected a positive duration such as "30m" or "6h", found '


def _rules(*, velero_server: bool = True, **retry: Any) -> dict[str, RetryRules]:
    parsed = parse_config(json.dumps({"nodeagent.io": {"retry": retry}}))
    assert (parsed.errors, parsed.notes) == ((), ())
    return build_retry_rules(parsed.config.own.retry, velero_server=velero_server)


def test_every_kind_has_the_defaults() -> None:
    assert _rules() == dict.fromkeys(TRANSFERS, RetryRules())


def test_every_key_has_its_effect() -> None:
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
        ([], f"{_PLACE}: expected an object, found a list []"),
        ({"enabled": "no"}, f'{_PLACE}.enabled: expected true or false, found the string "no" (did you mean false?)'),
        ({"maxRetries": -1}, f"{_PLACE}.maxRetries: expected a number of at least 0, found the number -1"),
        ({"maxRetries": 101}, f"{_PLACE}.maxRetries: expected a number of at most 100, found the number 101"),
        (
            {"maxRetries": "3"},
            f'{_PLACE}.maxRetries: expected a whole number, found the string "3" (did you mean 3?)',
        ),
        ({"initialBackoff": "30"}, f'{_PLACE}.initialBackoff: {_DURATION}the string "30"'),
        ({"initialBackoff": "0"}, f'{_PLACE}.initialBackoff: {_DURATION}the string "0"'),
        (
            {"maxBackoff": 600},
            f'{_PLACE}.maxBackoff: expected a string, found the number 600 (did you mean "600"?)',
        ),
        (
            {"deadline": "-4h"},
            f'{_PLACE}.deadline: expected a duration such as "30m" or "6h", or "0", found the string "-4h"',
        ),
        (
            {"deadline": "never"},
            f'{_PLACE}.deadline: expected a duration such as "30m" or "6h", or "0", found the string "never"',
        ),
        (
            {"oomMemoryFactor": 0.5},
            f"{_PLACE}.oomMemoryFactor: expected a number of at least 1.0, found the number 0.5",
        ),
        ({"oomMemoryFactor": "2"}, f'{_PLACE}.oomMemoryFactor: expected a number, found the string "2"'),
        ({"oomMemoryFactor": True}, f"{_PLACE}.oomMemoryFactor: expected a number, found the value true"),
        (
            {"oomMemoryLimitMax": "0"},
            f'{_PLACE}.oomMemoryLimitMax: expected more than 0, such as "8Gi", found the string "0"',
        ),
        (
            {"perKind": {"DataUploads": {}}},
            (
                f"{_PLACE}.perKind.DataUploads: expected 'DataUpload', 'DataDownload', 'PodVolumeBackup' or "
                "'PodVolumeRestore', found the string \"DataUploads\" (did you mean DataUpload?)"
            ),
        ),
        (
            {"perKind": {"DataUpload": {"maxRetry": 1}}},
            f"{_PLACE}.perKind.DataUpload.maxRetry: unknown key; ignored (did you mean maxRetries?)",
        ),
        (
            {"perKind": {"DataUpload": {"maxRetries": 1.5}}},
            f"{_PLACE}.perKind.DataUpload.maxRetries: expected a whole number, found the number 1.5",
        ),
    ],
    ids=lambda value: json.dumps(value) if not isinstance(value, str) else "",
)
def test_a_wrong_value_is_explained_and_costs_its_own_key_only(retry: Any, finding: str) -> None:
    parsed = parse_config(json.dumps({"nodeagent.io": {"retry": retry, "moverServiceAccount": "movers"}}))
    assert [*map(str, parsed.errors), *map(str, parsed.notes)] == [finding]
    assert build_retry_rules(parsed.config.own.retry, velero_server=True)["DataUpload"] == RetryRules()
    assert parsed.config.own.mover_service_account == "movers"


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_a_factor_that_is_no_number_is_invalid(text: str) -> None:
    parsed = parse_config('{"nodeagent.io": {"retry": {"oomMemoryFactor": X}}}'.replace("X", text))
    assert [error.path for error in parsed.errors] == [f"{_PLACE}.oomMemoryFactor"]

"""The budgets of the configuration: when they hold, and what is invalid."""

import json
from datetime import timedelta

import pytest

from core.models.transfer_settings import BandwidthLimits
from nodeagent.config.own_keys import BandwidthBudget, BandwidthKeys
from nodeagent.config.parse import parse_config
from tests.nodeagent.support.hand_clock import NOON


def _errors(value: object) -> list[str]:
    parsed = parse_config(json.dumps({"nodeagent.io": {"bandwidth": value}}))
    return [str(one) for one in parsed.errors]


def _budget(**keys: object) -> BandwidthBudget:
    return BandwidthBudget.model_validate(keys)


def test_a_budget_with_windows_holds_in_these_alone() -> None:
    window = {"schedule": "0 8 * * *", "timeZone": "UTC", "duration": "10h"}
    budget = _budget(uploadBytesPerSecond=1_000_000, windows=[window])
    assert budget.at(NOON) == BandwidthLimits(upload_bytes_per_second=1_000_000)
    assert budget.at(NOON + timedelta(hours=7)) == BandwidthLimits()
    assert _budget(downloadBytesPerSecond=200_000).at(NOON).download_bytes_per_second == 200_000


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"perNode": {"uploadBytesPerSecond": 1000}}, "perNode.uploadBytesPerSecond"),
        ({"perNode": {"uploadBytesPerSecond": -1}}, "perNode.uploadBytesPerSecond"),
        ({"perMover": {"downloadBytesPerSecond": "5M"}}, "perMover.downloadBytesPerSecond"),
        (
            {"perLocation": {"default": {"windows": [{"schedule": "x", "duration": "1h"}]}}},
            "perLocation.default.windows",
        ),
    ],
)
def test_an_invalid_value_is_named(value: object, error: str) -> None:
    (found,) = _errors(value)
    assert error in found


def test_without_the_key_there_are_no_budgets() -> None:
    parsed = parse_config("{}")
    assert parsed.config.own.budgets is None
    assert parse_config('{"nodeagent.io": {"bandwidth": {}}}').config.own.budgets == BandwidthKeys()
    assert _errors({"perNode": {"uploadBytesPerSecond": 0}}) == []

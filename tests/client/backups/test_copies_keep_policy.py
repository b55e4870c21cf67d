"""A policy of a schedule: its words, its annotation, and what is invalid."""

from datetime import timedelta

import pytest

from client.backups.copies import KeepPolicy, KeepRule, format_keep, parse_keep, ttl_of_keep
from core.errors import ConfigError

_POLICY = KeepPolicy({KeepRule.YEARLY: 1, KeepRule.DAILY: 7}, "Europe/Berlin")


def test_the_annotation_has_the_policy_and_the_time_to_live() -> None:
    text = format_keep(_POLICY, timedelta(days=2))
    assert text == "daily=7,yearly=1,zone=Europe/Berlin,ttl=48h0m0s"
    assert (parse_keep(text), ttl_of_keep(text)) == (_POLICY, "48h0m0s")
    assert ttl_of_keep(format_keep(_POLICY, None)) is ttl_of_keep("") is None


def test_words_and_text_have_one_order() -> None:
    assert _POLICY.argv == ["--keep-daily=7", "--keep-yearly=1", "--time-zone=Europe/Berlin"]
    assert KeepPolicy({KeepRule.LAST: 3}).argv == ["--keep-last=3"]
    assert list(_POLICY.by_name.items()) == [("daily", 7), ("yearly", 1)]


def test_without_a_count_there_is_no_policy() -> None:
    assert KeepPolicy.of(dict.fromkeys(KeepRule), "Mars") is None
    assert KeepPolicy.of({KeepRule.DAILY: 1, KeepRule.LAST: None}, "") == KeepPolicy({KeepRule.DAILY: 1})


@pytest.mark.parametrize(
    ("count", "zone", "error"),
    [(0, "", "--keep-daily: must be at least 1: 0"), (1, "Europe/Berln", "--time-zone: no time zone: Europe/Berln")],
    ids=["count", "zone"],
)
def test_an_invalid_policy_names_the_flag(count: int, zone: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        KeepPolicy.of({KeepRule.DAILY: count}, zone)


@pytest.mark.parametrize("text", ["", "ttl=1h", "daily", "daily=x", "daily=0", "daily=1,zone=Mars", "quarterly=1"])
def test_an_invalid_annotation_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_keep(text)

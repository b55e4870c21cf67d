"""Text for a terminal: nothing in it controls the terminal, and numbers are short."""

from datetime import timedelta

import pytest

from client.text import format_bytes, format_event, format_limits
from core.models.transfer_settings import BandwidthLimits
from core.text import format_age, one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä €", "plain ä €"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\rb\nc\td", r"a\rb\nc\td"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("evil\u202egpj", r"evil\u202egpj"),
        ("a\u200bb\u2028c\ufeff", r"a\u200bb\u2028c\ufeff"),
        ("\ud800 \U000e0041", r"\ud800 \U000e0041"),
    ],
    ids=["plain", "escape", "lines", "C1", "direction", "invisible", "surrogate"],
)
def test_what_is_not_printable_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text).isprintable()


def test_a_message_becomes_one_line_without_secrets() -> None:
    assert one_line("a\n  b\x1b https://u:secret@host") == r"a b\x1b https://u:***@host"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-5, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (7199, "119m"),
        (7200, "2h"),
        (172_799, "47h"),
        (172_800, "2d"),
    ],
)
def test_an_age_has_one_unit(seconds: float, shown: str) -> None:
    assert format_age(timedelta(seconds=seconds)) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**60, "1024.0 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_a_size_has_a_binary_unit(size: int, shown: str) -> None:
    assert format_bytes(size) == shown


@pytest.mark.parametrize(
    ("sent", "received", "shown"),
    [(0, 0, ""), (1_000_000, 0, "976.6 KiB/s sent"), (2**20, 2**30, "1.0 MiB/s sent, 1.0 GiB/s received")],
    ids=["none", "one", "both"],
)
def test_a_limit_of_the_bandwidth_names_its_directions(sent: int, received: int, shown: str) -> None:
    limits = BandwidthLimits(upload_bytes_per_second=sent, download_bytes_per_second=received)
    assert format_limits(limits) == shown


@pytest.mark.parametrize(
    ("reason", "message", "shown"),
    [
        ("Data-Path-Progress", '{"doneBytes":1024}', "1.0 KiB of 0 B, 0 B/s"),
        ("Data-Path-Completed", '{"snapshotID":"k1","totalBytes":2048}', "2.0 KiB moved"),
        ("Data-Path-Progress", "half", "half"),
        ("Data-Path-Failed", '{"doneBytes":1024}', '{"doneBytes":1024}'),
    ],
)
def test_the_json_of_a_data_mover_is_shown_in_words(reason: str, message: str, shown: str) -> None:
    assert format_event(reason, message) == shown

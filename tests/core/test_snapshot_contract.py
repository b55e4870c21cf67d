"""What data movers say about snapshots, as lines of their output."""

import pytest

from core.snapshot_contract import REPORTED_LINE, ReportedSnapshot, SnapshotVerdict


def test_a_reported_snapshot_is_one_line_without_control_characters() -> None:
    snapshot = ReportedSnapshot(
        id="a", verdict=SnapshotVerdict.UNKNOWN, reason="it has no tags", source="u@h:/\x1b[2J\x9b1m\u2028\n/ä", bytes=5
    )
    line = REPORTED_LINE.format(snapshot)
    assert line.isascii()
    assert line.isprintable()
    assert REPORTED_LINE.parse(f"{line}\n") == snapshot


@pytest.mark.parametrize(
    "line",
    [
        "",
        "level=info msg=started",
        '{"level": "info", "msg": "started"}',
        '{"nodeagent.io/reported-snapshot": {"id": "a"}}',
        '{"nodeagent.io/reported-snapshot": {"id": "a", "verdict": "maybe", "reason": ""}}',
        '["nodeagent.io/reported-snapshot"]',
    ],
)
def test_other_lines_of_a_log_have_no_snapshot(line: str) -> None:
    assert REPORTED_LINE.parse(line) is None

"""The output of a Job, as lines of its log: what is read back, and how a log that lacks lines is noticed."""

import io
import json
from collections.abc import Callable

import pytest

from core.errors import ContractError, ResultError
from core.models.job_output import JobOutput, read_output
from core.snapshot_contract import (
    CHECKED_LINE,
    DELETED_LINE,
    ENTRY_LINE,
    REPORTED_LINE,
    CheckedCopy,
    DeletedSnapshot,
    FileEntry,
    FileListing,
    FileType,
    ReportedSnapshot,
    SnapshotDeletion,
    SnapshotVerdict,
)
from tests.support.job_output import seal

_DELETED = [DeletedSnapshot(id=one, volume_namespace="app", backup="b", transfer_uid="u") for one in ("s1", "s2")]
_CHECKED = CheckedCopy(volume_namespace="app", snapshot_id="s3")
_NOISE = "time=1 level=info msg=begin\n"


def _write() -> tuple[str, str]:
    """Return the termination message and the log of a Job."""
    stream = io.StringIO()
    output = JobOutput(stream)
    stream.write(_NOISE)
    output.write(DELETED_LINE, _DELETED[0])
    stream.write(_NOISE)
    output.write(CHECKED_LINE, _CHECKED)
    output.write(DELETED_LINE, _DELETED[1])
    return output.seal(SnapshotDeletion(unread_count=2)), stream.getvalue()


def test_each_kind_of_objects_is_read_as_it_was_written_between_other_lines() -> None:
    message, log = _write()
    assert read_output(DELETED_LINE, message, log) == _DELETED
    assert read_output(CHECKED_LINE, message, log) == [_CHECKED]
    assert read_output(REPORTED_LINE, message, log) == []
    # The termination message still has the result.
    assert SnapshotDeletion.from_json(message) == SnapshotDeletion(unread_count=2)
    assert json.loads(message) == json.loads(seal(SnapshotDeletion(unread_count=2), *log.splitlines()))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda log: log[: log.rindex('{"nodeagent')], "its log was rotated or cut off: it has 2 of 3 results"),
        (lambda log: log[log.index("}\n") + 2 :], "its log was rotated or cut off: it has 2 of 3 results"),
        (lambda log: log[:-20], "its log has other results than the 3 that it wrote"),
        (lambda _: "", "its log was rotated or cut off: it has 0 of 3 results"),
        (lambda log: log.replace("s2", "s9"), "its log has other results than the 3 that it wrote"),
        (lambda log: f'{log}{{"nodeagent.io/forged":{{}}}}\n', "its log has other results than the 3 that it wrote"),
    ],
    ids=["end", "begin", "in a line", "all", "changed", "forged"],
)
def test_a_log_that_is_not_what_was_written_is_an_error(damage: Callable[[str], str], error: str) -> None:
    message, log = _write()
    with pytest.raises(ResultError, match=f"^{error}$"):
        read_output(DELETED_LINE, message, damage(log))


def test_a_result_that_is_none_or_not_counted_is_an_error() -> None:
    line = '{"nodeagent.io/deleted-snapshot":{"id":"s1"}}'
    with pytest.raises(ResultError, match="a result in its log is invalid: "):
        read_output(DELETED_LINE, seal(SnapshotDeletion(), line), line)
    with pytest.raises(ContractError, match="needs agents of version"):
        read_output(DELETED_LINE, SnapshotDeletion().to_json(), "")
    with pytest.raises(ContractError):
        read_output(DELETED_LINE, "out of memory", "")


def test_a_name_with_a_line_separator_adds_no_line() -> None:
    forged = ENTRY_LINE.format(FileEntry(name="forged", type=FileType.FILE))
    assert read_output(ENTRY_LINE, seal(FileListing(type=FileType.FILE)), f"cannot read a\u2028{forged}\n") == []


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

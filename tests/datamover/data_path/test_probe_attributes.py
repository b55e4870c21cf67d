"""Owner, mode and time of an entry, compared and set."""

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from core.models.base import JsonDict
from datamover.data_path.probe import Attribute, Attributes
from tests.datamover.support.mounts import need_root

_ENTRY = {"type": "f", "mode": "40000750", "uid": 1001, "gid": 1002, "mtime": "2020-09-13T12:26:40.123456789Z"}
_NS = 1_600_000_000_123_456_789


def _set(path: Path, attributes: Attributes, unset: Collection[str]) -> None:
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        for change in attributes.changes(path.name, fd, unset):
            change()
    finally:
        os.close(fd)


def test_what_differs_is_named_and_set(tmp_path: Path) -> None:
    need_root("owners")
    (file := tmp_path / "f").touch(0o600)
    os.utime(file, ns=(_NS - 3 * 10**9, _NS - 3 * 10**9))
    attributes = Attributes.of(_ENTRY)
    unset = attributes.find_unset(file.lstat())
    assert unset == {
        Attribute.OWNER: "owner 0:0 instead of 1001:1002",
        Attribute.MODE: "mode 600 instead of 4750",
        Attribute.TIME: "time 1599999997 instead of 1600000000",
    }
    _set(file, attributes, unset)
    assert attributes.find_unset(file.lstat()) == {}
    assert file.lstat().st_mtime_ns == _NS


def test_a_new_owner_takes_no_setuid_away(tmp_path: Path) -> None:
    need_root("owners")
    (file := tmp_path / "f").touch()
    file.chmod(0o4750)
    _set(file, Attributes.of(_ENTRY), {Attribute.OWNER})
    assert file.lstat().st_mode & 0o7777 == 0o4750


def test_a_link_is_not_followed_and_has_no_mode(tmp_path: Path) -> None:
    need_root("owners")
    (other := tmp_path / "other").touch(0o600)
    (link := tmp_path / "l").symlink_to("other")
    before = other.lstat()
    attributes = Attributes.of({**_ENTRY, "type": "s"})
    assert Attribute.MODE not in attributes.find_unset(link.lstat())
    _set(link, attributes, set(Attribute))
    # A tenant may replace a file by a link.
    _set(link, Attributes.of(_ENTRY), {Attribute.MODE})
    assert attributes.find_unset(link.lstat()) == {}
    assert other.lstat() == before


@pytest.mark.parametrize(
    ("entry", "root", "time_ns"),
    [
        ({"type": "d", "mtime": "1970-01-01T00:00:01Z", "summ": {"maxTime": "1970-01-01T00:00:02Z"}}, False, 2 * 10**9),
        ({"type": "d", "mtime": "1970-01-01T00:00:01Z", "summ": {"maxTime": "1970-01-01T00:00:02Z"}}, True, 10**9),
        ({"type": "f", "mtime": "1969-12-31T23:59:59.5Z"}, False, -500_000_000),
        ({"type": "f", "mtime": "30828-01-01T00:00:00Z"}, False, None),
        ({"type": "f"}, False, 0),
    ],
    ids=["directory", "root", "before 1970", "invalid", "absent"],
)
def test_the_time_is_the_one_that_kopia_sets(entry: JsonDict, root: bool, time_ns: int | None) -> None:
    assert Attributes.of(entry, root=root) == Attributes((0, 0), 0, time_ns)

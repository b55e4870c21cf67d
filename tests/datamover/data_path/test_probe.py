"""What a probe file shows of a target that does not keep what is set."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datamover.data_path.probe import Probe, probe_target
from datamover.kopia.snapshots import Snapshot
from tests.datamover.support.mounts import need_root

_SOUND = Probe(owner=True, mode=True, times=True, names=True, apart=True)


def _probe(target: Path, latest: str = "2020-09-13T12:26:40Z") -> Probe:
    root = {"uid": 1001, "gid": 1002, "summ": {"maxTime": latest}}
    found = probe_target(target, Snapshot("id", "s", "", "k", 0, 0, links=1, root_entry=root), lambda: False)
    assert not [*target.iterdir()]
    return found


def _failing(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def _nothing(*_: object, **__: object) -> None:
    """Pretend to set something."""


def test_a_file_system_of_linux_is_sound(tmp_path: Path) -> None:
    need_root("owners")
    # An attempt that was killed left it.
    (tmp_path / ".nodeagent-probe-ä").touch()
    assert _probe(tmp_path) == _SOUND
    assert _probe(tmp_path, "no time") == _SOUND
    assert _SOUND.sound


@pytest.mark.parametrize("name", [".nodeagent-probe-ä", ".nodeagent-probe-ä-link"])
def test_what_the_target_had_before_stays(tmp_path: Path, name: str) -> None:
    for text, link in (("theirs", None), (None, "elsewhere")):
        had = tmp_path / name
        had.symlink_to(link) if link else had.write_text(str(text))
        found = probe_target(tmp_path, Snapshot("id", "s", "", "k", 0, 0, links=1), lambda: False)
        assert not found.sound
        assert [*tmp_path.iterdir()] == [had]
        assert (str(had.readlink()) == link) if link else (had.read_text() == text)
        had.unlink()


@pytest.mark.parametrize(
    ("call", "wrong", "fails"),
    [
        ("fchown", _nothing, {"owner"}),
        ("fchown", _failing(errno.EPERM), {"owner"}),
        ("fchown", _failing(errno.EINVAL), {"owner", "refuses"}),
        ("fchmod", _nothing, {"mode"}),
        ("utime", _nothing, {"times"}),
        ("utime", _failing(errno.EOPNOTSUPP), {"times", "refuses"}),
        ("symlink", _failing(errno.EPERM), {"names", "refuses"}),
    ],
    ids=["owner pretended", "no owners", "owner unknown", "mode pretended", "time pretended", "no times", "no links"],
)
def test_what_is_refused_or_only_pretended_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, wrong: Callable[..., Any], fails: set[str]
) -> None:
    need_root("owners")
    monkeypatch.setattr(os, call, wrong)
    found = _probe(tmp_path)
    assert {name for name in ("owner", "mode", "times", "names") if not getattr(found, name)} == fails - {"refuses"}
    assert found.refuses == ("refuses" in fails)


@pytest.mark.parametrize(
    "same",
    [
        ".NODEAGENT-PROBE-Ä",
        ".NODEAGENT-PROBE-ä",
        ".nodeagent-probe-a\u0308",
        ".nodeagent-probe-ä.",
    ],
    ids=["case", "case of ASCII", "decomposed", "dot"],
)
def test_a_name_that_is_found_under_another_one_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: str
) -> None:
    need_root("owners")
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **more: stat(".nodeagent-probe-ä" if path == same else path, **more))
    assert _probe(tmp_path) == Probe(owner=True, mode=True, times=True, names=False)


def test_a_time_of_the_snapshot_that_the_target_cannot_keep_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_root("owners")
    utime, last = os.utime, 2**31 * 10**9
    monkeypatch.setattr(os, "utime", lambda fd, ns: utime(fd, ns=(min(ns[0], last), min(ns[1], last))))
    assert _probe(tmp_path).times
    assert not _probe(tmp_path, "2100-01-01T00:00:00Z").times


def test_nothing_is_known_of_a_target_that_takes_no_file(tmp_path: Path) -> None:
    assert not probe_target(tmp_path / "missing", Snapshot("id", "s", "", "k", 0, 0), lambda: False).sound


@pytest.mark.parametrize(("step_ns", "precision_ns"), [(1, 1), (100, 100), (10**9, 10**9), (7, 1)])
def test_a_target_that_cuts_times_has_their_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_ns: int, precision_ns: int
) -> None:
    utime = os.utime
    monkeypatch.setattr(os, "utime", lambda fd, ns: utime(fd, ns=(ns[0], ns[1] // step_ns * step_ns)))
    found = _probe(tmp_path)
    assert (found.precision_ns, found.times) == (precision_ns, True)

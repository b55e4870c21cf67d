"""Which incomplete snapshots a backup continues from, and which snapshots are deleted; with a kopia that only lists."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from core.errors import FencedError, KopiaError
from datamover.data_path.checkpoints import BackupAttempt, choose_checkpoints, inherit, remove_overtaken
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.snapshots import Checkpoint

_START: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)
_TARGET: Final = "default@default:some/volume"
_SOURCE: Final = {"userName": "default", "host": "default", "path": "some/volume"}
_DELETE: Final = ("snapshot", "delete")


def _at(seconds: float) -> datetime:
    return _START + timedelta(seconds=seconds)


def _listed(name: str, started: float, saved: float, **more: Any) -> dict[str, Any]:
    """Return a snapshot as kopia lists it: incomplete, unless `more` says otherwise."""
    times = {"startTime": _at(started).isoformat(), "endTime": _at(saved).isoformat()}
    root = {"obj": f"root of {name}", "summ": {"size": 10, "files": 1, "dirs": 1}}
    return {"id": name, "source": _SOURCE, "incomplete": "checkpoint", "rootEntry": root, **times, **more}


class _Lister:
    """Lists these snapshots, and notes what is deleted; the call that begins with `failing` fails."""

    def __init__(self, snapshots: Sequence[dict[str, Any]], failing: tuple[str, ...] = ()) -> None:
        self.snapshots = snapshots
        self.failing = failing
        self.calls: list[tuple[str, ...]] = []

    async def call(self, attempted: str, *arguments: str) -> KopiaAnswer:
        self.calls.append(arguments)
        code = 1 if self.failing and arguments[: len(self.failing)] == self.failing else 0
        return KopiaAnswer(attempted, code, json.dumps(self.snapshots).encode(), ["ERROR no access"] * code)

    @property
    def deleted(self) -> set[str]:
        return {name for call in self.calls if call[:2] == _DELETE for name in call[2:-1]}


def _says(alone: bool) -> Callable[[], Awaitable[bool]]:
    async def is_alone() -> bool:
        return alone

    return is_alone


async def _check() -> None:
    """Find no other attempt."""


_ATTEMPT: Final = BackupAttempt("u", 3, _says(True), _check, (_START, _at(3600)))
_TIMES: Final = {"a": (0.2, 600), "b": (0.2, 1200.5), "c": (0.2, 1200), "d": (3595, 4000), "e": (1800, 5000)}
_CHECKPOINTS: Final = [_listed(name, *times) for name, times in {**_TIMES, "f": (10.5, 5000)}.items()]
_COMPLETE: Final = _listed("z", -3600, -3000, incomplete="")


@pytest.mark.parametrize(("seconds", "chosen"), [(0, True), (10, True), (-10, True), (10.1, False), (-10.1, False)])
def test_a_checkpoint_is_an_attempts_own_if_it_began_within_ten_seconds(seconds: float, chosen: bool) -> None:
    checkpoints = [Checkpoint("a", _at(seconds), _at(600))]
    assert choose_checkpoints(checkpoints, [_START]) == ({"a"} if chosen else set())
    assert choose_checkpoints(checkpoints, []) == set()


async def test_the_last_checkpoint_of_each_earlier_attempt_is_kept() -> None:
    kopia = _Lister([_COMPLETE, *_CHECKPOINTS, _listed("parent", 0, 0, source={**_SOURCE, "path": "some"})])
    found = await inherit(kopia, _TARGET, _ATTEMPT)
    assert kopia.deleted == {"a", "c", "e", "f"}
    assert (found.continued, found.warning) == (True, None)
    assert found.latest is not None
    assert found.latest.root_object == "root of z"


async def _ask() -> bool:
    raise AssertionError("nothing to continue from")


@pytest.mark.parametrize(
    "attempt", [None, BackupAttempt("u", 1, _ask, _check), replace(_ATTEMPT, is_alone=_says(False))]
)
async def test_all_are_removed_without_a_start_or_beside_another_transfer(attempt: BackupAttempt | None) -> None:
    kopia = _Lister(_CHECKPOINTS)
    found = await inherit(kopia, _TARGET, attempt)
    assert kopia.deleted == set("abcdef")
    assert (found.latest, found.continued) == (None, False)
    assert found.warning == "removed 6 incomplete snapshots of earlier backups"


async def test_what_cannot_be_deleted_is_a_warning() -> None:
    found = await inherit(_Lister([_COMPLETE, *_CHECKPOINTS], _DELETE), _TARGET, _ATTEMPT)
    assert found.warning is not None
    assert found.warning.startswith("could not remove incomplete snapshots of earlier backups: ")
    assert found.latest is not None
    assert (found.latest.snapshot_id, found.continued, len(found.sizes)) == ("z", True, 1)


def _complete(name: str, attempt: str | None) -> dict[str, Any]:
    tags = {"tag:nodeagent.io/transfer-uid": "u"} | ({} if attempt is None else {"tag:nodeagent.io/attempt": attempt})
    return _listed(name, 0, 600, incomplete="", tags=tags)


async def test_a_complete_snapshot_of_an_earlier_attempt_is_continued_and_is_not_the_latest() -> None:
    """It has been seen by no agent: its node was lost."""
    found = await inherit(_Lister([_COMPLETE, _complete("first", "1")]), _TARGET, _ATTEMPT)
    assert found.latest is not None
    assert (found.latest.snapshot_id, found.continued, found.warning) == ("z", True, None)
    found = await inherit(_Lister([_complete("first", "1")]), _TARGET, replace(_ATTEMPT, uid="another"))
    assert found.latest is not None
    assert (found.latest.snapshot_id, found.continued) == ("first", False)


async def test_the_complete_snapshots_of_earlier_attempts_are_deleted_and_never_its_own_or_a_later_ones() -> None:
    """Also where it has been cut off from the API server: the fourth has the result of the transfer."""
    numbered = {"first": "1", "second": "2", "own": "3", "fourth": "4", "tenth": "10", "untagged": None, "odd": "2a"}
    kopia = _Lister([*(_complete(name, number) for name, number in numbered.items()), _listed("c", 0, 1)])
    assert await remove_overtaken(kopia, _TARGET, _ATTEMPT) is None
    assert kopia.calls[0][-1] == "--tags=nodeagent.io/transfer-uid:u"
    assert kopia.deleted == {"first", "second"}


async def test_an_attempt_that_was_overtaken_deletes_nothing() -> None:
    async def check() -> None:
        raise FencedError("another attempt (4) has begun")

    kopia = _Lister([_complete("second", "2"), _complete("own", "3")])
    with pytest.raises(FencedError):
        await remove_overtaken(kopia, _TARGET, replace(_ATTEMPT, check=check))
    assert kopia.calls == []


@pytest.mark.parametrize("failing", [("snapshot", "list"), _DELETE])
async def test_an_overtaken_snapshot_that_cannot_be_removed_is_a_warning(failing: tuple[str, ...]) -> None:
    warning = await remove_overtaken(_Lister([_complete("first", "1")], failing), _TARGET, _ATTEMPT)
    assert warning is not None
    assert warning.startswith("could not remove the snapshots of overtaken attempts: ")
    # Nothing is deleted where no attempt was overtaken; a failure of the listing fails a backup.
    kopia = _Lister([_complete("own", "3")])
    assert await remove_overtaken(kopia, _TARGET, _ATTEMPT) is None
    assert len(kopia.calls) == 1
    with pytest.raises(KopiaError, match="no access"):
        await inherit(_Lister(_CHECKPOINTS, ("snapshot", "list")), _TARGET, _ATTEMPT)

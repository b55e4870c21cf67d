"""Runs of kopia for the parts of a snapshot, into a target that refuses something."""

import json
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from core.errors import KopiaError
from datamover.data_path.parts import SKIP_EXISTING, SPARSE, Part, PartRestorer, Parts
from datamover.kopia.process import KopiaAnswer, KopiaFiles
from datamover.kopia.snapshots import Snapshot
from tests.datamover.support.data_paths import restore_data_path

_REFUSED = "ERROR error restoring: restore error: copy file: error creating file: open /t/a:b: invalid argument"
_DIRECTORY = json.dumps({"type": "d", "obj": "k1"})


def _restorer(target: Path, answers: Sequence[KopiaAnswer], **more: Any) -> tuple[PartRestorer, list[list[str]]]:
    """Return a restorer whose kopia gives these answers, and the arguments that it will get."""
    calls: list[list[str]] = []
    left = list(answers)

    async def run(attempt: Callable[[], Awaitable[KopiaAnswer]]) -> KopiaAnswer:
        return await attempt()

    async def move(_: object, __: str, *arguments: str, on_line: Callable[[str], None], **___: object) -> KopiaAnswer:
        calls.append([one.replace(str(target), "/t") for one in arguments[1:]])
        answer = left.pop(0)
        for line in answer.lines:
            on_line(line)
        return answer

    data_path = restore_data_path()
    data_path.run = move  # type: ignore[assignment,method-assign]  # kopia's place
    snapshot, repository = Snapshot("id", "s", "", "k", 2, 2), Mock(run=run)
    return PartRestorer(repository, snapshot, target, ["-f", SKIP_EXISTING], KopiaFiles(), data_path, **more), calls


def _answer(exit_code: int, *lines: str) -> KopiaAnswer:
    return KopiaAnswer("restore", exit_code, b"", list(lines))


async def test_a_refusal_is_ignored_by_a_second_kopia_and_by_those_of_later_parts(tmp_path: Path) -> None:
    answers = [_answer(1, _REFUSED), _answer(0, "ignored error open /t/a:b: invalid argument on a:b"), _answer(0)]
    restorer, calls = _restorer(tmp_path, answers)
    assert not restorer.refused
    await restorer.restore(Parts([Part("f", 1, 1), Part("g", 1, 1)]), 9)
    assert calls == [
        ["id/f", "/t/f", "-f", SKIP_EXISTING],
        # What the first one has left unfinished may look finished.
        ["id/f", "/t/f", "-f", "--ignore-errors"],
        ["id/g", "/t/g", "-f", SKIP_EXISTING, "--ignore-errors"],
    ]
    assert restorer.refused


async def test_a_target_that_is_known_to_refuse_needs_one_kopia(tmp_path: Path) -> None:
    restorer, calls = _restorer(tmp_path, [_answer(0)], tolerant=True)
    await restorer.restore(Parts([Part("", 1, 1)]), 9)
    assert calls == [["id", "/t", "-f", SKIP_EXISTING, "--ignore-errors"]]
    assert not restorer.refused


@pytest.mark.parametrize(
    ("answers", "tolerant"),
    [
        ([_answer(1, "ERROR error restoring: restore error: copy file: no space left on device")], False),
        ([_answer(0, "ignored error copy file: error creating file: open /t/f: no space left on device on f")], True),
        ([_answer(1, _REFUSED), _answer(1, "ERROR unable to open repository")], False),
    ],
    ids=["no refusal", "ignored, and no refusal", "the second kopia fails"],
)
async def test_any_other_error_ends_the_restore(tmp_path: Path, answers: Sequence[KopiaAnswer], tolerant: bool) -> None:
    restorer, calls = _restorer(tmp_path, answers, tolerant=tolerant)
    with pytest.raises(KopiaError):
        await restorer.restore(Parts([Part("", 1, 1)]), 9)
    assert len(calls) == len(answers)


@pytest.mark.parametrize(("block_bytes", "flags"), [(65536, [SPARSE]), (1 << 20, [])])
async def test_kopia_writes_holes_only_where_its_buffer_has_room_for_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, flags: list[str]
) -> None:
    """Else it would crash at the first file: with NFS, CephFS and ZFS."""
    blocks = {tmp_path.parent: block_bytes, tmp_path: 4096, tmp_path / "d": 4096}
    monkeypatch.setattr(os, "statvfs", lambda path: Mock(f_bsize=blocks[path]))
    restorer, calls = _restorer(tmp_path, [_answer(0), _answer(0)])
    restorer.flags = [SPARSE]
    await restorer.restore(Parts([Part("", 1, 1), Part("d/f", 1, 1)]), 9)
    assert calls == [["id", "/t", *flags], ["id/d/f", "/t/d/f", SPARSE]]


async def test_placeholders_are_made_for_each_kopia_and_none_stays(tmp_path: Path) -> None:
    """kopia removes a directory's once it has finished that, and no other one."""
    parts = [Part(f"{name}", 1, 1, _DIRECTORY) for name in ("d", "e", "no/such")]
    restorer, calls = _restorer(tmp_path, [_answer(1, _REFUSED), _answer(0)])
    await restorer.restore(Parts(parts), 9)
    assert [call[:2] for call in calls] == [["/t/d.kopia-entry", "/t/e.kopia-entry"]] * 2
    assert not [*tmp_path.iterdir()]
    # That of a directory which the target has refused cannot be made.
    assert restorer.refusals == 1


async def test_no_placeholder_stays_if_kopia_fails(tmp_path: Path) -> None:
    restorer, _ = _restorer(tmp_path, [_answer(1, "ERROR unable to open repository")])
    with pytest.raises(KopiaError):
        await restorer.restore(Parts([Part(name, 1, 1, _DIRECTORY) for name in "de"]), 9)
    assert not [*tmp_path.iterdir()]


async def test_no_kopia_runs_for_parts_whose_directory_was_refused(tmp_path: Path) -> None:
    restorer, calls = _restorer(tmp_path, [])
    await restorer.restore(Parts([Part(f"no/{name}", 1, 1, _DIRECTORY) for name in "de"]), 9)
    assert (calls, restorer.refusals) == ([], 2)

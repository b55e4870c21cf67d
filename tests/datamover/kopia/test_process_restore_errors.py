"""Which of kopia's errors mean that the target of a restore refused one entry."""

import pytest

from core.errors import KopiaError, StorageOutageError
from datamover.kopia.process import IgnoredErrors, KopiaAnswer, is_refusal

_FILE = "copy file: error creating file: "

_REFUSALS = {
    "name": f"{_FILE}open /t/12:13: invalid argument",
    "long name": f"{_FILE}open /t/x: file name too long",
    "directory": "create directory: error creating directory: mkdir /t/a: invalid argument",
    "link": "create symlink: error creating symlink: symlink a /t/l: operation not permitted",
    "another type": 'create symlink: unable to create symlink, "/t/l" already exists and is not a symlink',
    "owner": "copy file: error setting attributes: could not change owner/group for /t/f: invalid argument",
    "time": "finish directory: error setting attributes: could not change mod time on /t: chtimes /t: not supported",
    "size": f"{_FILE}truncate /t/f: file too large",
}
_OTHERS = {
    "full": f"{_FILE}open /t/f: no space left on device",
    "quota": f'{_FILE}cannot write data to file "/t/f": write /t/f: disk quota exceeded',
    "read-only": "create directory: error creating directory: mkdir /t/a: read-only file system",
    "disk": f"{_FILE}truncate /t/f: input/output error",
    "content": f'{_FILE}cannot write data to file "/t/f": unexpected content error: blob not found',
    "close": f"{_FILE}close /t/f: permission denied",
    "directory of the snapshot": "copy directory contents: error reading directory: unable to open object",
}


def _answer(line: str, exit_code: int = 1) -> KopiaAnswer:
    return KopiaAnswer("restore", exit_code, b"", ["Restoring to local filesystem (/t)...", line])


@pytest.mark.parametrize("error", _REFUSALS.values(), ids=_REFUSALS)
def test_others_can_be_restored_after_a_refusal(error: str) -> None:
    assert is_refusal(_answer(f"ERROR error restoring: restore error: {error}"))
    ignored = IgnoredErrors()
    ignored.take(f"ignored error {error} on f")
    ignored.check(_answer("Restored 1 files", 0))
    named = None if "error setting attributes" in error else f"{error} on f"
    assert (ignored.count, ignored.first) == (1, named)


@pytest.mark.parametrize("error", _OTHERS.values(), ids=_OTHERS)
def test_an_error_of_the_repository_or_of_the_whole_target_ends_the_restore(error: str) -> None:
    assert not is_refusal(_answer(f"ERROR error restoring: restore error: {error}"))
    ignored = IgnoredErrors()
    for line in ("restored something", f"ignored error {_REFUSALS['name']} on f", f"ignored error {error} on g"):
        ignored.take(line)
    with pytest.raises(KopiaError, match=r"^restore: .*\n"):
        ignored.check(_answer("Restored 1 files", 0))
    assert ignored.count == 2


def test_what_is_no_error_of_an_entry_is_no_refusal() -> None:
    assert not is_refusal(_answer("ERROR unable to get filesystem entry: open /x: invalid argument"))
    assert not is_refusal(_answer(f"ERROR error restoring: restore error: {_REFUSALS['name']}", -9))
    assert not is_refusal(_answer(f"ERROR error restoring: restore error: {_REFUSALS['name']}", 0))


def test_a_storage_that_does_not_answer_lets_another_attempt_follow() -> None:
    ignored = IgnoredErrors()
    ignored.take(f'ignored error {_FILE}cannot write data to file "/t/f": dial tcp: connection refused on f')
    with pytest.raises(StorageOutageError):
        ignored.check(_answer("Restored 1 files", 0))

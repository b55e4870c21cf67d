"""What the end of a kopia means: another attempt may avoid it, or the target of a restore refused one entry."""

import json
import os
from pathlib import Path

import pytest

from core.errors import KopiaCrashError, KopiaError, RepositoryError, StorageOutageError
from core.redact import Redactor
from datamover.kopia.process import IgnoredErrors, Kopia, KopiaAnswer, KopiaTimeoutError, is_refusal

_REFUSED = "dial tcp 10.0.0.1:9000: connect: connection refused"
_GOROUTINE = "goroutine 7 gp=0xc0001 m=4 mp=0xc00a [running]:"


def _error(exit_code: int, *lines: str, cause: str = "") -> KopiaError:
    return KopiaAnswer("back up /volume", exit_code, b"", list(lines)).error(cause)


@pytest.mark.parametrize(
    ("error", "kind", "shown"),
    [
        (_error(-9), KopiaCrashError, "kopia was killed by signal 9"),
        (_error(-7, _REFUSED), KopiaCrashError, "kopia was killed by signal 7"),
        (_error(2, "panic: no", _GOROUTINE), KopiaCrashError, "kopia crashed: panic: no"),
        (_error(2, _GOROUTINE), KopiaCrashError, "kopia exited with code 2"),
        (_error(2, "no"), KopiaError, "kopia exited with code 2"),
        (_error(-13, cause="cannot write to the device"), KopiaError, "cannot write to the device"),
        (_error(1, "Access Denied", _REFUSED), KopiaError, "the credentials have no access"),
        (_error(1, "invalid repository password"), KopiaError, "the repository password does not match"),
        (_error(0, _REFUSED, cause="read 1 of the device's 2 bytes"), KopiaError, "read 1 of the device's 2 bytes"),
    ],
)
def test_the_class_of_an_error_says_if_kopia_crashed(error: KopiaError, kind: type[KopiaError], shown: str) -> None:
    assert type(error) is kind
    assert str(error).splitlines()[0] == f"back up /volume: {shown}"


@pytest.mark.parametrize("path", ["/a", "/a\nb", "/a\n{", "/a\n[]", "/a\u0085b", "/a\u2028b"], ids=ascii)
def test_a_document_follows_comments_with_any_path(path: str) -> None:
    output = f"// id: k1\n// label path:{path}\n" + json.dumps({"path": path, "more": []}, indent=1, ensure_ascii=False)
    assert KopiaAnswer("show", 0, output.encode()).document() == {"path": path, "more": []}


def test_a_storage_that_kopia_gave_up_is_an_outage_and_a_file_with_such_a_name_is_none() -> None:
    """kopia retries for a minute in a restore, less than the stall timeout."""
    error = _error(1, _REFUSED)
    assert isinstance(error, StorageOutageError)
    assert isinstance(error, RepositoryError)
    assert error.exit_code == StorageOutageError.exit_code
    assert str(error) == f"back up /volume: the endpoint cannot be reached\n{_REFUSED}"
    line = "open /volume/connection refused: permission denied"
    error = KopiaAnswer("back up /volume", 1, b"", [line], volume="/volume").error()
    assert type(error) is KopiaError
    assert str(error) == f"back up /volume: permission denied\n{line}"


def _kopia(folder: Path, script: str) -> Kopia:
    """Return a kopia that runs a script of the shell."""
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    return Kopia({"PATH": os.environ["PATH"]}, Redactor(), program=str(program))


@pytest.mark.processes
async def test_the_cause_of_a_panic_is_kept_and_its_stacks_are_not(tmp_path: Path) -> None:
    stacks = f"for n in $(seq 100); do echo '{_GOROUTINE}'; echo main.go:$n; done"
    answer = await _kopia(tmp_path, f"( echo before; echo panic: no; {stacks} ) >&2\nexit 2\n").call("list", "snapshot")
    assert answer.crashed
    assert answer.lines == ["before", "panic: no", _GOROUTINE]
    # A call that has to hurry is killed a time after its line.
    kopia = _kopia(tmp_path, "echo early >&2\necho now writing >&2\nexec sleep 60\n")
    with pytest.raises(KopiaTimeoutError) as late:
        await kopia.call("create", "repository", hurry=("now", 0.1))
    assert late.value.lines == ["early", "now writing"]


_FILE = "copy file: error creating file: "

_REFUSALS = {
    "name": f"{_FILE}open /t/12:13: invalid argument",
    "long name": f"{_FILE}open /t/x: file name too long",
    "directory": "create directory: error creating directory: mkdir /t/a: invalid argument",
    "link": "create symlink: error creating symlink: symlink a /t/l: operation not permitted",
    "another type": 'create symlink: unable to create symlink, "/t/l" already exists and is not a symlink',
    "owner": "copy file: error setting attributes: could not change owner/group for /t/f: invalid argument",
    "time": "finish directory: error setting attributes: could not change mod time on /t: chtimes /t: not supported",
    "name of a placeholder": "copy file: unlinkat /t/f.kopia-entry: file name too long",
    "size": f"{_FILE}truncate /t/f: file too large",
    "name like an error": f"{_FILE}open /t/error setting attributes: operation not permitted",
}
_RESTORED = ("owner", "time", "name of a placeholder")
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


@pytest.mark.parametrize("kind", _REFUSALS)
def test_others_can_be_restored_after_a_refusal(kind: str) -> None:
    error = _REFUSALS[kind]
    assert is_refusal(_answer(f"ERROR error restoring: restore error: {error}"))
    ignored = IgnoredErrors()
    ignored.take(f"ignored error {error} on f")
    ignored.check(_answer("Restored 1 files", 0))
    named = None if kind in _RESTORED else f"{error} on f"
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
    for exit_code in (-9, 0):
        assert not is_refusal(_answer(f"ERROR error restoring: restore error: {_REFUSALS['name']}", exit_code))
    # A storage that does not answer lets another attempt follow.
    ignored = IgnoredErrors()
    ignored.take(f'ignored error {_FILE}cannot write data to file "/t/f": dial tcp: connection refused on f')
    with pytest.raises(StorageOutageError):
        ignored.check(_answer("Restored 1 files", 0))

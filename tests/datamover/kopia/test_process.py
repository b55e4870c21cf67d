"""What the end of a kopia means: whether another attempt may avoid it."""

import json
import os
from pathlib import Path

import pytest

from core.errors import KopiaCrashError, KopiaError, RepositoryError, StorageOutageError
from core.redact import Redactor
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaTimeoutError

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
def test_the_class_of_an_error_says_whether_kopia_crashed(
    error: KopiaError, kind: type[KopiaError], shown: str
) -> None:
    assert type(error) is kind
    assert str(error).splitlines()[0] == f"back up /volume: {shown}"


@pytest.mark.parametrize("path", ["/a", "/a\nb", "/a\n{", "/a\n[]", "/a\u0085b", "/a\u2028b"], ids=ascii)
def test_a_document_follows_comments_with_any_path(path: str) -> None:
    output = f"// id: k1\n// label path:{path}\n" + json.dumps({"path": path, "more": []}, indent=1, ensure_ascii=False)
    assert KopiaAnswer("show", 0, output.encode()).document() == {"path": path, "more": []}


def test_a_storage_that_kopia_gave_up_is_an_outage() -> None:
    """kopia retries for a minute in a restore, less than the stall timeout."""
    error = _error(1, _REFUSED)
    assert isinstance(error, StorageOutageError)
    assert isinstance(error, RepositoryError)
    assert error.exit_code == StorageOutageError.exit_code
    assert str(error) == f"back up /volume: the endpoint cannot be reached\n{_REFUSED}"


def test_a_file_that_cannot_be_read_is_no_outage_whatever_its_name_is() -> None:
    line = "open /volume/connection refused: permission denied"
    error = KopiaAnswer("back up /volume", 1, b"", [line], volume="/volume").error()
    assert type(error) is KopiaError
    assert str(error) == f"back up /volume: permission denied\n{line}"


@pytest.mark.processes
async def test_the_cause_of_a_panic_is_kept_and_its_stacks_are_not(tmp_path: Path) -> None:
    program = tmp_path / "program"
    stacks = f"for n in $(seq 100); do echo '{_GOROUTINE}'; echo main.go:$n; done"
    program.write_text(f"#!/bin/sh\n( echo before; echo panic: no; {stacks} ) >&2\nexit 2\n")
    program.chmod(0o755)
    answer = await Kopia({"PATH": os.environ["PATH"]}, Redactor(), program=str(program)).call("list", "snapshot")
    assert answer.crashed
    assert answer.lines == ["before", "panic: no", _GOROUTINE]


@pytest.mark.processes
async def test_a_call_that_has_to_hurry_is_killed_a_time_after_its_line(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho early >&2\necho now writing >&2\nexec sleep 60\n")
    program.chmod(0o755)
    kopia = Kopia({"PATH": os.environ["PATH"]}, Redactor(), program=str(program))
    with pytest.raises(KopiaTimeoutError) as late:
        await kopia.call("create", "repository", hurry=("now", 0.1))
    assert late.value.lines == ["early", "now writing"]

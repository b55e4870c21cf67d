"""Calls of a kopia with scripted answers: what is repeated, for how long, what is reported, what requests take."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from core.errors import KopiaCrashError, StorageOutageError
from core.redact import Redactor
from datamover.kopia.creation import CHECKED, OTHER_REPOSITORY
from datamover.kopia.process import Kopia, KopiaAnswer
from datamover.kopia.repository import Repository, RepositoryAddress
from datamover.kopia.stalls import StallLimits
from datamover.kopia.storage_calls import RequestTime, WaitReporter, Waits, parse_request_seconds
from datamover.runtime.work_dir import WorkDir
from datamover.storage.s3 import AwsKeys, S3Storage
from tests.support.clock import LoopClock

_REFUSED = "failed to open repository: cannot open storage: dial tcp 10.0.0.1:9000: connect: connection refused"
_KEYS = AwsKeys("key", "secret")
_BUSY = "unable to open repository: Please reduce your request rate."


class _ScriptedKopia(Kopia):
    """Fails with the given lines of output, one for each call, then succeeds; the last line may be repeated forever."""

    def __init__(self, *lines: str, forever: bool = False) -> None:
        super().__init__({}, Redactor())
        self.lines = list(lines)
        self.forever = forever
        self.seconds = 0.0
        self.verbs: list[str] = []
        self.on_call: Callable[[], None] = lambda: None

    async def call(self, attempted: str, *arguments: str, **_: Any) -> KopiaAnswer:
        self.verbs.append(" ".join(one for one in arguments[:3] if not one.startswith("-")))
        self.on_call()
        await asyncio.sleep(self.seconds)
        line = self.lines[0] if self.lines else ""
        if not self.forever:
            self.lines = self.lines[1:]
        return KopiaAnswer(attempted, 1 if line else 0, b'{"uniqueIDHex": "0a"}', [line] if line else [])


class _KilledKopia(_ScriptedKopia):
    """The kernel kills each call, for lack of memory."""

    async def call(self, attempted: str, *_: str, **__: object) -> KopiaAnswer:
        return KopiaAnswer(attempted, -9, b"", out_of_memory=True)


class _Reports(WaitReporter):
    """Notes each report and its kind."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []

    async def waiting(self, message: str) -> None:
        self.all.append(("waiting", message))

    async def ready(self, message: str) -> None:
        self.all.append(("ready", message))

    async def warn(self, message: str) -> None:
        self.all.append(("warning", message))


@pytest.fixture
def reports() -> _Reports:
    return _Reports()


def _open(
    kopia: Kopia,
    folder: Path,
    reports: _Reports,
    timeout: timedelta = timedelta(minutes=10),
    keys: AwsKeys | None = _KEYS,
) -> Repository:
    storage, work_dir = S3Storage("b", "r/", keys=keys), WorkDir(folder, folder / "kopia-cache")
    waits = Waits(LoopClock(), StallLimits(timeout), reports)
    return Repository(kopia, RepositoryAddress("repository r", storage), work_dir, waits=waits)


async def _list(kopia: Kopia, folder: Path, reports: _Reports, timeout: timedelta = timedelta(minutes=10)) -> bool:
    """Make a call, and return whether it succeeded."""
    return (await _open(kopia, folder, reports, timeout).call("list", "snapshot", "list")).succeeded


@pytest.mark.looptime
async def test_a_call_is_repeated_until_the_storage_answers(tmp_path: Path, reports: _Reports) -> None:
    kopia = _ScriptedKopia(_REFUSED, _REFUSED, _BUSY)
    assert await _list(kopia, tmp_path, reports)
    assert kopia.verbs == ["snapshot list"] * 4
    assert reports.all == [
        ("waiting", "repository r does not answer, will retry: the endpoint cannot be reached"),
        ("waiting", "repository r does not answer, will retry: the storage is busy"),
        ("ready", "repository r answers"),
    ]


@pytest.mark.looptime
async def test_a_storage_that_never_answers_fails_the_call_after_the_timeout(tmp_path: Path, reports: _Reports) -> None:
    started = LoopClock().monotonic()
    error = r"^repository r did not answer for 10m\d+s: the endpoint cannot be rea.*: f"
    with pytest.raises(StorageOutageError, match=error):
        await _list(_ScriptedKopia(_REFUSED, forever=True), tmp_path, reports)
    assert LoopClock().monotonic() - started == pytest.approx(600, abs=20)
    assert len(reports.all) == 1
    # A part of a second before, a call is repeated.
    kopia = _ScriptedKopia(_REFUSED)
    kopia.seconds = 6.6
    assert await _list(kopia, tmp_path, reports, timedelta(seconds=7))


@pytest.mark.looptime
async def test_no_storage_is_awaited_that_is_at_another_address(tmp_path: Path, reports: _Reports) -> None:
    """Without a timeout either; the location is not read again after each failure."""
    storage, work_dir = S3Storage("b", "r/", keys=_KEYS), WorkDir(tmp_path, tmp_path / "kopia-cache")
    find_change = AsyncMock(side_effect=[None, "edited"])
    waits = Waits(LoopClock(), StallLimits(timedelta(0)), reports, find_change)
    kopia = _ScriptedKopia(_REFUSED, forever=True)
    repository = Repository(kopia, RepositoryAddress("repository r", storage), work_dir, waits=waits)
    with pytest.raises(StorageOutageError, match=r"^repository r did not answer for \d+s: edited: the endpoint cannot"):
        await repository.call("list", "snapshot", "list")
    assert len(kopia.verbs) == 8


@pytest.mark.looptime
async def test_an_attempt_that_fills_the_cache_restarts_the_timeout(tmp_path: Path, reports: _Reports) -> None:
    """Not one that only reads again what an earlier one has read."""
    indexes = tmp_path / "kopia-cache" / "indexes"
    indexes.mkdir(parents=True)
    kopia = _ScriptedKopia(_REFUSED, forever=True)

    def read_an_index_for_an_hour() -> None:
        if LoopClock().monotonic() < 3600:
            (indexes / str(len(kopia.verbs))).touch()

    kopia.on_call = read_an_index_for_an_hour
    with pytest.raises(StorageOutageError, match="did not answer for 10m"):
        await _list(kopia, tmp_path, reports)
    assert LoopClock().monotonic() == pytest.approx(4200, abs=40)


@pytest.mark.parametrize("line", ["Access Denied", "invalid repository password", "something else"])
async def test_any_other_failure_is_not_repeated(tmp_path: Path, reports: _Reports, line: str) -> None:
    kopia = _ScriptedKopia(line, forever=True)
    assert not await _list(kopia, tmp_path, reports)
    assert kopia.verbs == ["snapshot list"]
    assert reports.all == []


@pytest.mark.looptime
@pytest.mark.parametrize(("denials", "succeeds"), [(2, True), (3, False)])
async def test_an_identity_that_is_denied_access_is_tried_again(
    tmp_path: Path, reports: _Reports, denials: int, *, succeeds: bool
) -> None:
    """kopia continues without keys if their service does not answer at once."""
    kopia = _ScriptedKopia(*["Access Denied"] * denials)
    repository = _open(kopia, tmp_path, reports, keys=None)
    assert (await repository.call("list", "snapshot", "list")).succeeded is succeeds
    assert len(kopia.verbs) == 3
    kind, message = reports.all[0]
    assert kind == "waiting"
    assert message.endswith(": the credentials have no access, or the service that grants it does not answer")


@pytest.mark.looptime
async def test_a_failed_upload_of_a_new_repository_is_repeated(tmp_path: Path, reports: _Reports) -> None:
    """The storage may have it all the same, or another process's."""
    none, empty, other = "repository not initialized", CHECKED, OTHER_REPOSITORY
    kopia = _ScriptedKopia(none, "", "", empty, _REFUSED, _BUSY, other)
    kopia.on_call = partial(_write_repository, tmp_path / "new-repository")
    assert await _open(kopia, tmp_path, reports).ensure() == "0a"
    connect, status = "repository connect", "repository status"
    assert kopia.verbs[2:4] == ["repository create filesystem", "repository create"]
    assert kopia.verbs[4:] == [*["repository sync-to from-config"] * 3, connect, status, "maintenance set"]


def _write_repository(folder: Path) -> None:
    """Write what kopia does for a new repository, with the unique ID of the scripted answers."""
    folder.mkdir(exist_ok=True)
    (folder / "kopia.blobcfg.f").touch()
    (folder / "kopia.repository.f").write_text('{"uniqueID": "Cg=="}')


@pytest.mark.looptime
async def test_a_data_path_is_repeated_only_if_the_repository_was_not_opened(tmp_path: Path, reports: _Reports) -> None:
    kopia = _ScriptedKopia(_REFUSED, _BUSY)
    repository = _open(kopia, tmp_path, reports)

    async def move() -> KopiaAnswer:
        return await kopia.call("back up", "snapshot", "create")

    answer = await repository.run(move)
    assert answer.lines == [_BUSY]
    assert kopia.verbs == ["snapshot create"] * 2


async def test_a_killed_kopia_is_no_fault_of_the_repository(tmp_path: Path, reports: _Reports) -> None:
    with pytest.raises(KopiaCrashError, match=r"^repository r: kopia was killed by the node's kernel: out of memory$"):
        await _open(_KilledKopia(), tmp_path, reports).connect()


async def test_too_many_index_blobs_are_reported_once(tmp_path: Path, reports: _Reports) -> None:
    kopia = _ScriptedKopia("Found too many index blobs (2001), this may result in degraded performance.", forever=True)
    repository = _open(kopia, tmp_path, reports)
    for _ in range(2):
        await repository.call("list", "snapshot", "list")
    ((kind, message),) = reports.all
    assert kind == "warning"
    assert message.startswith("repository r has 2001 index blobs")
    assert "kopia maintenance run --full" in message


def _counters(downloaded_ms: float, downloads: int, listed_ms: float, lists: int) -> str:
    name, values = "kopia_blob_storage_latency_ms", {"Close": (0.001, 1), "GetBlob-full": (downloaded_ms, downloads)}
    values["ListBlobs"] = (listed_ms, lists)
    lines = [f"# TYPE {name} histogram", f'{name}_bucket{{method="ListBlobs",le="0.5"}} 0']
    for method, (sum_ms, count) in values.items():
        lines += [f'{name}_sum{{method="{method}"}} {sum_ms}', f'{name}_count{{method="{method}"}} {count}']
    return "\n".join([*lines, ""])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (_counters(142.5, 3, 169.2, 3), 0.0475),
        # Of large index blobs.
        (_counters(9000, 3, 126, 3), 0.042),
        (_counters(0, 0, 126, 3), 0.042),
        (_counters(0, 0, 0, 0), None),
        ("", None),
    ],
)
def test_a_request_takes_what_lists_or_downloads_took_on_average(text: str, seconds: float | None) -> None:
    assert parse_request_seconds(text) == (seconds if seconds is None else pytest.approx(seconds))


def _run(time: RequestTime, text: str | None) -> list[str]:
    """Run a call of kopia that writes the text as its metrics; None: it was killed."""
    with time.measuring() as flags:
        if flags and text is not None:
            folder = Path(flags[1].removeprefix("--diagnostics-output-directory=")) / "a-call"
            folder.mkdir()
            (folder / "kopia-metrics.prom").write_text(text)
    return flags


def test_the_first_call_that_makes_requests_is_measured(tmp_path: Path) -> None:
    time = RequestTime(tmp_path)
    for killed in (None, "", _counters(0, 0, 0, 0)):
        assert _run(time, killed)[0] == "--metrics-store-on-exit"
        assert time.seconds == 0.0
    assert _run(time, _counters(84, 2, 0, 0))
    assert _run(time, _counters(2, 2, 0, 0)) == []
    assert time.seconds == pytest.approx(0.042)
    assert not list(tmp_path.iterdir())


def test_calls_at_the_same_time_are_measured_apart(tmp_path: Path) -> None:
    time = RequestTime(tmp_path)
    with time.measuring() as first:
        assert _run(time, _counters(84, 2, 0, 0))[1] != first[1]
        folder = Path(first[1].removeprefix("--diagnostics-output-directory="))
        (folder / "kopia-metrics.prom").write_text(_counters(82, 2, 0, 0))
    assert time.seconds == pytest.approx(0.041)
    # Nor is one without room for files.
    time = RequestTime(tmp_path / "missing")
    assert _run(time, None) == []
    assert time.seconds == 0.0

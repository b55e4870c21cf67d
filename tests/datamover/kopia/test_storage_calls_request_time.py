from pathlib import Path

import pytest

from datamover.kopia.storage_calls import RequestTime, parse_request_seconds

_TEXT = """# TYPE kopia_blob_storage_latency_ms histogram
kopia_blob_storage_latency_ms_bucket{{method="ListBlobs",le="0.5"}} 0
kopia_blob_storage_latency_ms_sum{{method="Close"}} 0.001
kopia_blob_storage_latency_ms_count{{method="Close"}} 1
kopia_blob_storage_latency_ms_sum{{method="GetBlob-full"}} {downloaded_ms}
kopia_blob_storage_latency_ms_count{{method="GetBlob-full"}} {downloads}
kopia_blob_storage_latency_ms_sum{{method="ListBlobs"}} {listed_ms}
kopia_blob_storage_latency_ms_count{{method="ListBlobs"}} {lists}
"""


def _counters(downloaded_ms: float, downloads: int, listed_ms: float, lists: int) -> str:
    return _TEXT.format(downloaded_ms=downloaded_ms, downloads=downloads, listed_ms=listed_ms, lists=lists)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        pytest.param(_counters(142.5, 3, 169.2, 3), 0.0475, id="downloads took less"),
        pytest.param(_counters(9000, 3, 126, 3), 0.042, id="large index blobs"),
        pytest.param(_counters(0, 0, 126, 3), 0.042, id="no downloads"),
        pytest.param(_counters(0, 0, 0, 0), None, id="no requests"),
        pytest.param("", None, id="nothing"),
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


def test_a_call_without_room_for_files_is_not_measured(tmp_path: Path) -> None:
    time = RequestTime(tmp_path / "missing")
    assert _run(time, None) == []
    assert time.seconds == 0.0

"""Progress in local mode: a bar on a terminal, lines elsewhere."""

import io

import pytest

from core.clock import SystemClock
from core.contract import ProgressMessage
from datamover.local.command import ProgressBar, format_bytes

_HALF = ProgressMessage(total_bytes=4_000_000_000, done_bytes=2_000_000_000, bytes_per_second=100_000_000)
_TEXT = "2.0 GB of 4.0 GB, 50 %, 100.0 MB/s, 20 s left"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_written_where_there_is_no_terminal() -> None:
    ProgressBar(stream := io.StringIO(), SystemClock()).draw(_HALF, last=True)
    assert stream.getvalue() == f"{_TEXT}\n"


def test_a_terminal_gets_one_line_that_is_drawn_again_and_ended() -> None:
    bar = ProgressBar(stream := _Terminal(), SystemClock())
    bar.draw(ProgressMessage(done_bytes=7))
    bar.draw(_HALF)
    bar.draw(ProgressMessage(total_bytes=1000, done_bytes=1000), last=True)
    drawn = stream.getvalue().split("\r\x1b[K")[1:]
    assert drawn == [
        f"[{' ' * 30}] 7 B",
        f"[{'#' * 15}{'.' * 15}] {_TEXT}",
        f"[{'#' * 30}] 1.0 KB of 1.0 KB, 100 %\n",
    ]


@pytest.mark.parametrize(("count", "text"), [(999, "999 B"), (1000, "1.0 KB"), (1.2e18, "1200.0 PB")])
def test_bytes_have_a_unit_of_their_size(count: float, text: str) -> None:
    assert format_bytes(count) == text

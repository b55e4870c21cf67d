"""A command whose terminal or shell ends still removes what it has made."""

import asyncio
import os
import pty
import signal
from collections.abc import Iterator

import click
import pytest

from client.cli.options import confirm
from client.cli.user_commands import interrupted_by_signals


@pytest.fixture(autouse=True)
def _in_a_terminal() -> Iterator[None]:
    """The tests themselves may run below nohup, or in the background."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL), signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip((signal.SIGHUP, signal.SIGINT), before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_command_which_cleans_up(number: signal.Signals, background: bool) -> None:
    cleaned = []
    if background:
        # As a shell without job control starts it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def command() -> None:
        try:
            signal.raise_signal(number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(number)

    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        asyncio.run(command())
    assert cleaned == [number]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_ctrl_c_at_a_question_ends_the_command_which_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = []

    def ask(_: str) -> str:
        signal.raise_signal(signal.SIGINT)
        return "y"

    async def command() -> None:
        try:
            confirm("Restore?", "nothing was restored")
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    monkeypatch.setattr(click.termui, "visible_prompt_func", ask)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(command())
    assert cleaned
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_below_nohup_a_command_continues() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupted_by_signals():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_after_a_hang_up_nothing_is_written_to_the_terminal() -> None:
    ours, theirs = pty.openpty()
    kept = os.dup(2)
    os.dup2(theirs, 2)
    try:
        with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert os.ttyname(theirs)
        assert not os.isatty(2)
    finally:
        os.dup2(kept, 2)
        for fd in (ours, theirs, kept):
            os.close(fd)

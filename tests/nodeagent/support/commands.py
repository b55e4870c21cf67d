"""Runs commands for users against a fake API server, at noon."""

import asyncio
from dataclasses import dataclass

import pytest

from nodeagent.cli.main import main
from nodeagent.runtime import connection
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.fakekube import FakeKube

__all__ = ["Done", "Shell", "open_shell"]


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Shell:
    """Runs commands."""

    capsys: pytest.CaptureFixture[str]

    def run(self, *words: str) -> Done:
        code = main(list(words))
        captured = self.capsys.readouterr()
        return Done(code, captured.out, captured.err)


class _HastyClock(HandClock):
    """Sleeps no longer than others need to go on: retries are not waited for."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


def open_shell(kube: FakeKube, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return a shell whose commands reach the server, whatever kubeconfig they name."""

    async def load(*_: object) -> tuple[FakeKube, str]:
        return kube, ""

    monkeypatch.setattr(connection, "load_transport", load)
    monkeypatch.setattr(connection, "SystemClock", _HastyClock)
    monkeypatch.delenv("VELERO_NAMESPACE", raising=False)
    return Shell(capsys)

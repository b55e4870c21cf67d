"""Runs commands for users against a fake API server, at noon."""

import asyncio
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import click
import msgspec
import pytest

from client import session
from client.cli import collection_commands, restore
from core.clock import Clock
from core.kube.transport import Transport
from nodeagent.__main__ import main
from nodeagent.runtime import connection
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.golden import assert_golden


class Done(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str


@dataclass
class Shell:
    """Runs commands, whose first words are always `begin`."""

    capsys: pytest.CaptureFixture[str]
    begin: tuple[str, ...] = ()

    def run(self, *words: str) -> Done:
        code = main([*self.begin, *words])
        captured = self.capsys.readouterr()
        return Done(code, captured.out, captured.err)

    def tell(self, *words: str) -> str:
        """Run a command; return its line, what it printed and its exit code, as a golden text has them."""
        done = self.run(*words)
        return mask(f"$ nodeagent {shlex.join(words)}\n{done.out}{done.err}exit code: {done.code}\n")


def mask(text: str) -> str:
    """Return the text with placeholders for what differs from run to run."""
    return re.sub(
        r"\b(?:[0-9a-f]{8}){1,2}\b", "HASH", re.sub(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UID", text)
    )


def assert_document(name: str, model: Any, text: str) -> None:
    """Compare a document and its schema with their golden files: what reads the document loses nothing of it."""
    found = json.loads(text)
    assert_golden(f"cli/{name}-schema", json.loads(json.dumps(msgspec.json.schema(model))))
    assert json.loads(model.from_json(text).to_json()) == found
    assert_golden(f"cli/{name}", found)


class FakeTerminal(io.StringIO):
    """What a command takes for a terminal."""

    def isatty(self) -> bool:
        return True


def walk_commands(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield the command, or each one of the group and of the groups below it, with the words that call it."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from walk_commands(found, f"{path} {name}".strip())
    else:
        yield path, command


class _HastyClock(HandClock):
    """Sleeps no longer than others need to go on: retries are not waited for."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class _Scene(Protocol):
    """What has a server."""

    kube: Any


_S = TypeVar("_S", bound=_Scene)


@dataclass
class SceneShell(Shell, Generic[_S]):
    """Runs commands against the scene."""

    scene: _S = field(kw_only=True)


def open_scene(
    scene: _S,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *begin: str,
    clock: Callable[[], Clock] = HandClock,
) -> SceneShell[_S]:
    """Return a shell whose commands reach the server that the scene has then, and have that clock."""
    reach(lambda: scene.kube, monkeypatch)
    for module in (session, connection, collection_commands, restore):
        monkeypatch.setattr(module, "SystemClock", clock)
    return SceneShell(capsys, begin, scene=scene)


def open_shell(kube: Transport, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return a shell whose commands reach the server, whatever kubeconfig they name."""
    reach(lambda: kube, monkeypatch)
    monkeypatch.setattr(connection, "SystemClock", _HastyClock)
    return Shell(capsys)


def reach(find_kube: Callable[[], Transport], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands reach the server, whatever kubeconfig they name."""

    async def load(*_: object) -> tuple[Transport, str]:
        return find_kube(), ""

    monkeypatch.setattr(connection, "load_transport", load)
    monkeypatch.delenv("VELERO_NAMESPACE", raising=False)

"""The pictures in the documentation show what the commands print now: `make screenshots` draws them."""

import io
import os
import re
from pathlib import Path

import pytest
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from client.cli.output import Printer
from client.cli.status import print_status
from client.cli.volumes import print_table
from client.status.view import build_view
from tests.client.support.commands import FakeTerminal
from tests.client.support.status_scene import StatusScene
from tests.client.support.volumes_scene import volumes_scene

_IMAGES = Path(__file__).parents[2] / "docs" / "images"
_COLUMNS = 132


def _picture(text: str, title: str) -> str:
    """Return an SVG of what a terminal shows after this text with its control sequences; it loads no fonts."""
    console = Console(file=io.StringIO(), record=True, width=_COLUMNS, legacy_windows=False)
    console.print(Text.from_ansi(text.rstrip()))
    template = re.sub(r"(?s) *@font-face {{.*?}}\n", "", CONSOLE_SVG_FORMAT)
    return console.export_svg(title=title, code_format=template, unique_id="terminal")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", str(_COLUMNS)), ("LINES", "60")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return FakeTerminal()


def _assert_current(terminal: FakeTerminal, title: str, name: str) -> None:
    drawn, path = _picture(terminal.getvalue(), title), _IMAGES / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(drawn, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == drawn


async def test_the_picture_of_the_status_is_current(terminal: FakeTerminal) -> None:
    scene = StatusScene()
    scene.put_transfers()
    print_status(Printer(terminal), build_view(await scene.reader.read()), wide=False)
    _assert_current(terminal, "nodeagent status -w", "status.svg")


async def test_the_picture_of_the_volumes_is_current(terminal: FakeTerminal) -> None:
    snapshot = await volumes_scene().reader.read_volumes()
    coverage = snapshot.coverage
    assert coverage is not None
    printer = Printer(terminal)
    printer.line(coverage.sentence)
    print_table(printer, coverage.volumes, snapshot.at)
    _assert_current(terminal, "nodeagent volumes", "volumes.svg")

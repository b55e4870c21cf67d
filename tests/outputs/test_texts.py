"""The texts in the product, with `{}` for each value, and what `--help` prints for every command of both programs."""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from datamover.arguments import parse_arguments
from nodeagent.__main__ import main
from tests.support.golden import assert_golden_text

_ROOT = Path(__file__).parents[2]
_OTHERS = ("tests", "benchmarks", "tools")
_PROSE = re.compile(r"[a-z}][,:;]? [a-z({\"]")


def _product() -> Iterator[Path]:
    for init in sorted(_ROOT.glob("*/__init__.py")):
        if init.parent.name not in _OTHERS:
            yield from init.parent.rglob("*.py")


def _texts(tree: ast.Module) -> Iterator[str]:
    """Yield all strings except docstrings; what `Translated` says before the text of an error has that text, too."""
    nodes = list(ast.walk(tree))
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    before_errors = {
        id(node.args[2])
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Translated"
    }
    for node in nodes:
        if id(node) in skipped:
            continue
        end = ": {}" if id(node) in before_errors else ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield f"{node.value}{end}"
        elif isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield "".join(parts) + end


def test_no_text_is_lost_or_changed_unseen() -> None:
    """Where a text stands does not matter."""
    found = {text for path in _product() for text in _texts(ast.parse(path.read_text(encoding="utf-8")))}
    # What has more lines is help, or a program.
    shown = sorted(repr(text)[1:-1] for text in found if _PROSE.search(text) and text.count("\n") < 3)
    assert_golden_text("texts", "".join(f"{text}\n" for text in shown))


_COMMAND = re.compile(r"(?m)^ {2,4}([a-z][a-z-]*)(?=  |$)")
_WITHOUT_EXAMPLES = {("node-agent",), ("run-schedule",), ("run-restore-test",)}
"""No person types them."""


def _list_commands(page: str) -> list[str]:
    return _COMMAND.findall(page.partition("ommands:\n")[2].partition("\n\n")[0])


@pytest.mark.parametrize(
    ("program", "run"),
    [("nodeagent", main), ("datamover", lambda words: parse_arguments(words, {}))],
    ids=["nodeagent", "datamover"],
)
def test_the_help_of(
    program: str,
    run: Callable[[Sequence[str]], object],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One line for each flag of argparse; click has a width of its own.
    monkeypatch.setenv("COLUMNS", "1000")

    def read_pages(*words: str) -> Iterator[str]:
        with suppress(SystemExit):
            run([*words, "--help"])
        page = capsys.readouterr().out
        assert "examples:\n  " in page or words in _WITHOUT_EXAMPLES
        assert max(map(len, page.partition("examples:")[2].splitlines()), default=0) <= 120
        # Python 3.13 has the value of a flag with two names only once.
        page = re.sub(r"(-\w) ([A-Z]+), (--[\w-]+) \2", r"\1, \3 \2", page)
        yield f"$ {' '.join([program, *words])} --help\n{page}"
        for command in _list_commands(page):
            yield from read_pages(*words, command)

    assert_golden_text(f"help/{program}", "\n".join(read_pages()))

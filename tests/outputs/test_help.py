"""What `--help` prints, for every command of both programs."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from datamover.arguments import parse_arguments
from nodeagent.__main__ import main
from tests.support.golden import assert_golden_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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

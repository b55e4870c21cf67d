"""Output for people and programs: colors on terminals only, nothing that a tenant wrote controls the terminal."""

import io
from collections.abc import Callable

import pytest

from client.cli.output import BAD, LiveRow, OutputFormat, Printer, Styled
from tests.client.support.commands import FakeTerminal

_EVIL = "\x1b]0;title\x07[bold]x[/bold] :smile: \u202e"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def _print(out: io.StringIO, use: Callable[[Printer], None]) -> str:
    use(Printer(out, io.StringIO()))
    return out.getvalue()


def test_colors_are_for_terminals_only_and_no_color_is_honored(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(printer: Printer) -> None:
        printer.table(["A"], [[Styled("red", BAD)]])

    assert _print(io.StringIO(), use) == "A\nred\n"
    assert "\x1b[31mred" in _print(FakeTerminal(), use)
    monkeypatch.setenv("NO_COLOR", "1")
    shown = _print(FakeTerminal(), use)
    assert ("red" in shown, "\x1b[31m" in shown) == (True, False)


@pytest.mark.parametrize(
    "use",
    [
        lambda printer: printer.table(["A", _EVIL], [[_EVIL, Styled(_EVIL, BAD)]]),
        lambda printer: printer.facts([("Label", _EVIL)]),
        lambda printer: printer.line(_EVIL),
        lambda printer: printer.document({"a": _EVIL + "\x7f\x9b"}, OutputFormat.JSON),
        lambda printer: printer.document({_EVIL: _EVIL + "\x7f\x9b"}, OutputFormat.YAML),
    ],
    ids=["table", "facts", "line", "json", "yaml"],
)
def test_text_of_tenants_is_literal_and_escaped(use: Callable[[Printer], None]) -> None:
    shown = _print(io.StringIO(), use)
    assert shown.replace("\n", "").isprintable()
    assert "[bold]x[/bold] :smile:" in shown


def test_rows_are_never_wrapped_where_a_program_reads_nor_cut_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(printer: Printer) -> None:
        printer.table(["A", "B"], [["x" * 300, "y" * 300]])

    assert _print(io.StringIO(), use).splitlines()[1] == f"{'x' * 300}   {'y' * 300}"
    monkeypatch.setenv("COLUMNS", "20")
    shown = _print(FakeTerminal(), use)
    assert (shown.count("x"), shown.count("y")) == (300, 300)


def test_a_locale_that_cannot_show_a_name_ends_no_command() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Printer(out).line("ä")
    out.flush()
    assert raw.getvalue() == b"\\xe4\n"


def test_notes_and_progress_go_to_standard_error() -> None:
    out, err = io.StringIO(), io.StringIO()
    printer = Printer(out, err)
    printer.note("a\x1b")
    with printer.progress("begin") as show:
        show("next\n\x1b")
    assert (out.getvalue(), err.getvalue()) == ("", "note: a\\x1b\nbegin\nnext \\x1b\n")


def test_a_line_that_is_printed_meanwhile_does_not_stand_behind_the_progress() -> None:
    """Both go to one terminal: before the line, what shows the progress is erased."""
    terminal = FakeTerminal()
    printer = Printer(terminal, terminal)
    with printer.progress("working"):
        printer.line("done")
    before = terminal.getvalue().partition("done\n")[0]
    assert "working" in before
    # Erase the line: ECMA-48, EL 2.
    assert "\x1b[2K" in before.rpartition("working")[2]


def test_many_rows_stay_on_the_page_that_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = FakeTerminal()
    with Printer(terminal).screen() as draw:
        draw(lambda page: page.table(["NAME"], [[f"row-{number}"] for number in range(600)]))
    assert "row-1" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_rows_that_change_are_lines_where_no_terminal_is() -> None:
    err = io.StringIO()
    with Printer(io.StringIO(), err).live() as show:
        show([LiveRow("a", ["a", Styled("1", BAD)], "x"), LiveRow("b", ["b", "", _EVIL], "x")])
        show([LiveRow("a", ["a", "2"], "x"), LiveRow("b", ["b"], "y")])
    assert err.getvalue().splitlines()[::2] == ["a 1", "b"]
    assert err.getvalue().replace("\n", "").isprintable()


def test_rows_that_change_stay_in_their_lines_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    err = FakeTerminal()
    with Printer(io.StringIO(), err).live() as show:
        for number in range(3):
            show([LiveRow("a", [f"{number}{_EVIL}" + "z" * 80, "b"], str(number))])
    # Each frame is one line, over the one before; the cursor is shown again at the end.
    assert err.getvalue().count("\n") == 1
    assert "\x1b]0;" not in err.getvalue()
    assert err.getvalue().count("…") >= 3
    assert err.getvalue().endswith("\x1b[?25h")

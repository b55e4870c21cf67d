"""The output of commands for users: tables and sentences for a terminal, JSON and YAML for programs.

rich is imported here alone. All text is printed literally and escaped (`core.text.printable`). Colors appear
on terminals only, and never with NO_COLOR.
"""

import io
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from itertools import zip_longest
from typing import Final, NamedTuple, TextIO

import yaml
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.status import Status
from rich.table import Table
from rich.text import Text

from client.text import EventLine, format_ago, format_event
from core.models.base import JsonDict, WireModel
from core.text import one_line, printable

GOOD: Final = "green"
WARN: Final = "yellow"
BAD: Final = "red"
HEADING: Final = "bold"

NONE: Final = "-"
"""A cell without a value."""

_UNLIMITED: Final = 100_000
"""Columns of what is no terminal: nothing is wrapped, so that programs find a row in one line."""

_GAP: Final = 3
_INDENT: Final = 2
_FOLDED_ROWS: Final = 500


class OutputFormat(StrEnum):
    """Values of `--output`."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def for_programs(self) -> bool:
        """Whether it is a document and not a text."""
        return self in {OutputFormat.JSON, OutputFormat.YAML}


class Styled(NamedTuple):
    """A text with one of the styles."""

    text: str
    style: str


Cell = str | Styled


class LiveRow(NamedTuple):
    """A row that changes while the user looks: `key` is what it is about, `state` what is worth a line of a log."""

    key: str
    cells: Sequence[Cell]
    state: str


class Printer:
    """Prints the answer of a command to `out`, and notes about it to `err`."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = _console(out or sys.stdout)
        self._err = _console(err or sys.stderr)
        self._status: Status | None = None

    def answer(
        self,
        answer: WireModel,
        form: OutputFormat,
        print_page: Callable[[], None],
        notes: Iterable[str] = (),
        *,
        absent: str = "",
    ) -> None:
        """Print the answer as a document for programs; for people as a page, with notes about it.

        `absent` is the note in place of the page if there is nothing to show.
        """
        if form.for_programs:
            self.document(answer.to_wire(), form)
            return
        if absent:
            self.note(absent)
        else:
            print_page()
        self.notes(notes)

    def document(self, document: JsonDict, form: OutputFormat) -> None:
        """Print one document, in ASCII: everything else in it is escaped."""
        if form is OutputFormat.YAML:
            text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=False)
        else:
            # JSON does not escape this one control character.
            text = json.dumps(document, indent=2).replace("\x7f", "\\u007f") + "\n"
        with self._paused():
            self._out.out(text, end="", highlight=False)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Cell]], *, indent: int = 0) -> None:
        """Print a table; without rows, its headers.

        Only a terminal needs lines that are folded; rich takes milliseconds and 200 KiB for each row.
        """
        if not self._out.is_terminal or len(rows) > _FOLDED_ROWS:
            self._print_lines(headers, rows, indent)
        else:
            self._fold(headers, rows, indent)

    def _fold(self, headers: Sequence[str], rows: Sequence[Sequence[Cell]], indent: int) -> None:
        table = _grid(show_header=True)
        for header in headers:
            table.add_column(_text(header), overflow="fold")
        for row in rows:
            table.add_row(*map(_text, row))
        self._write(Padding(table, (0, 0, 0, indent)))

    def section(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table below its title; nothing without rows."""
        if rows:
            self.line(Styled(title, HEADING))
            self.table(headers, rows, indent=_INDENT)

    def _print_lines(self, headers: Sequence[str], rows: Sequence[Sequence[Cell]], indent: int) -> None:
        lines = [[printable(_plain(cell)) for cell in row] for row in (headers, *rows)]
        # A row may have fewer cells than there are headers, or more.
        widths = [max(map(cell_len, column)) for column in zip_longest(*lines, fillvalue="")]
        with self._paused():
            for line in lines:
                cells = (
                    cell + " " * (width + _GAP - cell_len(cell)) for cell, width in zip(line, widths, strict=False)
                )
                self._out.file.write(f"{' ' * indent}{''.join(cells)}".rstrip(" ") + "\n")

    def events(self, events: Sequence[EventLine], now: datetime) -> None:
        """Print a section with the Events about an object."""
        rows: list[list[Cell]] = [
            [
                format_ago(one.last_seen, now),
                Styled(one.type, WARN) if one.type == "Warning" else one.type,
                one.reason,
                str(one.count),
                format_event(one.reason, one.message),
            ]
            for one in events
        ]
        self.section("Events:", ("LAST SEEN", "TYPE", "REASON", "COUNT", "MESSAGE"), rows)

    def facts(self, facts: Iterable[tuple[str, Cell]]) -> None:
        """Print one line for each label that has a value."""
        table = _grid(show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in facts:
            if value:
                table.add_row(_text(f"{label}:"), _text(value))
        self._write(table)

    def line(self, cell: Cell = "") -> None:
        """Print one line as it is, however long."""
        with self._paused():
            self._out.print(_text(cell), soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a note about the answer."""
        self._err.print(_note(text), soft_wrap=True)

    def notes(self, texts: Iterable[str]) -> None:
        """Print notes."""
        for text in texts:
            self.note(text)

    @contextmanager
    def progress(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show `text` while the context lasts, and then what the function that it yields is called with.

        A terminal shows the last text; elsewhere each one is a line.
        """
        if not self._err.is_terminal:
            self._progress_line(text)
            yield self._progress_line
            return
        with self._err.status(Text(one_line(text))) as status:
            self._status = status
            try:
                yield lambda doing: status.update(Text(one_line(doing)))
            finally:
                self._status = None

    @property
    def is_terminal(self) -> bool:
        """Whether a person reads the answer."""
        return self._out.is_terminal

    @contextmanager
    def screen(self) -> Iterator[Callable[[Callable[["Printer"], None]], None]]:
        """Yield a function that draws a page in the place of the one before; the last one stays.

        It is called with what prints the page. Lines below the end of the terminal are cut off.
        """
        with Live(console=self._out, auto_refresh=False, vertical_overflow="ellipsis") as live:

            def draw(print_page: Callable[[Printer], None]) -> None:
                page = _Page()
                print_page(page)
                live.update(Group(*page.parts), refresh=True)

            yield draw

    @contextmanager
    def live(self) -> Iterator[Callable[[Sequence[LiveRow]], None]]:
        """Yield a function that shows rows, each time all of them.

        A terminal shows the last ones in place, and keeps them; elsewhere a row is printed when its state changes.
        """
        if not self._err.is_terminal:
            yield self._row_printer()
            return
        with Live(console=self._err, auto_refresh=False) as live:
            yield lambda rows: live.update(_live_table(rows), refresh=True)

    def _row_printer(self) -> Callable[[Sequence[LiveRow]], None]:
        states: dict[str, str] = {}

        def show(rows: Sequence[LiveRow]) -> None:
            for row in rows:
                if states.get(row.key) != row.state:
                    states[row.key] = row.state
                    self._progress_line("  ".join(filter(None, map(_plain, row.cells))))

        return show

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Hide the progress meanwhile: it would stand in the line that is printed."""
        if self._status is None:
            yield
            return
        self._status.stop()
        try:
            yield
        finally:
            self._status.start()

    def _progress_line(self, text: str) -> None:
        self._err.print(Text(one_line(text)), soft_wrap=True)

    def _write(self, what: RenderableType) -> None:
        """Print without the spaces with which rich fills each line."""
        with self._out.capture() as captured:
            self._out.print(what)
        lines = captured.get().split("\n")
        with self._paused():
            self._out.out("\n".join(line.rstrip(" ") for line in lines), end="", highlight=False)


class _Page(Printer):
    """Keeps what is printed, to draw it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[RenderableType] = []

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Cell]], *, indent: int = 0) -> None:
        # What is below the end of the terminal is cut off.
        self._fold(headers, rows[: self._out.height], indent)

    def line(self, cell: Cell = "") -> None:
        self.parts.append(_text(cell))

    def note(self, text: str) -> None:
        self.parts.append(_note(text))

    def _write(self, what: RenderableType) -> None:
        self.parts.append(what)


class _Dumper(yaml.SafeDumper):
    """Writes what occurs twice twice: people read it, too."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - its signature
        return True


class NoteHandler(logging.Handler):
    """Prints warnings that are logged while a command runs as notes about its answer."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message, which may quote objects of tenants, as one line."""
        sys.stderr.write(f"note: {one_line(record.getMessage())}\n")


def _console(stream: TextIO) -> Console:
    if isinstance(stream, io.TextIOWrapper):
        # In a locale without UTF-8, a name that it cannot show must not end the command.
        stream.reconfigure(errors="backslashreplace")
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNLIMITED
    return console


def _grid(*, show_header: bool) -> Table:
    return Table(box=None, show_header=show_header, header_style=HEADING, padding=(0, _GAP, 0, 0), pad_edge=False)


def _live_table(rows: Sequence[LiveRow]) -> Table:
    """Return the rows as a table, each in one line: what is too long for the terminal is cut at its end."""
    table = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in range(max((len(row.cells) for row in rows), default=0)):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(one_line(_plain(cell)), style=_style(cell)) for cell in row.cells))
    return table


def _plain(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def _style(cell: Cell) -> str:
    return "" if isinstance(cell, str) else cell.style


def _note(text: str) -> Text:
    return Text.assemble(("note: ", WARN), one_line(text))


def _text(cell: Cell) -> Text:
    return Text(printable(_plain(cell)), style=_style(cell))

"""One vocabulary: the same word means the same in all commands, and an error says what to type instead."""

import inspect
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn
from unittest.mock import AsyncMock

import click
import pytest

from client.cli import options, preflight
from client.cli.user_commands import _root
from client.volume_check_plan import CheckChoice
from core.errors import ConfigError
from nodeagent.__main__ import main
from nodeagent.runtime.connection import ClusterAccess, Connection
from tests.client.support.commands import walk_commands

_IN_INSTALL: Final = {"--dry-run", "--output", "-o", "--wait"}
"""Of `nodeagent install`, which has the flags of `velero install`, written as in Go."""

_OF_THE_ARCHIVE: Final = {"--output", "-o"}
"""Of `support-bundle`: where the archive goes, as in Velero; `-o json` is accepted, too."""

_OTHER_TEXT: Final = {
    "--namespace": "of the agents, or of the PVCs where --agent-namespace is of the agents",
    "-n": "the same",
    "-w": "to wait for the end as in Velero, or to watch as in kubectl",
    "--from-storage-location": "to list a bucket, or to look for one backup in it",
    "--pvc": "PVCs to back up, or some of a backup",
    "--method": "of a backup, or of a restore",
    "--size": "of a scratch PVC, or of a restored one",
    "--storage-class": "the same",
    "--storage-location": "of a backup the default location, of the preflight the one named default",
    "--timeout": "of what it says, with its default",
}
"""Options whose help differs, since they are about something else."""

_METAVARS: Final = {
    "NAME",
    "NAMES",
    "NAME,...",
    "NAMESPACE/NAME",
    "OLD:NEW,...",
    "LABELS",
    "KEY=VALUE,...",
    "ID",
    "UID",
    "PATH",
    "DIRECTORY",
    "FORMAT",
    "[BOOL]",
    "yaml|json",
    None,
    "NUMBER",
    "DURATION",
    "QUANTITY",
    "CRON",
    "PORT",
    "URL",
    "HOSTS",
    "IMAGE",
    "POLICY",
    "TAINT,...",
    "FLAG=VALUE",
}


_COMMANDS: Final = dict(walk_commands(_root))


def _options(*, hidden: bool = False) -> Iterator[tuple[str, str, click.Option]]:
    """Yield each word of each option with its command."""
    for path, command in _COMMANDS.items():
        for option in command.params:
            if isinstance(option, click.Option) and (hidden or not option.hidden):
                for word in option.opts:
                    yield path, word, option


def _shape(option: click.Option) -> tuple[Any, ...]:
    """Return what is written behind the option, and what it accepts."""
    kind = option.type
    accepts = tuple(kind.choices) if isinstance(kind, click.Choice) else type(kind).__name__
    return option.metavar, option.is_flag, option.multiple, accepts


def test_an_option_has_one_form_in_all_commands() -> None:
    shapes: dict[str, dict[tuple[Any, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, word, option in _options():
        own = (path == "install" and word in _IN_INSTALL) or (path == "support-bundle" and word in _OF_THE_ARCHIVE)
        if not own and word not in {"-w", "--method"}:
            shapes[word][_shape(option)].append(path)
    assert {word: dict(found) for word, found in shapes.items() if len(found) > 1} == {}


def test_an_option_has_one_text_unless_it_is_about_something_else() -> None:
    texts: dict[str, set[str | None]] = defaultdict(set)
    for path, word, option in _options():
        if not (path in {"install", "support-bundle"} and word in _IN_INSTALL):
            texts[word].add(option.help)
    assert {word for word, found in texts.items() if len(found) > 1} == _OTHER_TEXT.keys()


def test_values_are_named_by_few_words() -> None:
    assert {option.metavar for _, _, option in _options()} == _METAVARS
    timeouts = [option.help or "" for _, word, option in _options() if word == "--timeout"]
    assert [text for text in timeouts if not text.startswith("how long ")] == []


def test_each_command_takes_the_namespace_of_the_agents_by_one_word() -> None:
    assert {path for path, word, _ in _options(hidden=True) if word == "--agent-namespace"} == _COMMANDS.keys()


def _asks(command: click.Command) -> bool:
    """Return whether the command, or a function of its module that it calls, asks."""
    assert command.callback is not None
    reached, left = set(), [inspect.unwrap(command.callback)]
    while left:
        function = left.pop()
        reached.add(function)
        source = inspect.getsource(function)
        if re.search(r"\bconfirm\w*\(", source):
            return True
        known = (function.__globals__.get(word) for word in re.findall(r"\w+", source))
        here = (one for one in known if inspect.isfunction(one) and one.__module__ == function.__module__)
        left += [one for one in here if one not in reached]
    return False


def test_each_command_that_asks_and_no_other_has_yes() -> None:
    asking = {path for path, command in _COMMANDS.items() if _asks(command)}
    assert asking == {"backup delete", "restore create", "uninstall"}
    for word in ("--yes", "-y", "--confirm"):
        assert {path for path, found, _ in _options(hidden=True) if found == word} == asking


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("backup delete x --yess", 'no such option "--yess" (did you mean --yes?)'),
        ("backup delete x --force", 'no such option "--force" (did you mean --yes?)'),
        ("backup delete x -n app", 'no such option "-n" (did you mean --agent-namespace?)'),
        ("backup create x --include-namespaces a", 'no such option "--include-namespaces" (did you mean --namespace?)'),
        ("schedule create x --keep-within 3d", 'no such option "--keep-within" (did you mean --ttl?)'),
        ("schedule create x --keep-annual 3", 'no such option "--keep-annual" (did you mean --keep-yearly?)'),
        ("status --context blue", 'no such option "--context" (did you mean --kubecontext?)'),
        ("status --zzz", 'no such option "--zzz"'),
        ("backup delet x", 'no such command "delet" (did you mean delete?)'),
        ("repo show", 'no such command "show" (did you mean describe?)'),
        ("repo zzz", 'no such command "zzz"'),
        ("backup", "missing command"),
        ("schedule create x", "missing option --schedule"),
        ("backup describe", "missing argument NAME"),
        ("backup get -o xml", "--output: 'xml' is not one of 'table', 'wide', 'json', 'yaml'"),
        ("status x", "got unexpected extra argument (x)"),
    ],
    ids=str,
)
def test_an_error_says_what_to_type_instead(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {error} (see nodeagent ")


@pytest.mark.parametrize("path", _COMMANDS)
def test_each_command_suggests_its_own_options(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = next(one for one in _COMMANDS[path].params if isinstance(one, click.Option) and not one.hidden)
    word = max(option.opts, key=len)
    assert main([*path.split(), f"{word}x"]) == 2
    assert f'no such option "{word}x" (did you mean {word}?)' in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Namespace and location of each preflight, which then ends."""
    found: list[tuple[str, str]] = []

    @asynccontextmanager
    async def connect(access: ClusterAccess) -> AsyncIterator[Connection]:
        yield Connection(AsyncMock(), access.namespace, AsyncMock(), AsyncMock())

    async def plan_check(_client: object, namespace: str, choice: CheckChoice) -> NoReturn:
        found.append((namespace, choice.location))
        raise ConfigError("enough")

    monkeypatch.setattr(options, "connect", connect)
    monkeypatch.setattr(preflight, "plan_check", plan_check)
    return found


@pytest.mark.parametrize("word", ["-n", "--namespace", "--agent-namespace"])
def test_the_namespace_of_the_agents_has_more_than_one_word(
    word: str, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, str]]
) -> None:
    monkeypatch.setenv("VELERO_NAMESPACE", "other")
    assert (main(["preflight", word, "agents", "--storage-location=a"]), main(["preflight"])) == (2, 2)
    assert asked == [("agents", "a"), ("other", "default")]

"""Options, types of flags and help that all commands for users have in common.

Source of the spelling of maps and booleans: Velero v1.18, pkg/cmd/util/flag/map.go; pflag v1, bool.go.
"""

import asyncio
import csv
import functools
import inspect
import os
import re
import shlex
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from client.cli.output import OutputFormat, Printer
from client.install.options import TRUTH_VALUES
from client.session import Session
from core.errors import AgentError, ConfigError, Translated
from core.kube.client import Selection
from core.kube.resources import Resource
from core.kube.types import PodToleration
from core.models.names import ANNOTATION, LABEL, LABEL_KEY, LABEL_VALUE, OBJECT_NAME
from core.models.units import parse_boolean, parse_positive_duration, parse_quantity
from core.text import format_age, guess
from nodeagent.runtime.connection import ClusterAccess, Connection, connect
from nodeagent.runtime.settings import DEFAULT_NAMESPACE, KUBECONFIG_HELP, KUBECONTEXT_HELP

_Function = Callable[..., object]

_AGENTS: Final = "--agent-namespace"
_ACCESS: Final = ("kubeconfig", "kubecontext", "of_agents")

EXIT_CODES: Final = """\
exit codes:
  0  done
  1  an error of the cluster, such as a missing permission or a wrong name
  2  invalid command line, or the cluster is not reachable
"""

dry_run_option: Final = click.option("--dry-run", is_flag=True, help="only show what would be done")
ignore_server_option: Final = click.option(
    "--ignore-velero-server", is_flag=True, help="create it although a Velero server is in the namespace"
)


class _Help:
    """A help text whose examples keep their lines."""

    epilog: str | None

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write(f"\n{self.epilog}")


class UserCommand(_Help, click.Command):
    """One command, whose function may be a coroutine function."""

    def invoke(self, ctx: click.Context) -> object:
        """Call the function, and return its result."""
        result = super().invoke(ctx)
        return asyncio.run(result) if inspect.iscoroutine(result) else result


class UserGroup(_Help, click.Group):
    """A command with commands."""

    command_class = UserCommand


def confirm(question: str, undone: str) -> bool:
    """Ask, and return whether the answer is yes; `undone` says what did not happen.

    Raises:
        ConfigError: there is no answer.
        KeyboardInterrupt: the user interrupts the command instead.
    """
    try:
        with _interruptible():
            return click.confirm(question, err=True)
    except click.Abort as e:
        if isinstance(e.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from e
        raise ConfigError(f"{undone}: there is no answer to the question (use --yes)") from e


@contextmanager
def _interruptible() -> Iterator[None]:
    """Have Ctrl-C interrupt the block, which blocks the event loop.

    asyncio cancels its task, which has no effect before the answer, and then cancels what the answer has begun.
    Source: Python 3.11, Lib/asyncio/runners.py (Runner._on_sigint).
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def add_options(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Return what adds these options, in this order."""

    def add(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


yes_option: Final = add_options(
    click.option("--yes", "-y", is_flag=True, help="do not ask"),
    click.option("--confirm", "yes", is_flag=True, hidden=True, help="the same, as Velero's commands have it"),
)
"""`--yes`, which each command has that asks, and the word that Velero's commands have for it."""


def cluster_options(function: _Function) -> _Function:
    """Add the options that say which cluster and namespace; the command gets them as `access`, a ClusterAccess.

    One that has these parameters gets the `cluster`, to which it is connected, and a `printer` for its answer.
    The namespace is never the kubeconfig's, which is the one that the user works in, and not the agents'.
    Source: Velero v1.18, pkg/client/config.go.
    """
    return _add_access(function, ("--namespace", "-n"))


def workload_options(function: _Function) -> _Function:
    """Add the same options for a command about PVCs, whose own `-n` is the namespace of the PVCs."""
    return _add_access(function, (_AGENTS,))


def _add_access(function: _Function, flags: tuple[str, ...]) -> _Function:
    text = "namespace of the agents and of the custom resources"
    text += f" (default: $VELERO_NAMESPACE, then {DEFAULT_NAMESPACE})"

    wanted = inspect.signature(function).parameters.keys()

    async def connected(access: ClusterAccess, given: Mapping[str, Any]) -> None:
        async with connect(access) as cluster:
            more = {"access": access, "cluster": cluster, "printer": Printer()}
            await cast("Awaitable[None]", function(**{key: more[key] for key in more.keys() & wanted}, **given))

    @functools.wraps(function)
    def run(**given: Any) -> object:
        access = _access({key: given.pop(key) for key in _ACCESS})
        return connected(access, given) if "cluster" in wanted else function(access=access, **given)

    return add_options(
        # So that one word means the same in all commands.
        *([] if _AGENTS in flags else [click.option(_AGENTS, "of_agents", metavar="NAME", hidden=True, help=text)]),
        click.option(*flags, "of_agents", metavar="NAME", default="", envvar="VELERO_NAMESPACE", help=text),
        click.option("--kubeconfig", metavar="PATH", type=click.Path(), default="", help=KUBECONFIG_HELP),
        click.option("--kubecontext", metavar="NAME", default="", help=KUBECONTEXT_HELP),
    )(run)


def _access(given: Mapping[str, str | None]) -> ClusterAccess:
    kubeconfig, kubecontext, namespace = (given.get(key) or None for key in _ACCESS)
    return ClusterAccess(kubeconfig, kubecontext, namespace or DEFAULT_NAMESPACE)


_COMPLETION_SECONDS: Final = 5.0
"""A person waits for the answer to a key, and retries would take longer."""


def complete_names(
    context: click.Context, begun: str, read: Callable[[Connection], Awaitable[Iterable[str]]]
) -> list[str]:
    """Return the names that `read` finds and that begin so, for the shell; none, if the cluster does not answer."""

    async def find() -> list[str]:
        # As the words before the one that is being completed say.
        async with asyncio.timeout(_COMPLETION_SECONDS), connect(_access(context.params)) as cluster:
            return list(await read(cluster))

    try:
        return [name for name in dict.fromkeys(asyncio.run(find())) if name.startswith(begun)]
    except (AgentError, TimeoutError):
        return []


def completing(
    read: Callable[[Connection], Awaitable[Iterable[str]]],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return what completes a word to one of the names that `read` finds; see `complete_names`."""
    return lambda context, _, begun: complete_names(context, begun, read)


async def list_names(cluster: Connection, resource: Resource) -> list[str]:
    """Return the names of the objects of this kind in the namespace of the agents."""
    found = await cluster.client.list(Selection(resource, cluster.namespace))
    return [raw["metadata"]["name"] for raw in found]


@contextmanager
def working(cluster: Connection, printer: Printer, text: str) -> Iterator[Session]:
    """Show `text`, and then what is being done, while the context lasts; yield what a command works with."""
    with printer.progress(text) as show:
        yield Session.of(cluster, printer.note, show)


def command_for(access: ClusterAccess, command: str) -> str:
    """Return a command with `workload_options` as a shell takes it, with the flags that lead to the same cluster.

    The default namespace is named too if `$VELERO_NAMESPACE` would lead elsewhere.
    """
    words = []
    if access.namespace != DEFAULT_NAMESPACE or os.environ.get("VELERO_NAMESPACE", "") not in {"", DEFAULT_NAMESPACE}:
        words += ["--agent-namespace", access.namespace]
    if access.kubecontext:
        words += ["--kubecontext", access.kubecontext]
    if access.kubeconfig:
        words += ["--kubeconfig", access.kubeconfig]
    return " ".join([command, *map(shlex.quote, words)])


output_option: Final = click.option(
    "--output",
    "-o",
    "form",
    type=click.Choice([form.value for form in OutputFormat]),
    default=OutputFormat.TABLE.value,
    callback=lambda _context, _option, value: OutputFormat(value),
    help="format of the answer (default: table)",
)
"""`--output`, which the command gets as `form`, an OutputFormat."""


def timeout_option(default: timedelta, what: str) -> Callable[[_Function], _Function]:
    """Return the option `--timeout`, which says how long `what` may take."""
    text = f"how long {what} (default: {format_age(default)})"
    return click.option("--timeout", type=DURATION, metavar="DURATION", default=default, help=text)


_T = TypeVar("_T")

_NAMESPACE: Final = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
"""Source: Kubernetes v1.34, apimachinery pkg/util/validation."""

_TAINT: Final = re.compile(rf"(?P<key>(?:{LABEL_KEY})?)(?:=(?P<value>{LABEL_VALUE}))?(?::(?P<effect>\w+))?")
_EFFECTS: Final = ("NoSchedule", "PreferNoSchedule", "NoExecute")

_LARGEST_QUANTITY: Final = 2.0**63
"""Source: Kubernetes v1.34, apimachinery pkg/api/resource/quantity.go."""


class FlagType(click.ParamType[_T]):
    """What `parse` returns; the message of its ValueError or ConfigError follows the name of the flag."""

    name = "value"

    def __init__(self, parse: Callable[[str], _T]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, _: click.Context | None) -> _T:
        """Return the converted value; a default may be converted already."""
        flag = max(param.opts, key=len) if param is not None else "value"
        converted: _T = self.read(flag, value) if isinstance(value, str) else value
        return converted

    def read(self, flag: str, value: str) -> _T:
        """Convert a value of this flag; ConfigError: it is not allowed."""
        with Translated((ValueError, ConfigError), ConfigError, flag):
            return self._parse(value)


class PathType(FlagType[_T]):
    """The same of a path, which a shell completes."""

    def shell_complete(self, _ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Let the shell propose files."""
        return [CompletionItem(incomplete, type="file")]


def not_allowed(value: str, expected: str) -> ValueError:
    """Return the error about a value, or a part of one."""
    return ValueError(f'"{value}" is not allowed: expected {expected}')


def matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Return what parses a text that matches a regular expression; an empty text is as if the flag was not given."""

    def parse(text: str) -> str:
        if text and not re.fullmatch(pattern, text):
            raise not_allowed(text, expected)
        return text

    return parse


def one_of(*allowed: str) -> FlagType[str]:
    """Return the type of a flag with these values."""

    def parse(text: str) -> str:
        if text not in allowed:
            hint = guess(text, allowed)
            raise not_allowed(text, f"one of {', '.join(allowed)}" + (f" ({hint})" if hint else ""))
        return text

    return FlagType(parse)


def size_type(expected: str, least_bytes: int = 1) -> FlagType[str]:
    """Return the type of a flag with a quantity of so many bytes at least; empty is as if the flag was not given."""

    def parse(text: str) -> str:
        try:
            is_valid = not text or parse_quantity(text) >= least_bytes
        except ValueError:
            is_valid = False
        if not is_valid:
            raise not_allowed(text, expected)
        return text

    return FlagType(parse)


def _parse_switch(text: str) -> bool:
    if text not in TRUTH_VALUES:
        raise not_allowed(text, "true or false")
    return parse_boolean(text)


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if "" in names:
        raise not_allowed("", _NAME_RULE)
    return tuple(map(_parse_name, names))


def _parse_quantity(text: str) -> str:
    """Return a Kubernetes quantity that is not negative; `0` is none."""
    try:
        number = float(parse_quantity(text))
    except ValueError:
        number = -1.0
    if not 0 <= number < _LARGEST_QUANTITY:
        raise not_allowed(text, "a quantity such as 500m, 1, 128Mi or 1Gi; 0 is none")
    return text if number else "0"


def parse_pairs(text: str) -> dict[str, str]:
    """Return pairs such as `a=1,b=2`; quotes enclose a pair with a comma, as in CSV; ValueError: a part is no pair."""
    with Translated(csv.Error, ValueError, "the value is not allowed"):
        parts = next(csv.reader([text]), []) if text else []
    found = {}
    for part in parts:
        key, sign, value = part.partition("=")
        if not sign or not key:
            raise not_allowed(part, "key1=value1,key2=value2")
        found[key] = value
    return found


def _parse_keyed(text: str, *, valid: re.Pattern[str], expected: str) -> dict[str, str]:
    """Return pairs that are valid as `key=value`."""
    found = parse_pairs(text)
    for key, value in found.items():
        if not valid.fullmatch(f"{key}={value}"):
            raise not_allowed(f"{key}={value}", f"key=value, {expected}")
    return found


parse_labels: Final = partial(_parse_keyed, valid=LABEL, expected="both valid in a label")
parse_annotations: Final = partial(_parse_keyed, valid=ANNOTATION, expected="with a key that is valid in an annotation")
"""Return labels, or annotations; a part that is none is a ValueError."""


def _parse_taint(text: str) -> PodToleration:
    """Return a v1 Toleration of a taint as kubectl writes it: `key=value:Effect`, `key:Effect`, or `*`."""
    if text == "*":
        return {"operator": "Exists"}
    found = _TAINT.fullmatch(text)
    effect = found["effect"] if found else None
    if found is None or not (found["key"] or effect) or (effect is not None and effect not in _EFFECTS):
        raise not_allowed(text, f"key=value:EFFECT, key:EFFECT, key or *; EFFECT is one of {', '.join(_EFFECTS)}")
    toleration: PodToleration = {"key": found["key"]} if found["key"] else {}
    value = found["value"]
    if value is not None and not found["key"]:
        raise not_allowed(text, "a key before =")
    toleration["operator"] = "Exists" if value is None else "Equal"
    if value is not None:
        toleration["value"] = value
    return toleration | ({"effect": effect} if effect else {})


class TextFile(NamedTuple):
    """A file that was read."""

    path: str
    content: str


def read_file(path: str) -> TextFile | None:
    """Return a text file that is not empty; None without a path; ValueError: it cannot be read, or is empty."""
    if not path:
        return None
    try:
        content = Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"{path} cannot be read: {e.strerror}") from e
    except UnicodeError as e:
        raise ValueError(f"{path} is not a text file in UTF-8") from e
    if not content.strip():
        raise ValueError(f"{path} is empty")
    return TextFile(path, content)


_NAME_RULE: Final = "the name of an object: a-z, 0-9, - and ., a letter or digit first and last"
_parse_name: Final = matching(OBJECT_NAME.pattern, _NAME_RULE)

SWITCH: Final = FlagType(_parse_switch)
"""Written as in Go: `--wait`, `--wait=true`, `--wait=false`."""
NAME: Final = FlagType(_parse_name)
"""Of an object."""
NAMES: Final = FlagType(_parse_names)
"""With commas between them."""
NAMESPACE: Final = FlagType(matching(_NAMESPACE, "at most 63 of a-z, 0-9 and -, a letter or digit first and last"))
QUANTITY: Final = FlagType(_parse_quantity)
DURATION: Final = FlagType(parse_positive_duration)
TAINTS: Final = FlagType(lambda text: tuple(map(_parse_taint, text.split(","))))
FILE: Final = PathType(read_file)

"""What the ConfigMap named by `--node-agent-configmap` says.

Knows the document's keys, their defaults, and what to do about a bad value at start: that key
alone takes its default and a warning says so. Does not know the cluster: `nodeagent.config_map`
reads the document, `nodeagent.priority` asks whether a class exists.
"""

import difflib
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from core.errors import ConfigError
from core.models.base import JsonDict

__all__ = ["LARGEST_PREPARE_QUEUE", "AgentConfig", "LoadConcurrency", "ParsedConfig", "parse_config"]

LARGEST_PREPARE_QUEUE: Final = 20_000
"""The ledger of admissions is one ConfigMap: at most 1 MiB, 37 bytes a load, with room to spare."""


@dataclass(frozen=True)
class LoadConcurrency:
    """`loadConcurrency`: how much goes on at a time.

    `global_config` loads move data on a node at a time. `prepare_queue_length` loads may be
    Accepted or Prepared in the whole cluster; None leaves that to the agent.
    """

    global_config: int = 1
    prepare_queue_length: int | None = None


@dataclass(frozen=True)
class AgentConfig:
    """The configuration in force; every default is the peer's."""

    load_concurrency: LoadConcurrency = field(default_factory=LoadConcurrency)
    priority_class_name: str = ""


@dataclass(frozen=True)
class ParsedConfig:
    """A configuration, what was found on the way, and the document's fingerprint.

    `mistakes` are bad values, whose defaults are in force instead. `notes` are keys that are
    tolerated and change nothing: unknown ones, and known ones that are not yet in force.
    """

    config: AgentConfig = field(default_factory=AgentConfig)
    mistakes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digest: str = ""

    @property
    def warnings(self) -> list[str]:
        """All that an operator should read."""
        return [*self.mistakes, *self.notes]


@dataclass
class _Findings:
    """What one reading of the document gathers; see ParsedConfig."""

    mistakes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


_JSON_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "an object": dict,
    "a list": list,
    "a string": str,
    "true or false": bool,
    'a list or "inherit"': (list, str),
}

_NOT_YET: Final = {
    "loadAffinity": "a list",
    "loadAffinityMode": "a string",
    "backupPVC": "an object",
    "restorePVC": "an object",
    "podResources": "an object",
    "privilegedFsBackup": "true or false",
    "cachePVC": "an object",
    "cacheVolume": "an object",
    "podLabels": "an object",
    "podAnnotations": "an object",
    "tolerations": 'a list or "inherit"',
}
_CONCURRENCY_NOT_YET: Final = {"perNodeConfig": "a list", "restoresFirst": "true or false"}
_IN_FORCE: Final = frozenset({"loadConcurrency", "priorityClassName"})
_CONCURRENCY_IN_FORCE: Final = frozenset({"globalConfig", "prepareQueueLength"})


def parse_config(text: str) -> ParsedConfig:
    """Return the configuration that `text` describes, with a warning for all that is not in force.

    Raises:
        ConfigError: `text` is no JSON object, so nothing of it can be used.
    """
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"the configuration is not JSON: {e}") from e
    if not isinstance(document, dict):
        raise ConfigError(f"the configuration is not a JSON object but {_told(document)}")
    findings = _Findings()
    config = AgentConfig(
        load_concurrency=_load_concurrency(document, findings),
        priority_class_name=_text(document, "priorityClassName", findings),
    )
    _report_rest(document, "", (_IN_FORCE, _NOT_YET), findings)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return ParsedConfig(config, findings.mistakes, findings.notes, digest)


def _load_concurrency(document: JsonDict, findings: _Findings) -> LoadConcurrency:
    section = document.get("loadConcurrency")
    if section is None:
        return LoadConcurrency()
    if not isinstance(section, dict):
        findings.mistakes.append(f"loadConcurrency: expected an object, found {_told(section)}; the defaults are used")
        return LoadConcurrency()
    path = "loadConcurrency."
    _report_rest(section, path, (_CONCURRENCY_IN_FORCE, _CONCURRENCY_NOT_YET), findings)
    slots = _number(section, "globalConfig", path, findings)
    length = _number(section, "prepareQueueLength", path, findings)
    if length is not None and length > LARGEST_PREPARE_QUEUE:
        findings.mistakes.append(
            f"{path}prepareQueueLength: {length} is more than {LARGEST_PREPARE_QUEUE}; it counts as unset"
        )
        length = None
    return LoadConcurrency(global_config=slots or LoadConcurrency.global_config, prepare_queue_length=length)


def _number(section: JsonDict, key: str, path: str, findings: _Findings) -> int | None:
    """Return the positive whole number under `key`, or None where there is none to use."""
    value = section.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        findings.mistakes.append(f"{path}{key}: expected a whole number, found {_told(value)}; it counts as unset")
        return None
    if value <= 0:
        # Source: Velero v1.18, pkg/nodeagent: numbers that are not positive are passed over.
        findings.mistakes.append(f"{path}{key}: {value} is not positive; it counts as unset")
        return None
    return value


def _text(document: JsonDict, key: str, findings: _Findings) -> str:
    value = document.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    findings.mistakes.append(f"{key}: expected a string, found {_told(value)}; it counts as unset")
    return ""


def _report_rest(
    section: JsonDict,
    path: str,
    keys: tuple[Iterable[str], dict[str, str]],
    findings: _Findings,
) -> None:
    """Warn of every key of `section` that is not in force: known ones, misshapen ones, unknown ones."""
    in_force, not_yet = keys
    known = [*in_force, *not_yet]
    for key, value in section.items():
        if key in not_yet:
            expected = not_yet[key]
            if value is not None and not isinstance(value, _JSON_TYPES[expected]):
                findings.mistakes.append(f"{path}{key}: expected {expected}, found {_told(value)}")
            findings.notes.append(f"{path}{key}: not yet in force in this version; it changes nothing")
        elif key not in in_force:
            findings.notes.append(f"{path}{key}: unknown key; it changes nothing{_hint(key, known)}")


def _hint(key: str, known: list[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(key.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""


def _told(value: object) -> str:
    """Return `value` as JSON, shortened, with the name of its type."""
    names = {dict: "an object", list: "a list", str: "the string", bool: "the value", type(None): "the value"}
    text = json.dumps(value, ensure_ascii=False)
    shown = text if len(text) <= 40 else text[:40] + "…"  # noqa: PLR2004 - what fits into a line
    return f"{names.get(type(value), 'the number')} {shown}"

"""What the document in the ConfigMap named by `--node-agent-configmap` says.

Knows how a document becomes a configuration, and that a bad value costs no more than its own
key: the rest is read as if that key were not there. Does not know the cluster
(`nodeagent.config.source`), nor whether a document with mistakes is put in force
(`nodeagent.config.current`).

What in a valid configuration may not do what its writer thinks.

Knows which settings have no effect beside, or without, others. Does not know mistakes
(`nodeagent.config.parse`): all of this is tolerated.
"""

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from core.errors import ConfigError
from core.models.base import JsonDict
from core.models.units import parse_quantity
from nodeagent.config.keys import Finding, Location, SortedKeys, ask, close_name, load_json, show_key, sort_keys
from nodeagent.config.models import LARGEST_PREPARE_QUEUE, AffinityMode, AgentConfig, LoadConcurrency

__all__ = [
    "LARGEST_PREPARE_QUEUE",
    "AgentConfig",
    "Finding",
    "LoadConcurrency",
    "ParsedConfig",
    "advise",
    "parse_config",
]


def advise(config: AgentConfig) -> list[Finding]:
    """Return a note on each setting of `config` that changes nothing, or more than it seems to."""
    return [*_on_affinity(config), *_on_backup_claims(config), *_on_cache(config), *_on_rules(config)]


def _on_affinity(config: AgentConfig) -> list[Finding]:
    if config.load_affinity_mode is AffinityMode.ANY:
        return []
    notes = []
    seen: Counter[str] = Counter()
    for index, entry in enumerate(config.load_affinity):
        seen[entry.storage_class] += 1
        if seen[entry.storage_class] > 1:
            which = f"for the class {entry.storage_class}" if entry.storage_class else "without a storage class"
            problem = f"only the first entry {which} counts; this one changes nothing"
            hint = '"loadAffinityMode": "any" makes them alternatives'
            notes.append(Finding(f"loadAffinity[{index}]", problem, hint))
    return notes


def _on_backup_claims(config: AgentConfig) -> list[Finding]:
    return [
        Finding(f"backupPVC{show_key(name)}.spcNoRelabeling", "it changes nothing without readOnly")
        for name, claim in config.backup_pvc.items()
        if claim.spc_no_relabeling and not claim.read_only
    ]


def _on_cache(config: AgentConfig) -> list[Finding]:
    cache = config.cache_pvc
    if cache.resident_threshold_in_mb and not cache.storage_class:
        return [Finding("cachePVC", "without storageClass there is no cache volume")]
    return []


def _on_rules(config: AgentConfig) -> list[Finding]:
    return [
        Finding("loadConcurrency.perNodeConfig", f"the rule for {rule.number} has no nodeSelector: every node matches")
        for rule in config.load_concurrency.per_node_config
        if rule.node_selector.empty
    ]


_WHOLE: Final = frozenset({"loadAffinity", "podResources", "tolerations"})
"""Keys that count as a whole or not at all: half of one would mean something else.

Source: Velero v1.18, docs: one bad value and podResources is passed over.
"""


_DIGEST_DIGITS: Final = 12


_SHOWN_LENGTH: Final = 40


_ROUNDS: Final = 20
"""Each round takes all bad values out that it finds; few need more than one, none of them more than three."""


@dataclass(frozen=True)
class ParsedConfig:
    """A configuration, what was found on the way, and the document's fingerprint.

    `mistakes` are bad values, in the place of which `config` has the peer's defaults. `notes`
    are tolerated: keys that change nothing, and what may not mean what it seems to.
    """

    config: AgentConfig = field(default_factory=AgentConfig)
    mistakes: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    digest: str = ""

    @property
    def warnings(self) -> list[str]:
        """All that an operator should read."""
        return [*(f"{mistake}; its default is used" for mistake in self.mistakes), *map(str, self.notes)]


def parse_config(text: str) -> ParsedConfig:
    """Return the configuration that `text` describes, with all that is wrong or strange about it.

    Raises:
        ConfigError: `text` is no JSON object, so nothing of it can be used.
    """
    try:
        document = load_json(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"the configuration is not JSON: {e}") from e
    if not isinstance(document, dict):
        raise ConfigError(f"the configuration is not a JSON object but {_told(document)}")
    keys = sort_keys(document, AgentConfig)
    mistakes: dict[str, Finding] = {}
    config = _validate(keys, mistakes)
    notes = (*keys.notes, *advise(config))
    return ParsedConfig(config, tuple(mistakes.values()), notes, _digest(text))


def _validate(keys: SortedKeys, mistakes: dict[str, Finding]) -> AgentConfig:
    """Return the configuration without what is noted in `mistakes`, by path."""
    for _ in range(_ROUNDS):
        try:
            return AgentConfig.model_validate(keys.document)
        except ValidationError as e:
            errors = e.errors(include_url=False)
        bad: set[Location] = set()
        for error in errors:
            place = _place_of(error)
            finding = _explain(error, keys.show(place))
            mistakes.setdefault(finding.path, finding)
            bad.add(_unit_of(place))
        for unit in sorted(bad, key=_index_of, reverse=True):
            _take_out(keys.document, unit)
    return AgentConfig()


def _place_of(error: ErrorDetails) -> Location:
    """Return where an error is, less what pydantic adds: `[key]`, and which form of a value it tried."""
    place = error["loc"]
    if place and place[-1] == "[key]":
        place = place[:-1]
    return tuple(part for part in place if place[0] != "tolerations" or part not in {":list", ":word"})


def _unit_of(place: Location) -> Location:
    """Return what has to go for a mistake at `place`."""
    if place[0] in _WHOLE:
        return place[:1]
    if place[:2] == ("loadConcurrency", "perNodeConfig"):
        # A rule counts as a whole, the others stay. Source: Velero v1.18, as the peer does.
        return place[:3]
    return place


def _index_of(unit: Location) -> int:
    """Return where in a list it stands: an entry that is taken out moves those behind it."""
    last = unit[-1]
    return last if isinstance(last, int) else -1


def _take_out(document: JsonDict, unit: Location) -> None:
    inside: Any = document
    for part in unit[:-1]:
        inside = inside[part]
    del inside[unit[-1]]


def _explain(error: ErrorDetails, path: str) -> Finding:
    """Return what was expected at `path`, what stands there, and what may have been meant."""
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return Finding(path, "this key is required")
    words = _EXPECTED.get(kind)
    what = words.format(**context) if words else error["msg"].removeprefix("expected ")
    return Finding(path, f"expected {what}, found {_told(value)}", ask(_guess(kind, value, what)))


def _guess(kind: str, value: object, what: str) -> str:
    """Return what may have been meant by `value`, where `what` was expected; empty where nothing comes to mind."""
    if kind == "string_type" and isinstance(value, (int, float)):
        return json.dumps(json.dumps(value))
    if not isinstance(value, str):
        return ""
    if kind == "int_type":
        return value if value.isdecimal() and value.isascii() else ""
    if kind == "bool_type":
        return {"true": "true", "yes": "true", "false": "false", "no": "false"}.get(value.lower(), "")
    if "quantity" in what:
        return _meant_quantity(value)
    if "a name of" in what:
        return re.sub(r"[^a-z0-9.]+", "-", value.lower()).strip("-.")
    return close_name(value, re.findall("'([^']+)'", what))


_EXPECTED: Final = {
    "int_type": "a whole number",
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
    "bool_type": "true or false",
    "string_type": "a string",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "tuple_type": "a list",
    "enum": "{expected}",
    "literal_error": "{expected}",
}
"""pydantic's kinds of error in words of the document."""


def _meant_quantity(text: str) -> str:
    """Return the quantity that `text` almost is: 500MB is 500M."""
    shorter = text.strip().removesuffix("B").removesuffix("b").replace(" ", "")
    try:
        parse_quantity(shorter)
    except (ValueError, ArithmeticError):
        return ""
    return shorter


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_DIGITS]


def _told(value: object) -> str:
    """Return `value` as JSON, shortened, with the name of its type."""
    names = {dict: "an object", list: "a list", str: "the string", bool: "the value", type(None): "the value"}
    text = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    shown = text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "…"
    kind = next((words for known, words in names.items() if isinstance(value, known)), "the number")
    return f"{kind} {shown}"

"""The parser of a configuration document, and where it comes from: the ConfigMap, or files for `check-config`.

An invalid value costs no more than its own key. Whether a document with errors becomes active is in
`nodeagent.config.current`. The agent itself reads no YAML.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from core.errors import ConfigError, Translated
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import CONFIG_MAPS
from core.kube.types import ConfigObject, Manifest
from core.models.base import JsonDict
from core.models.units import parse_quantity
from core.text import ask, close_name
from nodeagent.config.keys import AffinityMode, AgentConfig
from nodeagent.config.own_keys import OWN_KEY
from nodeagent.config.schema import ConfigFinding, Location, SortedKeys, load_json, show_key
from nodeagent.config.value_types import Section

FLAG: Final = "--node-agent-configmap"


def advise(config: AgentConfig) -> Iterator[ConfigFinding]:
    """Yield a finding for each setting of `config` that has no effect, or a wider one than intended."""
    seen: set[str] = set()
    for index, entry in enumerate(config.load_affinity):
        if entry.storage_class in seen and config.load_affinity_mode is AffinityMode.FIRST:
            which = f"for storage class {entry.storage_class}" if entry.storage_class else "without a storage class"
            problem = f"only the first entry {which} applies; this one is ignored"
            yield ConfigFinding(f"loadAffinity[{index}]", problem, '"loadAffinityMode": "any" makes them alternatives')
        seen.add(entry.storage_class)
    for name, claim in config.backup_pvc.items():
        if claim.spc_no_relabeling and not claim.read_only:
            yield ConfigFinding(f"backupPVC{show_key(name)}.spcNoRelabeling", "has no effect without readOnly")
        if claim.read_write_once_pod and claim.read_only:
            yield ConfigFinding(f"backupPVC{show_key(name)}.readWriteOncePod", "has no effect with readOnly")
    if config.cache_pvc.resident_threshold_in_mb and not config.cache_pvc.storage_class:
        yield ConfigFinding("cachePVC", "no cache volume without storageClass")
    for rule in config.load_concurrency.per_node_config:
        if rule.node_selector.empty:
            problem = f"the rule with number {rule.number} has no nodeSelector: every node matches"
            yield ConfigFinding("loadConcurrency.perNodeConfig", problem)


_WHOLE: Final = (("loadAffinity",), ("podResources",), ("tolerations",), (OWN_KEY, "excludedMetadata"))
"""Keys that one invalid value invalidates as a whole: a part of one would mean something else, or protect from less.

Source: Velero v1.18, docs: podResources with one invalid value is ignored.
"""

_LISTS: Final = frozenset({"perNodeConfig", "repositoryVolumes", "rules", "windows"})
"""Lists, wherever they are, whose invalid entries are dropped as a whole, and the others stay: the rest of one would
mean something else, such as to leave files out of the backups of all namespaces.

Source: Velero v1.18, for perNodeConfig.
"""

_DIGEST_DIGITS: Final = 12

_SHOWN_LENGTH: Final = 40

_ROUNDS: Final = 20
"""Each round removes all invalid values that it finds; most documents need one, none more than three."""


@dataclass(frozen=True)
class ParsedConfig:
    """A configuration, the findings about its document, and the document's fingerprint.

    `errors` are invalid values, which have Velero's defaults in `config`; with those that are `fatal`, no agent starts.
    `notes` are tolerated: keys without effect, and settings that may not mean what they seem to.
    """

    config: AgentConfig = field(default_factory=AgentConfig)
    errors: tuple[ConfigFinding, ...] = ()
    fatal: tuple[ConfigFinding, ...] = ()
    notes: tuple[ConfigFinding, ...] = ()
    digest: str | None = None

    @property
    def warnings(self) -> list[str]:
        """All findings as text."""
        return [*(f"{error}; the default is used" for error in self.errors), *map(str, self.notes)]


def parse_config(text: str) -> ParsedConfig:
    """Return the configuration in `text`, with all findings; `null` is an empty document, as in Velero.

    Source: Go, encoding/json: null leaves a struct unchanged.

    Raises:
        ConfigError: `text` is not a JSON object.
    """
    keys = SortedKeys(parse_object(text, "the configuration"), AgentConfig)
    errors = InvalidValues(_is_fatal)
    config = validate(keys, AgentConfig, errors)
    notes = (*keys.notes, *advise(config))
    fatal = tuple(errors.found[path] for path in errors.fatal)
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_DIGITS]
    return ParsedConfig(config, tuple(errors.found.values()), fatal, notes, digest)


def parse_object(text: str, what: str) -> JsonDict:
    """Return the JSON object in `text`; empty for `null`.

    Raises:
        ConfigError: there is none; the message begins with `what`.
    """
    with Translated((ValueError, RecursionError), ConfigError, f"{what} is not JSON"):
        document = load_json(text)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{what} is not a JSON object but {_describe(document)}")
    return document


@dataclass
class InvalidValues:
    """The invalid values of a document by path, and the fatal ones, as `is_fatal` judges pydantic's errors."""

    is_fatal: Callable[[ErrorDetails, Location], bool]
    found: dict[str, ConfigFinding] = field(default_factory=dict)
    fatal: list[str] = field(default_factory=list)

    def add(self, error: ErrorDetails, place: Location, path: str) -> None:
        """Add the value at `place`, which findings call `path`."""
        if path not in self.found:
            self.found[path] = _explain(error, path)
        # A key and its value may be invalid, which are at one path.
        if path not in self.fatal and self.is_fatal(error, place):
            self.fatal.append(path)


_Section = TypeVar("_Section", bound=Section)


def validate(keys: SortedKeys, section: type[_Section], errors: InvalidValues) -> _Section:
    """Return the `section` in `keys` without the invalid values, which are added to `errors`."""
    for _ in range(_ROUNDS):
        try:
            return section.model_validate(keys.document)
        except ValidationError as e:
            found = e.errors(include_url=False)
        invalid: set[Location] = set()
        for error in found:
            place = _place_of(error)
            errors.add(error, place, keys.show(place))
            invalid.add(_unit_of(place))
        for unit in sorted(invalid, key=_depth_and_index, reverse=True):
            _remove(keys.document, unit)
    return section()


def _place_of(error: ErrorDetails) -> Location:
    """Return where an error is, without what pydantic adds: `[key]`, and the variant of a value that it tried."""
    place = error["loc"]
    if place and place[-1] == "[key]":
        place = place[:-1]
    return tuple(part for part in place if place[0] != "tolerations" or part not in {":list", ":word"})


def _is_fatal(error: ErrorDetails, place: Location) -> bool:
    """Return whether Velero's agent would exit, or could not create a mover pod, with this value.

    Source: Velero v1.18, GetConfigs in pkg/nodeagent/node_agent.go: a value that json.Unmarshal
    cannot store. It does not check `loadAffinity`; the API server rejects each of its mover pods.
    """
    if place == ("tolerations",):
        return not isinstance(error["input"], (str, list))
    return place[0] == "loadAffinity" or has_wrong_type(error)


def has_wrong_type(error: ErrorDetails) -> bool:
    """Return whether the value is of a JSON type that Go cannot store in the field: null is of none."""
    kind, value = error["type"], error["input"]
    wrong = kind in _TYPE_ERRORS or (kind in _CHOICE_ERRORS and not isinstance(value, str))
    return wrong and value is not None


def _unit_of(place: Location) -> Location:
    """Return what is removed for an error at `place`."""
    for whole in _WHOLE:
        if place[: len(whole)] == whole:
            return whole
    for end, (part, index) in enumerate(pairwise(place), start=2):
        if part in _LISTS and isinstance(index, int):
            return place[:end]
    return place


def _depth_and_index(unit: Location) -> tuple[int, int]:
    """Return what sorts units: inner ones and later entries of a list are removed before what a removal shifts."""
    last = unit[-1]
    return len(unit), last if isinstance(last, int) else -1


def _remove(document: JsonDict, unit: Location) -> None:
    inside: Any = document
    for part in unit[:-1]:
        inside = inside[part]
    del inside[unit[-1]]


def _explain(error: ErrorDetails, path: str) -> ConfigFinding:
    """Return what was expected at `path`, what was found, and what may have been meant."""
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind in _KEYS:
        return ConfigFinding(path, _KEYS[kind])
    words = _EXPECTED.get(kind)
    what = words.format(**context) if words else error["msg"].removeprefix("expected ")
    return ConfigFinding(path, f"expected {what}, found {_describe(value)}", ask(_guess(kind, value, what)))


def _guess(kind: str, value: object, what: str) -> str | None:
    """Return what may have been meant by `value`, where `what` was expected; None if there is no guess."""
    if kind == "string_type" and isinstance(value, (int, float)):
        return json.dumps(json.dumps(value))
    if not isinstance(value, str):
        return None
    if kind == "int_type":
        return value if value.isdecimal() and value.isascii() else None
    if kind == "bool_type":
        return {"true": "true", "yes": "true", "false": "false", "no": "false"}.get(value.lower())
    if "quantity" in what:
        return _meant_quantity(value)
    if "a name of" in what:
        return re.sub(r"[^a-z0-9.]+", "-", value.lower()).strip("-.") or None
    return close_name(value, re.findall("'([^']+)'", what))


_CHOICE_ERRORS: Final = frozenset({"enum", "literal_error"})

_KEYS: Final = {"missing": "required key is missing", "extra_forbidden": "unknown key"}

_EXPECTED: Final = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "tuple_type": "a list",
    "list_type": "a list",
    "enum": "{expected}",
    "literal_error": "{expected}",
}
"""The error types of pydantic in the terms of the document."""

_TYPE_ERRORS: Final = frozenset(kind for kind in _EXPECTED if kind.endswith("_type")) - {"list_type"}
"""The value is of another JSON type than a key of Velero's; only our own keys are of the type list."""


def _meant_quantity(text: str) -> str | None:
    """Return the quantity that `text` resembles: 500M for 500MB."""
    shorter = text.strip().removesuffix("B").removesuffix("b").replace(" ", "")
    try:
        parse_quantity(shorter)
    except (ValueError, ArithmeticError):
        return None
    return shorter or None


def _describe(value: object) -> str:
    """Return `value` as JSON, shortened, with the name of its type."""
    names = {dict: "an object", list: "a list", str: "the string", bool: "the value", type(None): "the value"}
    text = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    shown = text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "…"
    kind = next((words for known, words in names.items() if isinstance(value, known)), "the number")
    return f"{kind} {shown}"


async def read_config(client: KubeClient, namespace: str, name: str | None) -> ParsedConfig:
    """Return the configuration in the ConfigMap `name`; None: all defaults.

    Raises:
        ConfigError: it is missing, cannot be read, does not have exactly one key, or holds no JSON object.
    """
    if not name:
        return ParsedConfig()
    return parse_config_map(await read_named(client, namespace, name, flag=FLAG))


async def read_named(
    client: KubeClient, namespace: str, name: str, *, flag: str, key: str | None = None
) -> ConfigObject:
    """Return the ConfigMap that `flag` names; with a `key` that it may have, one without data is unusable.

    Raises:
        ConfigError: it does not exist, has no data, or cannot be read.
    """
    with Translated(KubeError, ConfigError, f"ConfigMap {namespace}/{name} cannot be read"):
        found = await client.read(CONFIG_MAPS, namespace, name)
    if found is None:
        raise absent(namespace, name, flag)
    if key and not found.get("data"):
        raise ConfigError(f"ConfigMap {namespace}/{name} has no data: add the key {key}, or start without {flag}")
    return found


def absent(namespace: str, name: str, flag: str) -> ConfigError:
    """Return the error for a ConfigMap that does not exist."""
    return ConfigError(f"ConfigMap {namespace}/{name} does not exist: create it, or start without {flag}")


def parse_config_map(config_map: ConfigObject) -> ParsedConfig:
    """Return the configuration in `config_map`, a v1 ConfigMap as JSON dict.

    Raises:
        ConfigError: it does not have exactly one key, or holds no JSON object.
    """
    meta = config_map["metadata"]
    with Translated(ConfigError, ConfigError, f"ConfigMap {meta['namespace']}/{meta['name']}"):
        return parse_config(document_of(config_map))


def document_of(config_map: Mapping[str, Any]) -> str:
    """Return the one value of a v1 ConfigMap; ConfigError: it does not have exactly one key."""
    data = config_map.get("data") or {}
    if len(data) != 1:
        found = ", ".join(sorted(data)) or "none"
        raise ConfigError(f"must have exactly one key, whose value is a JSON document; found: {found}")
    document: str = next(iter(data.values()))
    return document


def read_document(path: str) -> str:
    """Return the configuration document in the file at `path`; `-` is standard input.

    Raises:
        ConfigError: the file cannot be read, or contains no single document.
    """
    text = _read(path)
    with Translated(ConfigError, ConfigError, path):
        return document_in(text)


def read_config_map(path: str) -> Manifest:
    """Return the v1 ConfigMap whose manifest is in the file at `path`; `-` is standard input.

    Raises:
        ConfigError: the file cannot be read, or contains no single ConfigMap whose data are strings.
    """
    text = _read(path)
    with Translated(ConfigError, ConfigError, path):
        if (found := _config_map_in(text)) is None:
            raise ConfigError("contains 0 ConfigMaps, expected one")
    return found


def _read(path: str) -> str:
    with Translated((OSError, ValueError), ConfigError, f"{path} cannot be read"):
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")


def document_in(text: str) -> str:
    """Return the configuration document in `text`: `text` itself, or the value in a ConfigMap manifest.

    Raises:
        ConfigError: `text` has several ConfigMaps, or one without exactly one key, whose value is a string.
    """
    found = _config_map_in(text)
    # Anything else is treated as the document, so that parsing it reports what is invalid.
    return document_of(found) if found is not None else text


def _config_map_in(text: str) -> Manifest | None:
    manifests = _manifests_in(text)
    if len(manifests) > 1:
        raise ConfigError(f"contains {len(manifests)} ConfigMaps, expected one")
    data = (manifests[0].get("data") or {}) if manifests else {}
    if not isinstance(data, dict) or not all(isinstance(one, str) for pair in data.items() for one in pair):
        raise ConfigError("the keys and values of data are not all strings")
    return manifests[0] if manifests else None


def _manifests_in(text: str) -> list[Manifest]:
    with suppress(ValueError, RecursionError):
        return _config_maps([load_json(text)])
    with suppress(yaml.YAMLError, ValueError, RecursionError):
        return _config_maps(list(yaml.safe_load_all(text)))
    return []


def _config_maps(objects: list[Any]) -> list[Manifest]:
    """Return the ConfigMaps among `objects`, including those in a List."""
    found: list[Manifest] = []
    for obj in objects:
        if not isinstance(obj, dict):
            continue
        if obj.get("kind") == "ConfigMap":
            found.append(obj)
        elif isinstance(obj.get("items"), list):
            found += _config_maps(obj["items"])
    return found

"""The configuration of new backup repositories and of maintenance Jobs: each a ConfigMap, named by a flag.

A setting of repositories is copied to a new BackupRepository, and an existing one keeps its own.
Source: Velero v1.18, pkg/controller/backup_repository_controller.go; docs, "Backup repository configuration";
pkg/types/repo_maintenance.go; getJobConfig in pkg/repository/maintenance/maintenance.go; VerifyJSONConfigs in
pkg/util/kube/utils.go.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, StrictInt
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from core.errors import ConfigError, Translated
from core.kube.client import KubeClient
from core.kube.resources import CONFIG_MAPS
from core.kube.types import ConfigObject
from core.models import storage
from core.models.units import parse_count, parse_quantity
from core.text import guess
from exposer.pods import JobSettings, is_reserved_label
from nodeagent.config import value_types
from nodeagent.config.expose_settings import node_requirements
from nodeagent.config.keys import AffinityMode, LoadAffinity, PodLabels, PodResources
from nodeagent.config.own_keys import WindowKeys
from nodeagent.config.parse import InvalidValues, has_wrong_type, parse_object, read_named, validate
from nodeagent.config.schema import ConfigFinding, Location, SortedKeys, show_key
from nodeagent.config.windows import Window

_log = logging.getLogger(__name__)

_FLAG: Final = "--backup-repository-configmap"
_INTERVALS: Final = tuple(storage.FULL_INTERVAL_SECONDS)


@dataclass(frozen=True)
class ParsedSettings:
    """The `repositoryConfig` of a new BackupRepository, the room of cache volumes (0: none), and the findings."""

    settings: Mapping[str, str] = field(default_factory=dict)
    cache_limit_mib: int = storage.DEFAULT_CACHE_LIMIT_MIB
    errors: tuple[ConfigFinding, ...] = ()
    notes: tuple[ConfigFinding, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """All findings as text."""
        return [*(f"{error}; the key is treated as unset" for error in self.errors), *map(str, self.notes)]


def parse_settings_of(config_map: ConfigObject) -> ParsedSettings:
    """Return the settings for repositories in `config_map`, a v1 ConfigMap as JSON dict.

    Keys that kopia repositories do not know are passed on unchanged. `null` is an empty document, as in Velero.

    Raises:
        ConfigError: the value for the repository type is not a JSON object.
    """
    data = config_map.get("data") or {}
    document = parse_object(data.get(storage.REPOSITORY_TYPE, "null"), f"its key {storage.REPOSITORY_TYPE}")
    settings: dict[str, str] = {}
    limit_mib = storage.DEFAULT_CACHE_LIMIT_MIB
    errors: list[ConfigFinding] = []
    notes: list[ConfigFinding] = []
    for key, value in document.items():
        path, text = f"{storage.REPOSITORY_TYPE}{show_key(key)}", _as_text(value)
        if value is None:
            continue
        if text is None:
            errors.append(ConfigFinding(path, "expected a string, a number, true or false"))
        elif key == storage.CACHE_LIMIT_KEY:
            limit = parse_count(text)
            if limit is None:
                errors.append(ConfigFinding(path, f"expected a whole number of MiB, found {text}"))
            else:
                limit_mib = limit
                # kopia would cache nothing with a limit of 0, and read everything several times.
                settings |= {key: text} if limit else {}
        elif key == storage.FULL_INTERVAL_KEY and text not in _INTERVALS:
            problem = f"expected one of {', '.join(_INTERVALS)}, found {text}"
            errors.append(ConfigFinding(path, problem, guess(text, _INTERVALS)))
        else:
            settings[key] = text
            if key != storage.FULL_INTERVAL_KEY:
                hint = guess(key, (storage.CACHE_LIMIT_KEY, storage.FULL_INTERVAL_KEY))
                notes.append(ConfigFinding(path, "unknown key; passed on to the BackupRepository", hint))
    return ParsedSettings(settings, limit_mib, tuple(errors), tuple(notes))


def _as_text(value: object) -> str | None:
    """Return a plain JSON value as Velero writes it into a BackupRepository; None for any other."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, (bool, int, float)) else None


class RepositoryConfig:
    """The settings of new backup repositories, read for each one; the last valid ones are kept."""

    def __init__(
        self, client: KubeClient, namespace: str, name: str | None, *, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Read the ConfigMap `name`, if any; call `on_change`, which must not block, after settings have changed."""
        self._client = client
        self._namespace = namespace
        self._name = name
        self._on_change = on_change
        self._last = ParsedSettings()

    @property
    def cache_limit_mib(self) -> int:
        """What a cache volume has room for, in MiB; 0: there are no cache volumes."""
        return self._last.cache_limit_mib

    async def check(self) -> None:
        """Read the ConfigMap once, so that an invalid one is reported at start.

        Raises:
            ConfigError: it does not exist, has no data, cannot be read, or holds no JSON object.
        """
        if self._name:
            self._keep(await self._read(self._name))

    async def settings(self) -> Mapping[str, str]:
        """Return the settings of a new repository; the last valid ones if the ConfigMap is no longer usable."""
        if not self._name:
            return {}
        try:
            self._keep(await self._read(self._name))
        except ConfigError as e:
            _log.warning("backup repository configuration rejected, the last valid one stays active: %s", e)
        return self._last.settings

    async def _read(self, name: str) -> ParsedSettings:
        found = await read_named(self._client, self._namespace, name, flag=_FLAG, key=storage.REPOSITORY_TYPE)
        with Translated(ConfigError, ConfigError, f"ConfigMap {self._namespace}/{name}"):
            return parse_settings_of(found)

    def _keep(self, parsed: ParsedSettings) -> None:
        before, self._last = self._last, parsed
        if parsed != before:
            self._on_change()
        if parsed.warnings != before.warnings:
            for warning in parsed.warnings:
                _log.warning("backup repository configuration: %s", warning)


FLAG: Final = "--repo-maintenance-job-configmap"
_GLOBAL: Final = "global"

_REQUIRED_STRINGS: Final = ("cpu_request", "memory_request", "cpu_limit", "memory_limit")
"""A Velero server starts no Job if one of them is missing."""

_GLOBAL_BY_DOCUMENTATION: Final = ("priority_class_name", "pod_labels", "pod_annotations")


def _check_limit(text: str) -> str:
    if value_types.is_zero(text or "0"):
        raise value_types.expected('a quantity such as "4Gi"')
    return text


def _check_deadline(deadline: timedelta) -> timedelta:
    # Source: Kubernetes v1.34, ValidatePodSpec in pkg/apis/core/validation (activeDeadlineSeconds).
    if not 1 <= deadline.total_seconds() < 2**31:
        raise value_types.expected("a duration from 1s to 596523h")
    return deadline


class RepositoryEntry(value_types.Section):
    """The value of a repository's key: Velero's keys."""

    load_affinity: tuple[LoadAffinity, ...] = ()
    pod_resources: PodResources | None = None
    keep_latest_maintenance_jobs: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] | None = None
    priority_class_name: value_types.ObjectName = ""
    pod_annotations: value_types.AnnotationMap = Field(default_factory=dict)
    pod_labels: PodLabels = Field(default_factory=dict)


class GlobalEntry(RepositoryEntry):
    """The value of `global`: Velero's keys (`tolerations` from 1.19 on), and our own."""

    tolerations: tuple[value_types.Toleration, ...] = ()
    load_affinity_mode: AffinityMode = AffinityMode.FIRST
    max_concurrent_jobs: Annotated[StrictInt, Field(ge=1, le=1000)] = 1
    windows: tuple[WindowKeys, ...] = ()
    active_deadline: Annotated[value_types.Duration, AfterValidator(_check_deadline)] = timedelta(hours=6)
    memory_limit_max: Annotated[value_types.QuantityText, AfterValidator(_check_limit)] = "4Gi"
    verify_blob_limit: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] = 100_000


_GLOBAL_KEYS: Final = frozenset(
    info.alias or name for name, info in GlobalEntry.model_fields.items() if name not in RepositoryEntry.model_fields
)
_OWN_KEYS: Final = _GLOBAL_KEYS - {"tolerations"}


@dataclass(frozen=True)
class MaintenanceSettings:
    """What applies to the maintenance of one repository; the defaults are those without a ConfigMap.

    `keep_jobs` is how many finished Jobs are kept. `memory_limit_max_bytes` ends the doubling after a run that was out
    of memory. Up to `verify_blob_limit` blobs, kopia checks its index against the bucket.
    """

    job: JobSettings = field(default_factory=JobSettings)
    keep_jobs: int = 3
    max_concurrent_jobs: int = 1
    windows: tuple[Window, ...] = ()
    memory_limit_max_bytes: int = 4 * 2**30
    verify_blob_limit: int = 100_000


@dataclass(frozen=True)
class ParsedMaintenance:
    """The document: its entries by key, and the findings.

    `unreadable` are the keys whose value no Velero server can read, each with the problem. `invalid` are values that
    count as absent; `notes` are tolerated.
    """

    entries: Mapping[str, RepositoryEntry] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    invalid: tuple[ConfigFinding, ...] = ()
    notes: tuple[ConfigFinding, ...] = ()

    @property
    def errors(self) -> tuple[ConfigFinding, ...]:
        """All errors: keys that cannot be read, and invalid values."""
        return (*(ConfigFinding(key, text) for key, text in self.unreadable.items()), *self.invalid)

    @property
    def warnings(self) -> list[str]:
        """All findings as text."""
        return [
            *(f"its key {key}: {text}; all defaults are used" for key, text in self.unreadable.items()),
            *(f"{error}; it counts as absent" for error in self.invalid),
            *map(str, self.notes),
        ]

    def settings_for(self, key: storage.RepositoryKey) -> MaintenanceSettings:
        """Return what applies to that repository; the defaults, if what it depends on cannot be read."""
        own = "-".join(key)
        if self.unreadable.keys() & {own, _GLOBAL}:
            return MaintenanceSettings()
        common = self.entries.get(_GLOBAL)
        return _merge(
            self.entries.get(own) or RepositoryEntry(), common if isinstance(common, GlobalEntry) else GlobalEntry()
        )


def _merge(own: RepositoryEntry, common: GlobalEntry) -> MaintenanceSettings:
    """Return the settings of the repository with its `own` entry.

    Velero's code, not its documentation, decides: the repository's priority class, labels and annotations
    apply if `global` has none.
    """
    resources = own.pod_resources if own.pod_resources is not None else common.pod_resources
    affinity = own.load_affinity or common.load_affinity
    chosen = affinity if common.load_affinity_mode is AffinityMode.ANY else affinity[:1]
    keeps = (own.keep_latest_maintenance_jobs, common.keep_latest_maintenance_jobs, MaintenanceSettings.keep_jobs)
    job = JobSettings(
        resources=resources.to_wire() if resources is not None else None,
        alternatives=tuple(tuple(node_requirements(entry.node_selector)) for entry in chosen),
        priority_class_name=common.priority_class_name or own.priority_class_name or None,
        labels=common.pod_labels or own.pod_labels,
        annotations=common.pod_annotations or own.pod_annotations,
        active_deadline=common.active_deadline,
        tolerations=tuple(one.to_wire() for one in common.tolerations),
    )
    return MaintenanceSettings(
        job=job,
        keep_jobs=next(keep for keep in keeps if keep is not None),
        max_concurrent_jobs=common.max_concurrent_jobs,
        windows=tuple(window.to_window() for window in common.windows),
        memory_limit_max_bytes=int(parse_quantity(common.memory_limit_max)),
        verify_blob_limit=common.verify_blob_limit,
    )


def parse_maintenance(config_map: Mapping[str, Any]) -> ParsedMaintenance:
    """Return the configuration in `config_map`, a v1 ConfigMap as JSON dict, with all findings."""
    entries: dict[str, RepositoryEntry] = {}
    unreadable: dict[str, str] = {}
    errors: list[ConfigFinding] = []
    notes: list[ConfigFinding] = []
    for key, text in sorted((config_map.get("data") or {}).items()):
        section = GlobalEntry if key == _GLOBAL else RepositoryEntry
        try:
            keys = SortedKeys(parse_object(text, "the value"), section)
        except ConfigError as e:
            unreadable[key] = str(e)
            continue
        invalid = InvalidValues(_is_fatal)
        entry = entries[key] = validate(keys, section, invalid)
        if invalid.fatal:
            unreadable[key] = "; ".join(str(invalid.found.pop(path)) for path in invalid.fatal)
        errors += _below(key, invalid.found.values())
        notes += _below(key, (*map(_explain_unknown, keys.notes), *_advise(key, entry)))
    return ParsedMaintenance(entries, unreadable, tuple(errors), tuple(notes))


def _is_fatal(error: ErrorDetails, place: Location) -> bool:
    """Return whether a Velero server could not read the value: it ignores our own keys."""
    return place[0] not in _OWN_KEYS and has_wrong_type(error)


def _explain_unknown(note: ConfigFinding) -> ConfigFinding:
    """Return the finding about an unknown key; in the entry of a repository, it may be one of `global`."""
    return ConfigFinding(note.path, f"has an effect in {_GLOBAL} only; ignored") if note.path in _GLOBAL_KEYS else note


def _advise(key: str, entry: RepositoryEntry) -> Iterator[ConfigFinding]:
    """Yield a finding for each setting that has no effect, or that a Velero server treats in another way."""
    if key != _GLOBAL and not key.endswith(f"-{storage.REPOSITORY_TYPE}"):
        yield ConfigFinding(
            "", f"applies to no repository: neither {_GLOBAL} nor <namespace>-<location>-{storage.REPOSITORY_TYPE}"
        )
    if (resources := entry.pod_resources) is not None:
        for name in _REQUIRED_STRINGS:
            if not getattr(resources, name):
                problem = "missing, counts as 0; a Velero server starts no Job without it"
                yield ConfigFinding(f"podResources.{to_camel(name)}", problem)
    for name in _GLOBAL_BY_DOCUMENTATION:
        if key != _GLOBAL and getattr(entry, name):
            problem = f"applies only if {_GLOBAL} has none; ignored according to Velero's documentation"
            yield ConfigFinding(to_camel(name), problem)
    for label in filter(is_reserved_label, entry.pod_labels):
        yield ConfigFinding(f"podLabels{show_key(label)}", "reserved; ignored")
    for index, affinity in enumerate(entry.load_affinity):
        if affinity.storage_class:
            yield ConfigFinding(f"loadAffinity[{index}].storageClass", "has no effect on maintenance")


def _below(key: str, findings: Iterable[ConfigFinding]) -> list[ConfigFinding]:
    """Return the findings about the value of `key` with whole paths."""
    place = show_key(key).removeprefix(".")
    return [replace(one, path=f"{place}{'' if one.path[:1] in {'', '['} else '.'}{one.path}") for one in findings]


async def read_maintenance(client: KubeClient, namespace: str, name: str) -> ConfigObject:
    """Return the ConfigMap, as an agent needs it at start.

    Raises:
        ConfigError: it does not exist, has no data, or cannot be read.
    """
    return await read_named(client, namespace, name, flag=FLAG, key=_GLOBAL)


class MaintenanceConfig:
    """The settings of maintenance Jobs, read for each one."""

    def __init__(self, client: KubeClient, namespace: str, name: str | None) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._logged: list[str] = []

    async def check(self) -> None:
        """Read the ConfigMap once, so that an unusable one is reported at start.

        Raises:
            ConfigError: it cannot be read, has no data, or has a value that a Velero server could not read either.
        """
        if not self._name:
            return
        parsed = parse_maintenance(await read_maintenance(self._client, self._namespace, self._name))
        if parsed.unreadable:
            problems = "; ".join(f"its key {key}: {text}" for key, text in parsed.unreadable.items())
            raise ConfigError(f"{self._place}: {problems}")
        self._log(parsed.warnings)

    async def settings_for(self, key: storage.RepositoryKey) -> MaintenanceSettings:
        """Return the settings of that repository; the defaults for all of them if they cannot be parsed.

        Raises:
            KubeError: the ConfigMap could not be read; without its windows, nothing may start.
        """
        if not self._name:
            return MaintenanceSettings()
        found = await self._client.read(CONFIG_MAPS, self._namespace, self._name)
        if found is None or not found.get("data"):
            why = "it does not exist" if found is None else "it has no data"
            self._log([f"{why}; all defaults are used"])
            return MaintenanceSettings()
        parsed = parse_maintenance(found)
        self._log(parsed.warnings)
        return parsed.settings_for(key)

    @property
    def _place(self) -> str:
        return f"ConfigMap {self._namespace}/{self._name}"

    def _log(self, warnings: list[str]) -> None:
        if warnings != self._logged:
            self._logged = warnings
            for warning in warnings:
                _log.warning("configuration of maintenance, %s: %s", self._place, warning)

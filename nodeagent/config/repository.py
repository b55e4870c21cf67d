"""The configuration of new backup repositories: the ConfigMap of `--backup-repository-configmap`.

Knows its format, a JSON document for each repository type, and the keys of kopia repositories. Does
not know when a repository is created (`nodeagent.leader.repositories.controller`), nor what follows
from a setting: it is copied to the BackupRepository, and an existing repository keeps its own.
Source: Velero v1.18, pkg/controller/backup_repository_controller.go; docs, "Backup repository
configuration".
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import CONFIG_MAPS
from core.kube.types import ConfigObject
from core.models.storage import (
    CACHE_LIMIT_KEY,
    DEFAULT_CACHE_LIMIT_MIB,
    FULL_INTERVAL_KEY,
    FULL_INTERVAL_SECONDS,
    REPOSITORY_TYPE,
)
from core.models.units import parse_count
from core.text import guess
from nodeagent.config.schema import ConfigFinding, load_json, show_key

__all__ = ["ParsedSettings", "RepositoryConfig", "parse_settings_of"]

_log = logging.getLogger(__name__)

_FLAG: Final = "--backup-repository-configmap"
_INTERVALS: Final = tuple(FULL_INTERVAL_SECONDS)


@dataclass(frozen=True)
class ParsedSettings:
    """The `repositoryConfig` of a new BackupRepository, with the findings about the document.

    `cache_limit_mib` is what a cache volume has room for; 0: there are no cache volumes.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    cache_limit_mib: int = DEFAULT_CACHE_LIMIT_MIB
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
    text = (config_map.get("data") or {}).get(REPOSITORY_TYPE)
    if text is None:
        return ParsedSettings()
    try:
        document = load_json(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"its key {REPOSITORY_TYPE} is not JSON: {e}") from e
    if document is None:
        return ParsedSettings()
    if not isinstance(document, dict):
        raise ConfigError(f"its key {REPOSITORY_TYPE} is not a JSON object")
    found = _Found()
    for key, value in document.items():
        found.take(key, value)
    return ParsedSettings(found.settings, found.cache_limit_mib, tuple(found.errors), tuple(found.notes))


class _Found:
    """Collects the settings and findings of one document."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self.cache_limit_mib = DEFAULT_CACHE_LIMIT_MIB
        self.errors: list[ConfigFinding] = []
        self.notes: list[ConfigFinding] = []

    def take(self, key: str, value: object) -> None:
        path = f"{REPOSITORY_TYPE}{show_key(key)}"
        text = _as_text(value)
        if value is None:
            return
        if text is None:
            self.errors.append(ConfigFinding(path, "expected a string, a number, true or false"))
        elif key == CACHE_LIMIT_KEY:
            self._take_limit(path, text)
        elif key == FULL_INTERVAL_KEY and text not in _INTERVALS:
            problem = f"expected one of {', '.join(_INTERVALS)}, found {text}"
            self.errors.append(ConfigFinding(path, problem, guess(text, _INTERVALS)))
        else:
            self.settings[key] = text
            if key != FULL_INTERVAL_KEY:
                problem = "unknown key; passed on to the BackupRepository"
                self.notes.append(ConfigFinding(path, problem, guess(key, (CACHE_LIMIT_KEY, FULL_INTERVAL_KEY))))

    def _take_limit(self, path: str, text: str) -> None:
        limit = parse_count(text)
        if limit is None:
            self.errors.append(ConfigFinding(path, f"expected a whole number of MiB, found {text}"))
            return
        self.cache_limit_mib = limit
        # kopia would cache nothing with a limit of 0, and read everything several times.
        if limit:
            self.settings[CACHE_LIMIT_KEY] = text


def _as_text(value: object) -> str | None:
    """Return a plain JSON value as Velero writes it into a BackupRepository; None for any other."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, (bool, int, float)) else None


class RepositoryConfig:
    """The settings of new backup repositories, read for each one; the last valid ones are kept."""

    def __init__(
        self, client: KubeClient, namespace: str, name: str, *, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Read the ConfigMap `name`; empty: there is none.

        `on_change` is called after each read that changed the settings; it must not block.
        """
        self._client = client
        self._namespace = namespace
        self._name = name
        self._on_change = on_change
        self._last = ParsedSettings()
        self._logged: list[str] = []

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
            self._keep(await self._read())

    async def settings(self) -> Mapping[str, str]:
        """Return the settings of a new repository; the last valid ones if the ConfigMap is no longer usable."""
        if not self._name:
            return {}
        try:
            self._keep(await self._read())
        except ConfigError as e:
            _log.warning("backup repository configuration rejected, the last valid one stays active: %s", e)
        return self._last.settings

    async def _read(self) -> ParsedSettings:
        place = f"ConfigMap {self._namespace}/{self._name}"
        try:
            found = await self._client.read(CONFIG_MAPS, self._namespace, self._name)
        except KubeError as e:
            raise ConfigError(f"{place} cannot be read: {e}") from e
        if found is None:
            raise ConfigError(f"{place} does not exist: create it, or start without {_FLAG}")
        if not found.get("data"):
            raise ConfigError(f"{place} has no data: add the key {REPOSITORY_TYPE}, or start without {_FLAG}")
        try:
            return parse_settings_of(found)
        except ConfigError as e:
            raise ConfigError(f"{place}: {e}") from e

    def _keep(self, parsed: ParsedSettings) -> None:
        changed, self._last = parsed != self._last, parsed
        if changed:
            self._on_change()
        if parsed.warnings != self._logged:
            self._logged = parsed.warnings
            for warning in parsed.warnings:
                _log.warning("backup repository configuration: %s", warning)

"""What new backup repositories are configured with: the ConfigMap of `--backup-repository-configmap`.

Knows its form, a JSON document for each type of repository, and what kopia repositories know of
it. Does not know when a repository is made (`nodeagent.leader.repositories.controller`), or what follows from a
setting: it is copied into the BackupRepository, and a repository that exists keeps what it has.
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
from core.models.base import JsonDict
from core.models.storage import CACHE_LIMIT_KEY, REPOSITORY_TYPE
from nodeagent.config.keys import Finding, guess, load_json, show_key

__all__ = ["ParsedSettings", "RepositoryConfig", "parse_settings_of"]

_log = logging.getLogger(__name__)

_FLAG: Final = "--backup-repository-configmap"
_INTERVAL_KEY: Final = "fullMaintenanceInterval"
_INTERVALS: Final = ("normalGC", "fastGC", "eagerGC")
"""24, 12 and 6 hours. Source: Velero v1.18, pkg/repository/udmrepo/repo_options.go."""


@dataclass(frozen=True)
class ParsedSettings:
    """What a BackupRepository gets as `repositoryConfig`, and what was found on the way."""

    settings: Mapping[str, str] = field(default_factory=dict)
    mistakes: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """All that an operator should read."""
        return [*(f"{mistake}; it counts as unset" for mistake in self.mistakes), *map(str, self.notes)]


def parse_settings_of(config_map: JsonDict) -> ParsedSettings:
    """Return the settings for repositories in `config_map`, a v1 ConfigMap as JSON dict.

    Keys that kopia repositories do not know are handed on: whoever reads them may.

    Raises:
        ConfigError: what it has for their type is no JSON object.
    """
    text = (config_map.get("data") or {}).get(REPOSITORY_TYPE)
    if text is None:
        return ParsedSettings()
    try:
        document = load_json(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"its key {REPOSITORY_TYPE} is not JSON: {e}") from e
    if not isinstance(document, dict):
        raise ConfigError(f"its key {REPOSITORY_TYPE} is not a JSON object")
    found = _Found()
    for key, value in document.items():
        found.take(key, value)
    return ParsedSettings(found.settings, tuple(found.mistakes), tuple(found.notes))


class _Found:
    """What one reading gathers."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self.mistakes: list[Finding] = []
        self.notes: list[Finding] = []

    def take(self, key: str, value: object) -> None:
        path = f"{REPOSITORY_TYPE}{show_key(key)}"
        text = _as_text(value)
        if value is None:
            return
        if text is None:
            self.mistakes.append(Finding(path, "expected a text, a number, true or false"))
        elif key == CACHE_LIMIT_KEY and not (text.isdecimal() and int(text) > 0):
            self.mistakes.append(Finding(path, f"expected a whole number of MiB of at least 1, found {text}"))
        elif key == _INTERVAL_KEY and text not in _INTERVALS:
            problem = f"expected one of {', '.join(_INTERVALS)}, found {text}"
            self.mistakes.append(Finding(path, problem, guess(text, _INTERVALS)))
        else:
            self.settings[key] = text
            if key not in {CACHE_LIMIT_KEY, _INTERVAL_KEY}:
                problem = "unknown key; it is handed on to the BackupRepository"
                self.notes.append(Finding(path, problem, guess(key, (CACHE_LIMIT_KEY, _INTERVAL_KEY))))


def _as_text(value: object) -> str | None:
    """Return a plain JSON value as the peer writes it into a BackupRepository; None for any other."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, (bool, int, float)) else None


class RepositoryConfig:
    """The settings for new repositories, read when one is made; the last good ones stay in mind."""

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
        self._told: list[str] = []

    @property
    def cache_limit_mib(self) -> int | None:
        """How large kopia's cache may become in repositories that are made now; None: kopia's default."""
        text = self._last.settings.get(CACHE_LIMIT_KEY)
        return int(text) if text else None

    async def check(self) -> None:
        """Read it once, so that a wrong one is told at start.

        Raises:
            ConfigError: it does not exist, cannot be read, or holds no JSON object.
        """
        if self._name:
            self._keep(await self._read())

    async def settings(self) -> Mapping[str, str]:
        """Return what a new repository gets; the last good settings where the ConfigMap has become unusable."""
        if not self._name:
            return {}
        try:
            self._keep(await self._read())
        except ConfigError as e:
            _log.warning("the last good configuration of repositories stays in force: %s", e)
        return self._last.settings

    async def _read(self) -> ParsedSettings:
        place = f"ConfigMap {self._namespace}/{self._name}"
        try:
            found = await self._client.read(CONFIG_MAPS, self._namespace, self._name)
        except KubeError as e:
            raise ConfigError(f"the configuration of repositories cannot be read: {e}") from e
        if found is None:
            raise ConfigError(f"{place} does not exist: create it, or start without {_FLAG}")
        try:
            return parse_settings_of(found)
        except ConfigError as e:
            raise ConfigError(f"{place}: {e}") from e

    def _keep(self, parsed: ParsedSettings) -> None:
        changed, self._last = parsed.settings != self._last.settings, parsed
        if changed:
            self._on_change()
        if parsed.warnings != self._told:
            self._told = parsed.warnings
            for warning in parsed.warnings:
                _log.warning("configuration of repositories: %s", warning)

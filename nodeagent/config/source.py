"""The sources of a configuration document: the ConfigMap, and files for `check-config`.

Knows what makes a ConfigMap or a file unusable. Does not know the document's keys
(`nodeagent.config.parse`). The agent itself reads no YAML.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import CONFIG_MAPS
from core.kube.types import ConfigObject, Manifest
from nodeagent.config.parse import ParsedConfig, parse_config
from nodeagent.config.schema import load_json

__all__ = [
    "absent",
    "document_in",
    "document_of",
    "parse_config_map",
    "read_config",
    "read_config_map",
    "read_document",
]


async def read_config(client: KubeClient, namespace: str, name: str) -> ParsedConfig:
    """Return the configuration in the ConfigMap `name`; all defaults if `name` is empty.

    Raises:
        ConfigError: the ConfigMap is missing, cannot be read, does not have exactly one key, or
            holds no JSON object.
    """
    if not name:
        return ParsedConfig()
    try:
        found = await client.read(CONFIG_MAPS, namespace, name)
    except KubeError as e:
        raise ConfigError(f"ConfigMap {namespace}/{name} cannot be read: {e}") from e
    if found is None:
        raise absent(namespace, name)
    return parse_config_map(found)


def absent(namespace: str, name: str) -> ConfigError:
    """Return the error for a ConfigMap that does not exist."""
    return ConfigError(
        f"ConfigMap {namespace}/{name} does not exist: create it, or start without --node-agent-configmap"
    )


def parse_config_map(config_map: ConfigObject) -> ParsedConfig:
    """Return the configuration in `config_map`, a v1 ConfigMap as JSON dict.

    Raises:
        ConfigError: it does not have exactly one key, or holds no JSON object.
    """
    try:
        return parse_config(document_of(config_map))
    except ConfigError as e:
        meta = config_map["metadata"]
        raise ConfigError(f"ConfigMap {meta['namespace']}/{meta['name']}: {e}") from e


def document_of(config_map: Mapping[str, Any]) -> str:
    """Return the one value of a v1 ConfigMap.

    Raises:
        ConfigError: it does not have exactly one key.
    """
    data = config_map.get("data") or {}
    if len(data) != 1:
        found = ", ".join(sorted(data)) or "none"
        raise ConfigError(f"must have exactly one key, whose value is a JSON document; found: {found}")
    document: str = next(iter(data.values()))
    return document


_STANDARD_INPUT = "-"


def read_document(path: str) -> str:
    """Return the configuration document in the file at `path`; `-` is standard input.

    Raises:
        ConfigError: the file cannot be read, or contains no single document.
    """
    text = _read(path)
    try:
        return document_in(text)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def read_config_map(path: str) -> Manifest:
    """Return the v1 ConfigMap whose manifest is in the file at `path`; `-` is standard input.

    Raises:
        ConfigError: the file cannot be read, or contains no single ConfigMap whose data are strings.
    """
    manifests = _manifests_in(_read(path))
    if len(manifests) != 1:
        raise ConfigError(f"{path}: contains {len(manifests)} ConfigMaps, expected one")
    data = manifests[0].get("data") or {}
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise ConfigError(f"{path}: the values of data are not strings")
    return manifests[0]


def _read(path: str) -> str:
    try:
        return sys.stdin.read() if path == _STANDARD_INPUT else Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from e


def document_in(text: str) -> str:
    """Return the configuration document in `text`: `text` itself, or the value in a ConfigMap manifest.

    Raises:
        ConfigError: `text` has several ConfigMaps, or one without exactly one key.
    """
    manifests = _manifests_in(text)
    if len(manifests) > 1:
        raise ConfigError(f"contains {len(manifests)} ConfigMaps, expected one")
    # Anything else is treated as the document, so that parsing it reports what is invalid.
    return document_of(manifests[0]) if manifests else text


def _manifests_in(text: str) -> list[Manifest]:
    """Return the ConfigMaps in `text`, which is JSON or YAML."""
    try:
        whole = load_json(text)
    except (ValueError, RecursionError):
        return _config_maps(_load_yaml(text))
    return _config_maps([whole])


def _load_yaml(text: str) -> list[Any]:
    try:
        return list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError, RecursionError):
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

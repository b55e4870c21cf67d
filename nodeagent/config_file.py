"""Reads a configuration from a file, as users keep it: a JSON document, or a manifest of the ConfigMap.

Knows the forms of such a file. Does not know what the document says (`nodeagent.config`). YAML is
imported here alone: the agent itself never reads any.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

from core.errors import ConfigError
from core.models.base import JsonDict
from nodeagent.config_keys import load_json
from nodeagent.config_map import document_of

__all__ = ["document_in", "read_document"]

_STANDARD_INPUT = "-"


def read_document(path: str) -> str:
    """Return the configuration document in the file at `path`; `-` is standard input.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    try:
        text = sys.stdin.read() if path == _STANDARD_INPUT else Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from e
    try:
        return document_in(text)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def document_in(text: str) -> str:
    """Return the configuration document in `text`: itself, or the value in a ConfigMap's manifest.

    Raises:
        ConfigError: `text` has several ConfigMaps, or one without exactly one key.
    """
    try:
        whole = load_json(text)
    except (ValueError, RecursionError):
        manifests = _config_maps(_load_yaml(text))
    else:
        manifests = _config_maps([whole])
    if len(manifests) > 1:
        raise ConfigError(f"it holds {len(manifests)} ConfigMaps; give the agent's alone")
    # What is neither is taken for the document: then its reader says what is wrong with it.
    return document_of(manifests[0]) if manifests else text


def _load_yaml(text: str) -> list[Any]:
    try:
        return list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError, RecursionError):
        return []


def _config_maps(objects: list[Any]) -> list[JsonDict]:
    """Return the ConfigMaps among some objects, those of a List among them."""
    found: list[JsonDict] = []
    for obj in objects:
        if not isinstance(obj, dict):
            continue
        if obj.get("kind") == "ConfigMap":
            found.append(obj)
        elif isinstance(obj.get("items"), list):
            found += _config_maps(obj["items"])
    return found

"""Fetches the agent's configuration from its ConfigMap.

Knows what makes a ConfigMap unusable. Does not know the document's keys (`nodeagent.config`).
"""

from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import CONFIG_MAPS
from core.models.base import JsonDict
from nodeagent.config import ParsedConfig, parse_config

__all__ = ["absent", "document_of", "parse_config_map", "read_config"]


async def read_config(client: KubeClient, namespace: str, name: str) -> ParsedConfig:
    """Return the configuration in the ConfigMap `name`; all defaults where `name` is empty.

    Raises:
        ConfigError: the ConfigMap is missing, cannot be read, does not have exactly one key, or
            holds no JSON object.
    """
    if not name:
        return ParsedConfig()
    try:
        found = await client.read(CONFIG_MAPS, namespace, name)
    except KubeError as e:
        raise ConfigError(f"the configuration cannot be read: {e}") from e
    if found is None:
        raise absent(namespace, name)
    return parse_config_map(found)


def absent(namespace: str, name: str) -> ConfigError:
    """Return the error that there is no such ConfigMap."""
    return ConfigError(
        f"ConfigMap {namespace}/{name} does not exist: create it, or start without --node-agent-configmap"
    )


def parse_config_map(config_map: JsonDict) -> ParsedConfig:
    """Return the configuration in `config_map`, a v1 ConfigMap as JSON dict.

    Raises:
        ConfigError: it does not have exactly one key, or holds no JSON object.
    """
    try:
        return parse_config(document_of(config_map))
    except ConfigError as e:
        meta = config_map["metadata"]
        raise ConfigError(f"ConfigMap {meta['namespace']}/{meta['name']}: {e}") from e


def document_of(config_map: JsonDict) -> str:
    """Return the one value of a v1 ConfigMap.

    Raises:
        ConfigError: it does not have exactly one key.
    """
    data = config_map.get("data") or {}
    if len(data) != 1:
        found = ", ".join(sorted(data)) or "none"
        raise ConfigError(f"it must have exactly one key, whose value is a JSON document; it has: {found}")
    document: str = next(iter(data.values()))
    return document

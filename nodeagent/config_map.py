"""Fetches the agent's configuration from its ConfigMap.

Knows what makes a ConfigMap unusable. Does not know the document's keys (`nodeagent.config`).
"""

from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import CONFIG_MAPS
from core.models.base import JsonDict
from nodeagent.config import ParsedConfig, parse_config

__all__ = ["document_of", "read_config"]


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
        raise ConfigError(
            f"ConfigMap {namespace}/{name} does not exist: create it, or start without --node-agent-configmap"
        )
    try:
        return parse_config(document_of(found))
    except ConfigError as e:
        raise ConfigError(f"ConfigMap {namespace}/{name}: {e}") from e


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

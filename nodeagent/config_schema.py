"""The JSON Schema of the configuration document, made from the models.

Knows how a schema is kept short and how it tells further names of a key. Does not know the keys
(`nodeagent.config_models`). Rules between keys are not in it: `nodeagent check-config` knows all.
"""

from typing import Any, Final

from core.models.base import JsonDict
from nodeagent.config_keys import nested_section
from nodeagent.config_models import AgentConfig, Section

__all__ = ["build_schema"]

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def build_schema() -> JsonDict:
    """Return the schema; keys that it does not name are tolerated, as the agent does."""
    schema = AgentConfig.model_json_schema(by_alias=True)
    definitions: JsonDict = schema.pop("$defs")
    for section in _sections(AgentConfig):
        described = schema if section is AgentConfig else definitions[section.__name__]
        for other, alias in section.other_names.items():
            described["properties"][other] = described["properties"][alias]
    about = "The document in the ConfigMap that --node-agent-configmap names."
    whole = {"$schema": _DIALECT, "title": "Configuration of node-agent", "description": about}
    plain: JsonDict = _tidied(schema | {"$defs": definitions})
    return plain | whole


def _sections(section: type[Section]) -> set[type[Section]]:
    found = {section}
    for info in section.model_fields.values():
        if nested := nested_section(info):
            found |= _sections(nested.section)
    return found


def _tidied(node: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return `node` without titles that only repeat the keys, and with maps that take no other keys."""
    if isinstance(node, list):
        return [_tidied(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy = {key: _tidied(value) for key, value in node.items() if key != "title" or not isinstance(value, str)}
    return tidy | ({"additionalProperties": False} if "patternProperties" in tidy else {})

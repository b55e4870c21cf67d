"""The page of all configuration keys, docs/configuration-keys.md, and their schema, docs/config.schema.json.

Rules between keys are not in the schema: `nodeagent check-config` checks all of them.
"""

import json
from collections.abc import Iterator
from typing import Any

from nodeagent.config.keys import AgentConfig
from nodeagent.config.own_keys import OWN_KEY
from nodeagent.config.schema import known_paths
from nodeagent.config.value_types import Section
from tests.support.objects import JsonDict

_IMMEDIATELY = "immediately; running transfers continue"
_NEXT = "for the next transfer that is exposed"
_IN_EFFECT = {
    "loadConcurrency.prepareQueueLength": "immediately; a lower value stops no transfer",
    "loadConcurrency.restoresFirst": "immediately",
    "loadConcurrency": _IMMEDIATELY,
    "nodeagent.io.bandwidth": "within 10 seconds, also for data movers that run and started with the key",
    "nodeagent.io.blockHash": "for the next repository that is created",
    "nodeagent.io.verification": "for the next Job",
    "nodeagent.io.retry": "for the next attempt of every transfer",
}
_HEAD = ("key", "type", "default", "meaning", "example", "takes effect")


_ABOUT = """\
# All keys

Generated from the models of the configuration (`tests/nodeagent/support/config_table.py`).
[configuration.md](configuration.md) explains the document.

In a key, `[]` stands for an entry of a list and `<name>` for a name of your own, such as the storage class of the
source volume. A key with the default `none` has no effect while it is absent. Sizes have the unit that the key names;
`MB` means MiB, as in Velero. "Load" in a key's name means *transfer*. Where the last cell is empty, a key takes effect
as the one that contains it.
"""


def build_page() -> str:
    """Return the page: a row for each key, in the order of the models."""
    schema = build_schema()
    effects: dict[str, str] = {}
    rows: list[tuple[str, ...]] = [_HEAD, ("---",) * len(_HEAD)]
    for path, _ in known_paths(AgentConfig):
        node = _resolve(schema, path)
        effect = next((words for key, words in _IN_EFFECT.items() if path.startswith(key)), _NEXT)
        plain = path.replace("[]", "")
        above = next((effects[other] for other in reversed(effects) if plain.startswith(f"{other}.")), None)
        effects[plain] = effect
        rows.append(
            (
                f"`{path}`",
                _form(schema, node),
                _default(node),
                node["description"],
                ", ".join(f"`{json.dumps(example)}`" for example in node.get("examples", [])),
                "" if effect == above else effect,
            )
        )
    lines = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n".join([_ABOUT, *lines]) + "\n"


def _resolve(schema: JsonDict, path: str) -> JsonDict:
    """The schema of the value at `path`."""
    node: JsonDict = schema
    for step in _steps(path):
        inside = _follow(schema, node)
        if step == "[]":
            forms = [inside, *inside.get("oneOf", [])]
            node = next(form["items"] for form in forms if "items" in form)
        elif step == "<name>":
            node = inside["additionalProperties"]
        else:
            node = inside["properties"][step]
    return node


def split_path(path: str) -> list[str]:
    """Return the keys of a path; only one of them has a dot."""
    own, _, rest = path.partition(f"{OWN_KEY}.")
    return [OWN_KEY, *rest.split(".")] if rest and not own else [path] if path == OWN_KEY else path.split(".")


def _steps(path: str) -> Iterator[str]:
    for part in split_path(path):
        yield part.removesuffix("[]")
        if part.endswith("[]"):
            yield "[]"


def _follow(schema: JsonDict, node: JsonDict) -> JsonDict:
    reference = node.get("$ref", "").rpartition("/")[2]
    return schema["$defs"][reference] if reference else node


def _form(schema: JsonDict, node: JsonDict) -> str:
    inside = _follow(schema, node)
    for key in ("oneOf", "anyOf"):
        if key in inside:
            return " or ".join(_form(schema, form) for form in inside[key] if form.get("type") != "null")
    if "enum" in inside:
        return ", ".join(f"`{word}`" for word in inside["enum"] if word)
    if "const" in inside:
        return f"`{inside['const']}`"
    if inside["type"] in {"integer", "number"}:
        return f"{'whole ' if inside['type'] == 'integer' else ''}number{_bounds(inside)}"
    kind: str = inside["type"]
    return {"boolean": "true or false", "array": "list"}.get(kind, kind)


def _bounds(inside: JsonDict) -> str:
    least = f" from {inside['minimum']}" if "minimum" in inside else ""
    return f"{least} to {inside['maximum']}" if inside.get("maximum", 2**31 - 1) < 2**31 - 1 else least


def _default(node: JsonDict) -> str:
    value: Any = node.get("default")
    return f"`{json.dumps(value)}`" if value not in (None, "", []) else "none" if value != "" else "empty"


def build_schema() -> JsonDict:
    """Return the JSON Schema; it tolerates unknown keys, as the agent does."""
    schema = AgentConfig.model_json_schema(by_alias=True)
    definitions: JsonDict = schema.pop("$defs")
    for section in Section.__subclasses__():
        described = schema if section is AgentConfig else definitions.get(section.__name__, {})
        for other, alias in section.other_names.items():
            described["properties"][other] = described["properties"][alias]
    about = "The document in the ConfigMap that --node-agent-configmap names."
    plain: JsonDict = _tidied(schema | {"$defs": definitions})
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return plain | {"$schema": dialect, "title": "Configuration of node-agent", "description": about}


def _tidied(node: Any) -> Any:
    """Return `node` without titles that only repeat the keys; maps accept no keys beside their pattern."""
    if isinstance(node, list):
        return [_tidied(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy = {key: _tidied(value) for key, value in node.items() if key != "title" or not isinstance(value, str)}
    return tidy | ({"additionalProperties": False} if "patternProperties" in tidy else {})

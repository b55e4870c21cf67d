"""The published schema and page of the keys are generated from the models.

`UPDATE_GOLDEN=1 pytest tests/nodeagent/config/test_schema.py` writes them.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from nodeagent.config.keys import AgentConfig
from nodeagent.config.parse import parse_config
from nodeagent.config.schema import known_paths
from nodeagent.config.value_types import (
    DurationText,
    LabelKey,
    LabelValue,
    ObjectName,
    OptionalDurationText,
    QuantityText,
)
from tests.nodeagent.support.config_table import build_page, build_schema, split_path

_DOCS = Path(__file__).parents[3] / "docs"
_SCHEMA = _DOCS / "config.schema.json"
_PAGE = _DOCS / "configuration.md"


def _fresh(path: Path, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_the_published_schema_is_generated_from_the_models() -> None:
    _fresh(_SCHEMA, json.dumps(build_schema(), indent=2) + "\n")


def test_the_page_of_keys_is_generated_from_the_models() -> None:
    _fresh(_DOCS / "configuration-keys.md", build_page())


def test_every_example_on_the_page_is_valid() -> None:
    blocks = re.findall(r"(?s)```json\n(.*?)```", _PAGE.read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        parsed = parse_config(block)
        assert (parsed.errors, parsed.notes) == ((), ()), block


_SAMPLES = st.text() | st.sampled_from(
    [
        "",
        "a",
        "A_b",
        "a.b",
        "example.com/name",
        "Example.com/name",
        "x" * 63,
        "0",
        "+1",
        "1.",
        ".5",
        "100m",
        "2E6",
        "1e-3",
        "1h30m",
        "+.5s",
        "10",
        "-0",
        "-0s",
    ]
)


@given(
    text=_SAMPLES,
    form=st.sampled_from([LabelKey, LabelValue, ObjectName, QuantityText, DurationText, OptionalDurationText]),
)
def test_the_schema_accepts_every_text_that_the_agent_accepts(text: str, form: Any) -> None:
    adapter: TypeAdapter[str] = TypeAdapter(form)
    try:
        adapter.validate_python(text)
    except ValidationError:
        return
    assert re.fullmatch(adapter.json_schema()["pattern"], text)


def _with_examples(section: Any) -> list[tuple[str, Any]]:
    """Return all examples except those that are only valid together with others, as in the example of the list."""
    found = [(path, example) for path, info in known_paths(section) for example in info.examples or []]
    return [(path, example) for path, example in found if not re.search(r"(tolerations|Expressions)\[\]\.", path)]


def _needed(part: str, shown: dict[str, Any]) -> dict[str, Any]:
    """Return what an entry of that list needs, whatever else is shown of it."""
    if part == "perNodeConfig[]":
        return {"number": 1}
    if part == "windows[]":
        return {"schedule": "@daily", "duration": "1h"}
    if part != "repositoryVolumes[]":
        return {}
    return {"mountPath": "/backups"} | ({} if "nfs" in shown else {"persistentVolumeClaim": "shared"})


@pytest.mark.parametrize(("path", "example"), _with_examples(AgentConfig), ids=str)
def test_every_example_of_a_key_is_valid(path: str, example: Any) -> None:
    document = example
    for part in reversed(split_path(path)):
        if part == "<name>":
            document = {"DataUpload" if "perKind" in path else "fast": document}
        elif part.endswith("[]"):
            document = {part.removesuffix("[]"): [_needed(part, document) | document]}
        elif part == "nfs" and path.count("nfs."):
            document = {part: {"server": "nfs", "path": "/export"} | document}
        else:
            document = {part: document}
    parsed = parse_config(json.dumps(document))
    assert parsed.errors == ()
    assert [note for note in parsed.notes if "unknown key" in note.problem] == []


def test_every_key_has_a_description_and_an_example() -> None:
    assert [path for path, info in known_paths(AgentConfig) if not info.description or not info.examples] == []

"""Golden files: the result of a builder, or what a command prints, is compared with a file.

`UPDATE_GOLDEN=1 pytest tests/exposer` rewrites the files; review the difference before you commit
it.
"""

import difflib
import json
import os
from pathlib import Path

from tests.support.objects import JsonDict

_TESTS = Path(__file__).parent.parent
_GOLDEN = _TESTS / "golden"
RECORDINGS = _TESTS / "recordings" / "velero-1.18.2"


def assert_golden(name: str, manifest: JsonDict) -> None:
    """Fail unless `manifest` is equal to `tests/golden/<name>.json`."""
    path = _GOLDEN / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    assert json.loads(path.read_text()) == manifest


def assert_golden_text(name: str, text: str) -> None:
    """Fail unless `text` is equal to `tests/golden/<name>.txt`."""
    path = _GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    changes = difflib.unified_diff(expected.splitlines(), text.splitlines(), "expected", "actual", n=0, lineterm="")
    assert expected == text, "\n".join(changes)


def recorded_objects() -> list[JsonDict]:
    """Return every object in every recording; watches hold it in `object`."""
    contents = [json.loads(file.read_text()) for file in sorted(RECORDINGS.glob("*.json"))]
    return [entry.get("object", entry) for content in contents if isinstance(content, list) for entry in content]


def recorded(name: str, index: int = 0, *, called: str = "") -> JsonDict:
    """Return the object of one watch event of a recording.

    `index` counts the events; `called` narrows them to those of one object.
    """
    events = json.loads((RECORDINGS / f"{name}.json").read_text())
    objects = [event["object"] for event in events]
    named: list[JsonDict] = [o for o in objects if not called or o["metadata"]["name"] == called]
    return named[index]

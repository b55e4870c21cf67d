"""The keys below `nodeagent.io`."""

import json

import pytest

from core.models.base import JsonDict
from exposer.tenant_metadata import DEFAULT_EXCLUDED
from nodeagent.config.parse import parse_config


def findings(document: JsonDict) -> list[str]:
    parsed = parse_config(json.dumps(document))
    return [*map(str, parsed.errors), *map(str, parsed.notes)]


def test_the_account_of_movers_is_read() -> None:
    parsed = parse_config('{"nodeagent.io": {"moverServiceAccount": "movers"}}')

    assert (parsed.errors, parsed.notes) == ((), ())
    assert parsed.config.own.mover_service_account == "movers"


def test_the_excluded_metadata_is_replaced() -> None:
    parsed = parse_config('{"nodeagent.io": {"excludedMetadata": ["cdi.kubevirt.io/"]}}')

    assert (parsed.errors, parsed.notes) == ((), ())
    assert parsed.config.own.excluded_metadata == ["cdi.kubevirt.io/"]
    assert parse_config("{}").config.own.excluded_metadata == list(DEFAULT_EXCLUDED)


@pytest.mark.parametrize(
    ("document", "finding"),
    [
        (
            {"nodeagent.io": {"moverServiceAccount": "Movers"}},
            (
                '["nodeagent.io"].moverServiceAccount: expected a name of lower-case letters, digits, '
                "'-' and '.', found the string \"Movers\" (did you mean movers?)"
            ),
        ),
        ({"nodeagent.io": "movers"}, '["nodeagent.io"]: expected an object, found the string "movers"'),
        (
            {"nodeagent.io": {"serviceAccount": "movers"}},
            '["nodeagent.io"].serviceAccount: unknown key; ignored (did you mean moverServiceAccount?)',
        ),
        (
            {"moverServiceAccount": "movers"},
            "moverServiceAccount: unknown key; ignored (did you mean nodeagent.io.moverServiceAccount?)",
        ),
        (
            {"nodeagent.io": {"excludedMetadata": [""]}},
            (
                '["nodeagent.io"].excludedMetadata[0]: expected the beginning of a key such as "example.com/" or '
                '"example.com/team", found the string ""'
            ),
        ),
    ],
    ids=["no name", "no object", "unknown", "outside", "no prefix"],
)
def test_a_wrong_key_or_value_is_explained(document: JsonDict, finding: str) -> None:
    assert findings(document) == [finding]
    assert parse_config(json.dumps(document)).config.own.mover_service_account == ""

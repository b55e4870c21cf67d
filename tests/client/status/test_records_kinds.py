"""The kinds of transfers as a user names them."""

import pytest

from client.status.records import TRANSFER_KINDS, TransferKind, kind_named, parse_target
from core.errors import ConfigError


@pytest.mark.parametrize("kind", TRANSFER_KINDS, ids=lambda kind: kind.name)
def test_a_kind_has_its_name_its_plural_and_a_short_name_in_any_case(kind: TransferKind) -> None:
    for word in (kind.name, kind.resource.plural, kind.short, kind.short.upper(), f"{kind.resource.plural}.velero.io"):
        assert kind_named(word) is kind


@pytest.mark.parametrize("words", [["du/b-1"], ["DataUpload", "b-1"], ["datauploads/b-1"]], ids=" ".join)
def test_a_transfer_is_named_with_a_slash_or_a_space(words: list[str]) -> None:
    kind, name = parse_target(words)
    assert (kind.name, name) == ("DataUpload", "b-1")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["datauplod/b"], r'"datauplod" is no kind of transfer: did you mean dataupload'),
        (["zzz/b"], r"no kind of transfer: DataUpload \(du\), DataDownload \(dd\)"),
        (["du"], "not KIND/NAME"),
        (["du/"], "not KIND/NAME"),
        (["du/a/b"], "not KIND/NAME"),
        (["du", "a", "b"], "not KIND/NAME"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_names_no_transfer_is_an_error(words: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_target(words)

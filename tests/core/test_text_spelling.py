import pytest

from core.text import guess


@pytest.mark.parametrize(
    ("name", "hint"), [("Zst", "did you mean zstd?"), ("PGZIP", "did you mean pgzip?"), ("none at all, really", None)]
)
def test_a_name_of_close_spelling_is_suggested_whatever_its_case(name: str, hint: str | None) -> None:
    assert guess(name, ["zstd", "pgzip", "s2-default"]) == hint

import pytest

from core.text import guess, hinted


@pytest.mark.parametrize(
    ("name", "hint"),
    [("Zst", "did you mean zstd?"), ("PGZIP", "did you mean pgzip?"), ("none at all, really", None)],
)
def test_a_name_of_close_spelling_is_suggested_whatever_its_case(name: str, hint: str | None) -> None:
    assert guess(name, ["zstd", "pgzip", "s2-default"]) == hint


def test_a_text_has_the_hint_behind_it_if_there_is_one() -> None:
    assert hinted("there is no zst", "zst", ["zstd"]) == "there is no zst (did you mean zstd?)"
    assert hinted("there is no x", "x", ["zstd"]) == "there is no x"

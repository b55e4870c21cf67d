"""When a backup is Shrunk."""

import pytest

from core.models.backups import SavedSize, find_full, is_shrunk, read_shrinkage
from core.models.names import SHRUNK_ANNOTATION

MIB = 1024**2


def _sizes(*sizes: tuple[int | None, int]) -> list[SavedSize]:
    return [SavedSize(f"s{number}", files, size * MIB) for number, (files, size) in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "full"),
    [
        pytest.param([(10, 1000)], None, id="first"),
        pytest.param([(1000, 1000), (499, 1000)], "s0", id="fewer files"),
        pytest.param([(1000, 1000), (500, 1000)], None, id="half of the files"),
        pytest.param([(1000, 1000), (1000, 499)], "s0", id="fewer bytes"),
        pytest.param([(1000, 1000), (1000, 500)], None, id="half of the bytes"),
        pytest.param([(100, 64), (0, 0)], None, id="no more than 100 files and 64 MiB are missing"),
        pytest.param([(101, 0), (0, 0)], "s0", id="101 files are missing"),
        pytest.param([(1, 65), (1, 0)], "s0", id="65 MiB are missing"),
        pytest.param([(150, 100), (40, 90), (40, 90)], None, id="another one confirms it"),
        pytest.param([(1000, 1000), (100, 100), (89, 100)], "s0", id="less than nine tenths confirm nothing"),
        pytest.param([(1000, 1000), (100, 100), (90, 89)], "s0", id="nor do fewer bytes"),
        pytest.param([(1000, 1000), (100, 100), (90, 90)], None, id="nine tenths confirm it"),
        pytest.param([(1000, 1000), (100, 100), (1000, 1000), (100, 100)], "s2", id="grown back"),
        pytest.param([(1000, 1000), (400, 400), (400, 400), (199, 400)], "s2", id="shrunk again"),
        pytest.param([(1000, 1000), (100, 100), (50, 50), (50, 50)], None, id="the last one before is confirmed"),
        pytest.param([(None, 1000), (1, 1000)], None, id="files not known"),
        pytest.param([(None, 1000), (1, 400)], "s0", id="bytes alone"),
    ],
)
def test_the_newest_that_is_not_shrunk_counts(sizes: list[tuple[int | None, int]], full: str | None) -> None:
    *history, new = _sizes(*sizes)
    found = find_full(history, new)
    assert (found and found.full_snapshot) == full
    if found:
        assert (found.files, found.bytes) == (new.files, new.bytes)


def test_an_acknowledged_one_is_not_shrunk() -> None:
    *history, new = _sizes((1000, 1000), (100, 100), (60, 60))
    assert find_full(history, new) is not None
    assert find_full(history, new, {"s1"}) is None


def test_a_new_rule_does_not_end_what_was_shrunk_before_it() -> None:
    full = SavedSize("s0", 1_000_000, MIB)
    shrunk, new = (
        SavedSize(f"s{n}", files, MIB, "rules", left) for n, files, left in [(1, 1000, None), (2, 800, (5, 5))]
    )
    found = find_full([full, shrunk], new)
    assert found is not None
    assert found.full_snapshot == "s0"


def test_a_new_rule_is_no_loss() -> None:
    full = SavedSize("s0", 1000, 500 * MIB)
    assert find_full([full], SavedSize("s1", 100, 50 * MIB, "rules", (900, 450 * MIB))) is None


def test_its_annotation_is_read_back_until_somebody_acknowledges_it() -> None:
    (history, new) = _sizes((1000, 2), (1, 1))
    found = find_full([history], new)
    assert found is not None
    annotations = {SHRUNK_ANNOTATION: found.to_json()}
    assert read_shrinkage(annotations) == found
    assert found.text == f"shrunk: the volume has 1 files with {MIB} bytes, and had 1000 files with {2 * MIB} bytes"
    assert is_shrunk(annotations)
    wire = found.to_json().replace("}", ',"acknowledged":"2026-01-01T00:00:00Z"}')
    assert not is_shrunk({SHRUNK_ANNOTATION: wire})


@pytest.mark.parametrize("text", ["", "{}", "[", '{"bytes": "many", "fullBytes": 1}'])
def test_an_invalid_annotation_counts_as_none(text: str) -> None:
    assert read_shrinkage({SHRUNK_ANNOTATION: text}) is None

"""Restores into a file system that takes some names for one or refuses them, as SMB shares do: see tools/foldfs."""

import os

import pytest

from core.errors import DataPathError, IncompleteRestoreError
from core.models.phases import Phase
from core.models.transfer_settings import InPlace
from exposer.pod_status import PodEnd
from nodeagent.transfers.outcome import decide_outcome
from tests.datamover.support.data_paths import VolumeBed
from tests.datamover.support.mounts import mounted_folding
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes

_FILES = {
    "A": "of one",
    "a": "another",
    "caf\u00e9": "in one form",
    "cafe\u0301": "in another",
    "stra\u00dfe": "these two differ",
    "strasse": "everywhere here",
    "D/f": "1",
    "d/f": "2",
    "d/g": "3",
    "LINKED/f": "not beside the file that the link leads to",
    "to": "another size",
    "To": "no link",
    "end": "as it is",
    "end.": "with a dot",
    "a:b": "refused",
    "x/new\nline": "refused in a directory",
    "x/Y": "1",
    "x/z": "2",
}
_LINKS = {"linked": "x", "TO": "x/z"}
_LOST = {
    "case": {"a", "d", "d/f", "d/g", "linked", "To", "to"},
    "form": {"caf\u00e9"},
    "end": {"end."},
    "odd": {"a:b", "x/new\nline"},
}


@pytest.mark.sample("whole-case form end odd", "incremental-case")
@pytest.mark.parametrize("rules", [tuple(_LOST), *((rule,) for rule in _LOST)], ids=" ".join)
@pytest.mark.parametrize("rule", [None, InPlace(incremental=True)], ids=["whole", "incremental"])
async def test_what_the_target_does_not_keep_apart_is_missing_and_all_else_is_as_in_the_snapshot(
    bed: VolumeBed, rule: InPlace | None, rules: tuple[str, ...]
) -> None:
    (volume := bed.volume).mkdir()
    for name, text in _FILES.items():
        (volume / name).parent.mkdir(exist_ok=True)
        (volume / name).write_text(text)
    for name, there in _LINKS.items():
        (volume / name).symlink_to(there)
        os.utime(volume / name, ns=(0, 0), follow_symlinks=False)
    (volume / "x").chmod(0o2750)
    expected = describe_tree(volume)
    snapshot_id = await bed.snapshot()
    lost = set[str]().union(*(_LOST[rule] for rule in rules))
    with mounted_folding(bed.folder / "target", *rules) as target:
        if rule is not None:
            (target / "x").mkdir()
            for name in ("x/y", "x/z"):
                (target / name).write_text("old")
        with pytest.raises(IncompleteRestoreError) as failed:
            await bed.restore(snapshot_id, target, in_place=rule)
        if rule is not None and "case" not in rules:
            (target / "x" / "y").unlink()
        assert describe_tree(target) == {name: one for name, one in expected.items() if name not in lost}
    message = str(failed.value)
    assert f": {len(lost)} missing: " in message
    assert "did not take" not in message
    named = {name.replace("\n", "\\n") for name in lost if not name.startswith("d/")}
    assert all(f" {name} (" in message for name in named)
    end = PodEnd(failed.value.exit_code, message, "Error")
    assert decide_outcome(end, lambda _: pytest.fail("a result"), cancel_requested=False).phase is Phase.FAILED


@pytest.mark.sample("case")
@pytest.mark.parametrize("rule", ["case", "odd"])
async def test_nothing_is_deleted_where_a_name_may_stand_for_another_one(bed: VolumeBed, rule: str) -> None:
    (volume := bed.volume).mkdir()
    (volume / "f").write_text("f")
    snapshot_id = await bed.snapshot()
    with mounted_folding(bed.folder / "target", rule) as target:
        (target / "extra").write_text("old")
        text = f"^cannot delete extra files: target {target} does not keep all names as they are$"
        with pytest.raises(DataPathError, match=text):
            await bed.restore(snapshot_id, target, in_place=InPlace(delete_extra_files=True))
        assert [one.name for one in target.iterdir()] == ["extra"]


async def test_names_in_another_form_are_reported_and_all_data_is_restored(bed: VolumeBed) -> None:
    bed.write("d./f ", text="f")
    snapshot_id = await bed.snapshot()
    with mounted_folding(bed.folder / "target", "end") as target:
        result = await bed.restore(snapshot_id, target)
        assert (target / "d" / "f").read_text() == "f"
    form = "(another form of its name)"
    assert result.note == f"the target did not take the name of 2 of the entries: d. {form}; d./f  {form}"

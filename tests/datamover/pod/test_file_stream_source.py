"""The list of a directory in a snapshot, and the plan of its restore, with a real kopia."""

from pathlib import Path

import pytest

from core.contract import parse_result
from core.models.transfer_settings import PLAN_LINE, EndedPlan
from core.mover_specs import ListFiles, PlanRestore
from core.snapshot_contract import ENTRY_LINE, FileEntry, FileListing, FileType
from datamover.pod import file_stream
from datamover.pod.storage_commands import run_storage_command
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.stored_files import SnapshotBed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


class Lister:
    """Lists, and reads what was printed."""

    def __init__(self, bed: SnapshotBed, capsys: pytest.CaptureFixture[str]) -> None:
        self.bed = bed
        self._capsys = capsys
        self.printed: dict[str, FileEntry] = {}

    async def list(self, path: str = "", *, device: bool = False, limit: int = 100, after: str = "") -> int:
        context = self.bed.pod.context
        spec = ListFiles(**self.bed.place(path, device=device), limit=limit, after=after)
        code = await run_storage_command(spec, context)
        lines = [ENTRY_LINE.parse(line) for line in self._capsys.readouterr().out.splitlines()]
        self.printed = {one.name: one for one in lines if one is not None}
        return code

    @property
    def listing(self) -> FileListing:
        return parse_result(FileListing, self.bed.pod.message)


@pytest.fixture
def lister(bed: SnapshotBed, capsys: pytest.CaptureFixture[str]) -> Lister:
    return Lister(bed, capsys)


async def test_the_volume_is_listed_with_attributes_in_the_order_of_names(lister: Lister) -> None:
    assert await lister.list() == 0, lister.bed.pod.message
    assert lister.listing == FileListing(type=FileType.DIRECTORY, entries=6, listed=6)
    assert list(lister.printed) == ["a", "bad\ufffd", "empty", "new\nline\x1b[31m", "sparse", "sub"]
    file = lister.printed["a"]
    assert (file.type, file.mode, file.size_bytes) == (FileType.FILE, "0640", 3)
    assert file.modified is not None
    assert file.modified[:4] == "2026" or file.modified.endswith("Z")
    assert (lister.printed["sub"].type, lister.printed["sub"].size_bytes) == (FileType.DIRECTORY, 7)
    assert lister.printed["sub"].files == 2
    assert lister.printed["empty"].mode == "2770"


async def test_a_path_with_odd_names_leads_to_the_file(lister: Lister) -> None:
    assert await lister.list("/sub//deep/$(HOME) ü%41") == 0
    assert lister.listing == FileListing(type=FileType.FILE, entries=1, listed=1)
    assert lister.printed["$(HOME) ü%41"].size_bytes == 4


async def test_links_are_listed_and_not_followed(lister: Lister) -> None:
    assert await lister.list("sub") == 0
    assert lister.printed["link"].type is FileType.LINK
    assert await lister.list("sub/link/x") == 10
    assert "sub/link is no directory but a link, which is not followed" in lister.bed.pod.message


async def test_the_list_is_cut_and_goes_on_after_a_name(lister: Lister) -> None:
    assert await lister.list(limit=2) == 0
    assert (lister.listing.entries, lister.listing.listed, list(lister.printed)) == (6, 2, ["a", "bad\ufffd"])
    assert await lister.list(after="new\nline\x1b[31m") == 0
    assert (lister.listing.entries, list(lister.printed)) == (2, ["sparse", "sub"])


async def test_the_list_is_cut_at_the_size_of_a_log(lister: Lister, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_stream, "_LISTED_BYTES", 300)
    assert await lister.list() == 0
    assert lister.listing.entries == 6
    assert 0 < lister.listing.listed == len(lister.printed) < 6


async def test_a_name_that_is_not_there_is_an_error_with_the_one_that_may_be_meant(lister: Lister) -> None:
    assert await lister.list("sbu") == 10
    assert "the snapshot has no sbu (did you mean sub?)" in lister.bed.pod.message
    assert await lister.list("sub/../a") == 10
    assert '".." is no name of a file' in lister.bed.pod.message


async def test_the_only_file_of_a_device_is_the_device(lister: Lister, tmp_path: Path, kopia_program: Path) -> None:
    assert await lister.list(device=True) == 10
    assert "is not one of a block device" in lister.bed.pod.message
    device = tmp_path / "device"
    device.mkdir()
    (device / "disk").write_bytes(bytes(1024))
    other = SnapshotBed.make(PlainKopia(kopia_program, tmp_path / "other"), tmp_path / "other", device)
    lister.bed = other
    assert await lister.list(device=True) == 0
    assert lister.printed["disk"].size_bytes == 1024


async def test_a_plan_is_one_line_and_the_volume_stays_as_it_is(
    bed: SnapshotBed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume = tmp_path / "scratch"
    volume.mkdir()
    (volume / "extra").write_text("12345")
    spec = PlanRestore(**bed.place(), volume_path=str(volume), delete_extra_files=True)
    assert await run_storage_command(spec, bed.pod.context) == 0, bed.pod.message
    (plan,) = (one for line in capsys.readouterr().out.splitlines() if (one := PLAN_LINE.parse(line)))
    assert (plan.to_delete.names, plan.to_delete.bytes) == (["extra"], 5)
    assert EndedPlan.from_json(bed.pod.message).entries == 6
    assert plan.to_write.directories == 3
    assert [*volume.iterdir()] == [volume / "extra"]


async def test_a_plan_needs_a_volume(bed: SnapshotBed) -> None:
    assert await run_storage_command(PlanRestore(**bed.place()), bed.pod.context) != 0
    assert "plan-restore needs --volume-path" in bed.pod.message

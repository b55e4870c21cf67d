"""A restore over files that its user may not write to, as a user without root's rights."""

from pathlib import Path

import pytest

from datamover.data_path import probe
from datamover.data_path.probe import allow_writing
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import read_snapshot
from tests.datamover.support.data_paths import back_up_volume, restore_data_path

pytestmark = pytest.mark.processes


def _make(folder: Path) -> dict[str, Path]:
    """Make a read-only directory with a file and a link in it, and return its paths."""
    (folder / "ro").mkdir(parents=True)
    (folder / "ro" / "file").touch(0o444)
    (folder / "ro" / "link").symlink_to("file")
    (folder / "ro").chmod(0o555)
    return {name: folder / "ro" / name for name in ("", "file", "link")}


@pytest.mark.parametrize("files", [True, False], ids=["files", "directories-only"])
async def test_only_what_is_restored_again_becomes_writable(
    mover_repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: bool
) -> None:
    monkeypatch.setattr(probe, "_overrides_modes", lambda: False)
    target, outside = tmp_path / "target", tmp_path / "outside"
    backup = await back_up_volume(mover_repository, _make(tmp_path / "volume")[""].parent)
    snapshot = await read_snapshot(mover_repository, backup.snapshot_id)
    again, others = _make(target), _make(target / "others")
    outside.touch(0o400)
    again["link"].unlink()
    again["link"].symlink_to(outside)
    target.chmod(0o500)
    await allow_writing(mover_repository, snapshot, target, data_path=restore_data_path(), files=files)
    modes = {name: oct(path.lstat().st_mode & 0o777) for name, path in again.items()}
    assert modes == {"": "0o755", "file": "0o644" if files else "0o444", "link": "0o777"}
    assert [oct(path.stat().st_mode & 0o777) for path in (target, outside)] == ["0o700", "0o400"]
    assert [oct(others[name].stat().st_mode & 0o777) for name in ("", "file")] == ["0o555", "0o444"]

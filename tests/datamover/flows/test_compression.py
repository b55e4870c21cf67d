"""A compressed volume takes less room, and every reader restores it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from core.models.transfer_settings import Compression
from datamover.kopia.repository import Repository
from tests.datamover.support.data_paths import back_up_volume
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes

_SOURCE = "some/volume"
_LINES = 200_000


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """4 MB of text, which every algorithm shrinks."""
    made = tmp_path / "volume"
    made.mkdir()
    (made / "log").write_text("".join(f"line {number} of a log\n" for number in range(_LINES)))
    return made


def _stored(repository: Path) -> int:
    """Return the size of a repository in a directory, or in one below it."""
    return sum(blob.stat().st_size for blob in repository.rglob("*.f"))


def test_the_algorithms_are_all_that_kopia_has_except_for_deprecated_ones(kopia_program: Path) -> None:
    asked = subprocess.run(
        [kopia_program, "policy", "set", "--global", "--compression=?"], capture_output=True, text=True, check=False
    )
    known = asked.stderr.partition("must be one of ")[2].partition(", got")[0].split(",")
    assert set(known) - {"inherit", "lz4", "zstd-best-compression"} == set(Compression)


_FAMILIES = (Compression.ZSTD, Compression.S2, Compression.PGZIP)


@pytest.mark.sample("zstd")
@pytest.mark.parametrize("algorithm", _FAMILIES)
async def test_plain_kopia_restores_what_an_algorithm_has_shrunk(
    mover_repository: Repository, repository: Path, volume: Path, kopia: PlainKopia, algorithm: Compression
) -> None:
    result = await back_up_volume(mover_repository, volume, compression=algorithm)
    kopia.run("restore", result.snapshot_id, str(volume.parent / "out"))
    assert describe_tree(volume.parent / "out") == describe_tree(volume)
    assert kopia.policy(_SOURCE)["compression"]["compressorName"] == algorithm
    assert _stored(repository) < result.total_bytes / 2
    assert isinstance(result.new_bytes, int)
    assert isinstance(result.stored_bytes, int)
    # Both have the directories of the snapshot, and the repository has indexes too.
    assert result.new_bytes >= result.total_bytes
    assert result.stored_bytes == pytest.approx(_stored(repository), rel=0.1, abs=50_000)


async def test_a_later_backup_without_compression_restores_and_sets_the_policy_back(
    mover_repository: Repository, volume: Path, kopia: PlainKopia
) -> None:
    await back_up_volume(mover_repository, volume, compression=Compression.ZSTD)
    (volume / "more").write_text("more")
    result = await back_up_volume(mover_repository, volume)
    kopia.run("restore", result.snapshot_id, str(volume.parent / "out"))
    assert describe_tree(volume.parent / "out") == describe_tree(volume)
    assert kopia.policy(_SOURCE)["compression"]["compressorName"] == "none"
    assert result.new_bytes is result.stored_bytes


@pytest.fixture
def pod(tmp_path: Path, _new_repository: Path) -> MoverPod:
    """A pod whose repository exists, for a storage class whose algorithm is zstd."""
    return MoverPod.ready(_new_repository, tmp_path, compression=Compression.ZSTD)


@pytest.mark.sample("-True-snapshot data", "none-False-pod volumes")
@pytest.mark.parametrize(
    ("backup", "restore", "key"),
    [("DataUpload", "DataDownload", "dataMoverConfig"), ("PodVolumeBackup", "PodVolumeRestore", "uploaderSettings")],
    ids=["snapshot data", "pod volumes"],
)
@pytest.mark.parametrize(("setting", "shrunk"), [("", True), ("none", False)])
async def test_the_setting_of_a_transfer_precedes_that_of_its_class(
    pod: MoverPod, volume: Path, *, backup: str, restore: str, key: str, setting: str, shrunk: bool
) -> None:
    given: dict[str, Any] = {key: {"Compression": setting}}
    result = await pod.transfer(backup, volume, **given)
    await pod.transfer(restore, pod.folder / "out", snapshotID=result["snapshotID"])
    assert (pod.folder / "out" / "log").read_bytes() == (volume / "log").read_bytes()
    assert (_stored(pod.folder / "backups") < result["totalBytes"] / 2) is shrunk
    assert ("storedBytes" in result) is shrunk

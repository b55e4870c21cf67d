"""Restores in pod mode: each type, volume mode and DeleteExtraFiles, from the custom resource to the result."""

import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.contract import VolumeMode
from core.models.transfer_settings import InPlace
from tests.datamover.support.pods import FLAGS, MoverPod
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes

_SETTINGS = {"DataDownload": "dataMoverConfig", "PodVolumeRestore": "uploaderSettings"}


@dataclass(frozen=True)
class _Row:
    """A restore as its custom resource asks for it."""

    kind: str
    restore_type: str
    delete: bool

    @property
    def settings(self) -> dict[str, str]:
        return {"DeleteExtraFiles": str(self.delete).lower()}

    @property
    def rule(self) -> InPlace | None:
        """What the data mover makes of it; None: a plain restore."""
        return InPlace.of(self.restore_type, self.settings)

    def put(self, pod: MoverPod) -> None:
        spec: dict[str, Any] = {_SETTINGS[self.kind]: self.settings, "restoreType": self.restore_type}
        if self.kind == "DataDownload" and self.rule:
            spec["targetVolume"] = {"namespace": "app", "pvc": "data", "pv": "pv-7"}
        pod.put_transfer(self.kind, **{"snapshotID": pod.result["snapshotID"], **spec})


def _rows(*kinds: str) -> list[Any]:
    types = ("", "none", "full", "incremental")
    return [
        pytest.param(_Row(*row), id="-".join((row[0], row[1] or "empty", "delete" if row[2] else "keep")))
        for row in itertools.product(kinds, types, (True, False))
    ]


@pytest.mark.sample(
    "DataDownload-incremental-delete",
    "PodVolumeRestore-incremental-keep",
    "PodVolumeRestore-full-delete",
    "DataDownload-none-delete",
)
@pytest.mark.parametrize("row", _rows("DataDownload", "PodVolumeRestore"))
async def test_a_file_system_becomes_the_snapshot(pod: MoverPod, tree: Path, row: _Row) -> None:
    before, rule = describe_tree(tree), row.rule
    await pod.transfer("DataUpload", tree)
    total_bytes = pod.result["totalBytes"]
    (tree / "setuid").write_text("changed")
    (tree / "extra").write_text("of mine")
    (tree / ".velero").mkdir()
    (tree / ".velero" / "uid-of-an-earlier-restore").touch()
    row.put(pod)
    assert await pod.run(FLAGS[row.kind], tree) == 0
    expected: dict[str, Any] = {
        "target": {"byPath": str(tree), "volumeMode": "Filesystem"},
        "totalBytes": total_bytes,
    }
    written = {"incrementalBytes": 1 if rule.incremental else total_bytes} if rule else {}
    assert pod.result == expected | written
    assert "Data-Path-Warning" not in pod.reasons()
    done = {"DataDownload": "uid-of-an-earlier-restore", "PodVolumeRestore": "uid-of-restore"}[row.kind]
    assert [path.name for path in (tree / ".velero").iterdir()] == [done]
    shutil.rmtree(tree / ".velero")
    # A plain restore, into a new volume, never deletes.
    assert (tree / "extra").exists() is not (row.delete and rule is not None)
    (tree / "extra").unlink(missing_ok=True)
    assert describe_tree(tree) == before


@pytest.mark.sample("DataDownload-incremental-delete")
@pytest.mark.parametrize("row", _rows("DataDownload"))
async def test_a_device_is_written_as_a_whole(pod: MoverPod, tmp_path: Path, row: _Row) -> None:
    device, rule = tmp_path / "device", row.rule
    content = bytes(range(256)) * 4096
    device.write_bytes(content)
    await pod.transfer("DataUpload", device, VolumeMode.BLOCK)
    device.write_bytes(b"x" * len(content))
    row.put(pod)
    assert await pod.run("data-download", device, VolumeMode.BLOCK) == 0
    expected: dict[str, Any] = {
        "target": {"byPath": str(device), "volumeMode": "Block"},
        "totalBytes": len(content),
    }
    assert pod.result == expected | ({"fallbackFull": True} if rule and rule.incremental else {})
    assert device.read_bytes() == content

"""Two clusters at work in one location, with the same names: each has its own backups, from the first ones on."""

import asyncio
from pathlib import Path

import pytest

from tests.datamover.support.pods import MoverPod
from tests.datamover.support.trees import describe_tree, make_tree
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.processes


def _cluster(folder: Path, name: str) -> MoverPod:
    (folder / name).mkdir()
    pod = MoverPod(FakeKube(), folder / name, cluster=name)
    pod.put_location({"fspath": str(folder / "backups")}, provider="velero.io/fs")
    pod.put_repository()
    pod.put_transfer("DataUpload")
    return pod


async def test_two_clusters_back_up_at_once_and_restore_their_own(tmp_path: Path) -> None:
    (tmp_path / "backups").mkdir()
    pods = [_cluster(tmp_path, name) for name in ("one", "two")]
    volumes = [make_tree(tmp_path / pod.cluster / "volume") for pod in pods]
    for pod, volume in zip(pods, volumes, strict=True):
        (volume / "cluster").write_text(pod.cluster)
    assert await asyncio.gather(*(pod.init() for pod in pods)) == [0, 0]
    assert len({pod.result["uniqueID"] for pod in pods}) == 1
    assert sum(pod.result.get("created", False) for pod in pods) == 1
    for pod in pods:
        pod.put_repository(phase="Ready")
    backups = (pod.run("data-upload", volume) for pod, volume in zip(pods, volumes, strict=True))
    assert await asyncio.gather(*backups) == [0, 0]
    for pod in pods:
        pod.put_transfer("DataDownload", snapshotID=pod.result["snapshotID"])
    pods[0].put_job()
    assert await pods[0].maintain() == 0, pods[0].message
    for pod, volume in zip(pods, volumes, strict=True):
        (target := tmp_path / pod.cluster / "target").mkdir()
        assert await pod.run("data-download", target) == 0, pod.message
        assert describe_tree(target) == describe_tree(volume)

"""The snapshot of the last complete backup by block stays on the storage, alone, until another replaces it."""

import random
from dataclasses import replace
from datetime import timedelta

import pytest

from core.kube.resources import DEPLOYMENTS, SNAPSHOT_METADATA_SERVICES, VOLUME_SNAPSHOT_CONTENTS
from core.models.base import parse_time
from core.models.names import BASE_SNAPSHOT_LABEL
from exposer.leaked_objects import delete_leaked_objects, list_leaked_objects
from tests.exposer.support.cuts import CUTS, Cut, cut_short
from tests.exposer.support.scenes import BackupScene
from tests.exposer.support.steps import clean_up, ensure, expose

_DRIVER = "hostpath.csi.k8s.io"


class _Backups:
    """Backups of one volume, one after the other."""

    def __init__(self, *, policy: str = "Delete", service: bool = True, server: bool = False) -> None:
        self.scene = BackupScene(mode="Block", policy=policy)
        self.world = self.scene.world
        self.world.handles = {"other"}
        if service:
            spec = {"address": "a:1", "audience": "a", "caCert": "UEVN"}
            self.world.put(SNAPSHOT_METADATA_SERVICES, _DRIVER, spec=spec)
        if server:
            self.world.put(DEPLOYMENTS, "velero", namespace="velero", spec={})
        self.number = 0

    def take(self, name: str) -> str:
        """Take the next snapshot, to be backed up by a DataUpload of that name; return its handle."""
        self.number += 1
        scene, handle, source = self.scene, f"snapshot-{self.number:02}", f"source-{self.number}"
        scene.put_snapshot(source, f"content-{self.number}", handle, ready=True)
        self.world.handles.add(handle)
        owner = replace(scene.request.owner, name=name, uid=f"uid-{self.number:02}")
        scene.request = replace(scene.request, owner=owner, volume_snapshot=source, by_block=True, completed=False)
        return handle

    async def back_up(self, *, completed: bool = True, cut: Cut | None = None) -> str:
        """Back up once and clean up, first over a transport that may fail; return the snapshot's handle."""
        handle = self.take(f"b-{self.number + 1:02}")
        await expose(self.scene)
        self.end(completed=completed)
        if cut is not None:
            await cut_short(clean_up(self.scene, cut))
            # An agent that failed tries again after a pause.
            await self.world.settle()
        await clean_up(self.scene)
        return handle

    def end(self, *, completed: bool = True) -> None:
        self.scene.request = replace(self.scene.request, completed=completed)

    @property
    def kept(self) -> set[str]:
        """What is on the storage, besides another owner's snapshot."""
        return self.world.handles - {"other"}

    @property
    def bases(self) -> list[str]:
        """The UIDs of the DataUploads whose snapshots are kept."""
        contents = self.world.kube.objects(VOLUME_SNAPSHOT_CONTENTS)
        return [uid for one in contents if (uid := (one["metadata"].get("labels") or {}).get(BASE_SNAPSHOT_LABEL))]


async def test_fifty_backups_and_failures_leave_one_snapshot() -> None:
    backups, chance = _Backups(), random.Random(1)
    last = ""
    for _ in range(50):
        completed = chance.random() < 0.7
        handle = await backups.back_up(completed=completed)
        last = handle if completed else last
        assert backups.kept == ({last} if last else set())
        assert len(backups.bases) == bool(last)
    assert backups.world.violations == []


@CUTS
async def test_a_cleanup_that_is_cut_short_leaves_the_same(applied: bool) -> None:
    whole = _Backups()
    await whole.back_up()
    counting = Cut(whole.world.kube)
    await whole.back_up(cut=counting)
    for at in range(1, len(counting.calls) + 1):
        backups = _Backups()
        await backups.back_up()
        handle = await backups.back_up(cut=Cut(backups.world.kube, at, applied=applied))
        assert (backups.kept, backups.bases) == ({handle}, ["uid-02"]), counting.calls[at - 1]
        assert backups.world.violations == []


@pytest.mark.parametrize(
    ("policy", "service", "server", "kept"),
    [
        pytest.param("Delete", True, False, 1, id="without a server"),
        pytest.param("Retain", True, True, 1, id="beside a server, retained"),
        pytest.param("Delete", True, True, 0, id="beside a server"),
        pytest.param("Delete", False, False, 0, id="the driver tells nothing"),
    ],
)
async def test_a_snapshot_is_kept_if_it_serves(policy: str, service: bool, server: bool, kept: int) -> None:
    backups = _Backups(policy=policy, service=service, server=server)
    await backups.back_up()
    assert (len(backups.kept), len(backups.bases)) == (kept, kept)


async def test_a_driver_that_tells_nothing_any_more_keeps_no_older_one() -> None:
    backups = _Backups()
    await backups.back_up()
    await backups.world.delete(SNAPSHOT_METADATA_SERVICES, _DRIVER)
    base = backups.world.find(VOLUME_SNAPSHOT_CONTENTS, "b-01")
    later = parse_time(base["metadata"]["creationTimestamp"]) + timedelta(seconds=1)
    backups.scene.request = replace(backups.scene.request, requested_at=later)
    await backups.back_up()
    assert (backups.kept, backups.bases) == (set(), [])


async def test_a_snapshot_that_is_being_deleted_is_not_kept() -> None:
    """With the policy Retain, it would stay on the storage without a name."""
    backups = _Backups()
    backups.take("b-01")
    await expose(backups.scene)
    await backups.world.delete(VOLUME_SNAPSHOT_CONTENTS, "b-01")
    backups.end()
    await clean_up(backups.scene)
    assert (backups.kept, backups.bases) == (set(), [])


async def test_it_goes_with_its_transfer() -> None:
    backups = _Backups()
    await backups.back_up()
    client = backups.world.client
    leaked = (await list_leaked_objects(client, "velero"))["uid-01"]
    assert [one["metadata"]["name"] for one in leaked.bases] == ["b-01"]
    assert not leaked.objects
    assert await delete_leaked_objects(client, leaked) == "VolumeSnapshotContent b-01 is being deleted"
    await backups.world.settle()
    assert (backups.kept, backups.bases) == (set(), [])
    assert await list_leaked_objects(client, "velero") == {}


async def test_a_transfer_of_the_same_name_waits_until_it_is_deleted() -> None:
    backups = _Backups()
    await backups.back_up()
    backups.take("b-01")
    text = "VolumeSnapshotContent b-01 of an earlier DataUpload must be deleted first"
    assert (await ensure(backups.scene)).message == text
    client = backups.world.client
    await delete_leaked_objects(client, (await list_leaked_objects(client, "velero"))["uid-01"])
    await expose(backups.scene)


async def test_a_member_of_a_group_is_not_kept() -> None:
    backups = _Backups()
    handle = backups.take("b-01")
    backups.world.groups[handle] = "group-1"
    backups.world.lists = False
    await backups.world.patch(VOLUME_SNAPSHOT_CONTENTS, "content-1", status={"volumeGroupSnapshotHandle": "group-1"})
    await expose(backups.scene)
    backups.end()
    for _ in range(5):
        await backups.scene.exposer().clean_up(backups.scene.request)
        await backups.world.settle()
    assert backups.bases == []

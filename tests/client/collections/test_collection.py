"""Backups and restores: which transfers are listed, finding one by its name, waiting for it, and canceling it."""

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import pytest
from msgspec.structs import replace

from client.backups.manifests import BackupError
from client.backups.plan import Choice, ClaimName, plan_backup, start_backup
from client.collections.collection import (
    Backups,
    ProgressMeter,
    Restores,
    VolumeProgress,
    WaitingPod,
    cancel_restore,
    delete_waiting_pods,
)
from client.collections.models import Backup, BackupPhase, explain_end
from client.restores.create import plan_restore, start_restore
from client.restores.sources import RestoreError
from core.kube.errors import NotFoundError
from core.kube.resources import DATA_UPLOADS, POD_VOLUME_BACKUPS, POD_VOLUME_RESTORES, PODS
from core.models.names import VELERO_BACKUP_LABEL, label_value
from core.models.phases import Phase
from tests.client.support.backup_scene import BackupScene, SteppingClock
from tests.client.support.backups import DATA_VOLUME, build_backup
from tests.client.support.restore_scene import DATA, FILES, RestoreScene, saved


@dataclass
class _CountingClock(SteppingClock):
    """Remembers how long each sleep was."""

    sleeps: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(round(seconds, 2))
        await super().sleep(seconds)


async def _started(*names: str, claims: tuple[str, ...] = ("data",), clock: SteppingClock | None = None) -> BackupScene:
    scene = BackupScene(clock=clock or SteppingClock())
    choice = Choice(claims=tuple(ClaimName("app", claim) for claim in claims))
    for name in names:
        await start_backup(scene.tools, await plan_backup(scene.tools, scene.request(name), choice))
    scene.kube.requests.clear()
    return scene


async def _started_both() -> BackupScene:
    return await _started("night", claims=("data", "files"))


def _backups(scene: BackupScene) -> Backups:
    return Backups(scene.client, "velero")


async def _restored() -> RestoreScene:
    scene = RestoreScene()
    planned = await plan_restore(scene.tools, scene.request(), [saved(DATA, "s1"), saved(FILES, "s2")])
    await start_restore(scene.tools, planned)
    return scene


def _lists(scene: BackupScene) -> list[str]:
    """The selectors of the lists of transfers."""
    return [
        one.query.get("labelSelector", "")
        for one in scene.kube.requests
        if one.method == "GET" and one.path.endswith(("/datauploads", "/podvolumebackups"))
    ]


async def test_one_backup_is_found_without_listing_the_others() -> None:
    scene = await _started("night", "noon")
    found = await _backups(scene).find(("night",))
    assert [one.name for one in found.groups] == ["night"]
    assert sorted(_lists(scene)) == sorted(2 * ["nodeagent.io/backup=night", "velero.io/backup-name=night"])


@pytest.mark.parametrize("name", ["nightly", f"nightly-{'of-the-east-' * 6}20261121120000"], ids=["short", "long"])
async def test_a_backup_of_velero_is_shown_and_not_canceled(name: str) -> None:
    scene = await _started("night")
    (raw,) = scene.kube.objects(DATA_UPLOADS)
    owner = {"apiVersion": "velero.io/v1", "kind": "Backup", "name": name, "uid": "u"}
    meta = {"name": "v", "namespace": "velero", "labels": {VELERO_BACKUP_LABEL: label_value(name)}}
    scene.kube.put(raw | {"metadata": meta | {"ownerReferences": [owner]}})
    for names in ((name,), ()):
        assert name in [one.name for one in (await _backups(scene).find(names)).groups]
    with pytest.raises(BackupError, match=rf"^backup {name} is Velero's: use the command velero backup for it$"):
        await _backups(scene).cancel(name)


async def test_transfers_of_others_are_no_restore_of_ours() -> None:
    scene = await _restored()
    raw = scene.downloads[0]
    raw["metadata"] |= {"name": "velero-1", "labels": {"velero.io/restore-name": "r"}, "annotations": {}, "uid": "u9"}
    scene.kube.put(raw)
    assert [one.name for one in (await Restores(scene.client, "velero").find()).groups] == ["back"]


@pytest.mark.parametrize("name", ["a b", "ünï", "a,b", "-"])
async def test_a_name_that_no_label_can_have_does_not_exist(name: str) -> None:
    scene = BackupScene()
    with pytest.raises(NotFoundError, match=f"there is no backup {name} in namespace velero"):
        await _backups(scene).find((name,))
    assert set(_lists(scene)) == {""}


async def test_a_restore_of_unreadable_transfers_is_not_found_and_the_error_says_why() -> None:
    scene = await _restored()
    for raw in scene.downloads:
        scene.kube.put(raw | {"status": {"phase": "Odd"}})
    with pytest.raises(NotFoundError, match=r"^there is no restore back in namespace velero; invalid DataDownload"):
        await Restores(scene.client, "velero").find(("back",))


async def test_a_long_wait_asks_less_often_and_never_for_other_transfers() -> None:
    clock = _CountingClock()
    scene = await _started("night", "noon", clock=clock)
    clock.steps = [*[lambda: None] * 40, partial(scene.move, "data", "Completed")]
    await _backups(scene).wait("night", clock, lambda _: None)
    assert (clock.sleeps[0], clock.sleeps[-1], clock.sleeps) == (1.0, 5.0, sorted(clock.sleeps))
    assert set(_lists(scene)) == {"nodeagent.io/backup=night"}


async def test_a_long_wait_for_many_volumes_lists_a_hundred_of_them_per_second() -> None:
    clock = _CountingClock()
    scene = await _started("night", clock=clock)
    (raw,) = scene.kube.objects(DATA_UPLOADS)
    for number in range(599):
        scene.kube.put(raw | {"metadata": raw["metadata"] | {"name": f"night-{number}", "uid": f"u{number}"}})
    clock.steps = [partial(setattr, clock, "seconds", 3600.0), partial(scene.move, "data", "Completed")]
    await _backups(scene).wait("night", clock, lambda _: None)
    assert clock.sleeps == [1.0, 6.0]


async def test_an_outage_of_the_api_server_is_waited_for() -> None:
    scene = await _started("night")
    scene.kube.fail_next("GET", "/datauploads", "lost", times=10)
    scene.clock.steps = [*[lambda: None] * 10, partial(scene.move, "data", "Completed")]
    assert (await _backups(scene).wait("night", scene.clock, lambda _: None)).counted == "1/1"


async def test_a_backup_that_becomes_unreadable_while_waiting_was_not_deleted() -> None:
    scene = await _started("night")
    scene.clock.steps = [partial(scene.move, "data", "Odd")]
    with pytest.raises(NotFoundError, match=r"no transfer in namespace velero that can be read: invalid DataUpload"):
        await _backups(scene).wait("night", scene.clock, lambda _: None)


async def test_a_failure_counts_the_other_volumes_and_names_what_is_missing() -> None:
    scene = await _started_both()
    scene.move("data", "Failed")
    scene.move("files", "Canceled")
    assert explain_end(await _backups(scene).get_own("night")) == "PVC app/data is Failed: no message, and 1 more"
    scene.move("data", "Completed")
    (files,) = scene.objects(POD_VOLUME_BACKUPS)
    await scene.client.delete(POD_VOLUME_BACKUPS, "velero", files)
    backup = await _backups(scene).get_own("night")
    assert explain_end(backup) == "1 of 2 volumes have no transfer: it was deleted"


async def _cancel(scene: BackupScene) -> list[str]:
    _, canceled, failures = await _backups(scene).cancel("night")
    assert failures == []
    return [one.claim for one in canceled]


async def test_a_cancel_reaches_the_transfers_that_have_not_ended() -> None:
    scene = await _started_both()
    scene.move("data", "Completed")
    assert await _cancel(scene) == ["files"]
    specs = [one["spec"] for kind in (DATA_UPLOADS, POD_VOLUME_BACKUPS) for one in scene.kube.objects(kind)]
    assert [spec.get("cancel") for spec in specs] == [None, True]
    assert (await _backups(scene).get_own("night")).phase is BackupPhase.CANCELING
    assert await _cancel(scene) == ["files"]


async def test_a_transfer_that_is_deleted_meanwhile_is_left_out() -> None:
    scene = await _started_both()
    scene.kube.fail_next("PATCH", "/datauploads/", 404)
    assert await _cancel(scene) == ["files"]


@pytest.mark.parametrize("status", [403, 409, 410, 422, 429, 500])
async def test_a_transfer_that_cannot_be_changed_keeps_no_other_from_it(status: int) -> None:
    scene = await _started_both()
    shrunk = {"nodeagent.io/shrunk": '{"bytes":1,"fullBytes":100}'}
    for resource in (DATA_UPLOADS, POD_VOLUME_BACKUPS):
        (raw,) = scene.kube.objects(resource)
        raw["metadata"]["annotations"] |= shrunk
        scene.kube.put(raw)
    scene.kube.fail_next("PATCH", "/datauploads/", status, times=9)
    _, canceled, failures = await _backups(scene).cancel("night")
    acknowledged, _, unrecorded = await _backups(scene).acknowledge("night", scene.clock.now())
    assert [one.claim for one in (*canceled, *acknowledged)] == ["files", "files"]
    assert [text.partition(": ")[0] for text in (*failures, *unrecorded)] == ["PVC app/data", "PVC app/data"]


async def test_a_restore_of_before_the_definitions_of_velero_1_19_is_canceled() -> None:
    scene = await _restored()
    scene.move("data", "Completed")
    scene.kube.fail_next("PATCH", "/datadownloads/", 422)
    old = next(one for one in scene.downloads if one["spec"]["targetVolume"]["pvc"] == "files")
    del old["spec"]["restoreType"]
    scene.kube.put(old)
    await Restores(scene.client, "velero").cancel("back")
    found = {(one["spec"].get("cancel"), one["spec"]["restoreType"]) for one in scene.downloads}
    assert found == {(None, ""), (True, "")}


def _moving(done: int, phase: Phase = Phase.IN_PROGRESS, total: int = 1000) -> Backup:
    volume = replace(DATA_VOLUME, phase=phase, bytes_done=done, total_bytes=total, snapshot_id="")
    return build_backup(volume, phase=BackupPhase.IN_PROGRESS, expected=1)


@pytest.mark.parametrize(
    ("readings", "rate", "remaining"),
    [
        ([(0, 0)], None, None),
        ([(0, 0), (10, 500)], 50.0, 10.0),
        ([(0, 0), (10, 0)], 0.0, None),
        ([(0, 0), (100, 0), (110, 100), (131, 310)], 10.0, 69.0),
        ([(0, 900), (10, 0), (20, 100)], 10.0, 90.0),
    ],
    ids=["one reading", "two readings", "nothing moves", "the last seconds count", "another attempt"],
)
def test_the_rate_is_a_recent_one(
    readings: list[tuple[float, int]], rate: float | None, remaining: float | None
) -> None:
    meter = ProgressMeter()
    for at, done in readings:
        (progress,) = meter.read(_moving(done), at)
    assert progress.bytes_per_second == rate
    assert progress.remaining == (None if remaining is None else timedelta(seconds=remaining))


def test_a_volume_that_waits_for_another_attempt_starts_again_without_a_rate() -> None:
    meter = ProgressMeter()
    meter.read(_moving(0), 0)
    meter.read(_moving(500), 10)
    (ended,) = meter.read(_moving(500, Phase.COMPLETED), 20)
    (again,) = meter.read(_moving(500), 30)
    assert (ended.bytes_per_second, again.bytes_per_second) == (None, None)


@pytest.mark.parametrize(
    ("done", "total", "rate", "remaining"), [(500, 0, 10.0, None), (500, 100, 10.0, None), (1, 1 << 62, 0.03, 1e9)]
)
def test_the_remaining_time_is_not_known_without_the_size_and_has_a_limit(
    done: int, total: int, rate: float, remaining: float | None
) -> None:
    """Sizes are what any writer of a transfer has put there."""
    found = VolumeProgress(_moving(done, total=total).volumes[0], rate).remaining
    assert found == (None if remaining is None else timedelta(seconds=remaining))


async def _waiting() -> tuple[RestoreScene, WaitingPod]:
    scene = RestoreScene()
    (planned,) = await plan_restore(scene.tools, scene.request(wait_image="agents:1"), [saved(DATA, "s1")])
    await start_restore(scene.tools, [planned])
    return scene, planned.pod


def _end(scene: RestoreScene, phase: str) -> None:
    (transfer,) = scene.kube.objects(POD_VOLUME_RESTORES)
    scene.kube.put(transfer | {"status": {"phase": phase}})


@pytest.mark.looptime
@pytest.mark.parametrize("ends", [True, False])
async def test_a_pod_whose_data_has_arrived_ends_before_it_is_deleted_or_has_a_minute(ends: bool) -> None:
    scene, waiting = await _waiting()
    _end(scene, "Completed")
    deleting = asyncio.create_task(delete_waiting_pods(scene.tools, [waiting]), name="delete")
    await asyncio.sleep(5)
    (pod,) = scene.pods
    if ends:
        scene.kube.put(pod | {"status": {"phase": "Succeeded"}})
    await deleting
    assert (scene.pods, scene.notes if ends else []) == ([], [])


@pytest.mark.looptime
async def test_a_pod_that_cannot_be_deleted_is_named_with_the_command() -> None:
    scene, waiting = await _waiting()
    _end(scene, "Failed")
    scene.kube.fail_next("DELETE", "/pods/", 403, message="is forbidden")
    await delete_waiting_pods(scene.tools, [waiting])
    assert f"kubectl -n app delete pod {waiting.name}" in scene.notes[-1]


@pytest.mark.looptime
async def test_a_pod_whose_transfer_moves_stays_with_a_note() -> None:
    scene, waiting = await _waiting()
    await delete_waiting_pods(scene.tools, [waiting], timedelta())
    assert [one["metadata"]["name"] for one in scene.pods] == [waiting.name]
    assert f"Pod app/{waiting.name} stays: its PodVolumeRestore has not ended" in scene.notes[-1]


@pytest.mark.looptime
async def test_a_cancel_waits_for_the_end_and_deletes_the_pod() -> None:
    scene, _ = await _waiting()
    canceling = asyncio.create_task(cancel_restore(scene.tools, "back"), name="cancel")
    await asyncio.sleep(5)
    assert len(scene.pods) == 1
    _end(scene, "Canceled")
    canceled, failures = await canceling
    assert ([one.claim for one in canceled], failures) == (["data"], [])
    assert scene.pods == []
    scene, _ = await _waiting()
    _end(scene, "Failed")
    assert (await cancel_restore(scene.tools, "back"), scene.pods) == (([], []), [])


@pytest.mark.looptime
async def test_a_pod_that_is_not_of_a_restore_is_not_deleted() -> None:
    scene, waiting = await _waiting()
    _end(scene, "Canceled")
    (pod,) = scene.pods
    scene.kube.put(pod | {"metadata": pod["metadata"] | {"annotations": {}}})
    await cancel_restore(scene.tools, "back")
    assert [one["metadata"]["name"] for one in scene.pods] == [waiting.name]


@pytest.mark.looptime
async def test_a_transfer_that_cannot_be_created_leaves_no_pod() -> None:
    scene = RestoreScene()
    planned = await plan_restore(scene.tools, scene.request(wait_image="agents:1"), [saved(DATA, "s1")])
    scene.kube.fail_next("POST", "/podvolumerestores", 403, message="is forbidden")
    error = r"but its PVC exists: .* delete it first \(kubectl -n app delete pvc data\)"
    with pytest.raises(RestoreError, match=error):
        await start_restore(scene.tools, planned)
    assert [one for one in scene.kube.objects(PODS) if one["metadata"]["namespace"] == "app"] == []

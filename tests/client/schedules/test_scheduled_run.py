"""One run of a schedule: what it backs up, what it deletes, and what does not keep it from either."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from client.backups.copies import KeepPolicy, KeepRule
from client.backups.plan import Choice, ClaimName, plan_backup
from client.schedules.scheduled_run import ScheduleError, preview_schedule, run_schedule
from core.kube.resources import CONFIG_MAPS, DATA_UPLOADS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS
from core.models.backups import read_report
from core.models.verification import VerificationOutcome
from tests.client.support.schedule_scene import DATA, ScheduleScene

_FILES = ClaimName("app", "files")
_DAY = timedelta(days=1)


@pytest.fixture
def scene() -> ScheduleScene:
    """Two backups of a volume exist, both expired."""
    scene = ScheduleScene()
    scene.old.put_backup("first", 9)
    scene.old.put_backup("second", 5)
    return scene


async def test_a_run_backs_up_and_then_deletes_what_is_expired(scene: ScheduleScene) -> None:
    scene.end_backups()
    await run_schedule(scene.tools(), scene.request(ttl=_DAY, labels={"team": "a"}, annotations={"why": "b"}))
    (made,) = scene.made
    labels = {"nodeagent.io/backup": "night-20261121120000", "nodeagent.io/schedule": "night", "team": "a"}
    assert made["metadata"]["labels"] == labels
    assert made["metadata"]["annotations"].items() >= {"nodeagent.io/backup-ttl": "24h0m0s", "why": "b"}.items()
    assert scene.old.names() == {made["metadata"]["name"]}
    assert list(scene.kube.bucket) == [f"s-{made['metadata']['name']}"]


async def test_a_run_deletes_what_its_schedule_does_not_keep(scene: ScheduleScene) -> None:
    """Also backups that were made under another policy, or under none."""
    for day in range(1, 5):
        scene.old.put_backup(f"night-{day}", day, schedule="night", ttl="" if day < 3 else "1h")
    scene.old.put_backup("other-1", 3, schedule="other", keep="last=1,zone=UTC")
    scene.end_backups()
    keep = KeepPolicy({KeepRule.DAILY: 3}, "Europe/Berlin")
    await run_schedule(scene.tools(), scene.request(keep=keep))
    (made,) = (one for one in scene.made if one["metadata"]["name"].startswith("night-2026"))
    assert made["metadata"]["annotations"]["nodeagent.io/backup-keep"] == "daily=3,zone=Europe/Berlin"
    assert "nodeagent.io/backup-ttl" not in made["metadata"]["annotations"]
    # Three days have a copy, and the two that are no schedule's are expired.
    left = {"night-1-data", "night-2-data", "other-1-data"}
    assert scene.old.names() == {made["metadata"]["name"], *left, "night-3-data"}
    scene.end_backups()
    scene.clock.seconds += 86400
    await run_schedule(scene.tools(), scene.request(keep=keep))
    assert "night-2-data" not in scene.old.names()


async def test_a_backup_that_fails_does_not_eat_its_past(scene: ScheduleScene) -> None:
    scene.old.put_backup("third", 4)
    scene.old.put_backup("fourth", 3)
    scene.end_backups("Failed")
    error = "backup night-20261121120000 is Failed: PVC app/data is Failed: no message"
    with pytest.raises(ScheduleError, match=error):
        await run_schedule(scene.tools(), scene.request(ttl=_DAY))
    assert scene.kube.bucket.keys() == {"s-second-data", "s-third-data", "s-fourth-data"}
    (report,) = scene.reports
    assert [(one.backup, one.rule, one.command) for one in report.held] == [
        ("second", "failing-volume", "nodeagent backup delete second"),
        ("third", "failing-volume", "nodeagent backup delete third"),
        ("fourth", "newest-copy", "nodeagent backup delete fourth"),
    ]
    assert (report.schedule, report.deleted, report.failure) == ("night", 1, None)
    (stored,) = scene.kube.objects(CONFIG_MAPS)
    assert read_report(stored["data"]) == report


async def test_a_pvc_that_was_deleted_does_not_fail_the_others(scene: ScheduleScene) -> None:
    scene.end_backups()
    await run_schedule(scene.tools(), scene.request(ClaimName("app", "gone"), DATA))
    assert [one["spec"]["sourcePVC"] for one in scene.made] == ["data"]
    assert scene.made[0]["metadata"]["annotations"]["nodeagent.io/backup-volumes"] == "1"
    assert scene.old.notes == ["PVC app/gone does not exist any more: it is left out"]
    # Nothing is deleted without a time to live.
    assert ({"first-data", "second-data"} < scene.old.names(), scene.kube.ran) == (True, [])


async def test_a_pvc_that_cannot_be_backed_up_is_named_and_the_others_are_backed_up(scene: ScheduleScene) -> None:
    scene.end_backups()
    with pytest.raises(ScheduleError, match=r"^PVC app/loose: "):
        await run_schedule(scene.tools(), scene.request(DATA, _FILES, ClaimName("app", "loose"), ttl=_DAY))
    assert len(scene.made) == 2
    assert "backup night-20261121120000 is Incomplete: 2/3 volumes" in scene.lines
    assert not {"s-first-data", "s-second-data"} & scene.kube.bucket.keys()


async def test_each_pvc_is_named_when_all_are_rejected(scene: ScheduleScene) -> None:
    names = [f"more-{number}" for number in range(5)]
    for name in names:
        scene.claims.put_claim(name, "fast")
    scene.claims.reject_after_check()
    with pytest.raises(ScheduleError) as found:
        await run_schedule(scene.tools(), scene.request(*[ClaimName("app", name) for name in names]))
    assert [one for one in names if f"PVC app/{one} is missing in the backup: " not in str(found.value)] == []


async def test_a_namespace_that_was_deleted_does_not_fail_the_pvcs_of_others(scene: ScheduleScene) -> None:
    """The API server answers 403 then, and not 404."""
    gone = ClaimName("old", "data")
    for claims, made in (((gone,), 0), ((DATA, _FILES, gone), 2)):
        scene.end_backups()
        scene.kube.fail_next("GET", "/namespaces/old/", 403, times=2)
        with pytest.raises(ScheduleError, match=r"^PVC old/data cannot be backed up: get [^;]*: 403 [^;]*$"):
            await run_schedule(scene.tools(), scene.request(*claims))
        assert len(scene.made) == made
    assert scene.lines[-1] == "backup night-20261121120000 is Incomplete: 2/3 volumes"


@pytest.mark.parametrize("checked", [True, False])
async def test_what_is_rejected_of_one_pvc_does_not_fail_the_others(scene: ScheduleScene, checked: bool) -> None:
    scene.end_backups()
    if checked:
        scene.kube.fail_next("POST", "/volumesnapshots", 403, message="quota")
    else:
        scene.claims.reject_after_check("/datauploads")
    error = "cannot be backed up, nothing was created" if checked else "is missing in the backup"
    with pytest.raises(ScheduleError, match=f"^PVC app/data {error}: .*quota"):
        await run_schedule(scene.tools(), scene.request(DATA, _FILES))
    assert [one["kind"] for one in scene.made] == ["PodVolumeBackup"]
    assert "backup night-20261121120000 is Incomplete: 1/2 volumes" in scene.lines


async def test_if_none_can_be_backed_up_that_alone_is_the_failure(scene: ScheduleScene) -> None:
    with pytest.raises(ScheduleError, match=r"^PVC app/loose: [^;]*; no backup of files: [^;]*$"):
        await run_schedule(scene.tools(), scene.request(ClaimName("app", "loose")))
    assert scene.lines == []


async def test_the_backup_of_a_job_has_one_number_of_volumes_also_in_its_second_pod(scene: ScheduleScene) -> None:
    """Two numbers in a bucket would be of two backups of one name, and it would not be restored as a whole."""
    scene.old.put("Job", "night-1", "batch/v1", meta={"creationTimestamp": "2026-11-21T12:00:00Z"})
    waiting = scene.claims.put_claim("waiting", "fast", phase="Pending", labels={"tier": "web"})
    request = replace(scene.request(), choice=Choice(namespace="app", selector="tier=web"))
    scene.end_backups()
    with pytest.raises(ScheduleError, match=r"^PVC app/waiting: it has no volume yet: it is Pending$"):
        await run_schedule(scene.tools("night-1"), request)
    scene.clock.seconds += 60
    scene.kube.put(waiting | {"status": {"phase": "Bound"}})
    scene.claims.put_claim("later", "fast", labels={"tier": "web"})
    await scene.claims.client.delete(PERSISTENT_VOLUME_CLAIMS, "app", "files")
    scene.end_backups()
    await run_schedule(scene.tools("night-1"), request)
    assert scene.lines[-1] == "backup night-20261121120000 is Completed: 2/2 volumes"
    assert {one["metadata"]["annotations"]["nodeagent.io/backup-volumes"] for one in scene.made} == {"2"}
    assert scene.old.notes == ["PVC app/later was created after the backup: it is left out"]


async def test_a_backup_has_no_more_volumes_than_it_began_with(scene: ScheduleScene) -> None:
    """As many in a bucket would be of two backups of one name; which of them it began with is not known."""
    scene.old.put("Job", "night-1", "batch/v1", meta={"creationTimestamp": "2026-11-21T12:00:00Z"})
    waiting = scene.claims.put_claim("waiting", "fast", phase="Pending", labels={"tier": "web"})
    unlabeled = scene.claims.put_claim("unlabeled", "fast")
    request = replace(scene.request(), choice=Choice(namespace="app", selector="tier=web"))
    scene.end_backups()
    with pytest.raises(ScheduleError, match=r"^PVC app/waiting: it has no volume yet: it is Pending$"):
        await run_schedule(scene.tools("night-1"), request)
    scene.kube.put(waiting | {"status": {"phase": "Bound"}})
    scene.kube.put(unlabeled | {"metadata": unlabeled["metadata"] | {"labels": {"tier": "web"}}})
    scene.end_backups()
    left_out = "PVC app/waiting is left out: backup night-20261121120000 has 2 volumes already"
    with pytest.raises(ScheduleError, match=f"^{left_out}$"):
        await run_schedule(scene.tools("night-1"), request)
    assert scene.lines[-1] == "backup night-20261121120000 is Completed: 2/2 volumes"


async def test_the_snapshots_of_a_killed_run_go_with_a_later_one(scene: ScheduleScene) -> None:
    """But not a recent one, one that has a transfer, or one of anything else."""
    made = {}
    others: dict[str, Any] = {"other": {"schedule": "day"}, "command": {"schedule": None}}
    others["elsewhere"] = {"namespace": "velero-2"}
    for name, more in {"left": {}, "used": {}, **others}.items():
        (volume,) = await plan_backup(
            scene.claims.tools, scene.claims.request(name, schedule="night"), scene.request().choice
        )
        volume = replace(volume, request=replace(volume.request, **more))
        made[name] = await scene.claims.client.create(VOLUME_SNAPSHOTS, volume.build_snapshot() or {})
        if name == "used":
            await scene.claims.client.create(DATA_UPLOADS, volume.build_transfer())
    kept = set(scene.old.names(VOLUME_SNAPSHOTS))
    for hours, gone in ((1, set()), (1.1, {made["left"]["metadata"]["name"]})):
        scene.clock.seconds = hours * 3600
        scene.end_backups()
        await run_schedule(scene.tools(), scene.request())
        left = {one["metadata"]["name"] for one in scene.kube.objects(VOLUME_SNAPSHOTS)}
        assert kept - left == gone
    assert scene.old.notes == [f"deleted VolumeSnapshot app/{name}, left by a run that was killed" for name in gone]
    scene.kube.fail_next("GET", "/volumesnapshots", 403, message="may not list")
    scene.end_backups()
    await run_schedule(scene.tools(), scene.request())
    assert scene.old.notes[-1].startswith("VolumeSnapshots that killed runs of schedule night left may stay: list ")


async def test_a_location_that_refuses_fails_the_run_and_keeps_the_backups(scene: ScheduleScene) -> None:
    scene.end_backups()
    scene.kube.refused = 'BackupStorageLocation default has Velero\'s folder "backups": nothing is deleted in it'
    with pytest.raises(ScheduleError, match=r'^deletion of .*: nothing can be deleted .*default: .*folder "backups"'):
        await run_schedule(scene.tools(), scene.request(ttl=_DAY))
    assert {"first-data", "second-data"} < scene.old.names()
    assert len(scene.made) == 1


async def test_a_velero_server_keeps_a_run_from_both(scene: ScheduleScene) -> None:
    scene.old.put("Deployment", "velero", "apps/v1")
    with pytest.raises(ScheduleError, match=r"a Velero server is in namespace velero: ask it .*; deletion of expired"):
        await run_schedule(scene.tools(), scene.request(ttl=_DAY))
    assert (scene.made, len(scene.kube.bucket)) == ([], 2)


async def test_a_pod_without_the_right_to_the_lease_backs_up_and_deletes_nothing(scene: ScheduleScene) -> None:
    """As one of a schedule that has not been renewed, with the image of today."""
    scene.end_backups()
    scene.kube.fail_next("GET", "/leases/", 403, message="night cannot get leases")
    with pytest.raises(ScheduleError, match=r"^deletion of expired backups: .*; nodeagent schedule renew, or"):
        await run_schedule(scene.tools(), scene.request(ttl=_DAY))
    assert {"first-data", "second-data"} < scene.old.names()
    assert "backup night-20261121120000 is Completed: 1/1 volumes" in scene.lines


async def test_a_preview_names_what_would_be_missing(scene: ScheduleScene) -> None:
    scene.kube.fail_next("POST", "/podvolumebackups", 403, message="quota")
    preview = await preview_schedule(scene.tools(), scene.request(DATA, _FILES, ClaimName("app", "loose")))
    assert [volume.claim.name for volume in preview.volumes] == ["data"]
    missing, rejected = preview.failures
    assert missing.startswith("PVC app/loose: ")
    assert rejected.startswith("PVC app/files cannot be backed up, nothing was created: ")
    # It has neither a time to live nor a policy.
    assert (scene.made, preview.deletion) == ([], None)


@pytest.fixture
def verified(scene: ScheduleScene) -> ScheduleScene:
    """The scene, with the repository of the volumes."""
    spec = {"volumeNamespace": "app", "backupStorageLocation": "default", "repositoryType": "kopia"}
    scene.old.put("BackupRepository", "app-default-kopia", spec=spec | {"maintenanceFrequency": "1h"})
    scene.end_backups()
    return scene


async def test_with_verify_the_backup_is_read_back_and_the_result_recorded(verified: ScheduleScene) -> None:
    await run_schedule(verified.tools(), verified.request(ttl=_DAY, verify=True))
    assert "verification of app/data: passed" in verified.lines
    annotation = verified.made[0]["metadata"]["annotations"]["nodeagent.io/verification"]
    assert '"outcome":"passed"' in annotation
    assert not {"s-first-data", "s-second-data"} & verified.kube.bucket.keys()


async def test_a_backup_that_does_not_pass_fails_the_run_and_keeps_the_copy_before_it(verified: ScheduleScene) -> None:
    verified.kube.verified = VerificationOutcome.FAILED
    with pytest.raises(ScheduleError, match="verification of backup night-20261121120000: "):
        await run_schedule(verified.tools(), verified.request(ttl=_DAY, verify=True))
    assert "s-second-data" in verified.kube.bucket
    assert "s-first-data" not in verified.kube.bucket
    kept = "it has the newest copy of app/data in default whose verification did not fail"
    assert [(one.backup, one.reason) for one in verified.reports[0].held] == [("second", kept)]


@pytest.mark.parametrize("outcome", [None, VerificationOutcome.FAILED])
async def test_nothing_is_deleted_without_a_record(
    verified: ScheduleScene, outcome: VerificationOutcome | None
) -> None:
    verified.kube.verified = outcome
    verified.kube.fail_next("PATCH", "/datauploads/", 403)
    with pytest.raises(ScheduleError, match="expired backups are not deleted, since it is not recorded"):
        await run_schedule(verified.tools(), verified.request(ttl=_DAY, verify=True))
    assert {"s-first-data", "s-second-data"} < verified.kube.bucket.keys()


async def test_nothing_is_deleted_when_a_second_pod_cannot_verify_the_backup(verified: ScheduleScene) -> None:
    verified.old.put("Job", "night-1", "batch/v1", meta={"creationTimestamp": "2026-11-21T02:00:00Z"})
    await run_schedule(verified.tools("night-1"), verified.request())
    await verified.claims.client.delete(PERSISTENT_VOLUME_CLAIMS, "app", "data")
    with pytest.raises(ScheduleError, match=r"none of the PVCs exists any more; expired backups are not deleted"):
        await run_schedule(verified.tools("night-1"), verified.request(ttl=_DAY, verify=True))
    assert {"s-first-data", "s-second-data"} < verified.kube.bucket.keys()


@pytest.mark.parametrize(("outcome", "reads"), [(VerificationOutcome.PASSED, 1), (VerificationOutcome.FAILED, 2)])
async def test_a_second_pod_of_a_job_that_failed_reads_only_what_did_not_pass(
    verified: ScheduleScene, outcome: VerificationOutcome, reads: int
) -> None:
    verified.old.put("Job", "night-1", "batch/v1", meta={"creationTimestamp": "2026-11-21T02:00:00Z"})
    verified.kube.verified = outcome
    for _ in range(2):
        with pytest.raises(ScheduleError, match="PVC app/loose"):
            await run_schedule(
                verified.tools("night-1"), verified.request(DATA, ClaimName("app", "loose"), verify=True)
            )
    made = [one for one in verified.kube.requests if one.method == "POST" and one.path.endswith("/jobs")]
    assert len(made) == reads
    assert verified.lines.count(f"verification of app/data: {outcome}") == reads


async def test_a_backup_that_failed_is_not_verified(scene: ScheduleScene) -> None:
    scene.end_backups("Failed")
    with pytest.raises(ScheduleError, match="is Failed: PVC app/data is Failed"):
        await run_schedule(scene.tools(), scene.request(verify=True))
    assert not [line for line in scene.lines if line.startswith("verification")]

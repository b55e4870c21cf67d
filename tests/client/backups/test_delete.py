"""The deletion of backups: its order, what an interruption leaves, and what is refused."""

import json
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from client.backups import delete, deletion_jobs
from client.backups.copies import Copy
from client.backups.delete import DeletionPlan, DeletionWish, check_plan, plan_deletion
from client.backups.deletion_jobs import DeletionRecord
from client.backups.deletion_report import build_deletion, build_report
from client.backups.retention import Check, DeletionError
from core.errors import AgentError, ContractError
from core.kube.errors import KubeError, UnreachableError
from core.kube.resources import CONFIG_MAPS, DATA_UPLOADS, JOBS, LEASES
from tests.client.support.deletion_scene import DeletionScene
from tests.nodeagent.support.hand_clock import FreeClock


@pytest.fixture
def scene() -> DeletionScene:
    """Three backups of a volume, of which two are expired and one is younger; another volume is in the oldest alone."""
    scene = DeletionScene()
    scene.put_backup("first", 9, "data", "gone")
    scene.put_backup("second", 5)
    scene.put_backup("third", 0.5)
    return scene


def _recorded(scene: DeletionScene) -> dict[str, list[str]]:
    found = scene.kube.objects(CONFIG_MAPS)
    data = (found[0].get("data") or {}) if found else {}
    return {name: list(json.loads(text)["default"]) for name, text in data.items() if name[0] != "_"}


def _went(scene: DeletionScene) -> dict[str, int]:
    """Return how many copies of each PVC went lately, as the record has it."""
    (found,) = scene.kube.objects(CONFIG_MAPS)
    history = json.loads(found["data"]["_history"])
    return {claim: len(times) for claim, times in history["default"]["app"].items()}


def _names(plan: DeletionPlan) -> tuple[list[str], list[str]]:
    return [one.backup for one in plan.deleted], [one.backup for one in plan.kept]


async def _delete_by_name(scene: DeletionScene, name: str | None) -> list[str]:
    """Return the notes about the deletion of a backup; None: of all that are expired."""
    plan = await scene.check(name)
    return build_deletion(plan, await scene.execute(plan), done=True).notes


async def test_expired_backups_are_deleted_with_their_snapshots_and_no_others(scene: DeletionScene) -> None:
    plan, found = await check_plan(scene.tools, await plan_deletion(scene.tools))
    assert _names(plan) == (["second"], ["first"])
    assert [one.id for one in found] == ["s-second-data"]
    assert [str(one) for one in scene.kube.ran[0].checks] == ["app/s-third-data"]
    assert (len(scene.names()), len(scene.kube.bucket)) == (4, 4)
    deleted = await scene.execute(plan)
    assert [one.id for one in deleted] == ["s-second-data"]
    assert scene.names() == {"first-data", "first-gone", "third-data"}
    assert scene.kube.bucket.keys() == {"s-first-data", "s-first-gone", "s-third-data"}
    assert (_recorded(scene), _went(scene), scene.names(JOBS)) == ({}, {"data": 1}, set())
    (lease,) = scene.kube.objects(LEASES)
    assert lease["spec"]["holderIdentity"] == ""
    assert _names(await plan_deletion(scene.tools)) == ([], ["first"])


async def test_the_age_is_by_the_dates_of_the_api_server(scene: DeletionScene) -> None:
    scene.clock.skew = timedelta(days=300)
    assert _names(await plan_deletion(scene.tools)) == (["second"], ["first"])
    scene = replace(scene)
    scene.kube.dated = False
    with pytest.raises(DeletionError, match="have no Date: how old backups are is not known"):
        await plan_deletion(scene.tools)


async def test_an_interruption_at_any_request_is_finished_by_the_next_run() -> None:
    """Whichever request fails: nothing is lost but what was to go, and two runs have done it all."""
    requests = len(await _run_with_fault(None))
    for index in range(requests):
        await _run_with_fault(index)


async def _run_with_fault(index: int | None) -> list[str]:
    # A Lease that could not be released keeps the next run waiting for a minute.
    scene = DeletionScene(FreeClock())
    for name, days in (("first", 9.0), ("second", 5.0), ("third", 0.5)):
        scene.put_backup(name, days)
    before = len(scene.kube.requests)
    inner = scene.kube.request

    async def request(what: object) -> object:
        if index is not None and len(scene.kube.requests) - before == index:
            scene.kube.requests.append(what)  # type: ignore[arg-type]
            raise UnreachableError("the connection was lost", status=0)
        return await inner(what)  # type: ignore[arg-type]

    scene.kube.request = request  # type: ignore[assignment, method-assign]
    try:
        await scene.run()
    except AgentError:
        assert index is not None
    assert "s-third-data" in scene.kube.bucket
    assert "third-data" in scene.names()
    seen = [one.path for one in scene.kube.requests[before:]]
    scene.kube.request = inner  # type: ignore[method-assign]
    await scene.run()
    assert (scene.names(), set(scene.kube.bucket)) == ({"third-data"}, {"s-third-data"})
    assert _recorded(scene) == {}
    return seen


async def test_what_goes_by_name_fills_no_record(scene: DeletionScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion_jobs, "_MOST_HISTORY", 2)
    for name in ("first", "second", "third"):
        await scene.execute(await scene.check(name))
        assert sum(_went(scene).values()) == 2
    assert scene.names() == set()


async def test_a_record_of_a_transfer_that_still_exists_is_dropped(scene: DeletionScene) -> None:
    scene.kube.fail_next("DELETE", "/datauploads/", 500)
    with pytest.raises(KubeError):
        await scene.execute(await scene.check("third"))
    assert _recorded(scene).keys() == {"third"}
    # Its deletion began before anything of it was deleted: now it is the newest copy, and stays.
    await scene.run()
    assert _recorded(scene) == {}
    assert "s-third-data" in scene.kube.bucket


async def test_a_snapshot_that_is_kept_stays_recorded(scene: DeletionScene) -> None:
    scene.kube.pinned = {"s-second-data"}
    note = "snapshot s-second-data of backup second is kept: DataDownload velero/back names it"
    assert await _delete_by_name(scene, None) == [note]
    assert _recorded(scene).keys() == {"second"}
    scene.kube.pinned = set()
    await scene.run()
    assert "s-second-data" not in scene.kube.bucket


async def test_a_backup_that_has_become_the_last_copy_since_the_plan_is_not_deleted(scene: DeletionScene) -> None:
    """Its Jobs, or a question, may take hours, in which another command deletes the newer one."""
    expired, named = await scene.check(), await scene.check("second")
    await scene.execute(await scene.check("third"))
    why = "backup second is not deleted, it has changed since the plan was made: it has the newest copy of app/data in"
    await scene.execute(expired)
    assert scene.notes[-1].startswith(why)
    with pytest.raises(DeletionError, match=f"^{why} default$"):
        await scene.execute(named)
    assert scene.names() == {"first-data", "first-gone", "second-data"}
    assert _recorded(scene) == {}
    await scene.execute(await scene.check("second"))
    assert scene.names() == {"first-data", "first-gone"}


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"phase": "InProgress"}, "DataUpload run-data of app/data is InProgress: cancel the backup first"),
        ({"snapshotID": "s-now"}, "DataDownload back restores app/data from it"),
    ],
    ids=str,
)
async def test_a_backup_that_a_rule_holds_is_refused(scene: DeletionScene, status: dict[str, str], why: str) -> None:
    scene.put_backup("run", 3, **status)
    spec: dict[str, Any] = {"snapshotID": "s-now", "sourceNamespace": "app", "backupStorageLocation": "default"}
    spec |= {"targetVolume": {"pvc": "new", "namespace": "app"}}
    scene.put("DataDownload", "back", "velero.io/v2alpha1", spec=spec, status={"phase": "Accepted"})
    with pytest.raises(DeletionError, match=f"backup run cannot be deleted: {why}"):
        await plan_deletion(scene.tools, DeletionWish("run"))


async def test_a_person_lets_go_of_what_is_in_a_location_that_is_gone_for_good(scene: DeletionScene) -> None:
    for name in ("second", "older"):
        scene.put_backup(name, 5 + len(name), location="gone")
    expired = await scene.check()
    assert expired.now is not None
    held = {one.backup: (one.rule, one.reason, one.command) for one in build_report(expired, expired.now).held}
    closed = "BackupStorageLocation velero/gone does not exist: nothing in it is deleted"
    assert held["second"] == ("location", closed, "nodeagent backup delete second")
    assert (held["older"][0], held["older"][2]) == ("newest-copy", "nodeagent backup delete older")
    await scene.execute(expired)
    assert "second-data" in scene.names()
    note = "BackupStorageLocation gone does not exist: snapshot s-second-data stays until it is back"
    assert await _delete_by_name(scene, "second") == [note]
    assert "second-data" not in scene.names()
    scene.put_location("gone")
    scene.kube.places["s-second-data"] = "gone"
    await scene.run()
    assert "s-second-data" not in scene.kube.bucket


_MOVED = {"objectStorage": {"bucket": "replica"}}


@pytest.mark.parametrize("named", [None, "second"], ids=["expired", "named"])
@pytest.mark.parametrize(
    ("spec", "why"),
    [(_MOVED, "has changed since its snapshots were checked"), ({"accessMode": "ReadOnly"}, "is read-only")],
    ids=["another bucket", "read-only"],
)
async def test_a_changed_location_keeps_all(
    scene: DeletionScene, named: str | None, spec: dict[str, Any], why: str
) -> None:
    plan = await scene.check(named)
    scene.put_location("default", **spec)
    with pytest.raises(DeletionError) if named else nullcontext():
        await scene.execute(plan)
    assert ("second-data" in scene.names(), len(scene.kube.bucket)) == (True, 4)
    if not named:
        assert f"BackupStorageLocation velero/default {why}: nothing in it is deleted" in scene.notes[-1]


async def test_snapshots_that_were_found_are_not_called_deleted_where_they_are_not_found(scene: DeletionScene) -> None:
    plan = await scene.check()
    scene.kube.places["s-second-data"] = "elsewhere"
    with pytest.raises(DeletionError, match="1 of them are not in default, where a check has found them"):
        await scene.execute(plan)
    assert _recorded(scene).keys() == {"second"}
    scene.kube.places["s-second-data"] = "default"
    await scene.run()
    assert ("s-second-data" in scene.kube.bucket, _recorded(scene)) == (False, {})


async def test_what_is_unfinished_in_a_location_that_is_closed_waits_for_it(scene: DeletionScene) -> None:
    scene.kube.failure = "object is locked"
    with pytest.raises(DeletionError, match="object is locked"):
        await scene.run()
    scene.kube.failure = ""
    scene.put_location("default", "Unavailable")
    for _ in range(2):
        plan = await scene.check()
        assert (plan.unfinished, plan.check) == (frozenset(), Check())
        await scene.execute(plan)
    scene.put_location("default")
    await scene.run()
    assert _recorded(scene) == {}
    assert "s-second-data" not in scene.kube.bucket


async def test_a_snapshot_that_was_gone_before_is_named(scene: DeletionScene) -> None:
    """Its location may be another one than it was: only a person deletes its transfer."""
    del scene.kube.bucket["s-second-data"]
    expired = await scene.check()
    assert "its snapshot s-second-data is not in default" in expired.kept[-1].holds[-1].text
    await scene.execute(expired)
    assert "second-data" in scene.names()
    note = "DataUpload second-data of app/data: its snapshot s-second-data is not in the repository"
    assert await _delete_by_name(scene, "second") == [note]
    assert "second-data" not in scene.names()


async def test_a_transfer_with_a_finalizer_keeps_its_snapshot_alone() -> None:
    scene = DeletionScene(FreeClock())
    scene.put_backup("old", 20, "data", "held")
    scene.put_backup("third", 0.5)
    scene.put_backup("newer", 3, "held")
    scene.change("old-held", metadata={"finalizers": ["example.com/hold"]})
    held = r"^DataUpload old-held is still being deleted \(example.com/hold\): repeat"
    with pytest.raises(DeletionError, match=held):
        await scene.run()
    assert scene.kube.bucket.keys() == {"s-old-held", "s-third-data", "s-newer-held"}
    assert _recorded(scene) == {"old": ["app/old/uid-old-held"]}
    scene.change("old-held", metadata={"finalizers": []})
    await scene.run()
    assert "s-old-held" not in scene.kube.bucket
    assert _recorded(scene) == {}


async def test_what_is_going_away_stays_recorded_while_another_rule_keeps_its_backup() -> None:
    scene = DeletionScene(FreeClock())
    scene.put_backup("old", 20)
    scene.put_backup("new", 0.5)
    scene.change("old-data", metadata={"finalizers": ["example.com/hold"]})
    with pytest.raises(DeletionError, match="still being deleted"):
        await scene.run()
    scene.kube.rootless = {"s-new-data"}
    await scene.run()
    await scene.client.patch(DATA_UPLOADS, "velero", "old-data", {"metadata": {"finalizers": []}})
    await scene.run()
    assert (scene.names(), set(scene.kube.bucket), _recorded(scene)) == ({"new-data"}, {"s-new-data"}, {})


async def test_a_transfer_whose_deletion_met_another_write_keeps_its_snapshot() -> None:
    scene = DeletionScene(FreeClock())
    scene.put_backup("old", 20)
    scene.put_backup("new", 0.5)
    plan = await scene.check()
    scene.kube.fail_next("DELETE", "/datauploads/", 409)
    with pytest.raises(DeletionError, match=r"^DataUpload old-data is still being deleted"):
        await scene.execute(plan)
    assert "s-old-data" in scene.kube.bucket
    await scene.run()
    assert (scene.names(), set(scene.kube.bucket)) == ({"new-data"}, {"s-new-data"})


async def test_a_large_deletion_is_recorded_in_parts(scene: DeletionScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete, "_MOST_RECORDED", 3)
    scene.put_backup("young", 0.2, "data", "gone")
    for number in range(3):
        scene.put_backup(f"old-{number}", 20 + number, "data", "gone")
    sizes = []
    add = DeletionRecord.add

    async def note(record: DeletionRecord, copies: list[Copy]) -> None:
        await add(record, copies)
        sizes.append(sum(map(len, record.entries.values())))

    monkeypatch.setattr(DeletionRecord, "add", note)
    await scene.run()
    assert max(sizes) <= 3
    # Of app/gone, one copy was completed within a day, so that three go, and what is younger waits.
    assert not {name for name in scene.names() if name.startswith("old")}
    assert {"first-gone", "second-data"} < scene.names()
    assert _recorded(scene) == {}


async def test_without_the_cluster_s_identity_or_the_record_nothing_is_deleted(scene: DeletionScene) -> None:
    scene.kube.fail_next("GET", "/namespaces/kube-system", 403)
    with pytest.raises(DeletionError, match="Namespace kube-system cannot be read"):
        await plan_deletion(scene.tools)
    scene.put("ConfigMap", "node-agent-backup-deletions", "v1", data={"x": '{"default":{"a":["",0]}}'})
    with pytest.raises(ContractError, match="ConfigMap velero/node-agent-backup-deletions: invalid entry x: not NAMES"):
        await plan_deletion(scene.tools)

"""The metrics about volumes that are not protected: the states by namespace, and the names that an alert has."""

import importlib
import logging
import threading
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Literal

import pytest

from nodeagent.config.own_keys import OwnKeys
from nodeagent.leader.index import Entry
from nodeagent.leader.volumes.view import CoverageReader, PlannedCoverage, show_coverage
from nodeagent.metrics import Metrics
from tests.client.support.volumes_scene import put_volumes
from tests.nodeagent.coverage.test_read import a_server
from tests.nodeagent.leader.volumes.test_states import backup
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.volume_scene import a_claim, a_pod, a_schedule, an_object
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime

ALERTING = {"nodeagent.io/alert-not-protected": "true"}


def reader(kube: FakeKube) -> CoverageReader:
    return CoverageReader(kube.client, "velero", lambda: NOON)


async def planned(kube: FakeKube, rules: OwnKeys | None = None) -> PlannedCoverage:
    return await reader(kube).read(rules or OwnKeys())


def shown(metrics: Metrics) -> set[str]:
    lines = metrics.render().decode().splitlines()
    found = [
        one.replace('node="a",', "") for one in lines if one.startswith(("nodeagent_volumes{", "nodeagent_volume_n"))
    ]
    return {one.removeprefix("nodeagent_") for one in found}


async def show(kube: FakeKube, entries: Sequence[Entry] = (), rules: OwnKeys | None = None) -> set[str]:
    metrics = Metrics("a")
    await show_coverage(metrics, await planned(kube, rules), entries, NOON)
    return shown(metrics)


async def test_the_states_of_pvcs_are_counted_by_namespace_without_volumes_of_pods() -> None:
    kube = FakeKube()
    put_volumes(kube)
    opted_in = {"backup.velero.io/backup-volumes": "tmp"}
    kube.put(a_pod("web-0", "shop", volumes=[{"name": "tmp", "emptyDir": {}}], annotations=opted_in))
    assert await show(kube) == {
        'volumes{state="never-backed-up",volume_namespace="app"} 18.0',
        'volumes{state="left-out",volume_namespace="app"} 2.0',
        'volumes{state="never-backed-up",volume_namespace="db"} 8.0',
        'volumes{state="never-backed-up",volume_namespace="shop"} 12.0',
    }


async def test_backups_that_ended_decide_the_state() -> None:
    kube = FakeKube()
    kube.put(a_claim("data"))
    kube.fail_next("GET", "/backupstoragelocations", 403, times=9)
    assert await show(kube, [backup(20)]) == {'volumes{state="protected",volume_namespace="app"} 1.0'}
    assert await show(kube, [backup(1)]) == {'volumes{state="stale",volume_namespace="app"} 1.0'}
    damaged = [backup(18), backup(19, verified="failed")]
    assert await show(kube, damaged) == {'volumes{state="failing",volume_namespace="app"} 1.0'}
    assert await show(kube, [*damaged, backup(20)]) == {'volumes{state="protected",volume_namespace="app"} 1.0'}


async def test_a_backup_whose_location_does_not_exist_does_not_count() -> None:
    """One that is younger than the list of locations may be in a new one."""
    kube, there = FakeKube(), an_object("BackupStorageLocation", "there", "velero", "velero.io/v1")
    copy = backup(20).copy
    assert copy is not None
    for one in (a_claim("data"), there | {"spec": {}}):
        kube.put(one)
    for location, made, state in (("there", -1, "protected"), ("gone", -1, "never-backed-up"), ("new", 0, "protected")):
        one = replace(backup(20), location=location, copy=replace(copy, created=NOON + timedelta(minutes=made)))
        assert await show(kube, [one]) == {f'volumes{{state="{state}",volume_namespace="app"}} 1.0'}


async def test_backups_are_counted_without_holding_all_of_them() -> None:
    plans, entries, metrics = await planned(FakeKube()), [backup(1)] * 20_000, Metrics("a")
    tracemalloc.start()
    try:
        await show_coverage(metrics, plans, entries, NOON)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


async def test_volumes_of_chosen_namespaces_are_named() -> None:
    kube = FakeKube()
    kube.put(an_object("Namespace", "app", labels=ALERTING))
    kube.put(an_object("Namespace", "db"))
    kube.put(a_claim("data"))
    kube.put(a_claim("data", "db"))
    named = {one for one in await show(kube) if one.startswith("volume_")}
    assert named == {'volume_not_protected{claim="data",state="never-backed-up",volume_namespace="app"} 1.0'}
    everywhere = await show(kube, rules=OwnKeys(alert_not_protected=True))
    assert len([one for one in everywhere if one.startswith("volume_")]) == 2


async def test_at_most_fifty_are_named() -> None:
    kube = FakeKube()
    for number in range(60):
        kube.put(a_claim(f"data-{number:02}"))
    lines = await show(kube, rules=OwnKeys(alert_not_protected=True))
    assert len([one for one in lines if one.startswith("volume_")]) == 50
    assert 'volumes{state="never-backed-up",volume_namespace="app"} 60.0' in lines


async def test_nothing_is_shown_without_the_permission_or_once_another_agent_leads() -> None:
    kube, metrics = FakeKube(), Metrics("a")
    kube.put(a_claim("data", created="2026-11-01T00:00:00Z"))
    await show_coverage(metrics, await planned(kube, OwnKeys(alert_not_protected=True)), (), NOON + timedelta(1))
    assert len(shown(metrics)) == 2
    await show_coverage(metrics, PlannedCoverage(), (), NOON)
    assert shown(metrics) == set()
    kube.fail_next("GET", "/persistentvolumeclaims", 403, times=1)
    assert await show(kube) == set()


async def test_the_last_state_stays_while_something_cannot_be_read() -> None:
    kube = FakeKube()
    kube.put(a_claim("data"))
    coverage = reader(kube)
    assert len((await coverage.read(OwnKeys())).plans or ()) == 1
    kube.put(a_claim("more"))
    kube.fail_next("GET", "/cronjobs", 500, times=9)
    assert len((await coverage.read(OwnKeys())).plans or ()) == 1
    kube.fulfill()
    kube.fail_next("GET", "/", "lost", times=99)
    assert len((await coverage.read(OwnKeys())).plans or ()) == 1
    kube.fulfill()
    assert len((await coverage.read(OwnKeys())).plans or ()) == 2


@pytest.mark.parametrize("fault", ["lost", 500], ids=["no answer", "PVCs alone"])
async def test_the_last_state_is_given_up_after_six_reads_and_why_is_logged_once(
    fault: Literal["lost"] | int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nodeagent.leader.volumes.view")
    kube = FakeKube()
    kube.put(a_claim("data"))
    coverage = reader(kube)
    await coverage.read(OwnKeys())
    kube.fail_next("GET", "/persistentvolumeclaims", fault, times=999)
    known = [(await coverage.read(OwnKeys())).plans is not None for _ in range(8)]
    assert known == [True] * 6 + [False] * 2
    assert len(caplog.records) == 1
    kube.fulfill()
    assert (await coverage.read(OwnKeys())).plans is not None


@pytest.mark.parametrize(
    "name", ["coverage.read.select_volumes", "leader.volumes.view.plan_coverage", "leader.volumes.view.build_coverage"]
)
async def test_what_takes_seconds_does_not_block_the_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, function = f"nodeagent.{name}".rpartition(".")
    real, threads = getattr(importlib.import_module(module), function), []

    def observed(*args: object, **more: object) -> object:
        threads.append(threading.current_thread())
        return real(*args, **more)

    monkeypatch.setattr(f"{module}.{function}", observed)
    monkeypatch.setattr("core.aio._MANY", 0)
    kube = FakeKube()
    for one in (a_server(), a_schedule("night", includedNamespaces=["app"]), a_claim("data")):
        kube.put(one)
    await show(kube)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_pods_that_ended_or_have_no_data_do_not_count_as_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodeagent.leader.volumes.view._MOST_OBJECTS", 3)
    kube = FakeKube()
    for one in (a_server(), a_schedule("night", includedNamespaces=["app"])):
        kube.put(one)
    for number in range(3):
        kube.put(a_pod(f"ended-{number}", volumes=[{"name": "tmp", "emptyDir": {}}], phase="Succeeded"))
        kube.put(a_pod(f"token-{number}", volumes=[{"name": "token", "projected": {}}]))
    kube.put(a_pod("web-0", volumes=[{"name": "tmp", "emptyDir": {}}]))
    assert (await planned(kube)).plans is not None
    for number in range(3):
        kube.put(a_pod(f"web-{number}", volumes=[{"name": "tmp", "emptyDir": {}}]))
    assert (await planned(kube)).plans is not None
    kube.put(a_pod("web-3", volumes=[{"name": "tmp", "emptyDir": {}}]))
    assert (await planned(kube)).plans is None


async def test_too_many_pvcs_are_not_held(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("nodeagent.leader.volumes.view._MOST_OBJECTS", 3)
    kube = FakeKube()
    for number in range(3):
        kube.put(a_claim(f"data-{number}"))
    coverage = reader(kube)
    assert len((await coverage.read(OwnKeys())).plans or ()) == 3
    kube.put(a_claim("one-more"))
    for _ in range(2):
        assert (await coverage.read(OwnKeys())).plans is None
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "there are more than 3 persistentvolumeclaims" in warning.getMessage()

"""What is read of PVCs, Schedules and CronJobs, with and without permission."""

from datetime import UTC, datetime, timedelta

import pytest

from core.kube.client import KubeClient
from core.kube.resources import CRON_JOBS, PERSISTENT_VOLUME_CLAIMS, SCHEDULES, Resource
from core.kube.transport import Retry
from core.models.backups import REPORT_KEY, RetentionReport
from core.models.base import JsonDict
from core.models.names import (
    BACKUP_INTERVAL_ANNOTATION,
    DELETIONS_CONFIGMAP,
    SCHEDULE_LABEL,
    VERIFICATION_INTERVAL_ANNOTATION,
)
from nodeagent.leader.volumes.states import Plan, PlanReader
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def an_object(resource: Resource, name: str, spec: JsonDict, **meta: object) -> JsonDict:
    namespace = "app" if resource is PERSISTENT_VOLUME_CLAIMS else "velero"
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": "2026-11-01T00:00:00Z"} | meta,
        "spec": spec,
    }


def deletions(report: str) -> JsonDict:
    meta = {"name": DELETIONS_CONFIGMAP, "namespace": "velero"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {REPORT_KEY: report}}


def reader(kube: FakeKube) -> PlanReader:
    return PlanReader(KubeClient(kube, Retry(LoopClock())), "velero", lambda: NOW)


@pytest.mark.looptime
async def test_annotations_of_pvcs_are_read_and_invalid_ones_ignored() -> None:
    kube = FakeKube()
    asked = {BACKUP_INTERVAL_ANNOTATION: "24h", VERIFICATION_INTERVAL_ANNOTATION: "168h"}
    kube.put(an_object(PERSISTENT_VOLUME_CLAIMS, "data", {}, annotations=asked))
    kube.put(an_object(PERSISTENT_VOLUME_CLAIMS, "plain", {}))
    for number, text in enumerate(("daily", "0s", "-1h")):
        kube.put(
            an_object(PERSISTENT_VOLUME_CLAIMS, f"odd-{number}", {}, annotations={BACKUP_INTERVAL_ANNOTATION: text})
        )
    plans = await reader(kube).read()
    assert plans.read_at == NOW
    assert plans.claims is not None
    assert plans.claims["app", "data"].plan == Plan(DAY, 7 * DAY)
    others = {key: claim.plan for key, claim in plans.claims.items() if key != ("app", "data")}
    assert others == {("app", name): Plan() for name in ("plain", "odd-0", "odd-1", "odd-2")}


@pytest.mark.looptime
async def test_schedules_and_labeled_cron_jobs_have_plans_unless_they_are_paused() -> None:
    kube = FakeKube()
    verify = {VERIFICATION_INTERVAL_ANNOTATION: "48h"}
    kube.put(an_object(SCHEDULES, "nightly", {"schedule": "0 2 * * *"}, annotations=verify))
    kube.put(an_object(SCHEDULES, "paused", {"schedule": "0 2 * * *", "paused": True}))
    kube.put(an_object(SCHEDULES, "odd", {"schedule": "whenever"}))
    ours, zone = {SCHEDULE_LABEL: "hourly"}, {"timeZone": "Europe/Berlin"}
    kube.put(an_object(CRON_JOBS, "a", {"schedule": "0 * * * *"} | zone, labels=ours))
    kube.put(an_object(CRON_JOBS, "b", {"schedule": "@daily", "suspend": True}, labels={SCHEDULE_LABEL: "suspended"}))
    kube.put(an_object(CRON_JOBS, "c", {"schedule": "@daily"}))
    plans = await reader(kube).read()
    assert plans.schedules == {"nightly": Plan(DAY, 2 * DAY), "odd": Plan(), "hourly": Plan(HOUR)}


@pytest.mark.looptime
async def test_objects_without_the_form_of_their_kind_are_left_out() -> None:
    kube = FakeKube()
    kube.put(an_object(PERSISTENT_VOLUME_CLAIMS, "young", {}, creationTimestamp="yesterday"))
    kube.put(an_object(PERSISTENT_VOLUME_CLAIMS, "odd", {}, annotations={BACKUP_INTERVAL_ANNOTATION: 24}))
    kube.put(an_object(SCHEDULES, "odd", {"schedule": 24}))
    kube.put(an_object(CRON_JOBS, "odd", {"schedule": "@daily", "suspend": "no"}, labels={SCHEDULE_LABEL: "odd"}))
    plans = await reader(kube).read()
    assert (plans.claims, plans.schedules) == ({}, {})
    kube.put(deletions("no report"))
    assert (await reader(kube).read()).report is None


@pytest.mark.looptime
async def test_without_permission_nothing_is_known_and_after_an_error_what_was_read_last() -> None:
    kube = FakeKube()
    kube.put(an_object(PERSISTENT_VOLUME_CLAIMS, "data", {}))
    kube.put(an_object(SCHEDULES, "nightly", {"schedule": "0 2 * * *"}))
    kube.put(deletions(RetentionReport(at=NOW).to_json()))
    plans = reader(kube)
    first = await plans.read()
    assert first.report == RetentionReport(at=NOW)
    for status, kept in ((500, True), (403, False)):
        for path in ("/persistentvolumeclaims", "/schedules", "/configmaps"):
            kube.fail_next("GET", path, status, times=20)
        found = await plans.read()
        kube.fulfill()
        known = (found.claims, dict(found.schedules), found.report)
        assert known == ((first.claims, first.schedules, first.report) if kept else (None, {}, None))

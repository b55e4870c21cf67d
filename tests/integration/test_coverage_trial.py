"""What a new user finds in a cluster with 40 PVCs, three CronJobs and a Schedule of Velero; three volumes are bad.

A real agent leads. Nothing carries backups out: each is created as it ended.
"""

import asyncio
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from client.permissions import DESCRIBE_PERMISSIONS, STATUS_PERMISSIONS
from core.kube import resources
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS
from tests.client.support.browser import visit
from tests.client.support.volumes_scene import a_backup, a_cron_job
from tests.crash.controllers import set_status
from tests.crash.worlds import World, open_client
from tests.nodeagent.support.volume_scene import a_claim, a_pod, a_schedule, a_volume, an_object
from tests.support.apiserver import ApiServer, run_apiserver, serve_schedules
from tests.support.objects import JsonDict
from tests.support.rbac import grant
from tests.support.ui_command import running_ui

pytestmark = pytest.mark.integration

_RESOURCES = resources.BY_KIND
_COUNTS = {"app": 20, "db": 8, "shop": 12}
_SUSPECTS = {
    "shop/data-07": (
        "never backed up",
        r"Schedule shop-night copies no data: fs-backup needs pod report-x to run and to mount it",
    ),
    "db/data-05": ("failing", r"du/\S+ failed \d+\w ago: no space left on device"),
    "app/data-03": ("stale", r"the last backup is \d+\w old: expected every 1s by schedule often; no run yet"),
}
"""The state of each, and the reason as a pattern."""


@pytest.fixture
def apiserver() -> Iterator[ApiServer]:
    """A server without the PVCs of other tests."""
    with run_apiserver() as server:
        yield server


class _Trial:
    """Creates what is in the cluster; names of namespaces begin with the one of the agents."""

    def __init__(self, world: World) -> None:
        self._client, self.agents = world.client, world.namespace

    async def _put(self, *objects: JsonDict) -> None:
        for one in objects:
            resource, meta = _RESOURCES[one["kind"]], one["metadata"]
            del meta["creationTimestamp"]
            if meta.get("namespace") == "velero":
                meta["namespace"] = self.agents
            await self._client.create(resource, one)
            if resource in {PERSISTENT_VOLUME_CLAIMS, PODS}:
                await set_status(self._client, resource, one, one["status"])

    async def put_volumes(self) -> None:
        """Create PVCs, and a pod that fs-backup is asked to back up, but has ended."""
        for app, count in _COUNTS.items():
            place = f"{self.agents}-{app}"
            await self._put(an_object("Namespace", place), an_object("ServiceAccount", "default", place))
            for number in range(count):
                claim = a_claim(f"data-{number:02}", place)
                claim["spec"]["resources"] = {"requests": {"storage": "1Gi"}}
                await self._put(claim, a_volume(f"data-{number:02}", place))
        asked = {"backup.velero.io/backup-volumes": "data-07"}
        pod = a_pod("report-x", f"{self.agents}-shop", claims=["data-07"], annotations=asked, phase="Succeeded")
        pod["spec"]["containers"][0]["image"] = "i"
        await self._put(pod)

    async def put_schedules(self) -> None:
        """Create what is to back them up; of the schedule `often`, two runs are missed within seconds."""
        nightly = [f"--pvc={self.agents}-app/data-{number:02}" for number in range(_COUNTS["app"]) if number != 3]
        cron_jobs = [
            a_cron_job("app-night", *nightly),
            a_cron_job("db-hourly", f"--namespace={self.agents}-db", "--selector=", schedule="@hourly"),
            a_cron_job("often", f"--pvc={self.agents}-app/data-03", schedule="@every 1s"),
        ]
        for one in cron_jobs:
            one["spec"]["jobTemplate"]["spec"]["template"]["spec"]["restartPolicy"] = "Never"
        template: JsonDict = {"includedNamespaces": [f"{self.agents}-sh*"], "snapshotMoveData": True}
        server = {"containers": [{"name": "velero", "image": "i", "args": ["server", "--features=EnableCSI"]}]}
        labels = {"app": "velero"}
        spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": server}}
        deployment = an_object("Deployment", "velero", "velero", "apps/v1", spec=spec)
        await self._put(*cron_jobs, a_schedule("shop-night", "0 3 * * *", **template), deployment)

    async def put_backups(self) -> None:
        """Create a complete backup of each but two."""
        for app, count in _COUNTS.items():
            for number in range(count):
                if f"{app}/data-{number:02}" not in {"shop/data-07", "db/data-05"}:
                    await self._put(a_backup(f"{self.agents}-{app}", f"data-{number:02}", datetime.now(UTC)))

    async def fail(self) -> None:
        message = "no space left on device"
        await self._put(a_backup(f"{self.agents}-db", "data-05", datetime.now(UTC), "Failed", message=message))


async def _run(*words: str) -> str:
    argv = [sys.executable, "-m", "nodeagent", *words]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def test_one_command_and_the_page_name_the_volumes_that_are_not_protected_and_why(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    serve_schedules(apiserver)
    async with open_client(apiserver) as client:
        world = World(apiserver, client, "DataUpload")
        await world.prepare_agents()
        trial = _Trial(world)
        await trial.put_volumes()
        await trial.put_schedules()
        await trial.put_backups()
        apiserver.create_account(trial.agents, "user")
        grant(apiserver.api, trial.agents, "user", (*STATUS_PERMISSIONS, *DESCRIBE_PERMISSIONS))
        access = ("--kubeconfig", str(apiserver.account_kubeconfig(trial.agents, "user", tmp_path)))
        async with world.agent(), running_ui("-n", trial.agents, *access) as (_, url), visit(url) as tab:
            await trial.fail()
            sentence = "37 of 40 volumes protected; 1 never backed up, 1 failing, 1 stale"
            await tab.page.get_by_text(sentence).wait_for()
            rows = await tab.page.get_by_role("region", name="Volumes, table").locator("tbody tr").all_inner_texts()
        lines = (await _run("volumes", "--agent-namespace", trial.agents, *access)).splitlines()
        status = await _run("status", "-n", trial.agents, *access)
    assert lines[0] == sentence
    assert f"{sentence} (nodeagent volumes says why)" in status
    for (name, (state, reason)), row, line in zip(_SUSPECTS.items(), rows, lines[3:], strict=False):
        assert re.match(rf"{trial.agents}-{name}\t{state}\t{reason}\t", row)
        assert re.fullmatch(rf"{trial.agents}-{name} +{state.replace(' ', '-')} .* {reason}", line)

"""`nodeagent schedule` and `run-schedule`: what they print, their errors and exit codes."""

import json
import re

import pytest
import yaml

from client.cli import install
from client.schedules.store import ScheduleList
from core.kube.resources import CRON_JOBS
from tests.client.support.commands import SceneShell, assert_document, open_scene
from tests.client.support.schedule_scene import ScheduleScene
from tests.support.golden import assert_golden, assert_golden_text

_WHEN = ("--schedule", "0 2 * * *")
_CREATE = ("schedule", "create", "night", *_WHEN, "--pvc", "app/data", "--ttl", "24h")


_Shell = SceneShell[ScheduleScene]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> _Shell:
    scene = ScheduleScene()
    scene.old.put_backup("first", 9)
    scene.old.put_backup("second", 5)
    monkeypatch.delenv("NODE_AGENT_JOB", raising=False)
    return open_scene(scene, capsys, monkeypatch, clock=lambda: scene.clock)


def test_a_schedule_is_created_shown_and_changed(shell: _Shell) -> None:
    code, out, err = shell.run(*_CREATE)
    assert (code, out) == (0, "schedule night was created: its first run is at 2026-11-22T02:00:00Z\n")
    assert err == (
        "note: nodeagent schedule get night shows it\n"
        "note: the backup has the data of volumes only: no manifests, and no hooks run\n"
    )
    (cron_job,) = shell.scene.cron_jobs
    status = {"lastScheduleTime": "2026-11-21T02:00:00Z", "lastSuccessfulTime": "2026-11-20T02:10:00Z"}
    shell.scene.kube.put(cron_job | {"status": status})
    assert_golden_text("cli/schedule-get", shell.run("schedule", "get")[1])
    assert_golden_text("cli/schedule-get-wide", shell.run("schedule", "get", "night", "-o", "wide")[1])
    assert_document("schedule-get", ScheduleList, shell.run("schedule", "get", "-o", "json")[1])
    assert shell.run(*_CREATE)[1] == "schedule night was changed: its next run is at 2026-11-22T02:00:00Z\n"


def _age(shell: _Shell) -> None:
    """Let the schedule be of an older version."""
    (cron_job,) = shell.scene.cron_jobs
    del cron_job["metadata"]["annotations"]
    shell.scene.kube.put(cron_job)


def test_a_schedule_that_deletes_by_older_rules_is_named_until_it_is_renewed(shell: _Shell) -> None:
    shell.run(*_CREATE)
    _age(shell)
    older = "note: schedule night deletes by older rules of retention: run nodeagent schedule renew night\n"
    assert shell.run("schedule", "get")[2] == older
    assert shell.run("schedule", "renew") == (0, "schedule night: renewed\n", "")
    assert shell.run("schedule", "get")[2] == ""
    shell.scene.kube.fail_next("PATCH", "/roles", 403, times=9, message="eve cannot patch roles")
    code, out, err = shell.run("schedule", "renew", "night")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: schedule night was not renewed: patch Role .*eve cannot patch roles\n", err)


def test_an_installation_renews_schedules_where_it_can(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: object, **__: object) -> None:
        return

    monkeypatch.setattr(install, "run_install", run)
    words = ("install", "--no-default-backup-location", "--no-secret", "--image=mover:1")
    shell.run(*_CREATE)
    _age(shell)
    assert shell.run(*words) == (0, "schedule night: renewed\n", "checking permissions\n")
    _age(shell)
    assert shell.run(*words, "-o", "yaml")[0] == 0
    assert "annotations" not in shell.scene.cron_jobs[0]["metadata"]
    shell.scene.kube.fail_next("PATCH", "/roles", 403, times=9, message="eve cannot")
    code, out, err = shell.run(*words)
    assert (code, out) == (0, "")
    assert re.fullmatch(
        r"note: schedule night was not renewed: patch Role .*: run nodeagent schedule renew", err.splitlines()[1]
    )
    shell.scene.kube.fail_next("GET", "/cronjobs", 403, times=9, message="eve may not list")
    code, out, err = shell.run(*words)
    assert (code, out) == (0, "")
    assert re.fullmatch(r"note: schedules were not renewed: .*eve.*: run nodeagent schedule renew", err.splitlines()[1])


def test_for_gitops_the_objects_are_printed_and_not_created(shell: _Shell) -> None:
    code, out, err = shell.run(*_CREATE, "-o", "yaml")
    assert (code, err) == (0, "")
    kinds = [one["kind"] for one in yaml.safe_load(out)["items"]]
    assert (kinds[0], kinds[-3:], len(kinds)) == ("ServiceAccount", ["ConfigMap", "Lease", "CronJob"], 10)
    assert shell.scene.old.names(CRON_JOBS) == set()


def test_the_command_line_of_its_pods_backs_up_and_deletes(shell: _Shell) -> None:
    shell.run(*_CREATE)
    (cron_job,) = shell.scene.cron_jobs
    (container,) = cron_job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    shell.scene.end_backups()
    code, out, err = shell.run(*container["args"])
    assert (code, err) == (0, "")
    out = re.sub(r"[0-9a-f]{8}(-x)?\b", "HASH", out)
    assert_golden_text("cli/run-schedule", out)
    (made,) = shell.scene.made
    assert list(shell.scene.kube.bucket) == [f"s-{made['metadata']['name']}"]


def test_a_dry_run_notes_each_pvc_that_is_left_out(shell: _Shell) -> None:
    names = [f"app/loose-{number}" for number in range(4)]
    for name in names:
        shell.scene.claims.put_claim(name.removeprefix("app/"), "plain")
    shell.run(*_CREATE, "--pvc=app/gone", *(f"--pvc={name}" for name in names))
    code, _, err = shell.run("schedule", "run", "night", "--dry-run")
    assert "note: PVC app/gone does not exist any more: it is left out\n" in err
    assert (code, re.findall(r"note: PVC (\S+): no CSI snapshot", err)) == (1, names)


def test_a_person_can_run_it(shell: _Shell) -> None:
    shell.run(*_CREATE)
    shell.scene.end_backups("Failed")
    code, out, err = shell.run("schedule", "run", "night")
    assert code == 1
    assert (
        "backup second is expired, and kept: it has the newest copy of app/data in default (1.0 GiB, 5d old); "
        "nodeagent backup delete second lets go\n"
    ) in out
    assert err.splitlines()[-1].startswith("error: backup night-20261121120000 is Failed: PVC app/data is Failed")


def test_each_copy_of_a_schedule_is_explained(shell: _Shell) -> None:
    for day in range(6):
        claims = ("data", "gone") if day == 4 else ("data",)
        shell.scene.old.put_backup(f"night-{day}", day + 0.1, *claims, schedule="night", ttl="36h" if day < 3 else "")
    keep = ("--keep-last=2", "--keep-weekly=2", "--time-zone=Europe/Berlin")
    shell.run("schedule", "create", "night", *_WHEN, "--pvc=app/data", *keep)
    code, out, err = shell.run("schedule", "retention", "night")
    assert (code, err) == (0, "note: nodeagent schedule run night --dry-run also looks at the snapshots\n")
    assert_golden_text("cli/schedule-retention", out)
    assert_golden("cli/schedule-retention", json.loads(shell.run("schedule", "retention", "night", "-o", "json")[1]))
    assert "last 2, weekly 2" in shell.run("schedule", "get")[1]
    shell.run("schedule", "create", "other", *_WHEN, "--pvc=app/data")
    code, out, err = shell.run("schedule", "retention", "other")
    assert (code, out) == (0, "")
    assert err.splitlines()[:2] == [
        "note: schedule other has no backups",
        "note: schedule other deletes nothing: it has neither --ttl nor --keep-...",
    ]


@pytest.mark.parametrize("form", ["table", "yaml"])
def test_a_schedule_whose_runs_would_fail_is_refused(shell: _Shell, form: str) -> None:
    shell.scene.old.put_location("archive", accessMode="ReadOnly")
    _, _, missing = shell.run(*_CREATE, "--storage-location=defalt", "-o", form)
    assert missing.endswith(" velero/defalt does not exist (did you mean default?)\n")
    _, _, read_only = shell.run(*_CREATE, "--storage-location=archive", "-o", form)
    assert read_only.endswith(" velero/archive is read-only: --storage-location names another\n")
    shell.scene.old.put("Deployment", "velero", "apps/v1")
    code, out, err = shell.run(*_CREATE, "-o", form)
    assert (code, out, shell.scene.old.names(CRON_JOBS)) == (1, "", set())
    why = "error: a Velero server is in namespace velero: ask it .*; --ignore-velero-server creates .*\n"
    assert re.fullmatch(why, err)
    assert shell.run(*_CREATE, "--ignore-velero-server", "-o", form)[0] == 0


def test_a_pvc_that_does_not_exist_is_named_and_left_out(shell: _Shell) -> None:
    code, _, err = shell.run(*_CREATE, "--pvc", "app/dta")
    assert code == 0
    assert err.startswith("note: PVC app/dta does not exist (did you mean data?): it is left out until it does\n")
    matching = ("schedule", "create", "night", *_WHEN, "-n", "app", "-l")
    code, _, err = shell.run(*matching, "tier=wbe")
    none = 'there is no PVC in namespace app with the labels "tier=wbe": runs fail until there is one'
    assert (code, err.partition("\n")[0]) == (0, f"note: {none}")
    assert "there is no PVC" not in shell.run(*matching, "tier=web")[2]
    shell.scene.kube.fail_next("GET", "/persistentvolumeclaims", 403, times=9)
    for words in ((*_CREATE, "--pvc", "app/dta"), (*matching, "tier=wbe")):
        code, _, err = shell.run(*words)
        assert (code, "exist" in err, "there is no" in err) == (0, False, False)

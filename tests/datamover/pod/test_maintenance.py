"""Maintenance in the pod of a Job, with a real kopia: may it run, and what is left of it."""

import asyncio
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from core.models.base import format_time, parse_time
from core.models.names import REPO_NAME_LABEL, REPOSITORY_ID_ANNOTATION
from datamover.runtime.resources import ResourceLimits
from tests.datamover.support.plainkopia import PASSWORD, PlainKopia
from tests.datamover.support.pods import REPOSITORY, MoverPod
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.s3proxy import Fault, S3Proxy
from tests.datamover.support.trees import make_large_file
from tests.datamover.support.unconfined import put_program
from tests.support.fakekube import FakeKube

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

_ERROR: Final = "Repo maintenance error: "


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "backups" / "kopia" / "app"


@pytest.fixture
def other(plain_kopia: PlainKopia) -> PlainKopia:
    """kopia of another cluster, or a person, on the same repository."""
    return plain_kopia


def _info(kopia: PlainKopia) -> Any:
    return json.loads(kopia.run("maintenance", "info", "--json"))


def _finished(pod: MoverPod, name: str) -> None:
    """Let the runs so far be a Job's of this cluster."""
    pod.put_job(name, status={"completionTime": format_time(pod.clock.now())})


def _contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


async def test_what_is_due_runs_once(released: MoverPod, other: PlainKopia) -> None:
    assert await released.maintain() == 0, released.message
    first = released.result
    assert first["mode"] == "full"
    assert first["fullIntervalSeconds"] == 86400
    assert first["repositoryID"]
    assert first["indexBlobs"] >= 1
    assert first["peakBytes"] > 20 << 20
    info = _info(other)
    assert first["nextFull"][:19] == info["schedule"]["nextFullMaintenance"][:19]
    assert info["schedule"]["runs"]["cleanup-logs"][0]["success"]
    _finished(released, "job-0")
    released.put_repository({REPOSITORY_ID_ANNOTATION: first["repositoryID"]}, phase="Ready")
    assert await released.maintain() == 0, released.message
    assert released.result["mode"] == "none"
    assert released.result["reason"].startswith("nothing is due: full maintenance is due at ")
    assert _info(other) == info
    other.run("maintenance", "set", "--pause-quick=0s")
    assert await released.maintain() == 0, released.message
    assert released.result["mode"] == "quick"
    runs = _info(other)["schedule"]["runs"]
    assert len(runs["advance-epoch"]) == 2
    assert len(runs["snapshot-gc"]) == 1


async def test_without_an_owner_the_maintenance_is_ours(released: MoverPod, bucket: Path, tmp_path: Path) -> None:
    """As after a creation that was killed once the repository was there."""
    whole = bucket.rename(tmp_path / "whole")
    bucket.mkdir()
    for name in (".shards", "kopia.repository.f"):
        (whole / name).rename(bucket / name)
    assert await released.maintain() == 0, released.message
    assert released.result["mode"] == "full"


async def test_only_deleted_snapshots_are_freed(
    released: MoverPod, other: PlainKopia, bucket: Path, tmp_path: Path
) -> None:
    def size() -> int:
        return sum(len(content) for _, content in _contents(bucket).values())

    for name, size_mib in (("kept", 1), ("deleted", 45)):
        # A pack has 20 MiB; kopia merges small ones, with what is deleted.
        other.run("snapshot", "create", str(make_large_file(tmp_path / name / "data", size_mib).parent))
    deleted = next(one["id"] for one in other.snapshots() if one["source"]["path"].endswith("deleted"))
    before = size()
    other.run("snapshot", "delete", "--delete", deleted)
    # kopia forgets what was deleted in an earlier second of its clock, and deletes its pack in a later run.
    deadline = time.monotonic() + 60
    while size() >= before - (20 << 20):
        assert time.monotonic() < deadline
        other.run("maintenance", "run", "--full", "--safety=none")
    other.run("maintenance", "set", "--pause-full=0s")
    assert await released.maintain(ignore_foreign=True) == 0, released.message
    assert released.result["mode"] == "full"
    assert size() < before - (20 << 20)
    other.run("snapshot", "verify", "--verify-files-percent=100")


async def test_another_clusters_maintenance_is_not_joined(released: MoverPod, other: PlainKopia, bucket: Path) -> None:
    other.run("maintenance", "run")
    before = _contents(bucket)
    assert await released.maintain() == 0, released.message
    assert released.result["mode"] == "none"
    assert "another cluster or a person ran maintenance at " in released.result["reason"]
    assert released.result["held"]
    assert "foreignAt" in released.result
    assert _contents(bucket) == before
    assert await released.maintain(ignore_foreign=True) == 0, released.message
    assert released.result["mode"] == "full"
    assert "foreignAt" in released.result


@pytest.mark.parametrize("known", ["history", "our Job", "Velero's Job", "failed Job"])
async def test_a_run_of_this_cluster_is_not_foreign(released: MoverPod, other: PlainKopia, known: str) -> None:
    other.run("maintenance", "run", "--full")
    now = format_time(released.clock.now())
    if known == "history":
        entry = {"result": "Succeeded", "startTimestamp": now, "completeTimestamp": now}
        released.put_repository(phase="Ready", recentMaintenance=[entry])
    elif known == "our Job":
        _finished(released, "job-0")
    elif known == "Velero's Job":
        meta = {"namespace": "velero", "name": "job-0", "labels": {REPO_NAME_LABEL: REPOSITORY}}
        released.kube.put({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta})
    else:
        condition = {"type": "Failed", "status": "True", "lastTransitionTime": now}
        released.put_job("job-0", status={"conditions": [condition]})
    assert await released.maintain() == 0, released.message
    assert "nothing is due" in released.result["reason"]
    assert not {"held", "foreignAt"} & released.result.keys()


async def test_a_missing_pack_fails_the_run(
    released: MoverPod, other: PlainKopia, bucket: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").write_bytes(os.urandom(10000))
    other.run("snapshot", "create", str(tmp_path / "data"))
    (pack,) = [path for path in (bucket / "p").rglob("*") if path.is_file()]
    pack.rename(tmp_path / "pack")
    before = _contents(bucket).keys()
    assert await released.maintain() == 1
    name = "p" + "".join(pack.relative_to(bucket / "p").parts).removesuffix(".f")
    assert released.message.endswith(f"{_ERROR}blob not found: {name}")
    assert before <= _contents(bucket).keys()
    # Many blobs are not verified.
    assert await released.maintain(ignore_foreign=True, verify_blobs=2) == 0, released.message
    assert released.result["mode"] == "full"


async def _other_id(pod: MoverPod, _: PlainKopia) -> str:
    pod.put_repository({REPOSITORY_ID_ANNOTATION: "ab" * 32}, phase="Ready")
    return "another repository: "


async def _other_owner(_: MoverPod, kopia: PlainKopia) -> str:
    kopia.run("maintenance", "set", "--owner=someone@else")
    return "not the owner: maintenance belongs to someone@else, not to default@default"


async def _wrong_password(pod: MoverPod, _: PlainKopia) -> str:
    pod.put_secret("velero-repo-credentials", "repository-password", "a wrong password")
    return "wrong password: "


@pytest.mark.parametrize("prepare", [_other_id, _other_owner, _wrong_password])
async def test_others_repositories_are_left(released: MoverPod, other: PlainKopia, bucket: Path, prepare: Any) -> None:
    cause = await prepare(released, other)
    before = _contents(bucket)
    assert await released.maintain(full_interval_seconds=21_600, ignore_foreign=True) == 1
    assert released.message.rpartition("\n")[2].startswith(f"{_ERROR}{cause}")
    assert "a wrong password" not in released.message
    assert _contents(bucket) == before


@pytest.mark.sample("eager")
@pytest.mark.parametrize(
    ("config", "nanoseconds"),
    [({}, 86400 * 10**9), ({"fullMaintenanceInterval": "eagerGC"}, 21600 * 10**9)],
    ids=["none", "eager"],
)
async def test_a_new_repository_gets_the_configured_full_interval(
    tmp_path: Path, kopia_program: Path, config: dict[str, str], nanoseconds: int
) -> None:
    pod = MoverPod(FakeKube(), tmp_path)
    (tmp_path / "backups").mkdir()
    pod.put_repository(config=config)
    assert await pod.init() == 0, pod.message
    assert pod.result["created"] is True
    kopia = PlainKopia(kopia_program, tmp_path)
    kopia.connect(tmp_path / "backups" / "kopia" / "app")
    assert _info(kopia)["full"]["interval"] == nanoseconds


async def test_the_interval_of_a_found_repository_changes_on_request(released: MoverPod, other: PlainKopia) -> None:
    released.put_repository(config={"fullMaintenanceInterval": "eagerGC"}, phase="Ready")
    assert await released.init() == 0, released.message
    assert released.result["created"] is False
    assert await released.maintain() == 0, released.message
    assert released.result["intervalDiffers"] is True
    assert _info(other)["full"]["interval"] == 86400 * 10**9
    _finished(released, "job-0")
    assert await released.maintain(full_interval_seconds=21_600) == 0, released.message
    assert "intervalDiffers" not in released.result
    assert (released.result["fullIntervalSeconds"], released.result["mode"]) == (21600, "full")
    assert _info(other)["full"]["interval"] == 21600 * 10**9
    # Otherwise a run of another cluster would seem to begin 18 hours after the last one.
    assert parse_time(released.result["nextFull"]) <= released.clock.now() + timedelta(hours=6)


def _replace_kopia(monkeypatch: pytest.MonkeyPatch, folder: Path, words: str, script: str) -> None:
    """Let a script run instead of kopia where its arguments contain `words`."""
    put_program(folder, f'case "$*" in *"{words}"*) {script};; esac\nexec PROGRAM "$@"', monkeypatch)


async def test_a_run_without_a_record_fails(
    released: MoverPod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'env > {tmp_path}/env; echo "$@" > {tmp_path}/argv; echo Finished full maintenance. >&2; exit 0'
    _replace_kopia(monkeypatch, tmp_path, "maintenance run", script)
    released.limits = ResourceLimits(2, 200 << 20)
    assert await released.maintain() == 1
    assert released.message == (
        f"Finished full maintenance.\n{_ERROR}nothing recorded: kopia exited with code 0, "
        "without a success of snapshot-gc, cleanup-logs"
    )
    environment = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    assert environment["GOGC"] == "50"
    assert environment["GOMEMLIMIT"] == "140MiB"
    assert environment["TMPDIR"].startswith(f"{tmp_path}/datamover-")
    assert environment["KOPIA_MAINTENANCE_CONTENT_VERIFY_PERCENTAGE"] == "100"
    arguments = (tmp_path / "argv").read_text()
    assert "maintenance run --full" in arguments
    assert not any(flag in arguments for flag in ("--force", "--safety", PASSWORD))


async def test_a_size_that_is_not_known_fails_none(
    released: MoverPod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _replace_kopia(monkeypatch, tmp_path, "content stats", "exit 1")
    assert await released.maintain() == 0, released.message
    assert released.result["mode"] == "full"
    assert "contents" not in released.result


@pytest.fixture
async def on_s3(proxy: S3Proxy, tmp_path: Path) -> MoverPod:
    """A pod of a released Job, whose repository is in a bucket behind a proxy."""
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_bucket(proxy.server, proxy.server.make_bucket("maintenance"), url=proxy.url)
    await pod.create_repository()
    pod.put_job()
    return pod


async def test_after_a_refusal_for_a_skewed_clock_the_next_run_is_full_again(on_s3: MoverPod, proxy: S3Proxy) -> None:
    proxy.skew = timedelta(hours=1)
    assert await on_s3.maintain() == 1
    assert f"\n{_ERROR}clock skew: the clocks of node and storage differ by 59m" in on_s3.message
    proxy.skew = timedelta()
    _finished(on_s3, "job-0")
    assert await on_s3.maintain() == 0, on_s3.message
    assert on_s3.result["mode"] == "full"


@pytest.mark.sample("kopia")
@pytest.mark.parametrize(
    ("end", "cause"),
    [("kill", "kopia was killed by signal 9"), ("stop", "the data mover was stopped by SIGTERM")],
    ids=["kopia", "pod"],
)
async def test_after_a_killed_run_the_next_is_full(on_s3: MoverPod, proxy: S3Proxy, end: str, cause: str) -> None:
    """It hangs after it wrote the next due times."""
    proxy.armed = ("HEAD /maintenance/kopia/app/kopia.maintenance", Fault.SILENCE)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(on_s3.maintain())
        await on_s3.wait_for(lambda: proxy.fault is not None or running.done())
        (kopia,) = running_kopia("maintenance run")
        if end == "kill":
            os.kill(kopia.pid, signal.SIGKILL)
        else:
            on_s3.signal()
    assert running.result() == 1
    assert on_s3.message.rpartition("\n")[2] == f"{_ERROR}{cause}"
    assert running_kopia("maintenance run") == []
    if end == "kill":
        proxy.recover()
        _finished(on_s3, "job-0")
        assert await on_s3.maintain() == 0, on_s3.message
        assert on_s3.result["mode"] == "full"

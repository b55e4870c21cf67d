"""The Jobs of a namespace, by the repositories that they are of."""

from dataclasses import replace
from datetime import timedelta

from core.models.storage import BackupRepository
from nodeagent.maintenance.jobs import MaintenanceJob, RepositoryJobs
from tests.nodeagent.support.maintenance_scene import repository_object
from tests.support.clock import NOON


def test_each_job_is_of_its_repository_once_the_oldest_first() -> None:
    repository = BackupRepository.parse(repository_object())
    labeled = MaintenanceJob("b", "1", NOON, owner_uid=repository.uid, repo_name=repository.name)
    jobs = [
        labeled,
        replace(labeled, name="a", uid="2", repo_name=None),
        replace(labeled, uid="3", owner_uid="of an earlier one", created=NOON - timedelta(hours=1), ended=True),
        replace(labeled, uid="4", owner_uid=None, created=NOON + timedelta(hours=1)),
        MaintenanceJob("d", "5", NOON, verifies=repository.uid),
        MaintenanceJob("c", "6", NOON, verifies=repository.uid, reason="DeadlineExceeded"),
        MaintenanceJob("e", "7", NOON, owner_uid="another", repo_name="another"),
        MaintenanceJob("f", "8", NOON),
    ]
    found = RepositoryJobs(jobs)
    assert [job.uid for job in found.of(repository)] == ["3", "2", "1", "4"]
    assert [job.uid for job in found.verifying(repository)] == ["6", "5"]
    # Ours that have neither ended nor failed.
    assert (found.running, len(found.all)) == (4, len(jobs))
    assert RepositoryJobs().of(repository) == RepositoryJobs().verifying(repository) == []

"""What agent and movers asked the API server for, in all tests of this tier, against what `deploy/` grants them.

It runs last, when all other processes have ended: it checks the audit log of the whole run.
"""

import json
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest

from core.models.names import MOVER_SERVICE_ACCOUNT, SERVICE_ACCOUNT
from nodeagent.runtime.permissions import MOVER_PERMISSIONS, Permission, Scope, agent_permissions
from nodeagent.runtime.preflight import PREFLIGHT_NAME
from tests.cluster.bed import Bed
from tests.cluster.conftest import RAN
from tests.support.access import Access, access_of_event, not_permitted
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.layout import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="last")]

_ACCOUNTS = {SERVICE_ACCOUNT: agent_permissions("node-agent-config"), MOVER_SERVICE_ACCOUNT: MOVER_PERMISSIONS}
"""The ServiceAccounts that `deploy/` installs, and what they may do."""

_FORBIDDEN = 403
_REQUIRED = {
    "test_bad_input.py",
    "test_cancel.py",
    "test_configuration.py",
    "test_crossing.py",
    "test_demo.py",
    "test_examples.py",
    "test_leaving_workloads.py",
    "test_pod_volumes.py",
    "test_unschedulable.py",
}
"""Tests whose requests are checked."""

_APART = "only for maintenance, which an agent with accounts of its own runs in this tier"
_MAINTAINED = "tests/cluster/test_maintenance.py::test_a_repository_is_maintained_by_a_job_and_its_failure_is_named"
_STEPS = "tests/nodeagent/leader/maintenance/test_steps.py"

_RARE = {
    **{f"{verb} jobs": (_APART, _MAINTAINED) for verb in ("create", "patch", "list", "watch")},
    "list deployments": (_APART, _MAINTAINED),
    "get jobs": ("only after a Job was lost", f"{_STEPS}::test_a_job_that_was_deleted_by_hand_is_a_failure"),
    "delete jobs": ("only beyond the Jobs to keep", f"{_STEPS}::test_as_many_finished_jobs_are_kept_as_configured"),
    "list backups": (
        "only for the snapshot report",
        "tests/datamover/pod/test_snapshot_report_references.py::test_backups_refer_by_their_status_and_restores_until_they_have_ended",
    ),
    "get backups": (
        "only for an interrupted PodVolumeBackup that a Backup owns",
        "tests/nodeagent/transfers/test_status.py::test_a_backup_that_is_final_does_not_wait",
    ),
    "patch persistentvolumeclaims": (
        "only for a restored volume that its controller has not bound by itself a moment later",
        "tests/exposer/test_generic_restore_rebind.py::test_the_pvc_is_kept_until_the_volume_is_on_no_node",
    ),
    "list volumeattachments": (
        "only for volumes with the annotation of vSphere's linked clones",
        "tests/exposer/test_sources_volume.py::test_a_linked_clone_avoids_the_nodes_of_its_source",
    ),
    "watch events": (
        "only for a mover whose files the agent does not see",
        "tests/nodeagent/node/test_progress_watch.py::test_twenty_running_transfers_need_one_watch",
    ),
    "patch volumesnapshots in its namespace": (
        "only after a provisioner has left its finalizer",
        "tests/exposer/test_ownership_volumes.py::test_what_a_provisioner_without_a_volume_leaves_on_the_snapshot_keeps_nothing",
    ),
    "patch volumesnapshotcontents/status": (
        "only for the snapshots of a group that the driver deletes only together",
        "tests/exposer/test_csi_snapshot_group.py::test_a_member_that_is_deleted_only_with_its_group_is_exposed_and_reported",
    ),
    "get snapshotmetadataservices": (
        "only for a backup by block",
        "tests/exposer/test_csi_snapshot_by_block.py::test_a_mover_gets_handles_service_and_token",
    ),
    "get volumesnapshots in its namespace": (
        "only by the service that a data mover asks for changed blocks, on its behalf",
        "tests/exposer/test_csi_snapshot_by_block.py::test_a_mover_gets_handles_service_and_token",
    ),
    "create backuprepositories": (
        "only for a transfer that a leader without a repository controller accepted",
        "tests/datamover/pod/test_cluster_repository.py::test_a_missing_backup_repository_is_created_and_awaited",
    ),
    "get leases": (
        "only after a renewal of the Lease met another write",
        "tests/nodeagent/leader/test_election.py::test_an_unanswered_renewal_is_retried",
    ),
    "get nodes": (
        "only for volumes that an attachment or their first consumer ties to a node",
        "tests/exposer/test_sources_volume.py::test_the_operating_system_follows_the_node_and_then_the_file_system",
    ),
}
"""Permissions that this tier does not use, or not always: when it does, and the test in which it does."""


@dataclass(frozen=True)
class Account:
    """A ServiceAccount: its permissions, and its events in the audit log of the whole run."""

    name: str
    permissions: tuple[Permission, ...]
    events: list[dict[str, Any]]

    @property
    def accesses(self) -> set[Access]:
        """Return all accesses but those of the checks at start, which use nothing."""
        return {access for event in self.events if (access := access_of_event(event)).name != PREFLIGHT_NAME}


@pytest.fixture(scope="module", params=_ACCOUNTS)
def account(agent: Bed, request: pytest.FixtureRequest) -> Account:
    """Each account of `deploy/`."""
    user = f"system:serviceaccount:{NAMESPACE}:{request.param}"
    with (agent.folder / "logs" / "audit.log").open() as log:
        # Most of a long log is about others.
        events = map(json.loads, (line for line in log if user in line))
        own = [event for event in events if event["user"].get("username") == user and "objectRef" in event]
    return Account(request.param, _ACCOUNTS[request.param], own)


def test_no_request_was_denied(account: Account) -> None:
    denied = [event for event in account.events if event["responseStatus"]["code"] == _FORBIDDEN]
    assert [f"{event['verb']} {event['requestURI']}" for event in denied] == []


def test_every_request_is_covered_by_a_listed_permission(account: Account) -> None:
    assert account.events
    assert not_permitted(account.accesses, account.permissions, NAMESPACE) == []


def test_no_watch_of_events_was_needed(account: Account) -> None:
    """Each Event would be sent to every agent; all movers of this tier write theirs to files."""
    assert [access for access in account.accesses if (access.verb, access.path) == ("watch", "events")] == []


def test_every_permission_is_used_unless_there_is_a_reason(agent: Bed, account: Account) -> None:
    if missing := _REQUIRED - {path.name for path in (agent.folder / RAN).iterdir()}:
        pytest.skip(f"only the whole tier uses all permissions; left out: {', '.join(sorted(missing))}")
    unused = {
        f"{verb} {permission.path}{permission.only} {permission.where}"
        for permission in account.permissions
        for verb in permission.verbs
        if not any(_uses(access, verb, permission) for access in account.accesses)
    }
    rare = {what for what in unused if any(f"{what} ".startswith(f"{each} ") for each in _RARE)}
    assert unused - rare == set()


def _uses(access: Access, verb: str, permission: Permission) -> bool:
    """Return whether a request needs the permission: one for every namespace is not needed for the account's own."""
    if (access.verb, access.group, access.path) != (verb, permission.resource.group, permission.path):
        return False
    if permission.resource.namespaced and (access.namespace == NAMESPACE) is not (
        permission.scope is Scope.OWN_NAMESPACE
    ):
        return False
    return not permission.names or access.name in permission.names


@pytest.mark.parametrize("what", _RARE)
def test_a_permission_that_this_tier_may_not_use_is_used_by_the_test_that_is_named(what: str) -> None:
    _, _, test = _RARE[what][1].partition("::")
    text = (ROOT / _RARE[what][1].partition("::")[0]).read_text(encoding="utf-8")
    assert f"def {test}(" in text
    verb, path, *_ = what.split()
    granted = [each for each in chain(*_ACCOUNTS.values()) if each.path == path and verb in each.verbs]
    assert granted

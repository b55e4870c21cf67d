"""What agent and movers asked the API server for, in all tests of this tier, against what `deploy/` grants them.

It runs last, when all other processes have ended: it checks the audit log of the whole run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from nodeagent.runtime.permissions import PERMISSIONS, Permission, Scope
from tests.cluster.conftest import RAN
from tests.support.access import Access, access_of_event, not_permitted
from tests.testbed.demonstration.manifests import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import Bed

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="last")]

_USER = f"system:serviceaccount:{NAMESPACE}:node-agent"
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

_NEVER_USED = {
    "delete persistentvolumes": "only where a restored volume could not be bound to its target PVC",
    "list volumeattachments": "only for volumes with the annotation of vSphere's linked clones",
}
_SELDOM_USED = {
    "get leases": "only after a renewal of the Lease met another write",
    "get nodes": "only for volumes that an attachment or their first consumer ties to a node",
}
"""Permissions for what this tier does not cause, or not always."""


@pytest.fixture(scope="module")
def events(agent: Bed) -> list[dict[str, Any]]:
    """What the audit log has of the agent's account."""
    with (agent.folder / "logs" / "audit.log").open() as log:
        # Most of a long log is about others.
        events = map(json.loads, (line for line in log if _USER in line))
        return [event for event in events if event["user"]["username"] == _USER and "objectRef" in event]


def test_no_request_was_denied(events: list[dict[str, Any]]) -> None:
    denied = [event for event in events if event["responseStatus"]["code"] == _FORBIDDEN]
    assert [f"{event['verb']} {event['requestURI']}" for event in denied] == []


def test_every_request_is_covered_by_a_listed_permission(events: list[dict[str, Any]]) -> None:
    assert events
    assert not_permitted(map(access_of_event, events), NAMESPACE) == []


def test_every_permission_is_used_unless_there_is_a_reason(agent: Bed, events: list[dict[str, Any]]) -> None:
    if missing := _REQUIRED - {path.name for path in (agent.folder / RAN).iterdir()}:
        pytest.skip(f"only the whole tier uses all permissions; left out: {', '.join(sorted(missing))}")
    requests = defaultdict(set)
    for access in map(access_of_event, events):
        requests[access.group, f"{access.verb} {access.path}"].add(access)
    unused = {
        what
        for what, permission in _granted()
        if not any(_uses(access, permission) for access in requests[permission.resource.group, what])
    }
    assert unused - _SELDOM_USED.keys() == _NEVER_USED.keys()


def _granted() -> Iterator[tuple[str, Permission]]:
    for permission in PERMISSIONS:
        for verb in permission.verbs:
            yield f"{verb} {permission.path}", permission


def _uses(access: Access, permission: Permission) -> bool:
    """Whether a request needed the permission: one for every namespace is not needed for the agent's own."""
    if permission.resource.namespaced and (access.namespace == NAMESPACE) is not (
        permission.scope is Scope.OWN_NAMESPACE
    ):
        return False
    return not permission.names or access.name in permission.names

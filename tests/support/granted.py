"""Fixture that fails a test whose product code sends a request that `deploy/` does not permit.

Tests send requests as well, as users, controllers and kubelets, through clients of the same class;
the nearest caller of the client identifies the sender.
"""

import re
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from client.install.manifests import build_everything, read_definitions
from client.permissions import (
    BACKUP_PERMISSIONS,
    DESCRIBE_PERMISSIONS,
    FILES_PERMISSIONS,
    REPO_PERMISSIONS,
    RESTORE_PERMISSIONS,
    STATUS_PERMISSIONS,
    SUPPORT_BUNDLE_PERMISSIONS,
    UNINSTALL_PERMISSIONS,
    VERIFY_PERMISSIONS,
    VERSION_PERMISSIONS,
    VOLUME_CHECK_PERMISSIONS,
    delete_permissions,
    installer_permissions,
)
from client.schedules.manifests import DELETION_PERMISSIONS, SCHEDULE_PERMISSIONS, SCHEDULED_PERMISSIONS
from core.clock import Clock
from core.kube.transport import Request
from core.models.names import (
    ADMISSIONS_CONFIGMAP,
    AGENT_DAEMONSET_WINDOWS,
    DELETIONS_LEASE,
    DISPATCHER_LEASE,
    HISTORY_CONFIGMAPS,
)
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, agent_permissions
from tests.support.access import Access, access_of, not_permitted
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

_NAMESPACE = "velero"
_AGENT = (*agent_permissions("agent-config", "repository-config", "maintenance-config"), *COPY_PERMISSIONS)
_USER = "client"
_DISCOVERY = re.compile(r"/apis(/[^/]+/[^/]+)?")
_EVERYTHING: list[JsonDict] = build_everything(_NAMESPACE)
_SHARED: tuple[JsonDict, ...] = (
    {"kind": "Lease", "metadata": {"name": DISPATCHER_LEASE}},
    {"kind": "Lease", "metadata": {"name": DELETIONS_LEASE}},
    *({"kind": "ConfigMap", "metadata": {"name": name}} for name in (ADMISSIONS_CONFIGMAP, *HISTORY_CONFIGMAPS)),
)
_FORMER: tuple[JsonDict, ...] = ({"kind": "DaemonSet", "metadata": {"name": AGENT_DAEMONSET_WINDOWS}},)
_USERS = (
    *BACKUP_PERMISSIONS,
    *FILES_PERMISSIONS,
    *VERIFY_PERMISSIONS,
    *DELETION_PERMISSIONS,
    *SCHEDULED_PERMISSIONS,
    *SCHEDULE_PERMISSIONS,
    *REPO_PERMISSIONS,
    *STATUS_PERMISSIONS,
    *DESCRIBE_PERMISSIONS,
    *SUPPORT_BUNDLE_PERMISSIONS,
    *RESTORE_PERMISSIONS,
    *VERSION_PERMISSIONS,
    *VOLUME_CHECK_PERMISSIONS,
    *UNINSTALL_PERMISSIONS,
    *installer_permissions([*read_definitions(), *_EVERYTHING]),
    *delete_permissions([*_EVERYTHING, *_SHARED, *_FORMER]),
)
_PERMISSIONS = {"exposer": _AGENT, "nodeagent": _AGENT, "datamover": MOVER_PERMISSIONS, _USER: _USERS}
"""Of the product's packages; commands for users use others, for which they send requests."""

_COMMANDS = {
    "backups/test_delete.py": DELETION_PERMISSIONS,
    "backups/test_plan": BACKUP_PERMISSIONS,
    "client/restores/": RESTORE_PERMISSIONS,
    "client/status/": STATUS_PERMISSIONS,
    "client/test_repositories": REPO_PERMISSIONS,
    "client/test_support_bundle.py": SUPPORT_BUNDLE_PERMISSIONS,
    "client/test_volume_check.py": VOLUME_CHECK_PERMISSIONS,
}
"""Of users in tests of one command, by a part of the path: the others' permissions would hide that one is missing."""


def _sender() -> str:
    """Return the package of the product that sends a request; empty: a test does."""
    frame: FrameType | None = sys._getframe(1)
    in_client = False
    sender = ""
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if module.startswith(_USER):
            return _USER
        if package in _PERMISSIONS:
            sender = sender or package
        in_client = in_client or package == "core"
        if package == "asyncio" or (in_client and package == "tests"):
            return sender
        frame = frame.f_back
    return sender


class _Requests(list[Request]):
    """The requests of one server, which records the accesses of the product by its packages."""

    def __init__(self, accesses: dict[str, set[Access]]) -> None:
        super().__init__()
        self._accesses = accesses

    def append(self, request: Request) -> None:
        super().append(request)
        # Everybody may ask which kinds are served.
        if (sender := _sender()) and not _DISCOVERY.fullmatch(request.path):
            access = access_of(request)
            # A Lease is renewed and released in the background, where no command is on the stack.
            self._accesses[_USER if access.name == DELETIONS_LEASE else sender].add(access)


@pytest.fixture(name="_only_granted_requests", autouse=True)
def only_granted_requests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    accesses: dict[str, set[Access]] = {package: set() for package in _PERMISSIONS}
    build = FakeKube.__init__

    def build_watched(kube: FakeKube, clock: Clock | None = None) -> None:
        build(kube, clock)
        kube.requests = _Requests(accesses)

    monkeypatch.setattr(FakeKube, "__init__", build_watched)
    yield
    users = next((found for part, found in _COMMANDS.items() if part in str(request.path)), _USERS)
    for package, permissions in (_PERMISSIONS | {_USER: users}).items():
        if missing := not_permitted(accesses[package], permissions, _NAMESPACE):
            pytest.fail(f"nodeagent/runtime/permissions.py does not allow {package}: {missing}", pytrace=False)

"""A person with the permissions of some commands, and how many requests these make."""

from pathlib import Path
from typing import Final

from nodeagent.runtime.permissions import Permission
from tests.support.apiserver import ApiServer
from tests.support.rbac import grant

__all__ = ["Person"]

_NAME: Final = "person"


class Person:
    """An account of the API server; `kubeconfig` is its kubeconfig."""

    def __init__(self, server: ApiServer, namespace: str, folder: Path, permissions: tuple[Permission, ...]) -> None:
        """Create the account in the namespace; its kubeconfig is in `folder`."""
        self._server, self._namespace = server, namespace
        server.create_account(namespace, _NAME)
        self.kubeconfig: Path = server.account_kubeconfig(namespace, _NAME, folder)
        grant(server.api, namespace, _NAME, permissions)

    def count_requests(self) -> int:
        """Return how many requests there were so far, as the audit log of the API server has them."""
        user = f"system:serviceaccount:{self._namespace}:{_NAME}"
        return len({event["auditID"] for event in self._server.audit_events() if event["user"]["username"] == user})

"""A person with some permissions in a namespace of a real API server, who runs commands."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from core.kube.resources import DAEMON_SETS, Resource
from nodeagent.__main__ import main
from nodeagent.runtime.permissions import Permission
from tests.support.apiserver import ApiServer
from tests.support.objects import build_object
from tests.support.rbac import grant
from tests.testbed.api import Json


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Person:
    """Runs commands with the permissions that a test grants. Objects are created by the administrator."""

    def __init__(self, apiserver: ApiServer, namespace: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.apiserver, self.api, self.namespace, self.folder = apiserver, apiserver.api, namespace, folder
        self._capsys = capsys
        apiserver.create_account(namespace, "user")
        self.kubeconfig = apiserver.account_kubeconfig(namespace, "user", folder)
        self.prepare()

    def prepare(self) -> None:
        """Create what the commands are about."""

    def install_agents(self) -> None:
        """Create the DaemonSet of agents, as if one were ready."""
        labels = {"role": "node-agent"}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
        self.create(DAEMON_SETS, "node-agent", spec={"selector": {"matchLabels": labels}, "template": template})
        self.set_status(DAEMON_SETS, "node-agent", numberReady=1)

    def grant(self, permissions: Sequence[Permission]) -> None:
        grant(self.api, self.namespace, "user", permissions)

    def run(self, *words: str) -> Done:
        code = main([*words, "--kubeconfig", str(self.kubeconfig)])
        return Done(code, *self._capsys.readouterr())

    def create(self, resource: Resource, name: str, **fields: Any) -> Json:
        return self.api.create(resource, build_object(resource, name, self._place(resource), **fields))

    def set_status(self, resource: Resource, name: str, **status: Any) -> None:
        """Set the status of an object; a transfer's is no subresource."""
        sub = "" if resource.group == "velero.io" else "status"
        self.api.patch(resource, {"status": status}, name=name, namespace=self._place(resource), sub=sub)

    def _place(self, resource: Resource) -> str:
        return self.namespace if resource.namespaced else ""

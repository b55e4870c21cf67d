"""A person who installs into a real API server: `nodeagent install` with a kubeconfig, and what it left there."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from client.install.options import resource_of
from core.kube.resources import NAMESPACES, Resource
from core.kube.transport import MERGE_PATCH
from core.models.base import JsonDict
from nodeagent.__main__ import main
from nodeagent.runtime.permissions import Permission
from tests.integration.person import Done
from tests.support.apiserver import ApiServer
from tests.support.objects import build_object
from tests.support.rbac import grant

ALONE = ("--no-default-backup-location", "--no-secret")

ALL_FLAGS = (
    "--provider=aws",
    "--bucket=backups",
    "--prefix=p",
    "--backup-location-config=region=r,s3Url=http://s3",
    "--cacert=ca.pem",
    "--secret-file=keys",
    "--image=registry.example.com/node-agent:1",
    "--image-pull-policy=Always",
    "--image-pull-secret=pull",
    "--features=EnableCSI",
    "--agent-arg=--log-level=debug",
    "--kubelet-root-dir=/var/lib/k0s/kubelet",
    "--privileged-node-agent",
    "--http-proxy=http://p:1",
    "--https-proxy=http://p:1",
    "--no-proxy=.svc",
    "--node-agent-config=config.json",
    "--node-agent-pod-cpu-request=0",
    "--node-agent-pod-mem-request=64Mi",
    "--node-agent-pod-cpu-limit=1",
    "--node-agent-pod-mem-limit=1Gi",
    "--pod-labels=team=storage",
    "--pod-annotations=example.com/a=1 2",
    "--node-selector=disk=ssd",
    "--toleration=a=1:NoSchedule,b:NoExecute,*",
    "--priority-classes",
    "--sa-annotations=iam.gke.io/gcp-service-account=a@b",
    "--volume-secrets",
    "--restore-tests",
    "--monitoring-namespace=prometheus",
)
"""Every flag that changes an object, but those that exclude others, and --openshift: only OpenShift serves its kind."""


@dataclass
class Installer:
    """Runs the command in a namespace of a test's own; without a kubeconfig, as the administrator."""

    server: ApiServer
    capsys: pytest.CaptureFixture[str]
    folder: Path
    kubeconfig: Path | None = None

    def __post_init__(self) -> None:
        self.namespace = f"install-{secrets.token_hex(4)}"
        (self.folder / "keys").write_text("[default]\n")
        (self.folder / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
        (self.folder / "config.json").write_text('{"loadConcurrency": {"globalConfig": 3}}')

    def run(self, *words: str, command: str = "install") -> Done:
        kubeconfig = f"--kubeconfig={self.kubeconfig or self.server.kubeconfig}"
        code = main([command, "-n", self.namespace, kubeconfig, *words])
        return Done(code, *self.capsys.readouterr())

    def get(self, resource: Resource, name: str) -> JsonDict | None:
        return self.server.api.get(resource, self.namespace if resource.namespaced else "", name)

    def versions(self, manifests: Iterable[JsonDict]) -> dict[str, str]:
        found = {}
        for one in manifests:
            stored = self.get(resource_of(one), one["metadata"]["name"])
            found[f"{one['kind']} {one['metadata']['name']}"] = stored["metadata"]["resourceVersion"] if stored else ""
        return found

    def change(self, resource: Resource, name: str, patch: JsonDict, *, manager: str = "another-manager") -> JsonDict:
        path = resource.path(self.namespace if resource.namespaced else "", name) + f"?fieldManager={manager}"
        return self.server.api.request("PATCH", path, body=patch, content_type=MERGE_PATCH)

    def become(self, permissions: Iterable[Permission]) -> None:
        """Continue as a user with these permissions and no others; the namespace is created for it."""
        permissions = tuple(permissions)
        self.create(NAMESPACES, self.namespace)
        self.server.create_account(self.namespace, "installer")
        grant(self.server.api, self.namespace, "installer", permissions)
        self.kubeconfig = self.server.account_kubeconfig(self.namespace, "installer", self.folder)

    def create(self, resource: Resource, name: str, **fields: Any) -> None:
        """Create an object as the administrator."""
        namespace = self.namespace if resource.namespaced else ""
        self.server.api.create(resource, build_object(resource, name, namespace, **fields))

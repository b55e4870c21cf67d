"""Brings the cluster up inside the test bed's namespaces, in parallel where possible.

Order: containerd and the images on one side, etcd, API server, controllers on the other;
the kubelet when both are there. Nothing is taken down here: the namespaces end.
"""

import os
import socket
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from core.kube.resources import NODES, SERVICE_ACCOUNTS
from tests.support.apiserver import apply_crds
from tests.support.tools import tool
from tests.testbed import cgroups, machine, othernode, settings
from tests.testbed.api import Api
from tests.testbed.controlplane import ControlPlane, Endpoint
from tests.testbed.images import import_images, pause_archive
from tests.testbed.layout import ROOT, Layout
from tests.testbed.node import Node
from tests.testbed.processes import LIMIT_SECONDS, Supervisor
from tests.testbed.storage.csi import Storage
from tests.testbed.storage.objects import class_objects


@dataclass
class Cluster:
    layout: Layout
    bed: str
    nodes: int
    image: Path
    _began: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Start everything; returns when pods can be made."""
        machine.prepare_mounts(self.layout.base)
        machine.share(self.layout.volumes)
        machine.add_addresses(settings.SERVICE_ADDRESS, settings.node_address(1))
        supervisor = Supervisor(self.layout.logs)
        self._install_command()
        plane = self._control_plane(supervisor)
        node = Node(1, self.layout.node(1), cgroups.group_name(self.bed, 1), plane)
        supervisor.start("containerd-1", node.containerd)
        self._start_s3(supervisor)
        storage = Storage(self.layout)
        with ThreadPoolExecutor(max_workers=1) as pool:
            images = pool.submit(self._import_images, node)
            # They have images to import before they need an API server.
            for index in range(2, self.nodes + 1):
                other = Node(index, self.layout.node(index), cgroups.group_name(self.bed, index), plane)
                othernode.start(other, [pause_archive(), self.image], supervisor, storage.driver(index))
            plane.start()
            self._say("API server ready")
            self._start_controllers(plane, supervisor)
            supervisor.start("kubelet-1", node.kubelet)
            self._prepare_api(plane)
            self._start_storage(supervisor)
            self._wait_for_nodes(supervisor, images)
        supervisor.check()
        self._say("cluster ready")

    def environment(self) -> dict[str, str]:
        """What a command in the cluster finds in its environment."""
        folders = {tool("kubernetes", "kubectl").parent, tool("kopia", "kopia").parent}
        path = ":".join([str(self._programs), *sorted(map(str, folders)), os.environ["PATH"]])
        return {
            "PATH": path,
            "KUBECONFIG": str(self.layout.kubeconfig),
            "KUBECACHEDIR": str(self.layout.base / "kubectl-cache"),
            "BED_DIR": str(self.layout.base),
            "BED_NODE": settings.node_name(1),
            "BED_NODES": " ".join(self._node_names()),
            "BED_IMAGE": settings.AGENT_IMAGE,
            "BED_S3_URL": f"http://{settings.S3_ADDRESS}:{settings.S3_PORT}",
            "BED_S3_BUCKET": settings.BUCKET,
            "BED_S3_ACCESS_KEY": settings.S3_ACCESS_KEY,
            "BED_S3_SECRET_KEY": settings.S3_SECRET_KEY,
        }

    @property
    def _programs(self) -> Path:
        return self.layout.base / "bin"

    def _install_command(self) -> None:
        """Let `nodeagent` be the command of this checkout, as a kubectl plug-in too."""
        self._programs.mkdir()
        for name in ("nodeagent", "kubectl-nodeagent"):
            program = self._programs / name
            program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m nodeagent "$@"\n')
            program.chmod(0o755)

    def _node_names(self) -> list[str]:
        return [settings.node_name(index + 1) for index in range(self.nodes)]

    def _control_plane(self, supervisor: Supervisor) -> ControlPlane:
        folder = self.layout.kubeconfig.parent
        folder.mkdir(parents=True)
        endpoint = Endpoint(
            settings.SERVICE_ADDRESS,
            settings.API_PORT,
            etcd_port=2379,
            etcd_peer_port=2380,
            advertised=settings.node_address(1),
        )
        return ControlPlane(folder, endpoint, supervisor)

    def _start_s3(self, supervisor: Supervisor) -> None:
        (self.layout.s3 / settings.BUCKET).mkdir(parents=True)
        keys = {"ROOT_ACCESS_KEY": settings.S3_ACCESS_KEY, "ROOT_SECRET_KEY": settings.S3_SECRET_KEY}
        address = f"{settings.S3_ADDRESS}:{settings.S3_PORT}"
        argv: list[str | Path] = [tool("versitygw", "versitygw"), "--port", address]
        supervisor.start("s3", [*argv, "posix", "--nometa", self.layout.s3], env=keys)

    def _import_images(self, node: Node) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not Path(node.socket).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        import_images(node, self.image)
        self._say("images imported")

    def _start_controllers(self, plane: ControlPlane, supervisor: Supervisor) -> None:
        common = [f"--kubeconfig={plane.kubeconfig}", "--leader-elect=false"]
        manager = [
            f"--root-ca-file={plane.authority.pair.certificate}",
            f"--service-account-private-key-file={plane.accounts.key}",
            "--use-service-account-credentials=true",
            f"--cert-dir={self.layout.base}/controller-manager",
        ]
        binary = tool("kubernetes", "kube-controller-manager")
        supervisor.start("kube-controller-manager", [binary, *common, *manager])
        # A pod whose claim is bound during its check is pending until the next one, five minutes later by default.
        recheck = "--pod-max-in-unschedulable-pods-duration=20s"
        supervisor.start("kube-scheduler", [tool("kubernetes", "kube-scheduler"), *common, recheck])

    def _prepare_api(self, plane: ControlPlane) -> None:
        apply_crds(plane.kubeconfig, ROOT / "tests" / "testbed" / "crds")
        api = Api(plane.kubeconfig)
        for resource, body in class_objects():
            api.create(resource, body)

    def _start_storage(self, supervisor: Supervisor) -> None:
        storage = Storage(self.layout)
        supervisor.start("driver-1", storage.driver(1))
        supervisor.wait("the storage", Path(storage.socket(1)).exists)
        for name, argv in storage.controllers().items():
            supervisor.start(name, argv)

    def _wait_for_nodes(self, supervisor: Supervisor, images: Future[None]) -> None:
        api = Api(self.layout.kubeconfig)
        for name in self._node_names():
            supervisor.wait(f"node {name}", partial(_is_ready, api, name))
            self._say(f"node {name} ready")
        supervisor.wait(
            "the service account default", lambda: api.get(SERVICE_ACCOUNTS, "default", "default") is not None
        )
        supervisor.wait("the S3 server", _s3_answers)
        supervisor.wait("the images", images.done)
        images.result()

    def _say(self, what: str) -> None:
        print(f"[{time.monotonic() - self._began:5.1f} s] {what}", file=sys.stderr, flush=True)


def _is_ready(api: Api, node: str) -> bool:
    found = api.get(NODES, "", node) or {}
    conditions = found.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _s3_answers() -> bool:
    try:
        socket.create_connection((settings.S3_ADDRESS, settings.S3_PORT), timeout=1).close()
    except OSError:
        return False
    return True

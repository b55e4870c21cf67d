"""One node of the test bed: containerd and a kubelet, and the files they are configured with.

Source: https://kubernetes.io/docs/reference/config-api/kubelet-config.v1beta1/ and
https://github.com/containerd/containerd/blob/release/1.6/docs/cri/config.md
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.support.tools import tool
from tests.testbed.controlplane import ControlPlane
from tests.testbed.settings import PAUSE_IMAGE, node_address, node_name, pod_subnet

_CNI_PLUGINS = ("/usr/lib/cni", "/opt/cni/bin")

_CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.tracing"]
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/library/{pause}"
  # Without CAP_SYS_RESOURCE no process may lower its score, and every pod would fail at that.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{folder}/cni"
"""


@dataclass(frozen=True)
class Node:
    """A node, counted from 1; it runs in whatever namespaces its programs are started in."""

    index: int
    folder: Path
    cgroup: str
    plane: ControlPlane

    @property
    def name(self) -> str:
        return node_name(self.index)

    @property
    def socket(self) -> str:
        """Where containerd listens; each node has a `/run` of its own."""
        return "/run/containerd/containerd.sock"

    @cached_property
    def containerd(self) -> list[str]:
        """The command that runs containerd; writes its configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_network()
        plugins = next(path for path in _CNI_PLUGINS if Path(path).is_dir())
        config = self.folder / "containerd.toml"
        config.write_text(
            _CONTAINERD.format(folder=self.folder, socket=self.socket, pause=PAUSE_IMAGE, plugins=plugins)
        )
        return ["containerd", "--config", str(config)]

    @cached_property
    def kubelet(self) -> list[str]:
        """The command that runs the kubelet; writes its configuration."""
        authority = self.plane.authority
        user = authority.issue(f"kubelet-{self.index}", user=f"system:node:{self.name}", group="system:nodes")
        kubeconfig = self.folder / "kubelet.kubeconfig"
        self.plane.write_kubeconfig(kubeconfig, user)
        config = self.folder / "kubelet.json"
        config.write_text(json.dumps(self._kubelet_configuration(), indent=1))
        argv = [str(tool("kubernetes", "kubelet")), "--config", str(config)]
        argv += ["--kubeconfig", str(kubeconfig), "--hostname-override", self.name]
        argv += ["--node-ip", node_address(self.index), "--cert-dir", str(self.folder / "pki")]
        return argv

    def ctr(self, *arguments: str) -> list[str]:
        """A command on the images and containers of this node's pods."""
        return ["ctr", "--address", self.socket, "--namespace", "k8s.io", *arguments]

    def _kubelet_configuration(self) -> dict[str, object]:
        resolv = self.folder / "resolv.conf"
        resolv.write_text("nameserver 10.96.0.10\n")
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": node_address(self.index),
            "healthzBindAddress": "127.0.0.1",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.plane.authority.pair.certificate)},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "syncFrequency": "5s",
            # A pod waits until its node has reported that it will use the volume, and whoever detaches one until it
            # has reported that it no longer does.
            "nodeStatusUpdateFrequency": "1s",
            "makeIPTablesUtilChains": False,
            "clusterDomain": "cluster.local",
            # No server answers there; a pod that asks for a name learns at once that there is none.
            "clusterDNS": ["10.96.0.10"],
            "resolvConf": str(resolv),
            "volumePluginDir": str(self.folder / "volume-plugins"),
            "podLogsDir": str(self.folder / "pod-logs"),
            "maxPods": 110,
            "registryPullQPS": 0,
            "eventRecordQPS": 0,
        }

    def _write_network(self) -> None:
        folder = self.folder / "cni"
        folder.mkdir(exist_ok=True)
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": pod_subnet(self.index)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": str(self.folder / "addresses"),
            },
        }
        plugins = {"cniVersion": "0.4.0", "name": "bed", "plugins": [bridge]}
        (folder / "10-bed.conflist").write_text(json.dumps(plugins))

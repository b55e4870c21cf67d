"""The test bed's CSI driver and the released sidecars that it runs under.

Each node has a driver; the controllers use the one of the first node. Source of the flags: the READMEs of
kubernetes-csi/external-provisioner v6.3, external-attacher v4.12, external-resizer v2.2, external-snapshotter v8.6.
"""

from dataclasses import dataclass

from tests.support.tools import tool
from tests.testbed.layout import Layout
from tests.testbed.settings import node_name
from tests.testbed.storage.objects import DRIVER

_RETRIES = ("--retry-interval-start=100ms", "--retry-interval-max=2s")
"""Users wait up to 5 minutes for the next try; tests that clear a fault do not."""

_GROUPS = "--feature-gates=CSIVolumeGroupSnapshot=true"
"""VolumeGroupSnapshots, for controller and sidecar. Source: external-snapshotter v8.6, pkg/features/features.go."""


@dataclass(frozen=True)
class Storage:
    layout: Layout

    def driver(self, index: int) -> list[str]:
        """The driver of a node, counted from 1."""
        argv = [str(tool("csi", "driver")), "-name", DRIVER, "-node", node_name(index), "-socket", self.socket(index)]
        return [*argv, "-base", str(self.layout.base), "-kubeconfig", str(self.layout.kubeconfig)]

    def controllers(self) -> dict[str, list[str]]:
        """The sidecars and the snapshot controller by name."""
        access = [f"--kubeconfig={self.layout.kubeconfig}", "--kube-api-qps=100", "--kube-api-burst=200"]
        beside = [*access, f"--csi-address={self.socket(1)}", *_RETRIES]
        flags = {
            "csi-provisioner": [
                *beside,
                "--feature-gates=Topology=true",
                "--strict-topology",
                "--extra-create-metadata",
                "--default-fstype=ext4",
                "--timeout=30s",
            ],
            "csi-attacher": [*beside, "--timeout=30s"],
            "csi-resizer": [*beside, "--timeout=30s"],
            "csi-snapshotter": [*beside, _GROUPS, "--extra-create-metadata", "--timeout=60s"],
            "snapshot-controller": [*access, _GROUPS, *_RETRIES],
        }
        return {name: [str(tool("csi", name)), *own] for name, own in flags.items()}

    def socket(self, index: int) -> str:
        return str(self.layout.base / "csi" / f"{index}.sock")

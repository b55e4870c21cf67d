"""Volumes of workload pods, as the mover's mounts show them."""

from pathlib import Path

import pytest

from core.errors import DataPathError
from datamover.pod.cluster import check_mounted

POD = "/var/lib/kubelet/pods/0b1c8d2e/volumes"
VOLUME = Path("/scratch/volume")


def line(root: str, point: Path = VOLUME) -> str:
    return f"700 699 8:1 {root} {point} ro,relatime shared:5 master:1 - ext4 /dev/sda1 rw\n"


def check(tmp_path: Path, *lines: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text("".join(["22 1 8:1 / / rw - ext4 /dev/sda1 rw\n", *lines]))
    check_mounted(VOLUME, mounts)


@pytest.mark.parametrize(
    "root",
    [
        f"{POD}/kubernetes.io~csi/pvc-1/mount",
        f"{POD}/kubernetes.io~csi/pvc-1/mount//deleted",
        f"/@rootfs{POD}/kubernetes.io~nfs/share",
        "/pods/0b1c8d2e/volumes/kubernetes.io~local-volume/pv-1",
    ],
    ids=["CSI", "deleted", "NFS", "the kubelet's root is a mount"],
)
def test_a_directory_without_its_mount_is_rejected(tmp_path: Path, root: str) -> None:
    with pytest.raises(DataPathError, match=f"is not mounted on the node: {root} is a plain directory"):
        check(tmp_path, line(root))


@pytest.mark.parametrize(
    "root",
    [
        "/",
        "/csi-data-dir/77aa",
        f"{POD}/kubernetes.io~empty-dir/cache",
        f"{POD}/example~driver/data",
        f"{POD}/kubernetes.io~local-volume/pv-1/below",
    ],
    ids=["a device", "a bind mount", "emptyDir", "flexVolume", "a directory below a volume"],
)
def test_a_mounted_volume_or_one_that_is_never_mounted_is_accepted(tmp_path: Path, root: str) -> None:
    check(tmp_path, line(root))


def test_the_last_mount_on_the_volume_counts(tmp_path: Path) -> None:
    plain = line(f"{POD}/kubernetes.io~csi/pvc-1/mount")

    check(tmp_path, plain, line("/"))
    with pytest.raises(DataPathError):
        check(tmp_path, line("/"), plain)


def test_mounts_of_other_directories_do_not_count(tmp_path: Path) -> None:
    check(tmp_path, line(f"{POD}/kubernetes.io~csi/pvc-1/mount", VOLUME / "below"))

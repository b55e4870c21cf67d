"""A cluster is lost, and another one gets a copy of its bucket: `make test-recovery`, each in a test bed of its own."""

import os
import shutil
from pathlib import Path

import pytest

from core.kube.resources import NAMESPACES
from tests.cluster.bed import Bed
from tests.cluster.recovery import Recovery, lose
from tests.testbed.layout import Layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_SPACE = "shop"
_BUCKET, _CLUSTER = "bucket", "cluster"


@pytest.fixture
def kept() -> Path:
    """The folder that outlives a cluster."""
    return Path(os.environ["RECOVERY_FOLDER"])


def _cluster(bed: Bed) -> str:
    found = bed.api.get(NAMESPACES, "", "kube-system")
    assert found is not None
    return str(found["metadata"]["uid"])


def _bucket(bed: Bed) -> Path:
    return Layout(bed.folder).s3 / bed.env["BED_S3_BUCKET"]


def test_first_the_volumes_of_a_cluster_are_backed_up(agent: Bed, kept: Path) -> None:
    lose(agent, _SPACE, "night-1", "my-prefix")
    shutil.copytree(_bucket(agent), kept / _BUCKET)
    (kept / _CLUSTER).write_text(_cluster(agent))


def test_then_an_empty_cluster_restores_them_by_the_commands_of_the_page(bed: Bed, kept: Path, tmp_path: Path) -> None:
    assert _cluster(bed) != (kept / _CLUSTER).read_text()
    assert "velero" not in bed.user.names(["namespaces"])
    assert "velero.io" not in bed.user.kubectl("get", "crd", "-o", "name")
    shutil.copytree(kept / _BUCKET, _bucket(bed), dirs_exist_ok=True)
    Recovery(bed, tmp_path, {}).follow(_SPACE)

"""The chart in a cluster that has nothing of ours yet: `make test-chart`, in a test bed of its own."""

from pathlib import Path

import pytest

from client.install.manifests import read_definitions
from tests.cluster.bed import Bed
from tests.cluster.charts import build_values, complete, create_upload, fill_volume
from tests.support.helm import CHART, Helm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("binary", [pytest.param("helm", id="Helm 3"), pytest.param("helm4", id="Helm 4")])
def test_one_command_brings_agents_up_that_carry_out_transfers(
    bed: Bed, space: str, binary: str, tmp_path: Path
) -> None:
    helm = Helm(tmp_path, binary, bed.user.api.kubeconfig)
    names = [definition["metadata"]["name"] for definition in read_definitions()]
    assert bed.user.kubectl("get", "crd", "--ignore-not-found", *names) == ""

    wait, values = [f"--namespace={space}", "--wait", "--timeout=10m"], build_values(bed, space)
    said = helm.run("install", "fresh", str(CHART), *wait, values=values)
    if binary == "helm":
        # As its notes say: the location comes with the second revision.
        assert "--reuse-values" in said
        helm.run("upgrade", "fresh", str(CHART), *wait, "--reuse-values")
    complete(bed, create_upload(fill_volume(bed, space, "own"), "own", space))
    helm.run("uninstall", "fresh", *wait)

    bed.user.kubectl("delete", "crd", *names)

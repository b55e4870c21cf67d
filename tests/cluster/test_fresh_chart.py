"""The chart in a cluster that has nothing of ours yet: `make test-chart`, in a test bed of its own."""

from pathlib import Path

import pytest

from client.install.manifests import read_definitions
from client.install.options import InstallOptions, LocationOptions, ProxyOptions
from tests.cluster.bed import Bed
from tests.cluster.scenes import Volume, wait_released
from tests.support.helm import CHART, Helm, values_of
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import build_location
from tests.testbed.settings import AGENT_IMAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def _build_values(bed: Bed, space: str) -> Json:
    """The test bed's bucket, and a proxy behind which there is no API server."""
    secret, location = build_location(bed.env)
    spec = location["spec"]
    options = InstallOptions(
        image=AGENT_IMAGE,
        proxy=ProxyOptions(https="http://proxy.invalid:3128"),
        credentials=secret["stringData"]["cloud"],
        location=LocationOptions(
            provider=spec["provider"], bucket=spec["objectStorage"]["bucket"], prefix=space, config=spec["config"]
        ),
    )
    return values_of(options)


@pytest.mark.parametrize("binary", [pytest.param("helm", id="Helm 3"), pytest.param("helm4", id="Helm 4")])
def test_one_command_brings_agents_up_that_carry_out_transfers(
    bed: Bed, space: str, binary: str, tmp_path: Path
) -> None:
    helm = Helm(tmp_path, binary, bed.user.api.kubeconfig)
    names = [definition["metadata"]["name"] for definition in read_definitions()]
    assert bed.user.kubectl("get", "crd", "--ignore-not-found", *names) == ""
    wait, values = [f"--namespace={space}", "--wait", "--timeout=10m"], _build_values(bed, space)
    said = helm.run("install", "fresh", str(CHART), *wait, values=values)
    if binary == "helm":
        # As its notes say: the location comes with the second revision.
        assert "--reuse-values" in said
        helm.run("upgrade", "fresh", str(CHART), *wait, "--reuse-values")
    volume = Volume(bed, space)
    volume.fill('open("/data/file", "w").write("content")')
    volume.take_snapshots(["own"])
    upload = volume.upload(f"{space}-own", snapshot="own", location="default")
    upload["metadata"]["namespace"] = space
    bed.user.apply(upload)
    assert wait_released(bed, upload, "Completed")["status"]["snapshotID"]
    bed.user.kubectl("delete", "dataupload", upload["metadata"]["name"], "-n", space)
    helm.run("uninstall", "fresh", *wait)
    bed.user.kubectl("delete", "crd", *names)

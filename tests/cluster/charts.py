"""A release of the chart in the test bed, and DataUploads by its agents or by others."""

from client.install.options import InstallOptions, LocationOptions, ProxyOptions
from core.kube.resources import DATA_UPLOADS
from tests.cluster.bed import Bed
from tests.cluster.scenes import Volume, wait_released
from tests.cluster.workloads import wait_until
from tests.support.helm import values_of
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import build_location
from tests.testbed.settings import AGENT_IMAGE


def build_values(bed: Bed, space: str) -> Json:
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


def fill_volume(bed: Bed, space: str, *snapshots: str) -> Volume:
    """A volume with a snapshot for each transfer."""
    volume = Volume(bed, space)
    volume.fill('open("/data/file", "w").write("content")')
    volume.take_snapshots(snapshots)
    return volume


def create_upload(volume: Volume, snapshot: str, namespace: str) -> Json:
    """Create the DataUpload of a snapshot, for the installation in `namespace`."""
    body = volume.upload(f"{volume.namespace}-{snapshot}", snapshot=snapshot, location="default")
    body["metadata"]["namespace"] = namespace
    volume.bed.user.apply(body)
    return body


def complete(bed: Bed, *uploads: Json) -> None:
    """Wait for DataUploads and their cleanup, and delete them."""
    for upload in uploads:
        assert wait_until(bed, upload, "Completed")["status"]["snapshotID"]
    wait_released(bed, DATA_UPLOADS, [upload["metadata"]["name"] for upload in uploads])
    for upload in uploads:
        meta = upload["metadata"]
        bed.user.kubectl("delete", "dataupload", meta["name"], "-n", meta["namespace"])

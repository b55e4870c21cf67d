"""The Helm chart beside the cluster's own installation: both carry out transfers, also the one that is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nodeagent.operations.install.options import InstallOptions, LocationOptions, ProxyOptions
from tests.cluster.listing import everything
from tests.cluster.scenes import UPLOADS, Volume, wait_released
from tests.cluster.sharing import Shared, relies_on
from tests.cluster.workloads import wait_until
from tests.support.helm import CHART, Helm, values_of
from tests.testbed.demonstration.manifests import NAMESPACE, build_location
from tests.testbed.install import AGENT_LABEL
from tests.testbed.settings import AGENT_IMAGE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import Bed
    from tests.testbed.api import Json

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="moving"), pytest.mark.timeout(400)]

_LEFT = ("configmap/node-agent-admissions", "secret/velero-repo-credentials")
"""What agents create for themselves, as docs/install.md lists it."""

_PART_OF = "app.kubernetes.io/part-of=node-agent"
_VERSIONS = '{range .items[*]}{.kind} {.metadata.name} {.metadata.resourceVersion}{"\\n"}{end}'


@pytest.fixture
def volume(agent: Bed, space: str) -> Volume:
    """A volume with a snapshot for each transfer."""
    volume = Volume(agent, space)
    volume.fill('open("/data/file", "w").write("content")')
    volume.take_snapshots(["own", "other", "later"])
    return volume


def _values(bed: Bed, space: str) -> Json:
    """The test bed's bucket, and a proxy behind which there is no API server."""
    secret, location = build_location(bed.env)
    spec = location["spec"]
    options = InstallOptions(
        image=AGENT_IMAGE,
        proxy=ProxyOptions(https="http://proxy.invalid:3128"),
        credentials=secret["stringData"]["cloud"],
        location=LocationOptions(prefix=space, **spec["objectStorage"], **_chosen(spec)),
    )
    return values_of(options)


def _chosen(spec: Json) -> Json:
    return {name: spec[name] for name in ("provider", "config")}


def _upload(volume: Volume, snapshot: str, namespace: str) -> Json:
    """Create the DataUpload of a snapshot, for the installation in `namespace`."""
    body = volume.upload(f"{volume.namespace}-{snapshot}", snapshot=snapshot, location="default")
    body["metadata"]["namespace"] = namespace
    volume.bed.user.apply(body)
    return body


def _complete(bed: Bed, *uploads: Json) -> None:
    """Wait for DataUploads and their cleanup, and delete them."""
    for upload in uploads:
        assert wait_until(bed, UPLOADS, upload, "Completed")["status"]["snapshotID"]
    wait_released(bed, UPLOADS, [upload["metadata"]["name"] for upload in uploads])
    for upload in uploads:
        bed.user.kubectl("delete", "dataupload", upload["metadata"]["name"], "-n", upload["metadata"]["namespace"])


def _versions(bed: Bed, space: str) -> str:
    """The resource versions of what a release consists of; the leader writes that of its location each minute."""
    kinds = "serviceaccount,secret,role,rolebinding,daemonset,clusterrole,clusterrolebinding"
    return bed.user.kubectl("get", kinds, "-n", space, "-l", _PART_OF, "-o", f"jsonpath={_VERSIONS}")


def test_two_installations_work_side_by_side_and_one_without_the_other(
    agent: Bed, space: str, volume: Volume, tmp_path: Path
) -> None:
    helm = Helm(tmp_path, kubeconfig=agent.user.api.kubeconfig)
    before = everything(agent, space)

    wait, values = [f"--namespace={space}", "--wait", "--timeout=2m"], _values(agent, space)
    helm.run("install", "beside", str(CHART), *wait, values=values)
    # Helm waits for all agents but those that may be unavailable.
    agent.user.kubectl("rollout", "status", "daemonset/node-agent", "-n", space, "--timeout=60s")
    versions = _versions(agent, space)
    helm.run("upgrade", "beside", str(CHART), *wait, values=values)
    assert _versions(agent, space) == versions
    with relies_on(agent, Shared.AGENTS):
        _complete(agent, _upload(volume, "own", space), _upload(volume, "other", NAMESPACE))
    helm.run("uninstall", "beside", *wait)
    agent.user.kubectl("wait", "pod", "-l", AGENT_LABEL, "-n", space, "--for=delete", "--timeout=60s")
    with relies_on(agent, Shared.AGENTS):
        _complete(agent, _upload(volume, "later", NAMESPACE))

    for namespace in (space, NAMESPACE):
        agent.user.kubectl("delete", "backuprepository", f"{space}-default-kopia", "-n", namespace)
    assert everything(agent, space) - before == {f"{space} {name}" for name in _LEFT}

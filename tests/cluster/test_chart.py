"""The Helm chart beside the cluster's own installation: both carry out transfers, also the one that is left."""

from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.charts import build_values, complete, create_upload, fill_volume
from tests.cluster.listing import applied_versions, everything
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.support.helm import CHART, Helm
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.install import AGENT_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="waiting"), pytest.mark.timeout(WITH_LOCKS)]

_LEFT = ("configmap/node-agent-admissions", "secret/velero-repo-credentials")
"""What agents create for themselves, as docs/install.md lists it."""


@pytest.mark.thorough
def test_two_installations_work_side_by_side_and_one_without_the_other(agent: Bed, space: str, tmp_path: Path) -> None:
    volume = fill_volume(agent, space, "own", "other", "later")
    helm = Helm(tmp_path, kubeconfig=agent.user.api.kubeconfig)
    before = everything(agent, space)

    wait, values = [f"--namespace={space}", "--wait", "--timeout=10m"], build_values(agent, space)
    helm.run("install", "beside", str(CHART), *wait, values=values)
    # Helm waits for all agents but those that may be unavailable.
    agent.user.kubectl("rollout", "status", "daemonset/node-agent", "-n", space, "--timeout=600s")
    versions = applied_versions(agent, space)
    helm.run("upgrade", "beside", str(CHART), *wait, values=values)
    assert applied_versions(agent, space) == versions
    with relies_on(agent, Shared.AGENTS):
        complete(agent, create_upload(volume, "own", space), create_upload(volume, "other", NAMESPACE))
    helm.run("uninstall", "beside", *wait)
    agent.user.kubectl("wait", "pod", "-l", AGENT_LABEL, "-n", space, "--for=delete", "--timeout=600s")
    with relies_on(agent, Shared.AGENTS):
        complete(agent, create_upload(volume, "later", NAMESPACE))

    for namespace in (space, NAMESPACE):
        agent.user.kubectl("delete", "backuprepository", f"{space}-default-kopia", "-n", namespace)
    left = {found for found in everything(agent, space) - before if space in found}
    assert left == {f"{space} {name}" for name in _LEFT}

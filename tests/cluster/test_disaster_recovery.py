"""The commands of docs/disaster-recovery.md, as they are written there, where nothing but bucket and password is left.

A new namespace with agents of its own stands for the empty cluster: it has no BackupRepository and no transfer, and the
namespace of the volumes is gone. `make test-recovery` has a second cluster.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.recovery import Recovery, lose
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.demonstration.manifests import NAMESPACE

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="waiting"), pytest.mark.timeout(WITH_LOCKS)]


@pytest.fixture
def lost(agent: Bed) -> Iterator[str]:
    """The namespace, backup and prefix of three volumes that were backed up; all that named them is deleted."""
    bed, space = agent, f"test-{secrets.token_hex(4)}"
    with relies_on(bed, Shared.AGENTS):
        lose(bed, space, space, space)
    bed.user.kubectl("delete", "datauploads", "-n", NAMESPACE, "-l", f"nodeagent.io/backup={space}")
    left = [f"backuprepository/{space}-{space}-kopia", f"backupstoragelocation/{space}", f"secret/{space}-keys"]
    bed.user.kubectl("delete", *left, "-n", NAMESPACE)
    bed.user.kubectl("delete", "namespace", space, "--wait=true", "--timeout=600s")
    yield space
    bed.user.kubectl("delete", "namespace", space, "--ignore-not-found", "--wait=false")


@pytest.mark.thorough
def test_the_page_restores_three_volumes_by_at_most_five_commands(agent: Bed, lost: str, tmp_path: Path) -> None:
    space = f"test-{secrets.token_hex(4)}"
    try:
        with relies_on(agent, Shared.AGENTS):
            Recovery(agent, tmp_path, {"velero": space, "my-prefix": lost, "night-1": lost}).follow(lost)
    finally:
        agent.user.kubectl("delete", "namespace", space, "--ignore-not-found", "--wait=false")
        clean = [
            name for name in agent.user.names(["clusterroles,clusterrolebindings,priorityclasses"]) if space in name
        ]
        if clean:
            agent.user.kubectl("delete", *clean, "--ignore-not-found")

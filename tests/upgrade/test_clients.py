"""The commands of one version with agents, schedules and records of deletions of the other one, on a real kubelet."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.scenes import Place, Volume
from tests.support.tools import previous_sources
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.layout import ROOT
from tests.upgrade.release import current, previous

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

_FILL = "open('/data/file', 'w').write('what was there')"
_HERE = "--pvc SPACE/data --storage-location SPACE --ttl 24h"

_MADE = f"""
backup create SPACE-made {_HERE} --wait
backup create SPACE-gone {_HERE} --wait
backup delete SPACE-gone --yes
schedule create SPACE --schedule @yearly {_HERE}
"""
"""What the client of the agents' version has done before."""

_USED = f"""
version
status
backup get
backup describe SPACE-made
backup ls SPACE-made data
backup cp SPACE-made:data/file FOLDER
backup verify SPACE-made
backup get --from-storage-location SPACE
backup create SPACE-other {_HERE} --wait
restore create SPACE-back --from-backup SPACE-made --namespace-mappings SPACE:SPACE-new --wait
restore describe SPACE-back
schedule get SPACE
schedule run SPACE
schedule renew SPACE
repo get
repo describe SPACE-SPACE-kopia
repo report SPACE-SPACE-kopia
support-bundle --list
backup delete SPACE-made --yes
"""
"""What the client of the other version does then."""

_AFTERWARD = """
backup get
restore get
schedule get SPACE
schedule run SPACE
backup delete SPACE-other --yes
schedule delete SPACE
"""
"""What the first one does with what the other one has left."""


@dataclass(frozen=True)
class _Client:
    """The commands of one version, in a namespace of the test bed."""

    sources: Path
    bed: Bed
    space: str
    folder: Path

    def run(self, lines: str) -> None:
        """Run commands; each must succeed, or say which version it needs."""
        failed = []
        for line in lines.strip().splitlines():
            words = line.replace("SPACE", self.space).replace("FOLDER", str(self.folder)).split()
            done = self.bed.command(*words, sources=self.sources)
            if done.returncode and not re.search("needs .*version", done.stderr):
                failed.append(f"{line}: {done.returncode}: {done.stderr}")
        assert failed == []


@pytest.mark.usefixtures("two_images")
@pytest.mark.parametrize("newer", ["client", "agents"])
def test_a_client_works_with_agents_of_the_other_version(bed: Bed, space: str, tmp_path: Path, newer: str) -> None:
    agents = current() if newer == "agents" else previous()
    agents.install(bed)
    bed.user.apply(*Place(bed, space).build())
    Volume(bed, space).fill(_FILL)
    ours, theirs = (_Client(sources, bed, space, tmp_path) for sources in (ROOT, previous_sources()))
    own, other = (ours, theirs) if newer == "agents" else (theirs, ours)
    own.run(_MADE)
    other.run(_USED)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "what was there"
    # Its arguments are now of the other version, and its image is that of the agents.
    job = f"job/{space}"
    bed.user.kubectl("create", "job", space, f"--from=cronjob/{space}", "-n", NAMESPACE)
    bed.user.kubectl("wait", job, "--for=condition=complete", "--timeout=240s", "-n", NAMESPACE)
    bed.user.kubectl("delete", job, "-n", NAMESPACE, "--wait=false")
    own.run(_AFTERWARD)

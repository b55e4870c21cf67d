"""The manifests of this version are applied over those of the previous one, and undone, while data moves.

`make test-upgrade` runs this; PREVIOUS names the other version. Two nodes are updated one after the other, so each
version works beside the other for a while, as leader and on a node.
"""

import pytest

from tests.cluster_full.quartet import Seed
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.upgrade.release import current, find_left_behind, previous, undo_update
from tests.upgrade.scene import play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_transfers_complete_when_agents_are_updated(seed: Seed) -> None:
    """What the new manifests no longer have is deleted, as the documentation says."""
    bed = seed.site.bed
    with play(seed, "update") as scene:
        movers = scene.mover_uids()
        current().install(bed)
        if left := find_left_behind(bed):
            bed.user.kubectl("delete", *left, "-n", NAMESPACE)
        scene.expect_unchanged()
        assert scene.mover_uids() == movers
        scene.finish()


@pytest.mark.parametrize("undo", ["rollout-undo", "manifests"])
def test_transfers_complete_when_an_update_is_undone_by(seed: Seed, undo: str) -> None:
    """By a rollout, permissions and definitions remain those of this version; by the manifests they go back, too."""
    bed = seed.site.bed
    previous().install(bed)
    current().install(bed)
    with play(seed, undo) as scene:
        movers = scene.mover_uids()
        if undo == "rollout-undo":
            undo_update(bed, previous())
        else:
            previous().install(bed)
        scene.expect_unchanged()
        assert scene.mover_uids() == movers
        scene.finish()

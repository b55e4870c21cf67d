"""The manifests of this version are applied over those of the previous one, and undone, while data moves.

`make test-upgrade` runs this; PREVIOUS names the other version. Two nodes are updated one after the other, so each
version works beside the other for a while, as leader and on a node.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster_full.quartet import Seed
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.upgrade.release import current, find_left_behind, previous, undo_update
from tests.upgrade.scene import Scene, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_transfers_complete_when_agents_are_updated(seed: Seed, tmp_path: Path) -> None:
    """What the new manifests no longer have is deleted, as the documentation says."""
    scene = Scene(seed, "update")
    with play(scene) as recording:
        movers = scene.mover_uids()
        current().install(seed.bed)
        if left := find_left_behind(seed.bed):
            seed.bed.user.kubectl("delete", *left, "-n", NAMESPACE)
        scene.expect_unchanged()
        assert scene.mover_uids() == movers
        scene.finish(recording, tmp_path)


def _undo(seed: Seed) -> None:
    """Return the DaemonSet to what it was; permissions and definitions remain those of this version."""
    undo_update(seed.bed, previous())


def _apply_previous(seed: Seed) -> None:
    """Apply the manifests of the previous version again, permissions and definitions too."""
    previous().install(seed.bed)


@pytest.mark.parametrize("undo", [_undo, _apply_previous], ids=["rollout-undo", "manifests"])
def test_transfers_complete_when_an_update_is_undone_by(
    seed: Seed, tmp_path: Path, undo: Callable[[Seed], None], request: pytest.FixtureRequest
) -> None:
    previous().install(seed.bed)
    current().install(seed.bed)
    scene = Scene(seed, request.node.callspec.id)
    with play(scene) as recording:
        movers = scene.mover_uids()
        undo(seed)
        scene.expect_unchanged()
        assert scene.mover_uids() == movers
        scene.finish(recording, tmp_path)

"""Whatever the ConfigMap holds, pods and PVCs can be built from its settings."""

import copy
import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exposer.manifests import build_backup_claim, build_cache_claim, volume_mode
from exposer.model import LocatedVolume
from exposer.pods import build_backup_pod, build_pod_volume_pod, build_restore_pod
from exposer.settings import StorageAccess
from exposer.template import Placement
from tests.exposer.support.inputs import pod_volume_request, restore_request, snapshot_request, template
from tests.nodeagent.config.test_expose_settings_manifests import CONFIGURATIONS
from tests.nodeagent.support.configured import build_settings
from tests.support.objects import JsonDict, only

_SCALAR = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["inherit", "1Gi", "In"])
)
_JSON = st.recursive(
    _SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)


def paths_in(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every path in a document."""
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [found for key, item in inner for found in [(*path, key), *paths_in(item, (*path, key))]]


@st.composite
def documents(draw: st.DrawFn) -> JsonDict:
    """A valid document in which up to three values are replaced."""
    document: Any = copy.deepcopy(CONFIGURATIONS["everything"])
    for _ in range(draw(st.integers(0, 3))):
        *way, last = draw(st.sampled_from(paths_in(document)))
        inner = document
        for key in way:
            inner = inner[key]
        inner[last] = draw(_JSON)
    found: JsonDict = document
    return found


@given(documents())
def test_every_transfer_can_be_exposed(document: JsonDict) -> None:
    settings = build_settings(document, template())
    upload = replace(snapshot_request(), settings=settings)
    download = replace(restore_request(), settings=settings)
    backup = replace(pod_volume_request(), settings=settings)
    claim: JsonDict = build_backup_claim(upload, size="1Gi", mode=volume_mode(only(spec={})))
    rules = Placement(alternatives=settings.nodes.choose(upload.backup_class))
    cache, storage = settings.cache_for(0), StorageAccess()

    created = [
        claim,
        build_backup_pod(upload, claim, rules, storage=storage),
        build_restore_pod(download, volume_mode(claim), placement=rules, storage=storage),
        build_pod_volume_pod(backup, LocatedVolume("node-a", "/folder"), storage=storage),
        *([build_cache_claim(upload.owner, cache, node="")] if cache else []),
    ]

    assert json.loads(json.dumps(created, allow_nan=False)) == created

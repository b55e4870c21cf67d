"""Whatever the ConfigMap holds, there is a plan, and pods and claims can be made by it."""

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from core.models.base import JsonDict
from exposer.claims import build_backup_claim, build_cache_claim, claim_volume_mode
from exposer.model import LocatedVolume
from exposer.placement import Placement
from exposer.pods import build_backup_pod, build_pod_volume_pod, build_restore_pod
from exposer.settings import BackupPVCSettings, MoverOptions, MoverPlan
from nodeagent.config.current import CurrentConfig
from nodeagent.config.expose_settings import MoverPlans
from nodeagent.config.parse import parse_config
from tests.exposer.support.inputs import pod_volume_request, restore_request, snapshot_request, template
from tests.nodeagent.config.test_expose_settings_manifests import CONFIGURATIONS

_SCALAR = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["inherit", "1Gi", "In"])
)
_JSON = st.recursive(
    _SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)


def places_in(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a document where something else could stand."""
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [place for key, item in inner for place in [(*path, key), *places_in(item, (*path, key))]]


@st.composite
def documents(draw: st.DrawFn) -> JsonDict:
    """A good document in which something, somewhere, is something else."""
    document: Any = copy.deepcopy(CONFIGURATIONS["everything"])
    for _ in range(draw(st.integers(0, 3))):
        *way, last = draw(st.sampled_from(places_in(document)))
        inner = document
        for key in way:
            inner = inner[key]
        inner[last] = draw(_JSON)
    found: JsonDict = document
    return found


def plan_of(document: JsonDict) -> MoverPlan:
    current = CurrentConfig(parse_config(json.dumps(document)))
    plans = MoverPlans(
        template(),
        MoverOptions(),
        current=current,
        priority_class=lambda: current.config.priority_class_name,
        cache_limit_mib=lambda: 5000,
    )
    return plans()


@given(documents())
def test_every_load_can_be_exposed_by_it(document: JsonDict) -> None:
    plan = plan_of(document)
    common: dict[str, Any] = {"template": plan.template, "settings": plan.settings, "mover": plan.options}
    backup_pvc = plan.backup_pvcs.get("hostpath") or BackupPVCSettings()
    upload = snapshot_request(**common, backup_pvc=backup_pvc, nodes=plan.nodes)
    download, backup = restore_request(**common, nodes=plan.nodes), pod_volume_request(**common)
    claim = build_backup_claim(upload, size="1Gi", mode=claim_volume_mode({"spec": {}}))
    rules = Placement(alternatives=plan.nodes.choose(upload.backup_class))
    cache = plan.cache_for(0)

    made = [
        claim,
        build_backup_pod(upload, claim, rules),
        build_restore_pod(download, claim_volume_mode(claim), placement=rules),
        build_pod_volume_pod(backup, LocatedVolume("node-a", "/folder")),
        *([build_cache_claim(upload.owner, cache, node="")] if cache else []),
    ]

    assert json.loads(json.dumps(made, allow_nan=False)) == made

"""Which exclusions a backup's data mover is given."""

from dataclasses import replace

from core.contract import VolumeMode
from core.kube.types import Manifest
from core.models.transfer_settings import Exclusions
from exposer.manifests import build_backup_claim
from exposer.model import LocatedVolume
from exposer.pods import build_backup_pod, build_pod_volume_pod
from exposer.settings import ExclusionRule, ExclusionRules, ExposeSettings, StorageAccess
from exposer.template import Placement
from tests.exposer.support.inputs import pod_volume_request, snapshot_request, template
from tests.support.objects import JsonDict


def test_exclusions_are_given_to_backups_of_the_namespaces_and_classes_that_are_named() -> None:
    namespace = snapshot_request().source_namespace
    rules = ExclusionRules(
        (
            ExclusionRule(Exclusions(patterns=("a",))),
            ExclusionRule(Exclusions(patterns=("b",)), frozenset({namespace}), frozenset({"fast"})),
            ExclusionRule(Exclusions(patterns=("c",)), frozenset({"other"})),
        ),
        frozenset({namespace}),
    )
    settings = ExposeSettings(template(), exclusions=rules)
    upload = replace(snapshot_request(), storage_class="fast", settings=settings)
    back = replace(pod_volume_request("podvolumerestore"), settings=settings)
    claim: JsonDict = build_backup_claim(upload, size="2Gi", mode=VolumeMode.FILESYSTEM)
    pod = build_backup_pod(upload, claim, Placement(), storage=StorageAccess(), excluded="d\n!e")
    assert '--exclude={"patterns":["a","b","d"]}' in pod["spec"]["containers"][0]["args"]
    located = LocatedVolume("node-a", "/directory", excluded="d")
    assert not _excluding(build_pod_volume_pod(back, located, storage=StorageAccess()))
    foreign = replace(rules, annotation_namespaces=frozenset())
    assert foreign.exclude(namespace, "slow", "d") == '{"patterns":["a"]}'
    assert ExclusionRules().exclude(namespace, "slow", "d") is None


def _excluding(pod: Manifest) -> list[str]:
    return [one for one in pod["spec"]["containers"][0]["args"] if one.startswith("--exclude")]

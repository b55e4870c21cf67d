"""Volume policies: which documents are valid, and what a condition matches."""

import pytest

from core.errors import ContractError
from nodeagent.coverage.cluster import StoredVolume, VolumeClaim
from nodeagent.coverage.policies import Policies, PolicyAction, parse_policies
from tests.nodeagent.support.volume_scene import a_claim, a_volume, decoded


def skipping(conditions: str) -> dict[str, str]:
    return {"p": f"version: v1\nvolumePolicies:\n- conditions: {conditions}\n  action: {{type: skip}}\n"}


@pytest.mark.parametrize(
    ("conditions", "matches"),
    [
        # Velero, internal/resourcepolicies/volume_resources_test.go.
        ('{capacity: "10Gi,20Gi"}', True),
        ('{capacity: ",10Gi"}', True),
        ('{capacity: "11Gi,"}', False),
        ('{capacity: " 1Gi , 9Gi "}', False),
        ("{capacity: ''}", True),
        ("{storageClass: [fast, slow]}", True),
        # What is null counts as absent, but in a map of texts as an empty one.
        ("", True),
        ("{capacity: , storageClass: ~, nfs: null, csi: , volumeTypes: , pvcPhase: }", True),
        ("{csi: {driver: csi.example.com, volumeAttributes: }}", True),
        ("{pvcLabels: {yes: }}", False),
        ("{<<: {storageClass: [slow]}, storageClass: [fast]}", True),
        ("{csi: {}}", True),
        ("{csi: {driver: csi.example.com, volumeAttributes: {pool: ssd}}}", True),
        ("{csi: {driver: csi.example.com, volumeAttributes: {pool: hdd}}}", False),
        ("{nfs: {}}", False),
        ("{volumeTypes: [csi]}", True),
        ("{volumeTypes: [local, hostPath]}", False),
        ("{pvcLabels: {yes: 1}}", True),
        ("{pvcLabels: {yes: 1, other: x}}", False),
        ("{pvcPhase: [Pending]}", False),
        ("{pvcVolumeMode: Block}", False),
        ("{pvcVolumeMode: Filesystem, pvcAccessModes: [ReadWriteOnce]}", True),
        ("{csi: {driver: other}}", False),
        ("{pvcAccessModes: [ReadWriteOnce, ReadOnlyMany]}", False),
        ("{storageClass: [fast], volumeTypes: [nfs]}", False),
    ],
)
def test_a_condition(conditions: str, matches: bool) -> None:
    (claim,) = decoded(VolumeClaim, [a_claim("data", labels={"yes": "1"})])
    (volume,) = decoded(StoredVolume, [a_volume("data")])
    found = parse_policies(skipping(conditions)).match(claim, volume)
    assert found is (PolicyAction.SKIP if matches else None)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "0 keys instead of one"),
        ({"a": "", "b": ""}, "2 keys instead of one"),
        ({"p": "version: v2"}, 'version "v2" is not v1'),
        ({"p": "["}, "while parsing"),
        (skipping("{unknown: x}"), "unknown"),
        (skipping('{capacity: "1Gi"}'), "no range"),
        (skipping('{capacity: "x,y"}'), "not a quantity"),
        (skipping('{capacity: "9Gi,1Gi"}'), "begins above its end"),
        (skipping("{storageClass: [a], storageClass: [b]}"), "storageClass is repeated"),
        (skipping("{csi: {volumeAttributes: {pool: ssd}}}"), "without driver"),
        (skipping("{pvcLabels: }"), "pvcLabels"),
        (skipping("{pvcVolumeMode: }"), "pvcVolumeMode"),
        (skipping("{pvcAccessModes: }"), "pvcAccessModes"),
        ({"p": "version: v1\nvolumePolicy: []\n"}, "volumePolicy"),
        ({"p": "version: v1\nincludeExcludePolicy: {excludedClusterScopedResources: ['*']}\n"}, "* is no resource"),
        (
            {
                "p": "version: v1\nincludeExcludePolicy: &a {includedClusterScopedResources: &b [x],"
                " excludedClusterScopedResources: *b}\n"
            },
            "x is included and excluded",
        ),
        ({"p": "version: v1\nvolumePolicies:\n- action: {type: drop}\n"}, "drop"),
    ],
)
def test_policies_that_velero_rejects(data: dict[str, str] | None, words: str) -> None:
    with pytest.raises(ContractError) as raised:
        parse_policies(data)
    assert words in str(raised.value)


def test_nulls_unknown_types_and_volumes_without_a_class() -> None:
    text = "version: v1\nvolumePolicies:\nincludeExcludePolicy:\n---\nignored"
    assert parse_policies({"p": text}) == Policies()
    volumes = [a_volume("a"), a_volume("b", storageos={}), a_volume("c", class_="", unheard={})]
    csi, storage, unheard = decoded(StoredVolume, volumes)
    assert [csi.type, storage.type, unheard.type] == ["csi", "storageOS", ""]
    assert parse_policies(skipping("{storageClass: ['', fast]}")).match(None, unheard) is None
    (claim,) = decoded(VolumeClaim, [a_claim("data", labels=None)])
    assert claim.metadata.labels == {}
    with pytest.raises(ContractError, match="spec"):
        decoded(VolumeClaim, [a_claim("data") | {"spec": 5}])


@pytest.mark.parametrize(
    ("first", "next_"), [("[x]", "[{}]"), ("{a: x}", "{{<<: [{}]}}")], ids=["lists", "merged keys"]
)
def test_aliases_that_stand_for_too_much_are_refused(first: str, next_: str) -> None:
    levels = [f"&a0 {first}", *(f"&a{n} {next_.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 7))]
    text = "\n".join(["version: v1", "clusterScopedFilterPolicy:", *(f"- {one}" for one in levels[:3])])
    assert parse_policies({"p": text}) == Policies()
    with pytest.raises(ContractError, match=r"^its aliases stand for too much$"):
        parse_policies({"p": "\n".join([text, *(f"- {one}" for one in levels[3:])])})

"""A real API server accepts the mover pods of any ConfigMap: no transfer fails because of a typing error."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from core.contract import VolumeMode
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS
from exposer.manifests import build_backup_claim
from exposer.pod_manifest import Placement
from exposer.pods import build_backup_pod, build_init_pod
from exposer.settings import StorageAccess
from exposer.template import AgentTemplate
from tests.exposer.support.inputs import snapshot_request
from tests.nodeagent.support.configured import build_settings
from tests.support.apiserver import ApiServer
from tests.support.objects import JsonDict

pytestmark = pytest.mark.integration

_WORDS = st.sampled_from(
    [
        "",
        "a",
        "A_b",
        "-a",
        "a-",
        "a.b",
        "é",
        "x" * 63,
        "x" * 64,
        "a b",
        "a/b",
        "a/b/c",
        "A.com/a",
        "role",
        "1",
        "\n",
        "In",
    ]
) | st.text(max_size=5)
_MAPS = st.dictionaries(_WORDS | st.just("example.com/name"), _WORDS, max_size=3)
_QUANTITIES = st.sampled_from(
    [
        "",
        "0",
        "1",
        "+1",
        "-1",
        "1.",
        ".5",
        "100m",
        "1k",
        "1K",
        "1Ki",
        "1e3",
        "1E",
        "2E6",
        "1e-3",
        "1e99",
        "1e400",
        "9999Ei",
        "1 ",
    ]
)
_REQUIREMENTS = st.fixed_dictionaries(
    {"key": _WORDS, "operator": st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "in", ""])},
    optional={"values": st.lists(_WORDS | st.sampled_from(["7", "-7", "07", "--7", "٣"]), max_size=2)},
)
_SELECTORS = st.fixed_dictionaries(
    {}, optional={"matchLabels": _MAPS, "matchExpressions": st.lists(_REQUIREMENTS, max_size=2)}
)
_TOLERATIONS = st.fixed_dictionaries(
    {},
    optional={
        "key": _WORDS,
        "operator": st.sampled_from(["Exists", "Equal", "", "Is"]),
        "value": _WORDS,
        "effect": st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule", "", "No"]),
        "tolerationSeconds": st.integers() | st.integers(-1, 5),
    },
)
_RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        f"{what}{kind}": _QUANTITIES for what in ("cpu", "memory", "ephemeralStorage") for kind in ("Request", "Limit")
    },
)
_CLAIMS = st.fixed_dictionaries(
    {},
    optional={
        "storageClass": _WORDS,
        "readOnly": st.booleans(),
        "annotations": _MAPS,
        "spcNoRelabeling": st.booleans(),
    },
)
_PATHS = st.sampled_from(["/backups", "/backups/", "/a/b", "/a/../b", "/", "", "a", "/a:b", "/scratch", "/" + "x" * 99])
_VOLUMES = st.fixed_dictionaries(
    {},
    optional={
        "mountPath": _PATHS | _WORDS,
        "persistentVolumeClaim": _WORDS,
        "nfs": st.fixed_dictionaries({}, optional={"server": _WORDS | st.just("::1"), "path": _PATHS | _WORDS}),
    },
)
_DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "podLabels": _MAPS,
        "podAnnotations": _MAPS,
        "podResources": _RESOURCES,
        "tolerations": st.lists(_TOLERATIONS, max_size=2) | st.just("inherit"),
        "loadAffinity": st.lists(st.fixed_dictionaries({"nodeSelector": _SELECTORS}), max_size=2),
        "loadAffinityMode": st.sampled_from(["any", "first"]),
        "privilegedFsBackup": st.booleans(),
        "backupPVC": st.dictionaries(st.just("fast"), _CLAIMS),
        "nodeagent.io": st.fixed_dictionaries({"repositoryVolumes": st.lists(_VOLUMES, max_size=2)}),
    },
)


@pytest.fixture(scope="module")
def accepted(apiserver: ApiServer) -> Callable[[JsonDict], None]:
    """Create an object without storing it."""
    namespace = apiserver.create_namespace()

    def create(manifest: JsonDict) -> None:
        kind = PODS if manifest["kind"] == "Pod" else PERSISTENT_VOLUME_CLAIMS
        manifest["metadata"] |= {"namespace": namespace}
        apiserver.api.request("POST", f"{kind.path(namespace)}?dryRun=All&fieldValidation=Strict", body=manifest)

    return create


@given(document=_DOCUMENTS)
@hypothesis_settings(max_examples=80, derandomize=True)
def test_every_mover_and_its_claim_is_accepted(accepted: Callable[[JsonDict], None], document: JsonDict) -> None:
    settings = build_settings(document, AgentTemplate("mover:1"))
    request = replace(snapshot_request(storage_class="fast"), settings=settings)
    claim: JsonDict = build_backup_claim(request, size="1Gi", mode=VolumeMode.FILESYSTEM)
    accepted(claim)
    placement, storage = Placement(alternatives=settings.nodes.choose("fast")), StorageAccess()
    accepted(build_backup_pod(request, claim, placement, storage=storage))
    accepted(build_init_pod(replace(request.owner, kind="BackupRepository"), settings, storage=storage))
    for volume in settings.repository_volumes:
        shared = StorageAccess(directory=volume.mount_path)
        accepted(build_backup_pod(request, claim, placement, storage=shared))

"""The fields that mover pods inherit from the DaemonSet, and those they do not."""

import pytest

from core.errors import ContractError
from exposer.template import AgentTemplate
from tests.exposer.support.inputs import daemonset, template
from tests.support.objects import JsonDict


def host_path(name: str, path: str) -> JsonDict:
    return {"name": name, "hostPath": {"path": path}}


def test_third_party_labels_annotations_and_tolerations_are_inherited_and_no_others() -> None:
    parsed = template()
    assert parsed.labels == {"azure.workload.identity/use": "true"}
    assert parsed.annotations == {"iam.amazonaws.com/role": "mover"}
    assert [toleration["key"] for toleration in parsed.tolerations] == ["CriticalAddonsOnly"]
    raw = daemonset()
    raw["spec"]["template"]["metadata"] = {
        "labels": {"azure.workload.identity/use": "", "name": "node-agent"},
        "annotations": {"iam.amazonaws.com/role": "", "note": "x"},
    }
    parsed = AgentTemplate.parse(raw)
    assert parsed.labels == {"azure.workload.identity/use": ""}
    assert parsed.annotations == {"iam.amazonaws.com/role": ""}


def test_fields_of_pod_and_container_are_inherited_and_probes_are_not() -> None:
    raw = daemonset()
    pod = raw["spec"]["template"]["spec"]
    pod |= {
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["10.0.0.1"]},
        "imagePullSecrets": [{"name": "pull"}],
        "hostNetwork": True,
        "nodeSelector": {"kubernetes.io/os": "linux", "backups": "here"},
    }
    pod["containers"][0]["envFrom"] = [{"secretRef": {"name": "extra"}}]
    parsed = AgentTemplate.parse(raw)
    assert parsed.pod_fields == {
        "serviceAccountName": "velero",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["10.0.0.1"]},
        "imagePullSecrets": [{"name": "pull"}],
        # An agent of Velero 1.17 reads the operating system of a mover pod there, and fails a DataUpload without it.
        "nodeSelector": {"kubernetes.io/os": "linux"},
    }
    assert parsed.container_fields == {"envFrom": [{"secretRef": {"name": "extra"}}]}


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/var/lib/kubelet/pods", False),
        ("/var/lib/kubelet/", False),
        ("/var/lib/kubelet/plugins/x", False),
        ("/var/lib", False),
        ("/", False),
        ("/var/lib/../lib/kubelet", False),
        ("/var/lib/kubelet-ca", True),
        ("/etc/ssl/certs", True),
    ],
)
def test_a_host_path_that_exposes_the_kubelets_root_is_not_inherited(path: str, kept: bool) -> None:
    raw = daemonset()
    pod = raw["spec"]["template"]["spec"]
    pod["volumes"].append(host_path("extra", path))
    pod["containers"][0]["volumeMounts"].append({"name": "extra", "mountPath": "/extra"})
    parsed = AgentTemplate.parse(raw)
    assert ("extra" in {volume["name"] for volume in parsed.volumes}) is kept
    assert ("extra" in {mount["name"] for mount in parsed.volume_mounts}) is kept


def test_the_kubelet_root_is_the_parent_of_host_pods_if_the_agent_has_it() -> None:
    moved = template(volumes=[host_path("host-pods", "/data/kubelet/pods/"), host_path("p", "/data/kubelet/plugins")])
    assert (moved.kubelet_root, moved.host_pods, moved.volumes) == ("/data/kubelet", "/host_pods", ())
    bare = template(volumes=[])
    assert (bare.kubelet_root, bare.host_pods) == ("/var/lib/kubelet", None)


def test_a_daemonset_needs_a_container_with_an_image_that_is_no_sidecar() -> None:
    raw = daemonset()
    containers = raw["spec"]["template"]["spec"]["containers"]
    containers.insert(0, {"name": "sidecar", "image": "other"})
    assert AgentTemplate.parse(raw).image == "velero/velero:v1.18.2"
    containers.clear()
    with pytest.raises(ContractError, match="DaemonSet velero/node-agent has no container with an image"):
        AgentTemplate.parse(raw)


@pytest.mark.parametrize(
    ("container", "image", "secret"),
    [
        ({"name": "node-agent", "image": "velero/velero:v1.18.2"}, "velero/velero:v1.18.2", "pull"),
        ({"name": "node-agent", "image": "mover:1"}, "mover:1", "earlier"),
        ({"name": "sidecar", "image": "mover:1"}, "velero/velero:v1.18.2", "pull"),
    ],
    ids=["same", "earlier", "of a sidecar"],
)
def test_movers_have_the_image_of_the_running_agent(container: JsonDict, image: str, secret: str) -> None:
    """And the pull secrets of the same object."""
    pod: JsonDict = {"spec": {"containers": [container], "imagePullSecrets": [{"name": "earlier"}]}}
    found = template(imagePullSecrets=[{"name": "pull"}]).with_image_of(pod)
    assert (found.image, found.pod_fields["imagePullSecrets"]) == (image, [{"name": secret}])
    assert found.pod_fields["serviceAccountName"] == "velero"

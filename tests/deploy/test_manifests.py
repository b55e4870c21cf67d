"""What `deploy/` installs, against the code that runs in it."""

from pathlib import Path
from typing import Any

import yaml

from core.models.names import AGENT_DAEMONSET, AGENT_LABELS, MOVER_SERVICE_ACCOUNT, SERVICE_ACCOUNT
from exposer.template import AgentTemplate
from nodeagent.__main__ import _parser
from nodeagent.config.parse import document_of, parse_config
from nodeagent.runtime.settings import Settings, parse_settings
from tests.support.objects import JsonDict
from tools.manifests import generate

_DEPLOY = Path(__file__).parents[2] / "deploy"
_RECORDED = Path(__file__).parents[1] / "data" / "velero-1.18.2"


def _load(name: str) -> Any:
    return yaml.safe_load((_DEPLOY / name).read_text(encoding="utf-8"))


def _daemonset() -> JsonDict:
    daemonset: JsonDict = _load("agent/daemonset.yaml")
    return daemonset


def _pod() -> JsonDict:
    pod: JsonDict = _daemonset()["spec"]["template"]["spec"]
    return pod


def _settings() -> Settings:
    container = _pod()["containers"][0]
    assert container["command"] == ["python", "-m", "nodeagent"]
    environ = {"NODE_NAME": "node-a", "VELERO_NAMESPACE": "velero"}
    return parse_settings(_parser().parse_args(container["args"]), environ)


def test_every_file_is_installed() -> None:
    installed = {f"agent/{name}" for name in _load("agent/kustomization.yaml")["resources"]}
    installed |= set(_load("kustomization.yaml")["resources"]) - {"agent"}
    for component in ("monitoring", "network-policy", "openshift", "priority", "restore-tests", "volume-secrets"):
        installed |= {f"{component}/{name}" for name in _load(f"{component}/kustomization.yaml")["resources"]}
    files = {str(path.relative_to(_DEPLOY)) for path in _DEPLOY.rglob("*.yaml")}
    # Rules for a Prometheus without its operator are no object.
    files = {name for name in files if not name.startswith(("chart/", "crds/")) and name != "monitoring/rules.yaml"}
    assert installed == {name for name in files if not name.endswith("kustomization.yaml")}


def test_the_files_are_those_that_the_builders_of_the_installer_write() -> None:
    """`make manifests` writes them again."""
    assert {name: (_DEPLOY / name).read_text(encoding="utf-8") for name in generate()} == generate()


def test_names_and_labels_are_those_that_agents_select() -> None:
    daemonset = _daemonset()
    assert daemonset["metadata"]["name"] == AGENT_DAEMONSET
    assert AGENT_LABELS.items() <= daemonset["spec"]["template"]["metadata"]["labels"].items()
    assert _pod()["serviceAccountName"] == SERVICE_ACCOUNT == _load("agent/serviceaccount.yaml")["metadata"]["name"]


def test_movers_get_the_account_that_is_installed_for_them() -> None:
    text = (_DEPLOY / "agent" / "mover.yaml").read_text(encoding="utf-8")
    (account,) = [doc["metadata"]["name"] for doc in yaml.safe_load_all(text) if doc["kind"] == "ServiceAccount"]
    assert _settings().mover_service_account == account == MOVER_SERVICE_ACCOUNT


def test_every_node_that_is_not_a_windows_node_gets_an_agent() -> None:
    """As Velero's DaemonSet does: some distributions label their nodes with an operating system of their own."""
    pod = _pod()
    assert "nodeSelector" not in pod
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "NotIn", "values": ["windows"]}]}
    recorded = yaml.safe_load((_RECORDED / "daemonset-plain.yaml").read_text(encoding="utf-8"))
    assert pod["affinity"] == recorded["spec"]["template"]["spec"]["affinity"]


def test_the_named_config_map_is_installed_and_valid() -> None:
    config_map = _load("config.yaml")
    assert _settings().config_map_name == config_map["metadata"]["name"]
    assert parse_config(document_of(config_map)).warnings == []


def test_the_agents_get_a_priority_class_that_is_installed() -> None:
    text = (_DEPLOY / "priority" / "priority-classes.yaml").read_text(encoding="utf-8")
    (patch,) = _load("priority/kustomization.yaml")["patches"]
    (operation,) = yaml.safe_load(patch["patch"])
    assert operation["path"] == "/spec/template/spec/priorityClassName"
    assert operation["value"] in {item["metadata"]["name"] for item in yaml.safe_load_all(text)}
    assert patch["target"] == {"kind": "DaemonSet", "name": AGENT_DAEMONSET}


def test_the_network_policy_selects_the_agents_and_their_port() -> None:
    policy = _load("network-policy/network-policy.yaml")
    (rule,) = policy["spec"]["ingress"]
    assert policy["metadata"]["namespace"] == _daemonset()["metadata"]["namespace"]
    assert policy["spec"]["podSelector"]["matchLabels"] == AGENT_LABELS
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert [port["port"] for port in rule["ports"]] == [port["name"] for port in _pod()["containers"][0]["ports"]]
    assert len(rule["from"]) == 1


def test_velero_sets_the_user_that_it_needs() -> None:
    """The user of the image is not root."""
    for path in _RECORDED.glob("daemonset-*.yaml"):
        pod = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsUser"] == 0


def test_the_agent_may_list_the_kubelets_folder_of_pods_and_mounts_it_read_only() -> None:
    """Kubelets create it with mode 0750 and group root. A mount that ends on the node must end in the agent, too."""
    assert _pod()["securityContext"]["supplementalGroups"] == [0]
    assert "fsGroup" not in _pod()["securityContext"]
    (mount,) = [mount for mount in _pod()["containers"][0]["volumeMounts"] if mount["name"] == "host-pods"]
    assert (mount["readOnly"], mount["mountPropagation"]) == (True, "HostToContainer")


def test_mover_pods_inherit_credentials_and_scratch_and_no_folder_of_the_kubelet() -> None:
    template = AgentTemplate.parse(_daemonset())
    assert template.host_pods == "/host_pods"
    assert [volume["name"] for volume in template.volumes] == ["scratch", "cloud-credentials"]
    assert [mount["mountPath"] for mount in template.volume_mounts] == ["/scratch", "/credentials"]
    files = {
        item["name"]: item.get("value") for item in template.env if item["name"].endswith(("_FILE", "_CREDENTIALS"))
    }
    assert set(files.values()) == {"/credentials/cloud"}

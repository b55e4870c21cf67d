"""What surrounds the agents: namespace, credentials, location, priorities, and rules of the network and OpenShift."""

import base64
import json
from typing import Final

from client.install.daemonset import CREDENTIALS_SECRET
from client.install.objects import build_object
from client.install.options import InstallOptions, LocationOptions
from core.kube.types import Manifest
from core.models.base import JsonDict
from core.models.names import AGENT_LABELS
from exposer.pod_manifest import MOVER_CAPABILITIES

__all__ = [
    "DEFAULT_LOCATION",
    "build_config_map",
    "build_credentials",
    "build_location",
    "build_namespace",
    "build_network_policy",
    "build_priority_classes",
    "build_security_constraints",
]

DEFAULT_LOCATION: Final = "default"
"""Source: Velero v1.18, `velero install`."""

_PRIORITIES: Final = (
    ("server", 100, "", "The Velero server, if there is one."),
    ("node-agent", 50, "", "Node agents. Transfers of a node are not processed while its agent is preempted."),
    # A pending backup is better than a preempted workload.
    ("data-mover", 10, "Never", "Data movers, and maintenance of backup repositories."),
)
"""Workloads have the value 0 by default: any of them can preempt a data mover with a negative value."""


def build_namespace(options: InstallOptions) -> Manifest:
    """Return the namespace.

    Data movers run as root, because they read and write files of any owner, and the agent mounts a directory of the
    node: of the Pod Security Standards, only `privileged` allows either.
    """
    namespace = build_object("v1", "Namespace", options.namespace)
    namespace["metadata"]["labels"] |= {
        f"pod-security.kubernetes.io/{mode}": "privileged" for mode in ("enforce", "audit", "warn")
    }
    return namespace


def build_credentials(options: InstallOptions, content: str) -> Manifest:
    """Return the Secret with the file of credentials that locations use which name none."""
    secret = build_object("v1", "Secret", CREDENTIALS_SECRET, options.namespace)
    return {**secret, "type": "Opaque", "data": {"cloud": _encode(content)}}


def build_location(options: InstallOptions, location: LocationOptions) -> Manifest:
    """Return the BackupStorageLocation that is used where none is named."""
    storage: Manifest = {"bucket": location.bucket}
    if location.prefix:
        storage["prefix"] = location.prefix
    if location.ca_certificate:
        storage["caCert"] = _encode(location.ca_certificate)
    spec: Manifest = {"provider": location.provider, "default": True, "objectStorage": storage}
    if location.config:
        spec["config"] = dict(location.config)
    return {**build_object("velero.io/v1", "BackupStorageLocation", DEFAULT_LOCATION, options.namespace), "spec": spec}


def build_config_map(options: InstallOptions, document: JsonDict) -> Manifest:
    """Return the ConfigMap with the agents' configuration: one key, whose value is a JSON document."""
    name = options.config_map
    config_map = build_object("v1", "ConfigMap", name, options.namespace)
    return {**config_map, "data": {f"{name}.json": json.dumps(document, indent=2) + "\n"}}


def build_priority_classes(options: InstallOptions) -> list[Manifest]:
    """Return the PriorityClasses of server, agents and data movers."""
    classes = []
    for suffix, value, preemption, description in _PRIORITIES:
        item = build_object("scheduling.k8s.io/v1", "PriorityClass", options.cluster_name(suffix))
        item |= {"value": value, "globalDefault": False, "description": description}
        if preemption:
            item["preemptionPolicy"] = preemption
        classes.append(item)
    return classes


def build_network_policy(options: InstallOptions) -> Manifest:
    """Return the NetworkPolicy that lets only one namespace reach the agents' HTTP pages.

    The kubelet's probes need no rule: traffic from a pod's own node is always allowed. Data movers accept no
    connections, so that they need no policy. Source: Kubernetes v1.34, "Network Policies".
    """
    source = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": options.monitoring_namespace}}}
    policy = build_object("networking.k8s.io/v1", "NetworkPolicy", "node-agent", options.namespace)
    policy["spec"] = {
        "podSelector": {"matchLabels": dict(AGENT_LABELS)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [source], "ports": [{"port": "metrics"}]}],
    }
    return policy


def build_security_constraints(options: InstallOptions) -> list[Manifest]:
    """Return the SecurityContextConstraints of agents and data movers on OpenShift.

    Source: OpenShift 4, "Managing security context constraints"; security.openshift.io/v1.
    """
    agent = {
        "allowHostDirVolumePlugin": options.agent.host_path,
        "allowPrivilegedContainer": options.agent.privileged,
        "allowPrivilegeEscalation": options.agent.privileged,
        "requiredDropCapabilities": [] if options.agent.privileged else ["ALL"],
    }
    mover = {
        # Volumes of pods are mounted from the kubelet's directory; block volumes need a privileged container.
        "allowHostDirVolumePlugin": True,
        "allowPrivilegedContainer": True,
        "allowPrivilegeEscalation": True,
        "allowedCapabilities": list(MOVER_CAPABILITIES),
    }
    return [
        _constraints(options, "node-agent", options.account, agent),
        _constraints(options, "node-agent-mover", options.mover_account, mover),
    ]


def _constraints(options: InstallOptions, suffix: str, account: str, rules: Manifest) -> Manifest:
    return {
        **build_object("security.openshift.io/v1", "SecurityContextConstraints", options.cluster_name(suffix)),
        "allowHostIPC": False,
        "allowHostNetwork": False,
        "allowHostPID": False,
        "allowHostPorts": False,
        "readOnlyRootFilesystem": False,
        **rules,
        "runAsUser": {"type": "RunAsAny"},
        "fsGroup": {"type": "RunAsAny"},
        "supplementalGroups": {"type": "RunAsAny"},
        # Directories of pods have a label of their own for each pod.
        "seLinuxContext": {"type": "RunAsAny"},
        "seccompProfiles": ["*"],
        "volumes": [
            "configMap",
            "csi",
            "downwardAPI",
            "emptyDir",
            "ephemeral",
            "hostPath",
            "nfs",
            "persistentVolumeClaim",
            "projected",
            "secret",
        ],
        "users": [f"system:serviceaccount:{options.namespace}:{account}"],
        "groups": [],
    }


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()

"""All objects of an installation but the DaemonSet, and the order in which they are applied.

`deploy/` is generated from these (`tools/manifests.py`), and the Helm chart is compared with them.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Final

import yaml

from client.install.daemonset import build_daemonset
from client.install.options import CONFIG_MAP, AgentOptions, InstallOptions, LocationOptions, build_object
from client.permissions import VERIFY_PERMISSIONS
from core.kube.types import Manifest
from core.models import names as wire
from core.models.base import JsonDict
from exposer.pod_manifest import MOVER_CAPABILITIES
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, Permission, Scope, agent_permissions

VOLUME_SECRETS_ROLE: Final = "node-agent-volume-secrets"

_RBAC: Final = "rbac.authorization.k8s.io"
_API: Final = f"{_RBAC}/v1"


def build_service_accounts(options: InstallOptions) -> list[Manifest]:
    """Return the ServiceAccounts that do not exist yet: of agents, and of data movers."""
    accounts = []
    for given, name in (
        (options.service_account, wire.SERVICE_ACCOUNT),
        (options.mover_service_account, wire.MOVER_SERVICE_ACCOUNT),
    ):
        if given:
            continue
        account = build_object("v1", "ServiceAccount", name, options.namespace)
        if options.service_account_annotations:
            account["metadata"]["annotations"] = dict(options.service_account_annotations)
        if options.pull_secrets:
            account["imagePullSecrets"] = [{"name": secret} for secret in options.pull_secrets]
        accounts.append(account)
    return accounts


def build_agent_roles(options: InstallOptions) -> list[Manifest]:
    """Return the roles of the agents and their bindings."""
    agent = options.agent
    permissions = agent_permissions(options.config_map, agent.repository_config_map, agent.maintenance_config_map)
    return _roles(options, wire.SERVICE_ACCOUNT, options.account, permissions)


def build_mover_roles(options: InstallOptions) -> list[Manifest]:
    """Return the role of data movers and its binding."""
    return _roles(options, wire.MOVER_SERVICE_ACCOUNT, options.mover_account, MOVER_PERMISSIONS)


def build_volume_secrets_roles(options: InstallOptions) -> list[Manifest]:
    """Return the roles by which agents copy Secrets and ConfigMaps of volumes, and their bindings."""
    return _roles(options, VOLUME_SECRETS_ROLE, options.account, COPY_PERMISSIONS)


def build_restore_test_account(options: InstallOptions) -> list[Manifest]:
    """Return the account of the Jobs that test restores, its roles and their bindings."""
    account = build_object("v1", "ServiceAccount", wire.RESTORE_TEST_ACCOUNT, options.namespace)
    return [account, *_roles(options, wire.RESTORE_TEST_ACCOUNT, wire.RESTORE_TEST_ACCOUNT, VERIFY_PERMISSIONS)]


def in_scope(permissions: Iterable[Permission], scope: Scope) -> list[Permission]:
    """Return the permissions of one scope: the rules of one role, in their order."""
    return [permission for permission in permissions if permission.scope is scope]


def build_rule(permission: Permission) -> Manifest:
    """Return a permission as a rule of a role."""
    rule: Manifest = {"apiGroups": [permission.resource.group], "resources": [permission.path]}
    if permission.names:
        rule["resourceNames"] = list(permission.names)
    return {**rule, "verbs": list(permission.verbs)}


def build_role(
    name: str,
    namespace: str,
    permissions: Iterable[Permission],
    account: tuple[str, str],
    labels: Mapping[str, str] = wire.PART_OF_LABELS,
) -> list[Manifest]:
    """Return a role with these permissions, without `namespace` of the cluster, and its binding.

    `account` is namespace and name of the ServiceAccount that gets it.
    """
    kind = "Role" if namespace else "ClusterRole"
    role, binding = (build_object(_API, one, name, namespace, labels) for one in (kind, f"{kind}Binding"))
    role["rules"] = [build_rule(permission) for permission in permissions]
    binding["roleRef"] = {"apiGroup": _RBAC, "kind": kind, "name": name}
    binding["subjects"] = [{"kind": "ServiceAccount", "name": account[1], "namespace": account[0]}]
    return [role, binding]


def _roles(options: InstallOptions, name: str, account: str, permissions: Sequence[Permission]) -> list[Manifest]:
    objects = []
    for scope, own_name, namespace in (
        (Scope.OWN_NAMESPACE, name, options.namespace),
        (Scope.CLUSTER, options.cluster_name(name), ""),
    ):
        if found := in_scope(permissions, scope):
            objects += build_role(own_name, namespace, found, (options.namespace, account))
    return objects


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
    secret = build_object("v1", "Secret", wire.CREDENTIALS_SECRET, options.namespace)
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
    name = options.config_map or CONFIG_MAP
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
        "podSelector": {"matchLabels": dict(wire.AGENT_LABELS)},
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


def build_installation(options: InstallOptions) -> list[Manifest]:
    """Return every object but the custom resource definitions; the DaemonSet is the last."""
    objects = [build_namespace(options)]
    if options.priority_classes:
        objects += build_priority_classes(options)
    objects += build_service_accounts(options)
    if options.openshift:
        objects += build_security_constraints(options)
    objects += [*build_agent_roles(options), *build_mover_roles(options)]
    if options.volume_secrets:
        objects += build_volume_secrets_roles(options)
    if options.restore_tests:
        objects += build_restore_test_account(options)
    if options.credentials is not None:
        objects.append(build_credentials(options, options.credentials))
    if options.location is not None:
        objects.append(build_location(options, options.location))
    if options.configuration is not None:
        objects.append(build_config_map(options, options.configuration))
    if options.monitoring_namespace:
        objects.append(build_network_policy(options))
    return [*objects, build_daemonset(options)]


def build_everything(namespace: str) -> list[Manifest]:
    """Return every object that an installation in the namespace can have, whatever was chosen."""
    return build_installation(
        InstallOptions(
            namespace=namespace,
            agent=AgentOptions(config_map=CONFIG_MAP),
            credentials="",
            location=LocationOptions(provider="aws", bucket="any"),
            configuration={},
            openshift=True,
            monitoring_namespace=namespace,
            priority_classes=True,
            volume_secrets=True,
            restore_tests=True,
        )
    )


@cache
def read_definitions() -> tuple[Manifest, ...]:
    """Return our custom resource definitions, as apiextensions.k8s.io/v1 JSON dicts that must not be changed."""
    folder = files("client.install") / "crds"
    texts = (entry.read_text(encoding="utf-8") for entry in sorted(folder.iterdir(), key=lambda entry: entry.name))
    return tuple(yaml.safe_load(text) for text in texts)

"""The DaemonSet: one agent on each Linux node, whose settings data mover pods inherit.

They inherit image, environment, volumes and mounts (no directories of the kubelet), DNS settings and pull secrets.
"""

from typing import Final

from client.install.options import AgentOptions, ContainerResources, InstallOptions, build_object
from core.kube.types import Manifest
from core.models.names import AGENT_DAEMONSET, AGENT_LABELS, CREDENTIALS_SECRET, PART_OF_LABELS
from exposer.pod_manifest import Placement, build_node_affinity, escape_words
from nodeagent.runtime.settings import Settings

_CREDENTIALS_FILE: Final = "/credentials/cloud"
_CREDENTIALS_VARIABLES: Final = (
    "AWS_SHARED_CREDENTIALS_FILE",
    "AZURE_CREDENTIALS_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
)
"""For backup storage locations without spec.credential."""

_USER: Final = 65532
"""The image's user. By number, as a kubelet cannot tell from a name whether it is root."""

_API_SERVER: Final = "$(KUBERNETES_SERVICE_HOST)"
"""Its address, as a kubelet fills it in. Agents would otherwise look for it behind the proxy.

Source: Kubernetes v1.34, "Define Dependent Environment Variables"; pkg/kubelet/kubelet_pods.go.
"""


def build_daemonset(options: InstallOptions) -> Manifest:
    """Return the agents' apps/v1 DaemonSet."""
    agent, name = options.agent, AGENT_DAEMONSET
    daemonset = build_object("apps/v1", "DaemonSet", name, options.namespace)
    daemonset["spec"] = {
        "selector": {"matchLabels": {"name": name}},
        "updateStrategy": {
            "type": "RollingUpdate",
            # Data movers continue while the agent of their node restarts, so several agents may restart at a time.
            "rollingUpdate": {"maxUnavailable": "10%"},
        },
        "template": {
            "metadata": {
                # The leader watches pods with AGENT_LABELS.
                "labels": {**agent.pod_labels, "name": name, **AGENT_LABELS, **PART_OF_LABELS},
                "annotations": {
                    "prometheus.io/scrape": "true",
                    "prometheus.io/port": str(Settings.metrics_address.port),
                    "prometheus.io/path": "/metrics",
                    **agent.pod_annotations,
                },
            },
            "spec": _build_pod(options),
        },
    }
    return daemonset


def _build_pod(options: InstallOptions) -> Manifest:
    agent = options.agent
    pod: Manifest = {
        "serviceAccountName": options.account,
        # Enough to store outcomes and to release the leader's Lease.
        "terminationGracePeriodSeconds": 30,
        "enableServiceLinks": False,
        "affinity": build_node_affinity(Placement()),
        "securityContext": _build_pod_security(agent),
    }
    if agent.tolerations:
        pod["tolerations"] = list(agent.tolerations)
    if agent.node_selector:
        pod["nodeSelector"] = dict(agent.node_selector)
    if priority_class := agent.priority_class or (
        options.cluster_name("node-agent") if options.priority_classes else None
    ):
        pod["priorityClassName"] = priority_class
    if options.pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in options.pull_secrets]
    pod["containers"] = [_build_container(options)]
    pod["volumes"] = [{"name": name, **source} for name, source, _ in _build_volumes(agent)]
    return pod


def _build_pod_security(agent: AgentOptions) -> Manifest:
    if agent.privileged:
        return {"runAsUser": 0}
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        # For host-pods: kubelets give their directories the mode 0750 and the group root.
        **({"supplementalGroups": [0]} if agent.host_path else {}),
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _build_container(options: InstallOptions) -> Manifest:
    agent = options.agent
    container: Manifest = {
        "name": AGENT_DAEMONSET,
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy,
        "command": ["python", "-m", "nodeagent"],
        "args": _build_args(options),
        "env": _build_env(options),
        # An agent that cannot start says why in its last line.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "ports": [{"name": "metrics", "containerPort": Settings.metrics_address.port}],
        "startupProbe": {"httpGet": _probe("/healthz"), "periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {
            "httpGet": _probe("/healthz"),
            "periodSeconds": 20,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "readinessProbe": {"httpGet": _probe("/readyz"), "periodSeconds": 5, "timeoutSeconds": 5},
    }
    if resources := _build_resources(agent.resources):
        container["resources"] = resources
    container["securityContext"] = _build_security(agent)
    container["volumeMounts"] = [{"name": name, **mount} for name, _, mount in _build_volumes(agent)]
    return container


def _build_args(options: InstallOptions) -> list[str]:
    agent = options.agent
    flags = {
        "--node-agent-configmap": options.config_map,
        "--backup-repository-configmap": agent.repository_config_map,
        "--repo-maintenance-job-configmap": agent.maintenance_config_map,
        "--mover-service-account": options.mover_account,
        "--features": agent.features,
    }
    return ["serve", *(f"{flag}={value}" for flag, value in flags.items() if value), *agent.extra_args]


def _build_env(options: InstallOptions) -> list[Manifest]:
    fields = {"NODE_NAME": "spec.nodeName", "VELERO_NAMESPACE": "metadata.namespace"}
    proxy = options.proxy
    # A password may have a dollar sign.
    http, https, no_proxy = escape_words(one or "" for one in (proxy.http, proxy.https, proxy.no_proxy))
    not_proxied = ",".join(filter(None, (_API_SERVER, no_proxy))).rstrip(",")
    values = {
        "VELERO_SCRATCH_DIR": "/scratch",
        **dict.fromkeys(_CREDENTIALS_VARIABLES, _CREDENTIALS_FILE),
        "HTTP_PROXY": http,
        "HTTPS_PROXY": https,
        "NO_PROXY": not_proxied if http or https else None,
    }
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        *({"name": name, "value": value} for name, value in values.items() if value),
    ]


def _probe(path: str) -> Manifest:
    return {"path": path, "port": "metrics"}


def _build_resources(resources: ContainerResources) -> Manifest:
    sections = {
        "requests": {"cpu": resources.cpu_request, "memory": resources.memory_request},
        "limits": {"cpu": resources.cpu_limit, "memory": resources.memory_limit},
    }
    chosen = {
        section: {resource: quantity for resource, quantity in quantities.items() if quantity != "0"}
        for section, quantities in sections.items()
    }
    return {section: quantities for section, quantities in chosen.items() if quantities}


def _build_security(agent: AgentOptions) -> Manifest:
    if agent.privileged:
        # It has all capabilities, and the API server rejects a privileged container that may gain none.
        return {"readOnlyRootFilesystem": True, "privileged": True}
    return {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _build_volumes(agent: AgentOptions) -> list[tuple[str, Manifest, Manifest]]:
    """Return the name, source and mount of each volume."""
    volumes: list[tuple[str, Manifest, Manifest]] = [
        ("scratch", {"emptyDir": {}}, {"mountPath": "/scratch"}),
        (
            CREDENTIALS_SECRET,
            {"secret": {"secretName": CREDENTIALS_SECRET, "optional": True}},
            {"mountPath": "/credentials", "readOnly": True},
        ),
    ]
    if agent.host_path:
        source = {"hostPath": {"path": f"{agent.kubelet_root.rstrip('/')}/pods", "type": "Directory"}}
        # The agent lists directories in it, and opens no volume.
        mount = {"mountPath": "/host_pods", "mountPropagation": "HostToContainer", "readOnly": True}
        volumes.append(("host-pods", source, mount))
    return volumes

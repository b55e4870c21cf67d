"""The manifest of a pod that runs a command of the client: of a schedule, or of a restore test. A pure builder.

It has the agents' image, an account of its own, and nothing of a data mover.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from core.kube.types import DaemonSet, Manifest, PodToleration
from exposer.template import AgentTemplate, Placement, build_node_affinity

__all__ = ["JOB_VARIABLE", "AgentImage", "build_client_pod"]

JOB_VARIABLE: Final = "NODE_AGENT_JOB"
"""Environment variable of the pod: the name of its Job."""

_JOB_LABEL: Final = "batch.kubernetes.io/job-name"
"""Source: Kubernetes v1.27 and later, Job."""

_USER: Final = 65532
"""The user of the image."""

_RESOURCES: Final = {
    "requests": {"cpu": "10m", "memory": "96Mi"},
    "limits": {"memory": "512Mi"},
}


@dataclass(frozen=True)
class AgentImage:
    """The image of the agents, and how it is pulled."""

    image: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()

    @classmethod
    def of(cls, daemonset: DaemonSet) -> "AgentImage":
        """Return the image of the agents' apps/v1 DaemonSet: its first container is the agent."""
        spec = daemonset["spec"]["template"]["spec"]
        container = spec["containers"][0]
        secrets = tuple(one["name"] for one in spec.get("imagePullSecrets") or [])
        return cls(container["image"], container.get("imagePullPolicy") or "IfNotPresent", secrets)

    @classmethod
    def inherited(cls, template: AgentTemplate) -> "AgentImage":
        """Return what data movers inherit of it."""
        secrets = tuple(one["name"] for one in template.pod_fields.get("imagePullSecrets") or [])
        return cls(template.image, pull_secrets=secrets)


def build_client_pod(
    account: str,
    argv: Sequence[str],
    agent: AgentImage,
    *,
    container: str,
    placement: Placement = Placement(),  # noqa: B008 - frozen
    tolerations: Sequence[PodToleration] = (),
) -> Manifest:
    """Return the spec of a pod whose only `container` runs `python -m nodeagent` with these words."""
    job = {"fieldRef": {"fieldPath": f"metadata.labels['{_JOB_LABEL}']"}}
    built = {
        "name": container,
        "image": agent.image,
        "imagePullPolicy": agent.pull_policy,
        "command": ["python", "-m", "nodeagent"],
        "args": list(argv),
        "env": [{"name": JOB_VARIABLE, "valueFrom": job}],
        "resources": _RESOURCES,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "serviceAccountName": account,
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "affinity": build_node_affinity(placement),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"tolerations": list(tolerations)} if tolerations else {}),
        **({"imagePullSecrets": [{"name": one} for one in agent.pull_secrets]} if agent.pull_secrets else {}),
        "containers": [built],
    }

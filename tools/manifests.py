"""Writes the manifests of `deploy/` from the builders of `nodeagent install`.

    python -m tools.manifests [DIRECTORY]

Without DIRECTORY, `deploy/` of this checkout. A test compares the two; `make manifests` brings them together.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Final

from client.install.daemonset import build_daemonset
from client.install.manifests import (
    build_agent_roles,
    build_config_map,
    build_mover_roles,
    build_namespace,
    build_network_policy,
    build_priority_classes,
    build_restore_test_account,
    build_security_constraints,
    build_service_accounts,
    build_volume_secrets_roles,
)
from client.install.options import InstallOptions
from client.permissions import VERIFY_PERMISSIONS
from core.models.base import JsonDict
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, agent_permissions
from tools.chart import generate_chart
from tools.documents import build_file
from tools.monitoring import generate_monitoring

_DOCUMENT: Final[JsonDict] = {"loadConcurrency": {"globalConfig": 1}}

DEFAULTS: Final = InstallOptions(image="node-agent", configuration=_DOCUMENT)
"""What `deploy/` installs: an image whose name a kustomization replaces, and a configuration to edit."""

_ACCOUNT = "The account of the agent."
_RBAC = """\
Permissions of the agent, each with its reason; nodeagent/runtime/permissions.py has the list. The agent checks each of
them when it starts.
With another --node-agent-configmap, or with --backup-repository-configmap or --repo-maintenance-job-configmap, name
these ConfigMaps in resourceNames."""
_MOVER = """\
The account of data movers, which --mover-service-account names. Annotations of cloud identities (IRSA, workload
identity) and image pull secrets that data movers need belong to this account.
Its permissions, each with its reason; nodeagent/runtime/permissions.py has the list."""
_DAEMONSET = """\
One agent on each Linux node. Data mover pods inherit from this pod template: image, environment, volumes and their
mounts (except directories of the kubelet), DNS settings, pull secrets.
Velero's DaemonSet has the same name: install only one of them."""
_CONFIG = """\
The agent's configuration: exactly one key, whose name does not matter. Its value is a JSON document.
An edit is active within five seconds. docs/configuration.md has all keys; "nodeagent check-config FILE" checks the
document."""
_PRIORITY = """\
A hierarchy for backups: server, agents, data movers. docs/priority.md explains it, and the order of creation.
Workloads have the value 0 by default: any of them can preempt a data mover with a negative value."""
_NETWORK = """\
Change the namespace below to your Prometheus' own. The kubelet's probes need no rule: traffic from a pod's own
node is always allowed. (Kubernetes v1.34, "Network Policies")"""
_COPIES = """\
Permissions of the agent to copy Secrets and ConfigMaps that a driver needs beside the PVC of a backup or restore
(secretNames and configMapNames of backupPVC and restorePVC in its ConfigMap), each with its reason.
As it is, the agent can then read every Secret and ConfigMap of the cluster. To permit only those that you configure,
add their names to the two rules of the ClusterRole:
  resourceNames: [ceph-csi-kms-token]"""
_RESTORE_TESTS = """\
The account of the Jobs by which the leader tests restores (nodeagent.io.verification.restoreTest in its ConfigMap):
what "nodeagent backup verify --restore" needs, each permission with its reason."""
_OPENSHIFT = """\
Security context constraints of agents and data movers (docs/install.md)."""
_NAMESPACE = """\
Data movers run as root, because they read and write files of any owner, and the agent mounts a directory of the node.
The other Pod Security Standards allow neither."""


def generate() -> dict[str, str]:
    """Return the text of each generated file by its path in `deploy/`."""
    options = DEFAULTS
    agent, mover = build_service_accounts(options)
    own = agent_permissions(options.config_map)
    texts = {
        "namespace.yaml": build_file([build_namespace(options)], about=_NAMESPACE),
        "config.yaml": build_file([build_config_map(options, _DOCUMENT)], about=_CONFIG),
        "agent/serviceaccount.yaml": build_file([agent], about=_ACCOUNT),
        "agent/rbac.yaml": build_file(build_agent_roles(options), about=_RBAC, permissions=own),
        "agent/mover.yaml": build_file(
            [mover, *build_mover_roles(options)], about=_MOVER, permissions=MOVER_PERMISSIONS
        ),
        "agent/daemonset.yaml": build_file([build_daemonset(options)], about=_DAEMONSET),
        "priority/priority-classes.yaml": build_file(build_priority_classes(options), about=_PRIORITY),
        "network-policy/network-policy.yaml": build_file(
            [build_network_policy(replace(options, monitoring_namespace="monitoring"))], about=_NETWORK
        ),
        "volume-secrets/rbac.yaml": build_file(
            build_volume_secrets_roles(options), about=_COPIES, permissions=COPY_PERMISSIONS
        ),
        "restore-tests/account.yaml": build_file(
            build_restore_test_account(options), about=_RESTORE_TESTS, permissions=VERIFY_PERMISSIONS
        ),
        "openshift/security-context-constraints.yaml": build_file(
            build_security_constraints(options), about=_OPENSHIFT
        ),
    }
    definitions = files("client.install") / "crds"
    texts |= {f"crds/{entry.name}": entry.read_text(encoding="utf-8") for entry in definitions.iterdir()}
    texts |= {f"monitoring/{name}": text for name, text in generate_monitoring().items()}
    return texts | {f"chart/{name}": text for name, text in generate_chart().items()}


def main(arguments: Sequence[str]) -> int:
    """Write the files that differ; return the exit code."""
    folder = Path(arguments[0]) if arguments else Path(__file__).parents[1] / "deploy"
    for name, text in generate().items():
        path = folder / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

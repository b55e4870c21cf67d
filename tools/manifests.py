"""Writes the manifests of `deploy/` from the builders of `nodeagent install`.

    python -m tools.manifests [DIRECTORY]

Without DIRECTORY, `deploy/` of this checkout. A test compares the two; `make manifests` brings them together.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Final

import yaml

from core.models.base import JsonDict
from nodeagent.operations.install.accounts import (
    build_agent_roles,
    build_mover_roles,
    build_service_accounts,
    build_volume_secrets_roles,
)
from nodeagent.operations.install.daemonset import build_daemonsets
from nodeagent.operations.install.options import InstallOptions
from nodeagent.operations.install.surroundings import (
    build_config_map,
    build_namespace,
    build_network_policy,
    build_priority_classes,
    build_security_constraints,
)
from nodeagent.runtime.permissions import (
    COPY_PERMISSIONS,
    MOVER_PERMISSIONS,
    Permission,
    Scope,
    agent_permissions,
)

__all__ = ["DEFAULTS", "generate", "main"]

_GENERATED: Final = "# Generated from nodeagent/operations/install by `make manifests`: do not edit."

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
One agent on each node. Data mover pods inherit from this pod template: image, environment, volumes and their mounts
(except directories of the kubelet), DNS settings, pull secrets.
Velero's DaemonSet has the same name: install only one of them."""
_DAEMONSET_WINDOWS = """\
One agent on each Windows node; see daemonset.yaml. No Windows node has run it yet (docs/limits.md)."""
_CONFIG = """\
The agent's configuration: exactly one key, whose name does not matter. Its value is a JSON document.
An edit is active within five seconds. docs/configuration.md has all keys; "nodeagent check-config FILE" checks the
document."""
_PRIORITY = """\
A hierarchy for backups: server, agents, data movers. docs/priority.md explains it, and the order of creation.
Workloads have the value 0 by default: any of them can preempt a data mover with a negative value."""
_NETWORK = """\
Change the namespace below to that of your Prometheus. The kubelet's probes need no rule: traffic from a pod's own
node is always allowed. (Kubernetes v1.34, "Network Policies")"""
_COPIES = """\
Permissions of the agent to copy Secrets and ConfigMaps that a driver needs beside the PVC of a backup or restore
(secretNames and configMapNames of backupPVC and restorePVC in its ConfigMap), each with its reason.
As it is, the agent can then read every Secret and ConfigMap of the cluster. To permit only those that you configure,
add their names to the two rules of the ClusterRole:
  resourceNames: [ceph-csi-kms-token]"""
_OPENSHIFT = """\
Security context constraints of agents and data movers (docs/openshift.md)."""
_NAMESPACE = """\
Data movers run as root, because they read and write files of any owner, and the agent mounts a directory of the node.
The other Pod Security Standards allow neither."""


def generate(options: InstallOptions = DEFAULTS) -> dict[str, str]:
    """Return the text of each generated file by its path in `deploy/`."""
    agent, mover = build_service_accounts(options)
    own = agent_permissions(options.config_map)
    windows = build_daemonsets(replace(options, agent=replace(options.agent, linux=False, windows=True)))
    texts = {
        "namespace.yaml": _file(_NAMESPACE, [build_namespace(options)]),
        "config.yaml": _file(_CONFIG, [build_config_map(options, _DOCUMENT)]),
        "agent/serviceaccount.yaml": _file(_ACCOUNT, [agent]),
        "agent/rbac.yaml": _file(_RBAC, build_agent_roles(options), own),
        "agent/mover.yaml": _file(_MOVER, [mover, *build_mover_roles(options)], MOVER_PERMISSIONS),
        "agent/daemonset.yaml": _file(_DAEMONSET, build_daemonsets(options)),
        "windows/daemonset.yaml": _file(_DAEMONSET_WINDOWS, windows),
        "priority/priority-classes.yaml": _file(_PRIORITY, build_priority_classes(options)),
        "network-policy/network-policy.yaml": _file(
            _NETWORK, [build_network_policy(replace(options, monitoring_namespace="monitoring"))]
        ),
        "volume-secrets/rbac.yaml": _file(_COPIES, build_volume_secrets_roles(options), COPY_PERMISSIONS),
        "openshift/security-context-constraints.yaml": _file(_OPENSHIFT, build_security_constraints(options)),
    }
    definitions = files("nodeagent.operations.install") / "crds"
    return texts | {f"crds/{entry.name}": entry.read_text(encoding="utf-8") for entry in definitions.iterdir()}


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


def _file(about: str, objects: Iterable[JsonDict], permissions: Iterable[Permission] = ()) -> str:
    permissions = tuple(permissions)
    reasons = {
        kind: iter([one.reason for one in permissions if one.scope is scope])
        for kind, scope in (("Role", Scope.OWN_NAMESPACE), ("ClusterRole", Scope.CLUSTER))
    }
    header = "".join(f"# {line}\n" for line in about.splitlines())
    documents = [_document(item, reasons.get(str(item["kind"]), iter(()))) for item in objects]
    return f"{_GENERATED}\n{header}" + "---\n".join(documents)


def _document(item: JsonDict, reasons: Iterable[str]) -> str:
    """Return an object as YAML, each rule of a role below its reason."""
    if "rules" not in item:
        return _dump(item)
    parts = [_dump({key: value for key, value in item.items() if key != "rules"}), "rules:\n"]
    for rule, reason in zip(item["rules"], reasons, strict=True):
        parts.append(f"  # {reason}\n" + "".join(f"  {line}\n" for line in _dump([rule]).splitlines()))
    return "".join(parts)


class _Dumper(yaml.SafeDumper):
    """Block style with indented lists, as people write manifests."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - its signature
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - its signature
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _represent_list(dumper: yaml.SafeDumper, items: list[object]) -> yaml.SequenceNode:
    plain = all(isinstance(item, str) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=plain)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def _dump(value: object) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

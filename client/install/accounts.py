"""ServiceAccounts of agents and data movers, and roles with exactly the permissions that they use."""

from collections.abc import Iterable
from typing import Final

from client.install.objects import build_object
from client.install.options import InstallOptions
from core.kube.types import Manifest
from core.models.names import MOVER_SERVICE_ACCOUNT, SERVICE_ACCOUNT
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, Permission, Scope, agent_permissions

__all__ = [
    "VOLUME_SECRETS_ROLE",
    "build_agent_roles",
    "build_mover_roles",
    "build_rule",
    "build_service_accounts",
    "build_volume_secrets_roles",
    "in_scope",
]

VOLUME_SECRETS_ROLE: Final = "node-agent-volume-secrets"

_RBAC: Final = "rbac.authorization.k8s.io"
_API: Final = f"{_RBAC}/v1"


def build_service_accounts(options: InstallOptions) -> list[Manifest]:
    """Return the ServiceAccounts that do not exist yet: of agents, and of data movers."""
    accounts = []
    for given, name in (
        (options.service_account, SERVICE_ACCOUNT),
        (options.mover_service_account, MOVER_SERVICE_ACCOUNT),
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
    return _roles(options, SERVICE_ACCOUNT, options.account, permissions)


def build_mover_roles(options: InstallOptions) -> list[Manifest]:
    """Return the role of data movers and its binding."""
    return _roles(options, MOVER_SERVICE_ACCOUNT, options.mover_account, MOVER_PERMISSIONS)


def build_volume_secrets_roles(options: InstallOptions) -> list[Manifest]:
    """Return the roles by which agents copy Secrets and ConfigMaps of volumes, and their bindings."""
    return _roles(options, VOLUME_SECRETS_ROLE, options.account, COPY_PERMISSIONS)


def in_scope(permissions: Iterable[Permission], scope: Scope) -> list[Permission]:
    """Return the permissions of one scope: the rules of one role, in their order."""
    return [permission for permission in permissions if permission.scope is scope]


def build_rule(permission: Permission) -> Manifest:
    """Return a permission as a rule of a role."""
    rule: Manifest = {"apiGroups": [permission.resource.group], "resources": [permission.path]}
    if permission.names:
        rule["resourceNames"] = list(permission.names)
    return {**rule, "verbs": list(permission.verbs)}


def _roles(options: InstallOptions, name: str, account: str, permissions: Iterable[Permission]) -> list[Manifest]:
    objects = []
    permissions = tuple(permissions)
    for scope, kind, own_name, namespace in (
        (Scope.OWN_NAMESPACE, "Role", name, options.namespace),
        (Scope.CLUSTER, "ClusterRole", options.cluster_name(name), ""),
    ):
        rules = [build_rule(permission) for permission in in_scope(permissions, scope)]
        if not rules:
            continue
        objects.append({**build_object(_API, kind, own_name, namespace), "rules": rules})
        objects.append(
            {
                **build_object(_API, f"{kind}Binding", own_name, namespace),
                "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": own_name},
                "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": options.namespace}],
            }
        )
    return objects

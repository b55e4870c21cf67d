"""What `deploy/` grants against the permissions that the agent requires."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodeagent.runtime.permissions import PERMISSIONS, Permission, Scope

_ROOT = Path(__file__).parents[2]
_RBAC = _ROOT / "deploy" / "agent" / "rbac.yaml"


def _documents() -> dict[str, dict[str, Any]]:
    return {doc["kind"]: doc for doc in yaml.safe_load_all(_RBAC.read_text(encoding="utf-8"))}


def _granted(kind: str) -> set[tuple[str, str, str, str]]:
    """Return what a role grants: group, resource, verb, and the one object's name or nothing."""
    return {
        (group, resource, verb, name)
        for rule in _documents()[kind]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def _needed(scope: Scope) -> set[tuple[str, str, str, str]]:
    return {
        (permission.resource.group, permission.path, verb, name)
        for permission in PERMISSIONS
        if permission.scope is scope
        for verb in permission.verbs
        for name in permission.names or ("",)
    }


@pytest.mark.parametrize(
    ("kind", "scope"), [("Role", Scope.OWN_NAMESPACE), ("ClusterRole", Scope.CLUSTER)], ids=["Role", "ClusterRole"]
)
def test_a_role_grants_what_is_needed_and_nothing_else(kind: str, scope: Scope) -> None:
    assert _granted(kind) == _needed(scope)


def test_every_rule_states_its_reason() -> None:
    reasons = re.findall(r"(?m)^  # (.*)\n  - apiGroups:", _RBAC.read_text(encoding="utf-8"))
    assert reasons == [permission.reason for permission in PERMISSIONS]


@pytest.mark.parametrize("kind", ["Role", "ClusterRole"])
def test_there_are_no_wildcards(kind: str) -> None:
    assert not [granted for granted in _granted(kind) if any("*" in part for part in granted)]


@pytest.mark.parametrize("kind", ["Role", "ClusterRole"])
def test_no_role_can_widen_itself_or_run_commands_in_pods(kind: str) -> None:
    forbidden = {"pods/exec", "pods/attach", "pods/portforward", "pods/ephemeralcontainers", "serviceaccounts/token"}
    for group, resource, verb, _ in _granted(kind):
        assert group != "rbac.authorization.k8s.io"
        assert resource not in forbidden
        assert verb not in {"escalate", "bind", "impersonate", "deletecollection"}


def test_secrets_are_never_listed_nor_read_outside_the_namespace() -> None:
    assert {(scope, verb) for scope, verb in _secret_verbs()} == {
        (Scope.OWN_NAMESPACE, "get"),
        (Scope.OWN_NAMESPACE, "create"),
    }


def _secret_verbs() -> list[tuple[Scope, str]]:
    return [
        (permission.scope, verb)
        for permission in PERMISSIONS
        if permission.path == "secrets"
        for verb in permission.verbs
    ]


@pytest.mark.parametrize("kind", ["RoleBinding", "ClusterRoleBinding"])
def test_bindings_name_the_agents_account(kind: str) -> None:
    binding = _documents()[kind]
    assert binding["roleRef"]["name"] == "node-agent"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "node-agent", "namespace": "velero"}]


@pytest.mark.parametrize(
    "permission", PERMISSIONS, ids=lambda permission: f"{permission.path}-{permission.scope}-{permission.names}"
)
def test_security_md_lists_every_permission_with_its_reason(permission: Permission) -> None:
    verbs = ", ".join(permission.verbs)
    name = f"{permission.resource.group}/{permission.path}" if permission.resource.group else permission.path
    only = f" (only {', '.join(permission.names)})" if permission.names else ""
    row = f"| {permission.where} | `{name}`{only} | {verbs} | {permission.reason} |"
    assert row in (_ROOT / "SECURITY.md").read_text(encoding="utf-8")

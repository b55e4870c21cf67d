"""What `deploy/` grants against what agent and data movers say they need."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from client.permissions import VERIFY_PERMISSIONS
from core.models.names import MOVER_SERVICE_ACCOUNT, RESTORE_TEST_ACCOUNT, SERVICE_ACCOUNT
from nodeagent.runtime.permissions import (
    COPY_PERMISSIONS,
    MOVER_PERMISSIONS,
    Permission,
    Scope,
    agent_permissions,
)

_ROOT = Path(__file__).parents[2]
_AGENT_PERMISSIONS = agent_permissions("node-agent-config")


@dataclass(frozen=True)
class _Role:
    """A role of `deploy/`: its kind and file, and the permissions that it grants to an account."""

    kind: str
    account: str
    file: str
    permissions: tuple[Permission, ...]
    name: str

    @property
    def text(self) -> str:
        return (_ROOT / "deploy" / self.file).read_text(encoding="utf-8")

    def document(self, kind: str) -> dict[str, Any]:
        return next(doc for doc in yaml.safe_load_all(self.text) if doc["kind"] == kind)

    @property
    def granted(self) -> set[tuple[str, str, str, str]]:
        """What it grants: group, resource, verb, and the one object's name or nothing."""
        return {
            (group, resource, verb, name)
            for rule in self.document(self.kind)["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
            for name in rule.get("resourceNames", [""])
        }


def _in_scope(permissions: Collection[Permission], scope: Scope) -> tuple[Permission, ...]:
    return tuple(permission for permission in permissions if permission.scope is scope)


_COPIES = "node-agent-volume-secrets"
_ROLES = {
    "agent": _Role(
        "Role",
        SERVICE_ACCOUNT,
        "agent/rbac.yaml",
        _in_scope(_AGENT_PERMISSIONS, Scope.OWN_NAMESPACE),
        SERVICE_ACCOUNT,
    ),
    "agent, all namespaces": _Role(
        "ClusterRole",
        SERVICE_ACCOUNT,
        "agent/rbac.yaml",
        _in_scope(_AGENT_PERMISSIONS, Scope.CLUSTER),
        f"velero-{SERVICE_ACCOUNT}",
    ),
    "mover": _Role("Role", MOVER_SERVICE_ACCOUNT, "agent/mover.yaml", MOVER_PERMISSIONS, MOVER_SERVICE_ACCOUNT),
    "copies": _Role(
        "Role",
        SERVICE_ACCOUNT,
        "volume-secrets/rbac.yaml",
        _in_scope(COPY_PERMISSIONS, Scope.OWN_NAMESPACE),
        _COPIES,
    ),
    "copies, all namespaces": _Role(
        "ClusterRole",
        SERVICE_ACCOUNT,
        "volume-secrets/rbac.yaml",
        _in_scope(COPY_PERMISSIONS, Scope.CLUSTER),
        f"velero-{_COPIES}",
    ),
    "restore tests": _Role(
        "Role",
        RESTORE_TEST_ACCOUNT,
        "restore-tests/account.yaml",
        _in_scope(VERIFY_PERMISSIONS, Scope.OWN_NAMESPACE),
        RESTORE_TEST_ACCOUNT,
    ),
    "restore tests, all namespaces": _Role(
        "ClusterRole",
        RESTORE_TEST_ACCOUNT,
        "restore-tests/account.yaml",
        _in_scope(VERIFY_PERMISSIONS, Scope.CLUSTER),
        f"velero-{RESTORE_TEST_ACCOUNT}",
    ),
}
_each_role = pytest.mark.parametrize("role", _ROLES.values(), ids=_ROLES.keys())


@_each_role
def test_a_role_grants_what_is_needed_and_nothing_else(role: _Role) -> None:
    assert role.granted == {
        (permission.resource.group, permission.path, verb, name)
        for permission in role.permissions
        for verb in permission.verbs
        for name in permission.names or ("",)
    }


@pytest.mark.parametrize(
    ("file", "permissions"),
    [
        ("agent/rbac.yaml", _AGENT_PERMISSIONS),
        ("agent/mover.yaml", MOVER_PERMISSIONS),
        ("volume-secrets/rbac.yaml", COPY_PERMISSIONS),
        ("restore-tests/account.yaml", VERIFY_PERMISSIONS),
    ],
    ids=["agent", "mover", "copies", "restore tests"],
)
def test_every_rule_states_its_reason(file: str, permissions: tuple[Permission, ...]) -> None:
    text = (_ROOT / "deploy" / file).read_text(encoding="utf-8")
    reasons = re.findall(r"(?m)^  # (.*)\n  - apiGroups:", text)
    in_order = _in_scope(permissions, Scope.OWN_NAMESPACE) + _in_scope(permissions, Scope.CLUSTER)
    assert reasons == [permission.reason for permission in in_order]


@_each_role
def test_there_are_no_wildcards(role: _Role) -> None:
    assert not [granted for granted in role.granted if any("*" in part for part in granted)]


@_each_role
def test_no_role_can_widen_itself_or_run_commands_in_pods(role: _Role) -> None:
    forbidden = {"pods/exec", "pods/attach", "pods/portforward", "pods/ephemeralcontainers", "serviceaccounts/token"}
    for group, resource, verb, _ in role.granted:
        assert group != "rbac.authorization.k8s.io"
        assert resource not in forbidden
        assert verb not in {"escalate", "bind", "impersonate", "deletecollection"}


@pytest.mark.parametrize(
    ("permissions", "verbs"),
    [(_AGENT_PERMISSIONS, {"get", "create"}), (MOVER_PERMISSIONS, {"get"})],
    ids=["agent", "mover"],
)
def test_secrets_are_never_listed_nor_read_outside_the_namespace(
    permissions: tuple[Permission, ...], verbs: set[str]
) -> None:
    secrets = [permission for permission in permissions if permission.path == "secrets"]
    assert {permission.scope for permission in secrets} == {Scope.OWN_NAMESPACE}
    assert {verb for permission in secrets for verb in permission.verbs} == verbs


def test_configmaps_are_only_read_and_changed_by_name() -> None:
    unnamed = [each for each in _AGENT_PERMISSIONS if each.path == "configmaps" and not each.names]
    assert [permission.verbs for permission in unnamed] == [("create",)]


def test_a_mover_can_change_nothing_and_has_no_permission_outside_its_namespace() -> None:
    assert {permission.scope for permission in MOVER_PERMISSIONS} == {Scope.OWN_NAMESPACE}
    writes = {
        (permission.path, verb)
        for permission in MOVER_PERMISSIONS
        for verb in permission.verbs
        if verb not in {"get", "list", "watch"}
    }
    assert writes == {("backuprepositories", "create"), ("events", "create")}


@_each_role
def test_a_binding_names_the_account_of_its_role(role: _Role) -> None:
    binding = role.document(f"{role.kind}Binding")
    assert binding["roleRef"]["name"] == role.document(role.kind)["metadata"]["name"] == role.name
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": role.account, "namespace": "velero"}]

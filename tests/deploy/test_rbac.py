"""What `deploy/` and the example of a role for installers grant, against what agent, data movers and they need."""

from pathlib import Path

import pytest
import yaml

from client.install.manifests import build_everything, build_rule, in_scope, read_definitions
from client.permissions import VERIFY_PERMISSIONS, installer_permissions
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, Permission, Scope, agent_permissions

_ROOT = Path(__file__).parents[2]
_AGENT_PERMISSIONS = agent_permissions("node-agent-config")
_FILES = {
    "agent/rbac.yaml": _AGENT_PERMISSIONS,
    "agent/mover.yaml": MOVER_PERMISSIONS,
    "volume-secrets/rbac.yaml": COPY_PERMISSIONS,
    "restore-tests/account.yaml": VERIFY_PERMISSIONS,
}
_KINDS = {Scope.OWN_NAMESPACE: "Role", Scope.CLUSTER: "ClusterRole"}
_FORBIDDEN = {"pods/exec", "pods/attach", "pods/portforward", "pods/ephemeralcontainers", "serviceaccounts/token"}


@pytest.mark.parametrize(("file", "permissions"), _FILES.items(), ids=_FILES)
def test_roles_grant_what_is_needed_and_nothing_else(file: str, permissions: tuple[Permission, ...]) -> None:
    documents = yaml.safe_load_all((_ROOT / "deploy" / file).read_text(encoding="utf-8"))
    granted = {
        (role["kind"], group, resource, verb, name)
        for role in documents
        if role["kind"] in _KINDS.values()
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }
    assert granted == {
        (_KINDS[permission.scope], permission.resource.group, permission.path, verb, name)
        for permission in permissions
        for verb in permission.verbs
        for name in permission.names or ("",)
    }


@pytest.mark.parametrize("scope", Scope)
def test_the_role_of_a_person_who_installs_has_exactly_the_permissions(scope: Scope) -> None:
    roles = yaml.safe_load_all((_ROOT / "examples" / "installer.yaml").read_text(encoding="utf-8"))
    needed = installer_permissions([*read_definitions(), *build_everything("velero")])
    role = next(one for one in roles if one["kind"] == _KINDS[scope])
    assert role["rules"] == [build_rule(one) for one in in_scope(needed, scope)]


@pytest.mark.parametrize("permissions", _FILES.values(), ids=_FILES)
def test_no_role_has_wildcards_can_widen_itself_or_run_commands_in_pods(permissions: tuple[Permission, ...]) -> None:
    for one in permissions:
        assert "*" not in "".join((one.resource.group, one.path, *one.verbs, *one.names))
        assert one.resource.group != "rbac.authorization.k8s.io"
        assert one.path not in _FORBIDDEN
        assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(one.verbs)


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

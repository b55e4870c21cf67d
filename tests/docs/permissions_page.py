"""The page of permissions: one table for each account and command, from the permissions in the code."""

import textwrap
from collections.abc import Sequence
from typing import Final, NamedTuple

from client.install.manifests import build_everything, read_definitions
from client.permissions import (
    BACKUP_PERMISSIONS,
    DESCRIBE_PERMISSIONS,
    FILES_PERMISSIONS,
    READ_BACK_PERMISSIONS,
    REPO_PERMISSIONS,
    RESTORE_PERMISSIONS,
    STATUS_PERMISSIONS,
    SUPPORT_BUNDLE_PERMISSIONS,
    UNINSTALL_PERMISSIONS,
    VERIFY_PERMISSIONS,
    VERSION_PERMISSIONS,
    VOLUME_CHECK_PERMISSIONS,
    VOLUMES_PERMISSIONS,
    installer_permissions,
)
from client.schedules.manifests import (
    DELETION_PERMISSIONS,
    EXPIRY_PERMISSIONS,
    SCHEDULE_PERMISSIONS,
    SCHEDULED_PERMISSIONS,
)
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, Permission, agent_permissions

_HEAD = """\
# Permissions

Generated from the permissions in the code (`tests/docs/permissions_page.py`). [SECURITY.md](../SECURITY.md) says what
an attacker gains by them.

`deploy/` grants the first three tables, without wildcards, and tests compare the roles with them. A command acts with
the permissions of the user who runs it, and no role in `deploy/` grants these, except `deploy/restore-tests`
([`nodeagent backup verify`](#nodeagent-backup-verify)). *Its namespace* is the namespace of the agents.

Three permissions are the most powerful. Grant them only to those who may do what the agents may:
- `create` on Jobs or pods runs any image with any account of the namespace, and so reads its Secrets.
- `create` on DataUploads reads any volume of the cluster into the bucket.
- `create` on DataDownloads writes any kopia snapshot of the locations into a PVC.
"""


class _Section(NamedTuple):
    heading: str
    about: str
    permissions: Sequence[Permission]


_SECTIONS: Final = (
    _Section(
        "Agent",
        "`configmaps` are limited to the names in the agents' flags: `nodeagent install` and the chart write them. "
        "With kustomize, patch `resourceNames` of the Role `node-agent`. The agent checks its permissions when it "
        "starts, and reports what is missing. Where movers have no account of their own, it checks theirs too. "
        "Permissions in every namespace are needed because the PVCs and snapshots of workloads are there.",
        agent_permissions("node-agent-config"),
    ),
    _Section(
        "Agent: copies of Secrets",
        "Only `secretNames` and `configMapNames` "
        "([configuration.md](configuration.md#secrets-of-encrypted-volumes)) need these, and only "
        "`deploy/volume-secrets` grants them. As it is, the agent can read every Secret of the cluster: add the "
        "configured names as `resourceNames` to the ClusterRole. The agent checks `get` for these names alone, and "
        "logs a warning if a permission is missing.",
        COPY_PERMISSIONS,
    ),
    _Section(
        "Data mover",
        "`get` on Secrets is not limited to names, because locations name theirs freely.",
        MOVER_PERMISSIONS,
    ),
    _Section(
        "nodeagent install",
        "[`nodeagent install`](install.md#permissions) checks these first, here for the namespace `velero`, and "
        "applies nothing if one is missing. Rows that name a flag are needed only with it. With all permissions of "
        "agents and data movers, neither `escalate` nor `bind` is needed. To renew schedules it also uses the "
        "permissions of [`nodeagent schedule`](#nodeagent-schedule); without them it says what to run. An account "
        "that may create the DaemonSet and bind its roles can become the agent.",
        installer_permissions([*read_definitions(), *build_everything("velero")]),
    ),
    _Section(
        "nodeagent uninstall",
        "Besides: `get` of the rows [above](#nodeagent-install), and `delete` on the objects that it lists as "
        "removed. The command checks these rows first, and `delete` before it asks. Without the rows `in every "
        "namespace` it works, but does not say how to delete the definitions.",
        UNINSTALL_PERMISSIONS,
    ),
    _Section(
        "nodeagent version",
        "",
        VERSION_PERMISSIONS,
    ),
    _Section(
        "nodeagent preflight",
        "`create` on pods in every namespace is as much as an administrator has. With `--namespace-for-test`, the "
        "rows `in every namespace` are needed in that namespace only, and `namespaces` with the verb `get` on its "
        "name. It works without the last two rows.",
        VOLUME_CHECK_PERMISSIONS,
    ),
    _Section(
        "nodeagent backup",
        "On PVCs, snapshots and pods, permissions in the namespaces of the PVCs suffice.",
        BACKUP_PERMISSIONS,
    ),
    _Section(
        "nodeagent backup verify",
        "The Job has the account of the data movers, is confined like one, and may only read its location and the "
        "scratch volume. For [restore tests](repositories.md#restore-tests), `nodeagent install --restore-tests`, "
        "`restoreTests` of the chart or the kustomize component `deploy/restore-tests` grant exactly these to an "
        "account of their own, `node-agent-restore-test`; without it, no account has them. The agents themselves get "
        "no permission, but may start pods with every account of their namespace.",
        VERIFY_PERMISSIONS,
    ),
    _Section(
        "nodeagent backup delete",
        "The Job has the account of the data movers, and deletes only snapshots whose tags name this cluster, the "
        "backup and its transfer.",
        DELETION_PERMISSIONS,
    ),
    _Section(
        "nodeagent backup ls and cp",
        "Anyone with these can read every file of every volume that the namespace backs up. `create` on `pods/exec` "
        "runs any program in any of its pods, agents included. [SECURITY.md](../SECURITY.md#files-out-of-a-backup) "
        "says how the files reach the user.",
        FILES_PERMISSIONS,
    ),
    _Section(
        "nodeagent restore",
        "Also for `nodeagent backup get --from-storage-location`. On PVCs, permissions in the namespaces of the new "
        "PVCs suffice. The Job has the account of the data movers, is confined like one, and may only read its "
        "location.",
        RESTORE_PERMISSIONS,
    ),
    _Section(
        "nodeagent schedule",
        "`schedule run` also needs the permissions of `nodeagent backup create` and `delete`. A user who has all "
        "permissions of the account below needs neither `escalate` nor `bind`.",
        SCHEDULE_PERMISSIONS,
    ),
    _Section(
        "Account of a schedule",
        "`schedule create` makes an account for each schedule, `node-agent-schedule-NAME`, with roles of exactly "
        "these permissions; none grants access to Secrets. On PVCs, snapshots and pods they are granted in the "
        "namespaces of its PVCs alone: on PVCs `get` if it names them, else `list`; on snapshots and classes unless "
        "the method is `fs-backup`; on pods unless it is `csi-snapshot`.",
        SCHEDULED_PERMISSIONS,
    ),
    _Section(
        "Account of a schedule that verifies",
        "With `--verify` also these.",
        READ_BACK_PERMISSIONS,
    ),
    _Section(
        "Account of a schedule that deletes",
        "With `--ttl` or `--keep-...` also these. RBAC cannot limit `create` on Jobs to the Job that deletes "
        "snapshots, so anyone "
        "who may start pods with this account, or read its tokens, can do what the agents can. A schedule without "
        "these and `--verify` may create no Jobs: then delete expired backups with one other schedule, or by "
        "hand.",
        EXPIRY_PERMISSIONS,
    ),
    _Section(
        "nodeagent repo",
        "`get` on `pods/proxy` reads everything that pods of the namespace serve. Without the permissions for Jobs "
        "and logs there is no report; without others, `get` and `describe` show less, and say what is missing.",
        REPO_PERMISSIONS,
    ),
    _Section(
        "nodeagent status",
        "Only `--watch` and `--wait-idle` watch. What may not be read is unknown in the answer, and never healthy.",
        STATUS_PERMISSIONS,
    ),
    _Section(
        "nodeagent volumes",
        "With `-n`, those on PVCs and pods in that namespace suffice. What may not be read is a note in the answer.",
        VOLUMES_PERMISSIONS,
    ),
    _Section(
        "nodeagent describe",
        "The log of a data mover has names of files.",
        DESCRIBE_PERMISSIONS,
    ),
    _Section(
        "nodeagent support-bundle",
        "Without some of them the bundle has less, and names what is missing. It never reads a Secret.",
        SUPPORT_BUNDLE_PERMISSIONS,
    ),
)


def build_permissions_page() -> str:
    """Return docs/permissions.md."""
    return "\n".join([_HEAD, *map(_render, _SECTIONS)])


def _render(section: _Section) -> str:
    about = [textwrap.fill(section.about, 120, break_on_hyphens=False), ""] if section.about else []
    rows = map(_row, section.permissions)
    table = ["| where | what | verbs | why |", "| --- | --- | --- | --- |", *rows]
    return "\n".join([f"## {section.heading}", *about, *table]) + "\n"


def _row(permission: Permission) -> str:
    name = f"{permission.resource.group}/{permission.path}" if permission.resource.group else permission.path
    return f"| {permission.where} | `{name}`{permission.only} | {', '.join(permission.verbs)} | {permission.reason} |"

"""Tables of pages that are generated from the code: `UPDATE_GOLDEN=1 make unit TESTS=tests/docs` writes them."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from client import permissions as of_users
from client.install.manifests import build_everything, read_definitions
from client.schedules import manifests as of_schedules
from nodeagent.metrics import METRICS, Counter, Metric
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, Permission, agent_permissions
from tools.modules import list_modules, read_responsibility

_ROOT = Path(__file__).parents[2]

_PERMISSIONS: Final[dict[str, Sequence[Permission]]] = {
    "Agent": agent_permissions("node-agent-config"),
    "Agent: copies of Secrets": COPY_PERMISSIONS,
    "Data mover": MOVER_PERMISSIONS,
    "nodeagent install": of_users.installer_permissions([*read_definitions(), *build_everything("velero")]),
    "nodeagent uninstall": of_users.UNINSTALL_PERMISSIONS,
    "nodeagent version": of_users.VERSION_PERMISSIONS,
    "nodeagent preflight": of_users.VOLUME_CHECK_PERMISSIONS,
    "nodeagent backup": of_users.BACKUP_PERMISSIONS,
    "nodeagent backup verify": of_users.VERIFY_PERMISSIONS,
    "nodeagent backup delete": of_schedules.DELETION_PERMISSIONS,
    "nodeagent backup ls and cp": of_users.FILES_PERMISSIONS,
    "nodeagent restore": of_users.RESTORE_PERMISSIONS,
    "nodeagent schedule": of_schedules.SCHEDULE_PERMISSIONS,
    "Account of a schedule": of_schedules.SCHEDULED_PERMISSIONS,
    "Account of a schedule that verifies": of_users.READ_BACK_PERMISSIONS,
    "Account of a schedule that deletes": of_schedules.EXPIRY_PERMISSIONS,
    "nodeagent repo": of_users.REPO_PERMISSIONS,
    "nodeagent status": of_users.STATUS_PERMISSIONS,
    "nodeagent volumes": of_users.VOLUMES_PERMISSIONS,
    "nodeagent describe": of_users.DESCRIBE_PERMISSIONS,
    "nodeagent support-bundle": of_users.SUPPORT_BUNDLE_PERMISSIONS,
}
"""By the headings of the page, one table for each account and command."""


def _table(*rows: Sequence[str]) -> str:
    first, *others = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([first, "| " + " | ".join("---" for _ in rows[0]) + " |", *others]) + "\n"


def _permission_row(permission: Permission) -> Sequence[str]:
    name = f"{permission.resource.group}/{permission.path}" if permission.resource.group else permission.path
    return permission.where, f"`{name}`{permission.only}", ", ".join(permission.verbs), permission.reason


def _renew_permissions(page: str) -> str:
    head, *sections = page.split("\n## ")
    texts = {section.partition("\n")[0]: section.partition("| where |")[0] for section in sections}
    assert list(texts) == list(_PERMISSIONS)
    heads = ("where", "what", "verbs", "why")
    tables = {heading: _table(heads, *map(_permission_row, _PERMISSIONS[heading])) for heading in texts}
    return "\n## ".join([head, *(text + tables[heading] for heading, text in texts.items())])


def _metric_row(metric: Metric) -> Sequence[str]:
    name = f"{metric.name}_total" if isinstance(metric, Counter) and not metric.bare else metric.name
    return f"`{name}`", type(metric).__name__.lower(), ", ".join(f"`{name}`" for name in metric.labels), metric.text


def _renew_metrics(page: str) -> str:
    rows = map(_metric_row, sorted(METRICS, key=lambda metric: metric.name))
    return page.partition("| metric |")[0] + _table(("metric", "type", "labels", "meaning"), *rows)


@pytest.mark.parametrize(("name", "renew"), [("metrics", _renew_metrics), ("permissions", _renew_permissions)])
def test_the_tables_of_a_page_match_the_code(name: str, renew: Callable[[str], str]) -> None:
    path = _ROOT / f"docs/{name}.md"
    page = path.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(renew(page), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == renew(page)


def test_every_module_and_folder_has_a_responsibility() -> None:
    """A noun phrase or a command on one line: `python -m tools.modules` shows it."""
    lines = {str(path): read_responsibility(path) for path in list_modules()}
    assert [path for path, line in lines.items() if not re.fullmatch(r"\S[^\n]{10,160}", line)] == []

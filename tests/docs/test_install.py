"""docs/install.md: the role of the person who installs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from client.install.manifests import build_everything, build_rule, in_scope, read_definitions
from client.permissions import installer_permissions
from nodeagent.runtime.permissions import Scope

_PAGE = (Path(__file__).parents[2] / "docs" / "install.md").read_text(encoding="utf-8")
_PERMISSIONS = installer_permissions([*read_definitions(), *build_everything("velero")])


@pytest.mark.parametrize(("kind", "scope"), [("ClusterRole", Scope.CLUSTER), ("Role", Scope.OWN_NAMESPACE)])
def test_the_role_on_the_page_has_exactly_the_permissions(kind: str, scope: Scope) -> None:
    section = _PAGE.partition("### Permissions\n")[2].partition("\n#")[0]
    block = textwrap.dedent("\n".join(re.findall(r"(?m)^    .*$", section)))
    role = next(one for one in yaml.safe_load_all(block) if one and one["kind"] == kind)
    assert role["rules"] == [build_rule(one) for one in in_scope(_PERMISSIONS, scope)]

"""examples/installer.yaml: the role of the person who installs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from client.install.manifests import build_everything, build_rule, in_scope, read_definitions
from client.permissions import installer_permissions
from nodeagent.runtime.permissions import Scope

_ROLES = (Path(__file__).parents[2] / "examples" / "installer.yaml").read_text(encoding="utf-8")
_PERMISSIONS = installer_permissions([*read_definitions(), *build_everything("velero")])


@pytest.mark.parametrize(("kind", "scope"), [("ClusterRole", Scope.CLUSTER), ("Role", Scope.OWN_NAMESPACE)])
def test_the_example_has_exactly_the_permissions(kind: str, scope: Scope) -> None:
    role = next(one for one in yaml.safe_load_all(_ROLES) if one["kind"] == kind)
    assert role["rules"] == [build_rule(one) for one in in_scope(_PERMISSIONS, scope)]

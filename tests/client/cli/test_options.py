"""Options that commands have in common: a command that is shown leads to the same cluster."""

import pytest

from client.cli.options import command_for
from nodeagent.runtime.connection import ClusterAccess


@pytest.mark.parametrize(
    ("access", "environ", "flags"),
    [
        (ClusterAccess(namespace="velero"), "", ""),
        (ClusterAccess(namespace="agents"), "", " --agent-namespace agents"),
        (ClusterAccess(namespace="agents"), "agents", " --agent-namespace agents"),
        (ClusterAccess(namespace="velero"), "agents", " --agent-namespace velero"),
        (ClusterAccess("/my files/c", "blue", "velero"), "", " --kubecontext blue --kubeconfig '/my files/c'"),
    ],
)
def test_a_shown_command_has_flags(
    monkeypatch: pytest.MonkeyPatch, access: ClusterAccess, environ: str, flags: str
) -> None:
    monkeypatch.setenv("VELERO_NAMESPACE", environ)
    assert command_for(access, "nodeagent restore get") == f"nodeagent restore get{flags}"

"""The commands for users beside those of an agent: who loads what, and what happens without the extra."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from click.shell_completion import ShellComplete

from client.cli.user_commands import _root
from nodeagent.__main__ import complete, main
from tests.client.support.commands import reach
from tests.client.support.user_scene import NAME, UserScene

_ROOT = Path(__file__).parents[3]
_MODULES = ("client.cli.user_commands", "client.cli.repo", "client.cli.options", "client.cli.output")


@pytest.mark.parametrize("package", ["click", "rich"])
def test_without_the_extra_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in list(sys.modules):
        if name in {*_MODULES, "client.cli.repo"} or name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["repo", "get"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: repo needs the Python package {package}: install node-agent with its extra")
    assert captured.err.count("\n") == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    "use",
    [
        "import nodeagent.app",
        "from nodeagent.__main__ import main\ntry: main(['serve', '--help'])\nexcept SystemExit: pass",
    ],
    ids=["agent", "serve --help"],
)
def test_an_agent_loads_no_command_for_users(use: str) -> None:
    code = f"{use}\nimport sys\nfound = {{n for n in sys.modules if n.split('.')[0] in {{'click', 'rich'}}}}\n"
    code += "found |= {n for n in sys.modules if n.startswith('client')}\nprint('loaded:', sorted(found))"
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("loaded: []\n")


@pytest.mark.processes
def test_a_command_without_a_configuration_does_not_load_its_models() -> None:
    code = "import client.cli.preflight, client.cli.support_bundle, client.cli.version, sys\n"
    code += "print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.processes
def test_a_shell_completes_commands() -> None:
    asked = {"_NODEAGENT_COMPLETE": "bash_complete", "COMP_WORDS": "nodeagent repo d", "COMP_CWORD": "2"}
    argv = [sys.executable, "-m", "nodeagent"]
    done = subprocess.run(argv, cwd=_ROOT, env=os.environ | asked, capture_output=True, text=True, check=True)
    assert done.stdout == "plain,describe\n"


@pytest.mark.parametrize(
    ("fault", "expected"), [(None, [NAME]), (403, []), ("lost", [])], ids=["cluster", "forbidden", "no cluster"]
)
def test_a_shell_completes_the_names_of_repositories(
    monkeypatch: pytest.MonkeyPatch, fault: Literal["lost"] | int | None, expected: list[str]
) -> None:
    scene = UserScene()
    scene.put_repository(name="db-default-kopia")
    if fault is not None:
        scene.kube.fail_next("GET", "/backuprepositories", fault, times=9)
    reach(lambda: scene.kube, monkeypatch)
    complete = ShellComplete(_root, {}, "nodeagent", "_NODEAGENT_COMPLETE")
    found = complete.get_completions(["repo", "describe", "-n", "velero"], "ap")
    assert [item.value for item in found] == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["des"], "describe\tShow everything about one transfer, and...\n:4\n"),
        (["repo", "describe", "-n", "velero", "ap"], f"{NAME}\n:4\n"),
        (["backup", "create", "night", "--method", "c"], "csi-snapshot\n:4\n"),
        (["backup", "get", "--kubeconfig", "s"], ":0\n"),
        (["install", "--secret-file", "s"], ":0\n"),
        (["install", "--prefix", "s"], ":4\n"),
    ],
    ids=["command", "name", "value", "kubeconfig", "file", "no file"],
)
def test_kubectl_completes_its_plug_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    scene = UserScene()
    reach(lambda: scene.kube, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-nodeagent", *words])
    assert complete() == 0
    assert capsys.readouterr().out == expected


def test_kubectl_completes_nothing_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "client.cli.user_commands", None)
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-nodeagent", ""])
    assert complete() == 1
    assert capsys.readouterr() == ("", "")

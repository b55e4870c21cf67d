"""The workflows of GitHub: what they may do, which actions they run, and that the targets that they call exist."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.tools import tool

_ROOT = Path(__file__).parents[2]
_WORKFLOWS = sorted((_ROOT / ".github" / "workflows").glob("*.yaml"))
_each = pytest.mark.parametrize("path", _WORKFLOWS, ids=[path.stem for path in _WORKFLOWS])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _load(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(_text(path))
    return found


@pytest.mark.processes
def test_actionlint_finds_nothing() -> None:
    argv = [str(tool("actionlint", "actionlint")), "-color=false", *map(str, _WORKFLOWS)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@_each
def test_actions_are_pinned_by_commit_and_name_their_version(path: Path) -> None:
    used = re.findall(r"(?m)^\s*(?:- )?uses: (.*)$", _text(path))
    assert used
    for each in used:
        assert re.fullmatch(r"\./\S+|[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)


@_each
def test_a_workflow_may_only_read_unless_a_job_says_why(path: Path) -> None:
    workflow = _load(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        for scope in job.get("permissions", {}):
            assert re.search(rf"(?m)^ +{scope}: write # \w+", _text(path)), name


@_each
def test_no_expression_is_expanded_within_a_script(path: Path) -> None:
    """What an event contains, such as the name of a branch, would be run."""
    scripts = [step["run"] for job in _load(path)["jobs"].values() for step in job.get("steps", []) if "run" in step]
    assert not [script for script in scripts if "${{" in script]


@_each
def test_credentials_are_not_left_in_the_checkout(path: Path) -> None:
    steps = [step for job in _load(path)["jobs"].values() for step in job.get("steps", [])]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_every_target_that_is_called_exists() -> None:
    commands = [command for path in _WORKFLOWS for command in re.findall(r"\bmake ((?: ?[a-z-]+)+)", _text(path))]
    called = {target for command in commands for target in command.split()}
    targets = set(re.findall(r"(?m)^([a-z-]+):", _text(_ROOT / "Makefile")))
    assert {"images", "release-check", "sbom"} <= called <= targets


def test_a_release_is_tested_before_it_is_published() -> None:
    (trigger,) = [value for key, value in _load(_ROOT / ".github/workflows/release.yaml").items() if key is True]
    jobs = _load(_ROOT / ".github/workflows/release.yaml")["jobs"]
    assert trigger == {"push": {"tags": ["v*"]}}
    assert jobs["publish"]["needs"] == "test"
    assert jobs["test"]["uses"] == "./.github/workflows/test.yaml"

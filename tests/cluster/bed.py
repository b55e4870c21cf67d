"""The cluster around the tests, and a namespace of their own in it."""

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.testbed.api import Api
from tests.testbed.demonstration.manifests import build_namespace
from tests.testbed.demonstration.user import User
from tests.testbed.layout import ROOT

_RUNNING = "daemonsets,jobs,pods,persistentvolumeclaims,volumesnapshots"
"""What a test leaves that takes room or processors, those first that create others."""


@dataclass(frozen=True)
class Bed:
    """The cluster that this process runs in."""

    env: Mapping[str, str]
    user: User

    @property
    def api(self) -> Api:
        return self.user.api

    @property
    def folder(self) -> Path:
        """Where the test bed keeps its files."""
        return Path(self.env["BED_DIR"])

    def command(self, *words: str, sources: Path = ROOT) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "nodeagent", *words]
        return subprocess.run(argv, cwd=sources, env=dict(self.env), capture_output=True, text=True, check=False)

    def said(self, *words: str) -> str:
        """Return what a command has printed, which must succeed."""
        done = self.command(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def document(self, *words: str) -> Any:
        """Return the JSON that a command has printed."""
        return json.loads(self.said(*words, "-o", "json"))


@contextmanager
def new_namespace(bed: Bed) -> Iterator[str]:
    """A namespace for as long as the context lasts; its pods and volumes are deleted after that.

    It stays, empty: to delete one takes a hundred requests, several for each kind of object that there is.
    """
    name = f"test-{secrets.token_hex(4)}"
    bed.user.apply(build_namespace(name))
    yield name
    bed.user.kubectl("delete", _RUNNING, "--all", "-n", name, "--wait=false")

"""The cluster around the tests, and a namespace of their own in it."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.api import Api
from tests.testbed.demonstration.manifests import build_namespace
from tests.testbed.demonstration.user import User

_RUNNING = "daemonsets,jobs,pods,persistentvolumeclaims,volumesnapshots"
"""What a test leaves that takes room or processors, those first that create others."""


@dataclass(frozen=True)
class Bed:
    """The cluster that this process runs in."""

    env: Mapping[str, str]
    user: User

    @property
    def api(self) -> Api:
        """A client with the administrator's permissions."""
        return self.user.api

    @property
    def folder(self) -> Path:
        """Where the test bed keeps its files."""
        return Path(self.env["BED_DIR"])


@contextmanager
def new_namespace(bed: Bed) -> Iterator[str]:
    """A namespace for as long as the context lasts; its pods and volumes are deleted after that.

    It stays, empty: to delete one takes a hundred requests, several for each kind of object that there is.
    """
    name = f"test-{secrets.token_hex(4)}"
    bed.user.apply(build_namespace(name))
    yield name
    bed.user.kubectl("delete", _RUNNING, "--all", "-n", name, "--wait=false")

"""Fixture that fails a test whose product code sends a request that `deploy/` does not permit.

Tests send requests as well, as users, controllers and kubelets, through clients of the same class;
the nearest caller of the client identifies the sender.
"""

import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from core.clock import Clock
from core.kube.transport import Request
from tests.support.access import Access, access_of, not_permitted
from tests.support.fakekube import FakeKube

__all__ = ["only_granted_requests"]

_NAMESPACE = "velero"
_PRODUCT = frozenset({"exposer", "nodeagent", "datamover"})


def _sent_by_product() -> bool:
    frame: FrameType | None = sys._getframe(1)
    in_client = False
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _PRODUCT:
            return True
        in_client = in_client or package == "core"
        if in_client and package == "tests":
            return False
        frame = frame.f_back
    return False


class _Requests(list[Request]):
    """The requests of one server, which records the accesses of the product."""

    def __init__(self, accesses: set[Access]) -> None:
        super().__init__()
        self._accesses = accesses

    def append(self, request: Request) -> None:
        super().append(request)
        if _sent_by_product():
            self._accesses.add(access_of(request))


@pytest.fixture(name="_only_granted_requests", autouse=True)
def only_granted_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    accesses: set[Access] = set()
    build = FakeKube.__init__

    def build_watched(kube: FakeKube, clock: Clock | None = None) -> None:
        build(kube, clock)
        kube.requests = _Requests(accesses)

    monkeypatch.setattr(FakeKube, "__init__", build_watched)
    yield
    if missing := not_permitted(accesses, _NAMESPACE):
        pytest.fail(
            f"nodeagent/runtime/permissions.py and deploy/agent/rbac.yaml do not allow: {missing}", pytrace=False
        )

"""What `nodeagent preflight` says about the definitions before it starts."""

from __future__ import annotations

import pytest

from client.cli.preflight import _describe_dropped
from core.kube.client import KubeClient
from core.kube.transport import Retry
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.versions import load_definitions


@pytest.mark.parametrize(
    ("version", "answer", "expected"),
    [
        ("main", None, ""),
        ("1.17.2", None, "definition datadownloads.velero.io lacks spec.restoreType, "),
        ("main", 403, "fields that the definitions drop are not known: "),
    ],
)
async def test_fields_that_are_dropped_are_named(version: str, answer: int | None, expected: str) -> None:
    kube = FakeKube()
    for definition in load_definitions(version).values():
        kube.put(definition)
    if answer is not None:
        kube.fail_next("GET", "/customresourcedefinitions/", answer)
    note = await _describe_dropped(KubeClient(kube, Retry(LoopClock())))
    assert note is not None
    assert note.startswith(expected)
    assert bool(note) is bool(expected)

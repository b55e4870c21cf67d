"""The settings of the next attempt of a transfer."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.models.names import ATTEMPTS_ANNOTATION
from core.models.phases import Attempts, Interruption, InterruptionCause, RetryRules
from core.models.transfers import DataUpload
from core.models.units import parse_quantity
from exposer.settings import ExposeSettings, PodSettings
from exposer.template import AgentTemplate
from tests.nodeagent.support.transfers import data_upload
from tests.support.objects import JsonDict

_OOM = InterruptionCause.OUT_OF_MEMORY


def _upload(*causes: InterruptionCause) -> DataUpload:
    attempts = Attempts()
    for cause in causes:
        attempts = attempts.interrupt(Interruption(at=datetime(2026, 1, 2, tzinfo=UTC), cause=cause))
    marks = {ATTEMPTS_ANNOTATION: attempts.to_json()} if causes else {}
    return DataUpload.parse(data_upload(status={"phase": "InProgress"}, annotations=marks))


def _resources(resources: JsonDict, rules: RetryRules, *causes: InterruptionCause) -> JsonDict:
    retries = {"DataUpload": rules, "DataDownload": RetryRules(oom_memory_factor=9)}
    settings = ExposeSettings(AgentTemplate("mover:1"), PodSettings(resources=resources), retries=retries)
    return settings.for_attempt(_upload(*causes)).pod.resources


_HALF = {"limits": {"cpu": "2", "memory": "2Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}}


def _memory(limit: str, request: str) -> JsonDict:
    return {"limits": {"cpu": "2", "memory": limit}, "requests": {"cpu": "1", "memory": request}}


@pytest.mark.parametrize("causes", [[], [InterruptionCause.KILLED], [InterruptionCause.EVICTED] * 3])
def test_the_settings_stay_while_no_data_mover_ran_out_of_memory(causes: list[InterruptionCause]) -> None:
    assert _resources(_HALF, RetryRules(), *causes) == _HALF


@pytest.mark.parametrize(
    ("times", "limit", "request_"),
    [
        pytest.param(1, "3072Mi", "1536Mi", id="once"),
        pytest.param(2, "4608Mi", "2304Mi", id="twice"),
        pytest.param(3, "6912Mi", "3456Mi", id="three times"),
        pytest.param(4, "8192Mi", "4096Mi", id="four times the limit at most"),
        pytest.param(9, "8192Mi", "4096Mi", id="again and again"),
    ],
)
def test_memory_grows_with_each_data_mover_that_ran_out_of_it(times: int, limit: str, request_: str) -> None:
    causes = [_OOM] * times + [InterruptionCause.KILLED]
    assert _resources(_HALF, RetryRules(), *causes) == _memory(limit, request_)


@pytest.mark.parametrize(
    ("most", "expected"),
    [("3Gi", "3072Mi"), ("20Gi", "20480Mi"), ("4G", "3814Mi"), ("1Gi", "2Gi"), ("2Gi", "2Gi"), ("2000Gi", "204800Mi")],
)
def test_the_configured_maximum_replaces_the_default_one(most: str, expected: str) -> None:
    rules = RetryRules(oom_memory_factor=10, oom_memory_limit_max=most)
    assert _resources(_HALF, rules, _OOM, _OOM)["limits"]["memory"] == expected


def test_a_factor_of_one_changes_nothing() -> None:
    assert _resources(_HALF, RetryRules(oom_memory_factor=1), _OOM, _OOM) == _HALF


@pytest.mark.parametrize("resources", [{}, {"requests": {"memory": "1Gi"}}, {"limits": {"cpu": "1"}}])
def test_a_pod_without_a_memory_limit_stays_without(resources: JsonDict) -> None:
    assert _resources(resources, RetryRules(), _OOM) == resources


def test_only_what_is_set_grows() -> None:
    resources = {"limits": {"memory": "512Mi", "ephemeral-storage": "8Gi"}, "requests": {"cpu": "1"}}
    grown = {"limits": {"memory": "768Mi", "ephemeral-storage": "8Gi"}, "requests": {"cpu": "1"}}
    assert _resources(resources, RetryRules(), _OOM) == grown


@given(
    limit=st.integers(1, 2**45),
    share=st.floats(0, 1),
    factor=st.floats(1, 10),
    most=st.integers(1, 2**45) | st.none(),
    times=st.integers(1, 10),
)
def test_a_grown_limit_covers_its_request_and_keeps_to_its_maximum(
    limit: int, share: float, factor: float, most: int | None, times: int
) -> None:
    request = int(limit * share)
    resources = {"limits": {"memory": str(limit)}, "requests": {"memory": str(request)}}
    rules = RetryRules(oom_memory_factor=factor, oom_memory_limit_max="" if most is None else str(most))
    grown = _resources(resources, rules, *[_OOM] * times)
    after, needed = (parse_quantity(grown[part]["memory"]) for part in ("limits", "requests"))
    assert needed <= after <= max(Decimal(limit), Decimal(most or 4 * limit))
    # Whole MiB.
    assert after > limit - 2**20

"""Each parser raises its own error alone, whatever it is given."""

import logging
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from core.contract import BackupResult, InitResult, MaintenanceResult, RestoreResult, parse_progress, parse_result
from core.errors import ConfigError, ContractError, ResultError
from core.kube.errors import KubeError, build_error, parse_json, parse_retry_after
from core.models.base import parse_time
from core.models.units import format_duration, parse_count, parse_duration, parse_quantity
from exposer.manifests import SnapshotSource
from nodeagent.config.parse import parse_config
from nodeagent.config.repositories import parse_settings_of
from nodeagent.transfers.mover_pod import MoverLoss
from nodeagent.transfers.outcome import Outcome
from tests.fuzz.cases import any_text
from tests.fuzz.values import hostile_answers
from tests.support.objects import only

_thoroughly = settings(max_examples=300, derandomize=True, database=None)


@_thoroughly
@given(any_text)
def test_texts_of_our_own_raise_contract_errors_alone(text: str) -> None:
    for model in (Outcome, MoverLoss, SnapshotSource):
        with suppress(ContractError):
            model.from_json(text)
    with suppress(ContractError):
        parse_progress(text)
    results: tuple[Any, ...] = (BackupResult, RestoreResult, InitResult, MaintenanceResult)
    for result in results:
        with suppress(ResultError):
            parse_result(result, text)
    with suppress(ContractError):
        parse_time(text)


@_thoroughly
@given(any_text)
def test_units_raise_value_errors_alone(text: str) -> None:
    with suppress(ValueError):
        format_duration(parse_duration(text))
    with suppress(ValueError):
        parse_quantity(text)
    parse_count(text)
    parse_retry_after(text)


@_thoroughly
@given(any_text)
def test_configurations_raise_config_errors_alone(text: str) -> None:
    logging.disable(logging.CRITICAL)
    with suppress(ConfigError):
        parse_config(text)
    with suppress(ConfigError):
        parse_settings_of(only(data={"kopia": text}))
    logging.disable(logging.NOTSET)


@_thoroughly
@given(hostile_answers, st.sampled_from([400, 404, 409, 410, 422, 429, 500, 503]))
def test_rejections_of_any_form_are_errors_of_the_api_server(body: bytes, status: int) -> None:
    assert isinstance(build_error(status, body, attempted="get Pod a/b"), KubeError)
    with suppress(ValueError):
        parse_json(body)

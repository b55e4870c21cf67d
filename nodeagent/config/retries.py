"""The key `nodeagent.io.retry`: when an interrupted transfer gets another attempt.

Knows the keys, and the rules for each kind of transfer that follow from them. Does not know what an
interruption is (`nodeagent.transfers.waiting`).
"""

from typing import Annotated, Final, Literal, get_args

from pydantic import AfterValidator, Field, StrictBool, StrictInt

from core.models.phases import RetryRules
from core.models.units import parse_duration
from nodeagent.config.value_types import DurationText, OptionalDurationText, QuantityText, Section, expected, is_zero

__all__ = ["RetryKeys", "RetryOverrides", "build_retry_rules", "rules_of_kind"]

_Kind = Literal["DataUpload", "DataDownload", "PodVolumeBackup", "PodVolumeRestore"]

_MOST_RETRIES: Final = 100
"""An annotation has the attempts, and each starts a pod."""

_LARGEST_FACTOR: Final = 10


def _check_limit(text: str) -> str:
    if text and is_zero(text):
        raise expected('more than 0, such as "8Gi"')
    return text


_Retries = Annotated[StrictInt, Field(ge=0, le=_MOST_RETRIES)]
_Factor = Annotated[float, Field(strict=True, ge=1, le=_LARGEST_FACTOR, allow_inf_nan=False)]
_Limit = Annotated[QuantityText, AfterValidator(_check_limit)]


class RetryOverrides(Section):
    """An entry of `perKind`: what differs for one kind."""

    enabled: StrictBool | None = Field(default=None, description="enabled of this kind", examples=[False])
    max_retries: _Retries | None = Field(default=None, description="maxRetries of this kind", examples=[5])
    initial_backoff: DurationText | None = Field(
        default=None, description="initialBackoff of this kind", examples=["1m"]
    )
    max_backoff: DurationText | None = Field(default=None, description="maxBackoff of this kind", examples=["30m"])
    deadline: OptionalDurationText | None = Field(default=None, description="deadline of this kind", examples=["8h"])
    oom_memory_factor: _Factor | None = Field(default=None, description="oomMemoryFactor of this kind", examples=[2])
    oom_memory_limit_max: _Limit | None = Field(
        default=None, description="oomMemoryLimitMax of this kind", examples=["16Gi"]
    )


class RetryKeys(Section):
    """The value of `nodeagent.io.retry`."""

    enabled: StrictBool = Field(
        default=True,
        description="give an interrupted transfer another attempt; false: it is Failed, as in Velero",
        examples=[False],
    )
    max_retries: _Retries = Field(default=3, description="how many more attempts a transfer gets at most", examples=[5])
    initial_backoff: DurationText = Field(
        default="30s",
        description="delay of the second attempt after the interruption; each further one is delayed for twice as long",
        examples=["1m"],
    )
    max_backoff: DurationText = Field(
        default="10m", description="longest delay, also where initialBackoff is longer", examples=["30m"]
    )
    deadline: OptionalDurationText = Field(
        default="",
        description='age of a transfer from which it is not retried; "0": none; empty: "4h" if it has an owner, '
        "which is as long as a Velero server waits by default, and else none",
        examples=["8h"],
    )
    oom_memory_factor: _Factor = Field(
        default=1.5,
        description="factor of the memory limit and request of a data mover after each one that ran out of memory; no "
        "effect without podResources.memoryLimit",
        examples=[2],
    )
    oom_memory_limit_max: _Limit = Field(
        default="",
        description="largest memory limit that results from the factor; empty: four times podResources.memoryLimit",
        examples=["8Gi"],
    )
    per_kind: dict[_Kind, RetryOverrides] = Field(
        default_factory=dict,
        description="other values for some kinds of transfers",
        examples=[{"DataUpload": {"maxRetries": 5}}],
    )


def build_retry_rules(retry: RetryKeys, *, velero_server: bool) -> dict[str, RetryRules]:
    """Return the rules for each kind, such as `DataUpload`.

    Args:
        retry: the active configuration.
        velero_server: whether a Velero server waits for the transfers, which is no longer than its item timeout.
    """
    return {kind: rules_of_kind(retry, kind, velero_server=velero_server) for kind in get_args(_Kind)}


def rules_of_kind(retry: RetryKeys, kind: str, *, velero_server: bool) -> RetryRules:
    """Return the rules for one kind, such as `DataUpload`; arguments as for `build_retry_rules`."""
    own: RetryOverrides | None = dict(retry.per_kind).get(kind)  # type: ignore[call-overload] # any kind may be asked for
    deadline = RetryRules.deadline if velero_server else None
    chosen = retry if own is None else retry.model_copy(update=own.model_dump(exclude_none=True))
    return RetryRules(
        enabled=chosen.enabled,
        max_retries=chosen.max_retries,
        initial_backoff=parse_duration(chosen.initial_backoff),
        max_backoff=parse_duration(chosen.max_backoff),
        deadline=(parse_duration(chosen.deadline) or None) if chosen.deadline else deadline,
        oom_memory_factor=chosen.oom_memory_factor,
        oom_memory_limit_max=chosen.oom_memory_limit_max,
    )

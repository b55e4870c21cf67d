"""A simulated day on which nothing is wrong, as input of promtool: nightly and hourly backups of a small fleet."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MINUTES = 30 * 60
"""The day, and the hours after which the longest rule could still fire."""

_KINDS = ("DataUpload", "DataDownload", "PodVolumeBackup", "PodVolumeRestore")
_NIGHT = range(2 * 60, 4 * 60)
"""Backups run from two to four o'clock, and two of them at a time all day long."""

_RESTART = 13 * 60
"""Then agent `a` restarts, and `b` becomes the leader: gauges of the leader move, and counters begin again."""


def build_healthy_day(alerts: Iterable[str]) -> dict[str, Any]:
    """Return the tests: at every tenth minute, no alert fires."""
    times = [f"{minute}m" for minute in range(10, _MINUTES, 10)]
    return {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "2m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in _series().items()],
                "alert_rule_test": [
                    {"eval_time": time, "alertname": alert, "exp_alerts": []} for alert in alerts for time in times
                ],
            }
        ],
    }


def _values(value: Callable[[int], float | None]) -> str:
    """The samples of each minute in promtool's notation; None: there is none."""
    found = (value(minute) for minute in range(_MINUTES))
    return " ".join("_" if each is None else f"{each:.0f}" for each in found)


def _of_node(node: str, value: Callable[[int], float]) -> str:
    """A gauge or counter of every agent; that of `a` has no sample for two minutes."""
    return _values(lambda minute: None if node == "a" and _RESTART <= minute < _RESTART + 2 else value(minute))


def _of_leader(node: str, value: Callable[[int], float]) -> str:
    """A gauge of the leader alone."""
    return _values(lambda minute: value(minute) if _leads(node, minute) else None)


def _counted(node: str, value: Callable[[int], float]) -> Callable[[int], float]:
    """A counter that begins again where its agent restarts."""
    return lambda minute: value(minute) - (value(_RESTART) if node == "a" and minute >= _RESTART else 0)


def _backups_until(minute: int) -> float:
    """How many transfers were accepted: ten an hour, and a hundred in the night."""
    night = min(max(minute - _NIGHT.start, 0), len(_NIGHT)) / len(_NIGHT)
    return minute // 6 + 100 * night


def _ended_until(phase: str, minute: int) -> float:
    return {"Completed": 1.0, "Canceled": 0.01, "Failed": 0.0}[phase] * _backups_until(minute)


def _due(interval: int, minute: int) -> float:
    """When the next backup of a volume is due, which takes 20 minutes."""
    return ((minute - 20) // interval + 1) * interval * 60


def _answers(node: str, minute: int) -> bool:
    """Whether the agent answers: the new pod of `a` does not at once."""
    return not (node == "a" and minute == _RESTART + 2)


def _leads(node: str, minute: int) -> bool:
    return (minute < _RESTART) is (node == "a")


def _constant(value: float, _: int) -> float:
    return value


def _series() -> dict[str, str]:
    found = {}
    for node in "ab":
        here = f'node="{node}"'
        found[f'up{{job="node-agent", instance="{node}"}}'] = _of_node(node, partial(_answers, node))
        found[f"nodeagent_dispatcher{{{here}}}"] = _of_node(node, partial(_leads, node))
        found[f"nodeagent_config_valid{{{here}}}"] = _of_node(node, lambda _: 1)
        found |= _transfers(node, here) | _leader(node, here)
    return found


def _transfers(node: str, here: str) -> dict[str, str]:
    found = {}
    for kind in _KINDS:
        of_kind = f'kind="{kind}", {here}'
        for phase in ("Completed", "Canceled", "Failed"):
            ended = _counted(node, partial(_ended_until, phase))
            found[f'nodeagent_transfers_finished_total{{phase="{phase}", {of_kind}}}'] = _of_node(node, ended)
        found[f"nodeagent_queue_seconds_count{{{of_kind}}}"] = _of_node(node, _counted(node, _backups_until))
        found[f"nodeagent_moved_bytes_total{{{of_kind}}}"] = _of_node(
            node, _counted(node, lambda minute: _backups_until(minute) * 1e9)
        )
        found[f'nodeagent_last_progress_seconds{{uid="1", {of_kind}}}'] = _of_node(
            node, lambda minute: minute // 10 * 600
        )
        # Now and then the API server throttles a single request.
        throttled = _counted(node, lambda minute: minute // 60)
        found[f'nodeagent_api_requests_total{{status="429", verb="{kind}", {here}}}'] = _of_node(node, throttled)
    return found


def _leader(node: str, here: str) -> dict[str, str]:
    found = {}
    for kind in _KINDS:
        found[f'nodeagent_queue_length{{state="New", kind="{kind}", {here}}}'] = _of_leader(
            node, lambda minute: 40 if minute % 1440 in _NIGHT else minute % 6 == 0
        )
    found[f"nodeagent_volumes_omitted{{{here}}}"] = _of_leader(node, lambda _: 0)
    found[f"nodeagent_retention_waiting_copies{{{here}}}"] = _of_leader(node, lambda _: 2)
    last = f'volume_namespace="app", claim="gone", rule="newest-copy", backup="b1", {here}'
    found[f"nodeagent_retention_held_bytes{{{last}}}"] = _of_leader(node, lambda _: 1e9)
    repository = f'repository_name="app-default-kopia", {here}'
    found[f"nodeagent_repository_ready{{{repository}}}"] = _of_leader(node, lambda _: 1)
    found[f"nodeagent_repository_index_blobs{{{repository}}}"] = _of_leader(node, lambda minute: minute // 2 % 800)
    # One maintenance fails, and the next one an hour later succeeds.
    found[f"velero_repo_maintenance_failure_total{{{repository}}}"] = _of_leader(node, lambda minute: minute >= 300)
    found[f"velero_repo_maintenance_success_total{{{repository}}}"] = _of_leader(
        node, lambda minute: minute // 60 - (minute >= 300)
    )
    for claim, interval in (("hourly", 60), ("nightly", 1440)):
        of_claim = f'volume_namespace="app", claim="{claim}", {here}'
        for what in ("backup", "verification"):
            name = f"nodeagent_volume_{what}"
            found[f"{name}_interval_seconds{{{of_claim}}}"] = _of_leader(node, partial(_constant, interval * 60))
            found[f"{name}_due_timestamp_seconds{{{of_claim}}}"] = _of_leader(node, partial(_due, interval))
        found[f"nodeagent_volume_last_verification_ok{{{of_claim}}}"] = _of_leader(node, lambda _: 1)
    return found

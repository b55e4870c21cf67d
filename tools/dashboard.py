"""The Grafana dashboard of `deploy/monitoring`, from a table of panels.

Source: Grafana 11, "Dashboard JSON model"; schema version 39.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from core.models.base import JsonDict

_WIDTH: Final = 24
_SOURCE: Final[JsonDict] = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One panel: its queries by their legends, a unit of Grafana, and its width in 24ths.

    `kind` is `timeseries`, `stat` or `table`; a table shows the labels of the last values.
    """

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    about: str = ""


def _p95(name: str) -> str:
    return f"histogram_quantile(0.95, sum by (le, kind) (increase({name}_bucket{{{_NODE}}}[1h])))"


def _bytes_of_a_day(name: str) -> str:
    return f"sum(increase(nodeagent_{name}_bytes_total{{{_NODE}}}[1d]))"


def _of_fleet(name: str) -> str:
    return f"sum(increase(nodeagent_{name}_bytes_total[1d]))"


def _ratio(part: str, whole: str) -> str:
    return f"{_bytes_of_a_day(part)} / {_bytes_of_a_day(whole)}"


def _of_repository(result: str) -> str:
    return f"sum by (repository_name) (increase(velero_repo_maintenance_{result}_total[1d]))"


def _of_volumes(name: str) -> str:
    """Return a series for each of the chosen volumes, but of the largest ones alone: a cluster may have thousands."""
    largest = f"topk({_MOST_CURVES}, {_BACKUPS} (nodeagent_volume_last_backup_bytes{{{_CHOSEN}}} @ end()))"
    return f"{_BACKUPS} ({name}{{{_CHOSEN}}}) and {largest}"


_NODE: Final = 'node=~"$node"'
_CHOSEN: Final = 'volume_namespace=~"$volume_namespace", claim=~"$claim"'
_MOST_CURVES: Final = 20
_LARGEST: Final = f"The {_MOST_CURVES} largest of the chosen volumes"
_BACKUPS: Final = "max by (volume_namespace, claim)"
_STATES: Final = "max by (volume_namespace, state)"
_VOLUME: Final = "{{volume_namespace}}/{{claim}}"
_PROOF: Final = f"{_BACKUPS} (nodeagent_volume_last_verification_timestamp_seconds)"
_BY_REPOSITORY: Final = "max by (repository_name)"

PANELS: Final[Mapping[str, Sequence[Panel]]] = {
    "Protection": (
        Panel(
            "Volumes protected",
            {"": f'sum({_STATES} (nodeagent_volumes{{state="protected"}})) or vector(0)'},
            kind="stat",
            width=6,
        ),
        Panel(
            "Volumes not protected",
            {"": f'sum({_STATES} (nodeagent_volumes{{state!~"protected|left-out"}})) or vector(0)'},
            kind="stat",
            width=6,
            about="Without volumes that are left out on purpose",
        ),
        Panel("Age of the oldest proof", {"": f"max(time() - {_PROOF})"}, "s", "stat", 6),
        Panel(
            "Volumes that have a backup and no proof",
            {
                "": f"count({_BACKUPS} (nodeagent_volume_last_backup_timestamp_seconds) unless {_PROOF}) or vector(0)",
            },
            kind="stat",
            width=6,
            about="No backup of them was ever verified",
        ),
        Panel("Volumes by state", {"{{state}}": f"sum by (state) ({_STATES} (nodeagent_volumes))"}),
        Panel(
            "Volumes that need attention",
            {"": "max by (volume_namespace, claim, state) (nodeagent_volume_not_protected) == 1"},
            kind="table",
            about="The first 50, in namespaces for which the alert is turned on",
        ),
        Panel("Oldest proofs", {"": f"topk(20, time() - {_PROOF})"}, "s", "table"),
        Panel(
            "New data, 1 day",
            {"all volumes": f"{_of_fleet('hashed')} - {_of_fleet('deduplicated')}"},
            "bytes",
            about="Of the day before each point; before compression",
        ),
        Panel(
            "Stored size",
            {"all volumes": f"sum({_BACKUPS} (nodeagent_volume_last_backup_bytes))"},
            "bytes",
            about="Size of the files in the newest backup of each PVC, before deduplication and compression",
        ),
        Panel(
            "Time that data moved, 1 day",
            {"all transfers": '86400 * sum(avg_over_time(nodeagent_slots{state="used"}[1d]))'},
            "s",
            about="Of the day before each point; transfers at a time count as often",
        ),
        Panel(
            "New data by volume, 1 day",
            {_VOLUME: _of_volumes("nodeagent_volume_day_new_bytes")},
            "bytes",
            about=f"{_LARGEST}; of the day before each point; before compression",
        ),
        Panel(
            "Stored size by volume",
            {_VOLUME: _of_volumes("nodeagent_volume_last_backup_bytes")},
            "bytes",
            about=f"{_LARGEST}; before deduplication and compression",
        ),
        Panel(
            "Time that backups took by volume, 1 day",
            {_VOLUME: _of_volumes("nodeagent_volume_day_backup_seconds")},
            "s",
            about=f"{_LARGEST}; of the day before each point",
        ),
    ),
    "Fleet": (
        Panel("Agents that answer", {"agents": 'count(up{job="node-agent"} == 1)'}, kind="stat", width=4),
        Panel("Leaders", {"leaders": "sum(nodeagent_dispatcher)"}, kind="stat", width=4),
        Panel(
            "Configuration rejected",
            {"agents": "count(nodeagent_config_valid == 0) or vector(0)"},
            kind="stat",
            width=4,
        ),
        Panel("Interrupted transfers, 1 day", {"": "sum(increase(nodeagent_retries_total[1d]))"}, kind="stat", width=4),
        Panel(
            "Failed transfers, 1 day",
            {"": 'sum(increase(nodeagent_transfers_finished_total{phase="Failed"}[1d]))'},
            kind="stat",
            width=4,
        ),
        Panel(
            "Volumes whose backup is due",
            {"": f"count(time() - {_BACKUPS} (nodeagent_volume_backup_due_timestamp_seconds) > 0) or vector(0)"},
            kind="stat",
            width=4,
            about="Only volumes for which an interval is known",
        ),
        Panel("Transfers by state", {"{{state}}": "sum by (state) (nodeagent_queue_length)"}),
        Panel("Pending transfers by reason", {"{{reason}}": "sum by (reason) (nodeagent_pending)"}),
        Panel(
            "Moved bytes", {"{{kind}}": "sum by (kind) (rate(nodeagent_moved_bytes_total[$__rate_interval]))"}, "Bps"
        ),
        Panel(
            "Oldest last backups",
            {"": f"topk(20, time() - {_BACKUPS} (nodeagent_volume_last_backup_timestamp_seconds))"},
            "s",
            "table",
            about="Since the creation of the newest completed backup of each PVC",
        ),
        Panel(
            "Largest last backups", {"": f"topk(20, {_BACKUPS} (nodeagent_volume_last_backup_bytes))"}, "bytes", "table"
        ),
        Panel(
            "Shrunk backups",
            {"": "max by (volume_namespace, claim) (nodeagent_volume_shrunk) == 1"},
            kind="table",
        ),
        Panel(
            "Failed verifications",
            {"": "min by (volume_namespace, claim) (nodeagent_volume_last_verification_ok) == 0"},
            kind="table",
        ),
    ),
    "Node": (
        Panel(
            "Slots",
            {
                "{{node}} used": f'nodeagent_slots{{state="used", {_NODE}}}',
                "{{node}} total": f'nodeagent_slots{{state="total", {_NODE}}}',
            },
        ),
        Panel(
            "Moved bytes",
            {"{{node}}": f"sum by (node) (rate(nodeagent_moved_bytes_total{{{_NODE}}}[$__rate_interval]))"},
            "Bps",
        ),
        Panel("Nodes passed over", {"{{passed_over}}": "nodeagent_node_passed_over"}),
        Panel(
            "Requests to the API server",
            {"{{status}}": f"sum by (status) (rate(nodeagent_api_requests_total{{{_NODE}}}[$__rate_interval]))"},
            "reqps",
        ),
        Panel("Memory of agents", {"{{node}}": f"process_resident_memory_bytes{{{_NODE}}}"}, "bytes"),
        Panel("Clock ahead of the API server", {"{{node}}": f"nodeagent_clock_skew_seconds{{{_NODE}}}"}, "s"),
    ),
    "Transfers": (
        Panel(
            "Finished transfers",
            {
                "{{kind}} {{phase}}": "sum by (kind, phase) "
                f"(increase(nodeagent_transfers_finished_total{{{_NODE}}}[1h]))"
            },
        ),
        Panel("Running: rate", {"{{kind}} {{uid}}": f"nodeagent_rate_bytes_per_second{{{_NODE}}}"}, "Bps"),
        Panel(
            "Running: since the last byte",
            {"{{kind}} {{uid}}": f"time() - nodeagent_last_progress_seconds{{{_NODE}}}"},
            "s",
        ),
        Panel("Time in the queue, 95%", {"{{kind}}": _p95("nodeagent_queue_seconds")}, "s"),
        Panel("Time of exposing, 95%", {"{{kind}}": _p95("nodeagent_expose_seconds")}, "s"),
        Panel("Time until data moves, 95%", {"{{kind}}": _p95("nodeagent_wait_seconds")}, "s"),
        Panel(
            "Interruptions by cause",
            {"{{cause}}": f"sum by (cause) (increase(nodeagent_retries_total{{{_NODE}}}[1h]))"},
        ),
        Panel(
            "What interruptions cost",
            {
                "seconds": f"sum(increase(nodeagent_retry_lost_seconds_total{{{_NODE}}}[1h]))",
                "bytes": f"sum(increase(nodeagent_retry_resent_bytes_total{{{_NODE}}}[1h]))",
            },
        ),
        Panel(
            "Share of bytes, 1 day",
            {
                "read: found in the repository": _ratio("deduplicated", "hashed"),
                "new: stored after compression": f"{_bytes_of_a_day('stored')} / "
                f"({_bytes_of_a_day('hashed')} - {_bytes_of_a_day('deduplicated')})",
                "of the volumes: sent": _ratio("sent", "moved"),
            },
            "percentunit",
            about="Unchanged files are in the volumes, and not read. Kopia's indexes are sent, too",
        ),
    ),
    "Repositories": (
        Panel("Ready", {"{{repository_name}}": f"{_BY_REPOSITORY} (nodeagent_repository_ready)"}),
        Panel("Locations available", {"{{backup_location_name}}": "velero_backup_location_status_gauge"}),
        Panel(
            "Maintenance",
            {
                "{{repository_name}} succeeded": _of_repository("success"),
                "{{repository_name}} failed": _of_repository("failure"),
            },
        ),
        Panel(
            "Since the last maintenance",
            {
                "{{repository_name}} {{mode}}": "time() - max by (repository_name, mode) "
                "(nodeagent_maintenance_last_success_seconds)"
            },
            "s",
        ),
        Panel("Index blobs", {"{{repository_name}}": f"{_BY_REPOSITORY} (nodeagent_repository_index_blobs)"}),
        Panel("Contents", {"{{repository_name}}": f"{_BY_REPOSITORY} (nodeagent_repository_contents)"}),
    ),
}
"""The panels of each row."""


def build_dashboard() -> str:
    """Return the dashboard as Grafana imports it."""
    panels: list[JsonDict] = []
    top = 0
    for row, members in PANELS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": row, "gridPos": _place(0, top, _WIDTH, 1)})
        top, left, height = top + 1, 0, 0
        for panel in members:
            if left + panel.width > _WIDTH:
                top, left = top + height, 0
            height = 4 if panel.kind == "stat" else 8
            panels.append(_build_panel(panel, len(panels) + 1, _place(left, top, panel.width, height)))
            left += panel.width
        top += height
    dashboard = {
        "title": "Node agent",
        "uid": "node-agent",
        "description": "Agents that move the data of Kubernetes volumes",
        "tags": ["node-agent"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "templating": {"list": _build_variables()},
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _place(left: int, top: int, width: int, height: int) -> JsonDict:
    return {"x": left, "y": top, "w": width, "h": height}


def _build_panel(panel: Panel, number: int, place: JsonDict) -> JsonDict:
    table = panel.kind == "table"
    targets = [
        {"refId": chr(ord("A") + n), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        | ({"instant": True, "format": "table"} if table else {})
        for n, (legend, query) in enumerate(panel.queries.items())
    ]
    found: JsonDict = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0} if not table else {}, "overrides": []},
        "targets": targets,
    }
    if table:
        # All lines have the time of the query.
        hidden = {"excludeByName": {"Time": True}, "renameByName": {}}
        found["transformations"] = [{"id": "organize", "options": hidden}]
        unit = {"matcher": {"id": "byName", "options": "Value"}, "properties": [{"id": "unit", "value": panel.unit}]}
        found["fieldConfig"]["overrides"] = [unit]
    return found


def _build_variables() -> list[JsonDict]:
    claims = "nodeagent_volume_last_backup_bytes"
    chosen = f'{claims}{{volume_namespace=~"$volume_namespace"}}'
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        _build_variable("node", "Node", "label_values(nodeagent_slots, node)"),
        _build_variable("volume_namespace", "Namespace of volumes", f"label_values({claims}, volume_namespace)"),
        _build_variable("claim", "PVC", f"label_values({chosen}, claim)"),
    ]


def _build_variable(name: str, label: str, query: str) -> JsonDict:
    """Return a variable with all values of a label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }

"""Pages that are generated from the code: `UPDATE_GOLDEN=1 make unit TESTS=tests/docs` writes them."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent.metrics import METRICS, Counter, Metric
from tests.docs.permissions_page import build_permissions_page
from tools.modules import list_modules, read_responsibility

_ROOT = Path(__file__).parents[2]

_METRICS_HEAD = """\
# Metrics

Generated from the agent's registry (`tests/docs/test_generated.py`). Each agent serves them on `/metrics`
(`--metrics-address`, default `:8085`); every metric has the label `node`. Metrics named `podVolume_…` and
`velero_…` are Velero's, so that its dashboards keep working. Metrics of the process (`process_…`,
`python_…`) are left out. [alerts.md](alerts.md) has a dashboard and alerts.

The number of series is bounded:
- `uid` is the UID of a transfer that runs on the node: the series end with it, so that there are no more than slots.
- `nodeagent_volume_…` has eleven series at most for each PVC with a completed backup or an interval, of at most 2,000
  PVCs (`nodeagent_volumes_omitted` counts the others), in the leader only. The namespace of a PVC is
  `volume_namespace`: `namespace` is a label that Prometheus sets. They end with the PVC.
- `nodeagent_retention_held_bytes` has at most 100 series, in the leader only: for each PVC and rule that keeps expired
  backups, with the oldest of these as `backup`.
- `nodeagent_queue_position` has the first 100 transfers, `podVolume_pod_volume_operation_…` the last 100.
- `reason` of `nodeagent_pending` is one of [troubleshooting.md](troubleshooting.md), or `Other` for one of the
  kubelet, the scheduler or a driver.
- The others have labels of few values, or the names of nodes, backup repositories, locations or schedules.

What became of the bytes of backups: of `nodeagent_moved_bytes_total`, unchanged files are not read; the others
are `nodeagent_hashed_bytes_total`; `nodeagent_deduplicated_bytes_total` were in the repository already. The
rest is `nodeagent_stored_bytes_total` after compression, and sent with kopia's indexes: `nodeagent_sent_bytes_total`.
An agent that restarts in the middle of a transfer misses some of the bytes.
"""


def _shown_name(metric: Metric) -> str:
    return f"{metric.name}_total" if isinstance(metric, Counter) and not metric.bare else metric.name


def _metrics_page() -> str:
    rows = [
        f"| `{_shown_name(metric)}` | {type(metric).__name__.lower()} "
        f"| {', '.join(f'`{name}`' for name in metric.labels)} | {metric.text} |"
        for metric in sorted(METRICS, key=lambda metric: metric.name)
    ]
    return "\n".join([_METRICS_HEAD, "| metric | type | labels | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"


@pytest.mark.parametrize(
    ("page", "build"),
    [("metrics.md", _metrics_page), ("permissions.md", build_permissions_page)],
    ids=["metrics", "permissions"],
)
def test_generated_page_matches_the_code(page: str, build: Callable[[], str]) -> None:
    path, text = _ROOT / "docs" / page, build()
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_every_module_and_folder_has_a_responsibility() -> None:
    """A noun phrase or a command on one line: `python -m tools.modules` shows it."""
    lines = {str(path): read_responsibility(path) for path in list_modules()}
    assert [path for path, line in lines.items() if not re.fullmatch(r"\S[^\n]{10,160}", line)] == []

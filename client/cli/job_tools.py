"""What a command runs a Job of a data mover with: the cluster it is connected to, and where the user sees progress."""

from collections.abc import Callable

from client.mover_jobs import JobTools
from core.clock import SystemClock
from nodeagent.runtime.connection import Connection

__all__ = ["build_job_tools"]


def build_job_tools(
    cluster: Connection, on_progress: Callable[[str], None], on_note: Callable[[str], None]
) -> JobTools:
    """Return what Jobs are run with in this cluster.

    Args:
        cluster: the agents' cluster and namespace.
        on_progress: gets a line whenever what the Job waits for changes.
        on_note: gets a line about what the user should know.
    """
    return JobTools(
        client=cluster.client,
        clock=SystemClock(),
        namespace=cluster.namespace,
        on_progress=on_progress,
        on_note=on_note,
    )

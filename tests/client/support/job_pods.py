"""Pods of the Jobs that a command starts."""

from core.models.names import MAINTENANCE_CONTAINER
from tests.support.objects import JsonDict


def ended(exit_code: int, message: str) -> JsonDict:
    """Return the status of a pod that has ended so."""
    terminated = {"exitCode": exit_code, "message": message, "reason": "Error" if exit_code else "Completed"}
    state = [{"name": MAINTENANCE_CONTAINER, "state": {"terminated": terminated}}]
    return {"phase": "Failed" if exit_code else "Succeeded", "containerStatuses": state}

"""Termination messages of Jobs whose output a test has written itself."""

import hashlib
import json

from core.models.base import WireModel


def seal(result: WireModel, *log: str) -> str:
    """Return the termination message of a Job with this result and this log; its own lines are counted."""
    lines = [f"{line}\n" for line in log if line.startswith('{"nodeagent.io/')]
    total = {"lines": len(lines), "sha256": hashlib.sha256("".join(lines).encode()).hexdigest()}
    return json.dumps(result.to_wire() | {"output": total})

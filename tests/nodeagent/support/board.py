"""The agent's own pod, as lists of what is recorded and shown there."""

from collections.abc import Mapping

from core.kube.errors import ServerError
from nodeagent.runtime.own_pod import OwnPod


class FakeBoard(OwnPod):
    """Keeps what the agent reports about itself; the next `broken` annotations fail."""

    def __init__(self, *, broken: int = 0) -> None:
        self.recorded: list[tuple[str, str]] = []
        self.annotations: list[dict[str, str]] = []
        self.broken = broken

    @property
    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.recorded]

    async def report(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.recorded.append((reason, message))

    async def annotate(self, annotations: Mapping[str, str]) -> None:
        if self.broken:
            self.broken -= 1
            raise ServerError("not now", status=500)
        self.annotations.append(dict(annotations))

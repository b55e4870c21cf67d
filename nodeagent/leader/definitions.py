"""The leader's check of the custom resource definitions: an older version may be applied at any time."""

import logging
from typing import Final

from core.clock import Clock
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError
from core.models.storage import BlockHash
from nodeagent.runtime.definitions import DefinitionReport, judge_definitions, read_definitions
from nodeagent.runtime.own_pod import AgentReporter

__all__ = ["DefinitionCheck"]

_log = logging.getLogger(__name__)

_SECONDS: Final = 300.0
"""Between two checks."""


class DefinitionCheck:
    """What the definitions drop, as last read; a change is logged, and reported if it needs action."""

    def __init__(self, client: KubeClient, clock: Clock, pod: AgentReporter) -> None:
        """Read through `client`, and report on the agent's pod."""
        self._client = client
        self._clock = clock
        self._pod = pod
        self.report = DefinitionReport()

    async def run(self) -> None:
        """Check again and again, until canceled."""
        while True:
            await self.refresh()
            await self._clock.sleep(_SECONDS)

    async def refresh(self) -> DefinitionReport:
        """Return what they drop now, or did when they could last be read."""
        try:
            report = judge_definitions(await read_definitions(self._client))
        except AgentError as e:
            # At start, a warning names a missing permission.
            level = logging.DEBUG if isinstance(e, ForbiddenError) else logging.WARNING
            _log.log(level, "could not check the custom resource definitions, will retry: %s", e)
            return self.report
        before, self.report = self.report, report
        if report.message != before.message:
            await self._announce(report)
        return report

    async def _announce(self, report: DefinitionReport) -> None:
        if report.warning:
            await self._pod.report("FieldsDropped", report.message, warning=True)
        else:
            _log.info("%s", report.message or "the custom resource definitions have all fields of this version")

    async def new_block_hash(self) -> BlockHash | None:
        """Return the hash of repositories of Velero 1.19 if the definitions are its own; None: kopia's default.

        Source: github.com/velero-io/velero/pull/10576.
        """
        return BlockHash.HMAC_SHA256_128 if (await self.refresh()).next_velero else None

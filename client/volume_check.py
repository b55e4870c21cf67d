"""A check of the installed agents by a small volume: written, backed up, restored, compared, and removed again."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Final, cast

from client.session import Session
from client.volume_check_plan import PREFLIGHT_LABELS, CheckPlan
from core.clock import Deadline
from core.errors import AgentError
from core.kube import resources as kube
from core.kube.client import Selection, select_labels
from core.kube.errors import ForbiddenError
from core.kube.types import Manifest, Metadata, ObjectT, UncheckedObject
from core.models.base import JsonDict, WireModel
from core.models.phases import FINAL_PHASES, Phase
from core.models.units import format_duration
from exposer.causes import CauseFinder
from exposer.pod_status import explain_exit, parse_pod_end

_POLL_SECONDS: Final = 1.0
_DELETION_SECONDS: Final = 0.5
_CLEANUP_TIMEOUT: Final = timedelta(minutes=3)
"""An agent deletes what a transfer needed within a minute."""

_TRANSFERS: Final = (kube.DATA_DOWNLOADS, kube.DATA_UPLOADS)
"""Deleted first: an agent cancels one that has not ended, and deletes what it had created for it."""

_VOLUMES: Final = (kube.PODS, kube.VOLUME_SNAPSHOTS, kube.PERSISTENT_VOLUME_CLAIMS)

_BOUND: Final = {
    "pv": (kube.PERSISTENT_VOLUMES, "persistentVolumeReclaimPolicy"),
    "volumesnapshotcontent": (kube.VOLUME_SNAPSHOT_CONTENTS, "deletionPolicy"),
}
"""What claims and snapshots are bound to, by the name that kubectl takes, and the policy that may keep it."""


class VolumeCheckError(AgentError):
    """A step of the check failed; the message has its cause."""


class CheckStep(WireModel):
    """One step; an empty `error` is a success."""

    name: str
    seconds: float
    error: str = ""


class CheckReport(WireModel):
    """The steps, in their order, and the kopia snapshot that stays in the repository."""

    steps: list[CheckStep]
    snapshot_id: str = ""

    @property
    def error(self) -> str | None:
        """The first error; None: all steps succeeded."""
        return next((step.error for step in self.steps if step.error), None)


async def check_volume(
    tools: Session, plan: CheckPlan, timeout: timedelta, on_step: Callable[[CheckStep], None]
) -> CheckReport:
    """Run all steps until one fails, and return them; what was created is deleted, also after a cancellation.

    `on_step` gets each of them once it has ended.
    """
    for one in plan.retaining:
        tools.on_note(f"{one}: what the test creates with it stays in the storage")
    run = _Run(tools, plan, Deadline.after(tools.clock, timeout), timeout, on_step)
    try:
        await run.carry_out()
    finally:
        await tools.finish("clean up", 2 * _CLEANUP_TIMEOUT, run.clean)
    return CheckReport(steps=run.steps, snapshot_id=run.snapshot_id)


@dataclass
class _Run:
    """The steps of a check; `bound` gets what deleted claims and snapshots were bound to, as kubectl names it.

    A policy may keep that.
    """

    tools: Session
    plan: CheckPlan
    deadline: Deadline
    timeout: timedelta
    on_step: Callable[[CheckStep], None]
    steps: list[CheckStep] = field(default_factory=list)
    snapshot_id: str = ""
    written: str = ""
    shown: str = ""
    bound: set[str] = field(default_factory=set)

    async def carry_out(self) -> None:
        steps: dict[str, Callable[[], Awaitable[None]]] = {
            "prepare": self._prepare,
            "volume": self._fill,
            "snapshot": self._take_snapshot,
            "backup": self._back_up,
            "restore": self._restore,
            "compare": self._compare,
        }
        for name, step in steps.items():
            async with self._timed(name):
                await step()
            if self.steps[-1].error:
                return

    async def clean(self) -> None:
        async with self._timed("clean up"):
            await self._remove_all(Deadline.after(self.tools.clock, _CLEANUP_TIMEOUT))
            if self.plan.retaining and (left := await self._find_retained()):
                self.tools.on_note(f"kept by the policy Retain, to delete by: kubectl delete {' '.join(left)}")

    @asynccontextmanager
    async def _timed(self, name: str) -> AsyncIterator[None]:
        self.tools.on_progress(name)
        began, error = self.tools.clock.monotonic(), ""
        try:
            yield
        except AgentError as e:
            error = str(e)
        step = CheckStep(name=name, seconds=round(self.tools.clock.monotonic() - began, 1), error=error)
        self.steps.append(step)
        self.on_step(step)

    async def _prepare(self) -> None:
        if await self._remove_all(Deadline.after(self.tools.clock, _CLEANUP_TIMEOUT)):
            self.tools.on_note("deleted what an earlier preflight had left")
        if await self.tools.client.read(kube.NAMESPACES, "", self.plan.space) is None:
            await self._create(kube.NAMESPACES, self.plan.build_namespace())
            await self._wait_account()

    async def _wait_account(self) -> None:
        """Return once the namespace has the account without which no pod is created in it."""

        async def find() -> str | None:
            found = await self.tools.client.read(kube.SERVICE_ACCOUNTS, self.plan.space, "default")
            return None if found is not None else f"ServiceAccount {self.plan.space}/default does not exist yet"

        await self._until(find)

    async def _fill(self) -> None:
        await self._create(kube.PERSISTENT_VOLUME_CLAIMS, self.plan.build_claim(self.plan.name))
        await self._create(kube.PODS, self.plan.build_pod(self.plan.name))
        self.written = await self._wait_pod(self.plan.name)
        # A volume that one node has attached may not be mounted on another.
        await self.tools.client.delete(kube.PODS, self.plan.space, self.plan.name)

    async def _take_snapshot(self) -> None:
        await self._create(kube.VOLUME_SNAPSHOTS, self.plan.build_snapshot())

        async def find() -> str | None:
            found = await self._get(kube.VOLUME_SNAPSHOTS, self.plan.space, self.plan.name)
            status = found.get("status") or {}
            if status.get("readyToUse"):
                return None
            cause = (status.get("error") or {}).get("message") or "no snapshot controller or driver has reported yet"
            return f"VolumeSnapshot {self.plan.space}/{self.plan.name} is not ready: {cause}"

        await self._until(find)

    async def _back_up(self) -> None:
        await self._create(kube.DATA_UPLOADS, self.plan.build_upload())
        ended = await self._wait_transfer(kube.DATA_UPLOADS)
        self.snapshot_id = str(ended.get("snapshotID", ""))

    async def _restore(self) -> None:
        await self._create(kube.PERSISTENT_VOLUME_CLAIMS, self.plan.build_claim(self.plan.restored))
        # Where volumes wait for their first consumer, it decides on the node.
        await self._create(kube.PODS, self.plan.build_pod(self.plan.restored))
        await self._create(kube.DATA_DOWNLOADS, self.plan.build_download(self.snapshot_id))
        await self._wait_transfer(kube.DATA_DOWNLOADS)

    async def _compare(self) -> None:
        found = await self._wait_pod(self.plan.restored)
        # A pod that says nothing has compared nothing.
        if not found or found != self.written:
            sums = f"SHA-256 {found or 'unknown'} instead of {self.written or 'unknown'}"
            raise VolumeCheckError(f"the restored file differs: {sums}")

    async def _wait_transfer(self, resource: kube.Resource[UncheckedObject]) -> JsonDict:
        """Return the status of the transfer once it is Completed."""
        status: JsonDict = {}

        async def find() -> str | None:
            nonlocal status
            status = (await self._get(resource, self.plan.namespace, self.plan.name)).get("status") or {}
            phase = status.get("phase") or Phase.NEW
            if phase == Phase.COMPLETED:
                return None
            text = f"{resource.kind} {self.plan.namespace}/{self.plan.name} is {phase}: "
            text += status.get("message") or "no message"
            if phase in FINAL_PHASES:
                raise VolumeCheckError(text)
            return text

        await self._until(find)
        return status

    async def _wait_pod(self, name: str) -> str:
        """Return the termination message of the pod once it has succeeded."""
        message, causes = "", CauseFinder(self.tools.client, self.tools.clock)

        async def find() -> str | None:
            nonlocal message
            pod = await self._get(kube.PODS, self.plan.space, name)
            end = parse_pod_end(pod)
            if end is None:
                pending = await causes.explain(pod)
                return pending.message if pending is not None else f"Pod {self.plan.space}/{name} is running"
            if end.exit_code != 0:
                cause = ": ".join(filter(None, (explain_exit(end), " ".join(end.message.split()))))
                raise VolumeCheckError(f"Pod {self.plan.space}/{name} failed: {cause}")
            message = end.message.strip()
            return None

        await self._until(find)
        return message

    async def _until(self, find: Callable[[], Awaitable[str | None]]) -> None:
        """Return once `find` returns nothing; show what it returns."""
        while missing := await find():
            if missing != self.shown:
                self.tools.on_progress(missing)
                self.shown = missing
            if self.deadline.expired:
                raise VolumeCheckError(f"not within {format_duration(self.timeout)} (--timeout): {missing}")
            await self.tools.clock.sleep(min(_POLL_SECONDS, max(self.deadline.remaining_seconds, 0.1)))

    async def _get(self, resource: kube.Resource[ObjectT], namespace: str, name: str) -> ObjectT:
        found = await self.tools.client.patiently().read(resource, namespace, name)
        if found is None:
            raise VolumeCheckError(f"{resource.kind} {namespace}/{name} was deleted meanwhile, as by another preflight")
        return found

    async def _create(self, resource: kube.Resource, manifest: Manifest) -> None:
        """Create an object; a request whose answer is not awaited might create it after the cleanup."""
        create = partial(self.tools.client.create, resource, manifest)
        await self.tools.finish(f"create {resource.kind}", _CLEANUP_TIMEOUT, create)

    async def _find_retained(self) -> list[str]:
        """Return what stays of `bound` by the policy Retain, or may, if that may not be read."""
        found = []
        for kind, name in sorted(one.split("/") for one in self.bound):
            resource, policy = _BOUND[kind]
            try:
                stored = await self.tools.client.read(resource, "", name)
                retained = stored is not None and cast("UncheckedObject", stored)["spec"].get(policy) == "Retain"
            except ForbiddenError:
                retained = True
            if retained:
                found.append(f"{kind}/{name}")
        return found

    async def _remove_all(self, deadline: Deadline) -> bool:
        """Delete everything, and return whether there was anything, once it is gone.

        Raises:
            VolumeCheckError: something still exists at the deadline; the message names it.
        """
        found = await self._delete_all(_TRANSFERS, self.plan.namespace, deadline)
        space = await self.tools.client.read(kube.NAMESPACES, "", self.plan.space)
        if space is None:
            return found
        found = await self._delete_all(_VOLUMES, self.plan.space, deadline) or found
        if PREFLIGHT_LABELS.items() <= (space["metadata"].get("labels") or {}).items():
            await self.tools.client.delete(kube.NAMESPACES, "", self.plan.space, uid=space["metadata"]["uid"])
            await self._wait_namespace(deadline)
            found = True
        return found

    async def _delete_all(self, resources: tuple[kube.Resource, ...], namespace: str, deadline: Deadline) -> bool:
        """Delete the objects of these kinds; return whether there were any, once they are gone."""
        deleted = False
        while left := [pair for resource in resources for pair in await self._list(resource, namespace)]:
            for resource, meta in left:
                if not meta.get("deletionTimestamp"):
                    await self.tools.client.delete(resource, namespace, meta["name"], uid=meta["uid"])
            deleted = True
            if deadline.expired:
                names = ", ".join(f"{resource.kind} {namespace}/{meta['name']}" for resource, meta in left)
                raise VolumeCheckError(f"not deleted yet: {names}; the next preflight deletes them")
            await self.tools.clock.sleep(_DELETION_SECONDS)
        return deleted

    async def _list(self, resource: kube.Resource, namespace: str) -> list[tuple[kube.Resource, Metadata]]:
        found = await self.tools.client.list(Selection(resource, namespace, select_labels(PREFLIGHT_LABELS)))
        for one in cast("list[UncheckedObject]", found):
            if volume := (one.get("spec") or {}).get("volumeName"):
                self.bound.add(f"pv/{volume}")
            if content := (one.get("status") or {}).get("boundVolumeSnapshotContentName"):
                self.bound.add(f"volumesnapshotcontent/{content}")
        return [(resource, one["metadata"]) for one in found]

    async def _wait_namespace(self, deadline: Deadline) -> None:
        while await self.tools.client.read(kube.NAMESPACES, "", self.plan.space) is not None:
            if deadline.expired:
                raise VolumeCheckError(f"not deleted yet: Namespace {self.plan.space}; the next preflight deletes it")
            await self.tools.clock.sleep(_DELETION_SECONDS)

"""A cluster with backups, buckets, commands and schedules, and what is true of it, whatever the product believes.

Nothing here asks the rules of retention: a copy can be restored if its custom resource is there and completed, and its
snapshot is in the bucket to which it was written, with a root that can be read.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from client.backups.copies import KeepPolicy, format_keep
from client.backups.delete import DeletionWish, check_plan, execute_plan, plan_deletion
from client.backups.deletion_jobs import hold_deletions
from client.backups.plan import Choice
from client.backups.retention import DeletionError
from client.schedules import scheduled_run
from client.schedules.request import ScheduleRequest
from client.session import Session
from core.kube.client import KubeClient
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    CONFIG_MAPS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    JOBS,
    POD_VOLUME_BACKUPS,
)
from core.kube.transport import Request, Retry
from core.models.backups import Shrinkage
from core.models.base import JsonDict, format_time, parse_time
from core.models.units import format_duration
from core.models.verification import Verification, VerificationOutcome
from core.snapshot_contract import TransferToDelete
from nodeagent.runtime.connection import ServerTime
from tests.client.support.deletion_scene import DeletionScene
from tests.nodeagent.support.hand_clock import NOON
from tests.retention.commands import Command, Fault, WorldClock, run_time
from tests.retention.facts import Fact, WorldKube, check_limit, is_kept

BUCKET: Final = "b"

_TRANSFERS: Final = (DATA_UPLOADS, POD_VOLUME_BACKUPS, DATA_DOWNLOADS)

_LONG_SECONDS: Final = 600.0
"""Commands stand still while more than that passes, as on a machine that sleeps: they would poll all the time."""

_MOST_REQUESTS: Final = 80
"""More than a command sends that deletes something."""

_MOST_SLEEPS: Final = 60
"""Two seconds each: a Lease that is not renewed is free before."""

_GRACE_SECONDS: Final = 30.0
_TOLERANCE: Final = timedelta(minutes=5)


@dataclass
class World:
    """The cluster, and its `facts` by the names of their transfers."""

    clock: WorldClock = field(default_factory=WorldClock)
    facts: dict[str, Fact] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    buckets: dict[str, str] = field(default_factory=lambda: {"default": BUCKET, "lab": BUCKET})
    edited: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    policies: dict[str, KeepPolicy] = field(default_factory=dict)
    """By the names of schedules."""
    jumps: list[float] = field(default_factory=list)
    """When all clocks were set."""

    def __post_init__(self) -> None:
        self.scene = DeletionScene(self.clock, make_kube=WorldKube)
        self.kube: WorldKube = self.scene.kube  # type: ignore[assignment]
        self.scene.put_location("lab")

    # -- backups -------------------------------------------------------------------------------

    def back_up(
        self, backup: str, phases: dict[str, str], location: str, ttl_hours: int | None, schedule: str = ""
    ) -> None:
        """Make a backup of these PVCs, whose transfers come to these phases."""
        ttl = timedelta(hours=ttl_hours) if ttl_hours is not None else None
        policy = self.policies.get(schedule)
        days_old = (NOON - self.kube.time) / timedelta(days=1)
        pods = {"files"} if len(phases) > 1 else set()
        self.scene.put_backup(
            backup,
            days_old,
            *phases,
            ttl=format_duration(ttl) if ttl is not None else "",
            location=location,
            phase="InProgress",
            pods=pods,
            schedule=schedule,
            keep=format_keep(policy, ttl) if policy is not None else "",
        )
        for claim, phase in phases.items():
            fact = Fact(
                backup,
                claim,
                (POD_VOLUME_BACKUPS if claim in pods else DATA_UPLOADS).plural,
                location,
                self.buckets[location],
                ttl,
                self.clock.seconds,
                format_time(self.kube.time),
                schedule,
            )
            self.facts[fact.name] = fact
            if phase != "InProgress":
                self.end_transfer(fact, phase)

    def end_transfer(self, fact: Fact, phase: str) -> None:
        """Let a transfer come to its end."""
        done = {"completionTimestamp": format_time(self.kube.time)}
        fact.phase = phase
        if phase == "Completed":
            fact.completed, fact.completed_stamp = self.clock.seconds, done["completionTimestamp"]
            done |= {"snapshotID": fact.snapshot}
            self.kube.bucket[fact.snapshot] = TransferToDelete("app", fact.backup, f"uid-{fact.name}")
        self._change(fact.name, status={"phase": phase} | done)
        self._place()
        # It may be the newest one now, which failed.
        self._blind(fact)

    def verify(self, fact: Fact, outcome: VerificationOutcome) -> None:
        """Record the result of a verification."""
        fact.damaged = outcome is VerificationOutcome.FAILED
        text = Verification(at=self.kube.time, outcome=outcome).to_json()
        self._change(fact.name, annotations={"nodeagent.io/verification": text})
        self._blind(fact)

    def shrink(self, fact: Fact, *, acknowledged: bool = False) -> None:
        """Let the copy be Shrunk, or somebody acknowledge it."""
        fact.shrunk = not acknowledged
        at = self.kube.time if acknowledged else None
        text = Shrinkage(bytes=0, full_bytes=1, acknowledged=at).to_json()
        self._change(fact.name, annotations={"nodeagent.io/shrunk": text})
        self._blind(fact)

    def lose_snapshot(self, fact: Fact) -> None:
        """Delete the snapshot by hand."""
        self.kube.bucket.pop(fact.snapshot, None)
        self.lost.add(fact.snapshot)
        self._blind(fact)

    def lose_root(self, fact: Fact) -> None:
        """Damage the root directory of the snapshot."""
        self.kube.rootless.add(fact.snapshot)
        self._blind(fact)

    def restore(self, fact: Fact) -> None:
        """Start a restore of the copy, which does not end before `end_restores`."""
        spec = {"snapshotID": fact.snapshot, "sourceNamespace": "app", "backupStorageLocation": fact.location}
        spec |= {"targetVolume": {"pvc": "new", "namespace": "app"}}  # type: ignore[dict-item]
        self.scene.put("DataDownload", f"of-{fact.name}", "velero.io/v2alpha1", spec=spec, status={"phase": "Accepted"})
        self.kube.pinned.add(fact.snapshot)
        self._blind(fact)

    def end_restores(self) -> None:
        for fact in self.facts.values():
            if fact.snapshot in self.kube.pinned:
                self._change(f"of-{fact.name}", status={"phase": "Completed"})
        self.kube.pinned = set()

    def _change(self, name: str, *, status: JsonDict | None = None, annotations: JsonDict | None = None) -> None:
        for raw in [one for kind in _TRANSFERS for one in self.kube.objects(kind)]:
            meta = raw["metadata"]
            if meta["name"] == name:
                marks = (meta.get("annotations") or {}) | (annotations or {})
                self.kube.put(
                    raw | {"metadata": meta | {"annotations": marks}, "status": raw["status"] | (status or {})}
                )

    def _blind(self, fact: Fact) -> None:
        """Note that what a command has read of the copies of the volume is not so any more."""
        for command in self.commands:
            command.blind |= {fact.name, fact.claim}

    # -- locations -----------------------------------------------------------------------------

    async def set_location(self, name: str, state: str) -> None:
        """Let the location be `Available`, `Unavailable`, `read-only` or `gone`, or point to the `other` bucket."""
        if state == "gone":
            await KubeClient(self.kube, Retry(self.clock, attempts=1)).delete(BACKUP_STORAGE_LOCATIONS, "velero", name)
        else:
            bucket = "other" if state == "other" else BUCKET
            spec = {"accessMode": "ReadOnly"} if state == "read-only" else {}
            phase = "Unavailable" if state == "Unavailable" else "Available"
            self.scene.put_location(name, phase, objectStorage={"bucket": bucket}, **spec)
            if bucket != self.buckets[name]:
                self.edited.add(name)
                self.buckets[name] = bucket
        self.kube.closed[name] = "" if state in {"Available", "other"} else f"the location is {state}"
        self._place()

    def _place(self) -> None:
        for fact in self.facts.values():
            here = self.buckets[fact.location] == fact.bucket
            self.kube.places[fact.snapshot] = fact.location if here else "elsewhere"

    # -- time ----------------------------------------------------------------------------------

    async def run_time(self, seconds: float) -> None:
        """Let time pass; while much passes, commands stand still."""
        for command in self.commands:
            command.paused = seconds > _LONG_SECONDS
        await run_time(self.clock, self.commands, seconds)
        for command in self.commands:
            command.paused = False
        for name, (_, deleted) in list(self.kube.running.items()):
            if deleted is not None and self.clock.seconds - deleted > _GRACE_SECONDS:
                self.kube.forget_job(name)
        await self._forget_ended()

    def set_clocks(self, ahead: timedelta, skew: timedelta) -> None:
        """Set all clocks of the cluster, and those of pods compared with the others."""
        if ahead != self.clock.ahead:
            self.jumps.append(self.clock.seconds)
        self.clock.ahead, self.clock.skew = ahead, skew

    # -- commands ------------------------------------------------------------------------------

    async def start(self, *, name: str | None = None, most: int | None = None, schedule: bool = False) -> Command:
        """Start `backup delete` of a name, or of `most` expired backups, or a schedule, up to its first request."""
        command = Command(self.kube, self.clock, self._observe, name, most, self.kube.time)
        self.commands.append(command)
        command.start(self._run_schedule if schedule else self._run_command)
        await command.settle()
        return command

    def _build_tools(self, command: Command) -> Session:
        time = ServerTime(command, command)  # type: ignore[arg-type] # no command streams
        client = KubeClient(time, Retry(command, attempts=1))
        return Session(client, command, "velero", lambda _: None, date=lambda: time.date, now=time.now)

    async def _run_command(self, command: Command) -> None:
        tools = self._build_tools(command)
        made = plan_deletion(tools, DeletionWish(command.name, command.most))
        plan, _ = await check_plan(tools, await made)
        if command.name is not None and plan.check is not None and plan.check.refused:
            raise DeletionError("refused")
        async with hold_deletions(tools) as guard:
            await execute_plan(tools, plan, guard)

    async def _run_schedule(self, command: Command) -> None:
        tools = replace(self._build_tools(command), in_pod=True)
        run = scheduled_run.ScheduleRun("night", parse_time(format_time(self.kube.time)))
        request = ScheduleRequest("night", "velero", Choice(), keep=self.policies.get("night"))
        means = scheduled_run.ScheduleTools(tools, lambda _: None, lambda _: None, lambda _: None, "night-1")
        await scheduled_run._expire(means, run, request)
        if run.failures:
            raise scheduled_run.ScheduleError("; ".join(run.failures))

    async def advance(self, command: Command, requests: int, *, fault: Fault = None) -> bool:
        """Let the command send so many requests, and sleep between them; the last one has the fault.

        Returns:
            Whether it did: not if it has ended, or waits for another command that does not go on.
        """
        sent = sleeps = 0
        while sent < requests:
            while command.wakes_at is not None and sleeps < _MOST_SLEEPS:
                for name in list(self.kube.running):
                    self.kube.end_job(name)
                await self.run_time(max(command.wakes_at - self.clock.seconds, 0))
                sleeps += 1
            if not command.sends:
                break
            sent += 1
            await command.answer(fault if sent == requests else None)
        await self._forget_ended()
        return sent == requests

    async def advance_to(self, command: Command, stop: str, *, fault: Fault = None) -> None:
        """Let the command come to the next request that changes an object of this kind, which may have a fault."""

        def stops() -> bool:
            request = command.next_request
            return request is not None and request.method != "GET" and f"/{stop}" in request.path

        for number in range(_MOST_REQUESTS):
            if (stops() and number) or not await self.advance(command, 1):
                break
        if fault == "killed":
            await self.end(command, killed=True)
        elif stops() and fault is not None:
            await self.advance(command, 1, fault=fault)

    async def end(self, command: Command, *, killed: bool) -> None:
        await (command.kill() if killed else command.cancel())
        await self._forget_ended()

    async def _forget_ended(self) -> None:
        for command in self.commands:
            if not command.task.done():
                command.seen = max(command.seen, self.kube.time)
        self.commands = [one for one in self.commands if not one.task.done()]

    # -- what may not happen -------------------------------------------------------------------

    def restorable(self, claim: str, location: str, bucket: str) -> Iterator[Fact]:
        """Yield the copies from which the volume can be restored."""
        for one in self.facts.values():
            stored = one.snapshot in self.kube.bucket and one.snapshot not in self.kube.rootless
            if one.series == (claim, location, bucket) and one.sound and stored:
                yield one

    def _observe(self, command: Command, request: Request) -> None:
        *_, plural, name = request.path.split("/")
        command.seen = max(command.seen, self.kube.time)
        if request.method == "DELETE" and plural == JOBS.plural and name in self.kube.running:
            self.kube.running[name] = self.kube.running[name][0], self.clock.seconds
        if request.method == "DELETE" and plural in {DATA_UPLOADS.plural, POD_VOLUME_BACKUPS.plural}:
            self._check_deletion(command, self.facts[name])

    def _check_deletion(self, command: Command, fact: Fact) -> None:
        """Check that the transfer might go which the command has just deleted."""
        before = list(self.restorable(*fact.series))
        fact.exists, fact.gone = False, self.clock.seconds
        assert fact.phase != "InProgress", f"{fact.name} has not ended"
        blind = fact.name in command.blind
        assert blind or fact.snapshot not in self.kube.pinned, f"a restore reads {fact.name}"
        if command.name is not None:
            assert command.name == fact.backup, f"{fact.name} was not named"
            return
        assert before != [fact] or fact.claim in command.blind, f"{fact.name} was the last copy of {fact.series}"
        full = [one for one in before if not one.shrunk]
        assert full != [fact] or fact.claim in command.blind, f"{fact.name} was the last full copy of {fact.series}"
        self._check_expired(command, fact)
        if command.most is None and fact.completed is not None:
            fact.by_limit = True
            check_limit(fact, self.facts.values(), self.clock.seconds, self.kube.time, self.jumps)

    def _check_expired(self, command: Command, fact: Fact) -> None:
        assert fact.ttl is None or fact.moment + fact.ttl < command.seen, f"{fact.name} is not expired"
        policy = self.policies.get(fact.schedule)
        assert fact.ttl is not None or policy is not None, f"{fact.name} has no time to live"
        latest = command.seen + _TOLERANCE
        assert policy is None or fact.moment <= latest, f"{fact.name} is from the future"
        if policy is not None and fact.phase == "Completed" and not fact.damaged and fact.claim not in command.blind:
            others = [one for one in self.facts.values() if one.moment <= latest]
            assert not is_kept(fact, others, policy), f"schedule {fact.schedule} keeps {fact.name}"

    def check_bucket(self) -> None:
        """Check that each snapshot which is not lost has its transfer, unless a deletion of that has begun."""
        for fact in self.facts.values():
            if fact.exists and fact.completed is not None and fact.snapshot not in self.lost:
                assert fact.snapshot in self.kube.bucket, f"the snapshot of {fact.name} was deleted"

    def check_end(self) -> None:
        """Check that nothing stays behind, once nothing is wrong any more and runs have ended."""
        assert self.recorded == {}
        for fact in self.facts.values():
            # What was deleted while its location pointed to another bucket is not found there.
            if not fact.exists and fact.location not in self.edited:
                assert fact.snapshot not in self.kube.bucket, f"the snapshot of {fact.name} stays"

    @property
    def recorded(self) -> JsonDict:
        """The entries of the record of deletions."""
        found = self.kube.objects(CONFIG_MAPS)
        data = (found[0].get("data") or {}) if found else {}
        return {name: json.loads(text) for name, text in data.items() if not name.startswith("_")}

"""The state machine: whatever happens in whatever order, the last copy of a volume stays, and nothing stays behind."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final, TypeVar
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from client.backups.copies import KeepPolicy, KeepRule
from core.models.verification import VerificationOutcome
from tests.retention.commands import Command, Fault
from tests.retention.facts import Fact
from tests.retention.world import World

_T = TypeVar("_T")

STEPS_EACH: Final = 50
"""Steps of one machine, at most: each begins with a new cluster."""

_MOST_COMMANDS: Final = 3
_WHOLE: Final = 400
"""Requests: more than a command sends that is not held up."""

_ANY: Final = st.integers(0, 7)
_NEW: Final = st.sampled_from([0, 0, 0, 1, 2, 3, 5])
"""Which copy, the newest first."""

_PHASES: Final = st.sampled_from(["Completed"] * 5 + ["Failed", "Canceled", "InProgress"])
_CLAIMS: Final = st.sampled_from([("data",), ("data",), ("data", "files"), ("data", "files", "logs")])
_LOCATIONS: Final = st.sampled_from(["default", "default", "default", "lab"])
_TTLS: Final = st.sampled_from([1, 1, 24, 72, 720])
_SCHEDULES: Final = st.sampled_from(["", "", "night", "night", "other"])
_POLICIES: Final = st.dictionaries(
    st.sampled_from(KeepRule), st.sampled_from([1, 1, 2, 3, 7]), min_size=1, max_size=3
).map(KeepPolicy)
_FAULTS: Final = st.sampled_from(
    [None] * 8 + ["lost", "lost-applied", 500, 409, 403, "stopped", "stopped", "asleep", "killed"]
)
_PAUSES: Final = st.sampled_from([None, None, "stopped", "asleep", "killed"])
_STOPS: Final = st.sampled_from(["leases", "configmaps", "configmaps", "datauploads", "datauploads", "jobs"])
"""What a command is about to change."""

_EXPIRING: Final = st.sampled_from([("schedule", None), ("expired", None), ("expired", 1), ("expired", 50)])
_COMMANDS: Final = st.one_of(_EXPIRING, st.tuples(st.just("named"), _NEW))
"""Those that delete what is expired, at most so many, and those that delete a backup, the newest with the number 0."""

_CLOCKS: Final = st.sampled_from([0.0] * 10 + [0.06, -0.06, 1.0, -1.0, 744.0, -744.0])
"""Hours ahead: a little, too much, and a month."""


class RetentionMachine(RuleBasedStateMachine):
    """A cluster in which backups are made and expire."""

    steps: ClassVar[int] = 0
    """Steps of all machines of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        # A request that stands still would time out on a busy machine, in another step each time.
        self.loop.time = lambda: 0.0  # type: ignore[method-assign]
        self.world = World()
        self.made = 0
        self.failed = False

    def _run(self, what: Coroutine[Any, Any, _T]) -> _T:
        try:
            return self.loop.run_until_complete(what)
        except BaseException:
            self.failed = True
            raise

    def _choose(self, number: int, wanted: Callable[[Fact], bool] = lambda _: True) -> Fact | None:
        """Return one of the copies that exist, the newest with the number 0."""
        found = [one for one in reversed(self.world.facts.values()) if one.exists and wanted(one)]
        return found[number % len(found)] if found else None

    def _choose_command(self, number: int) -> Command:
        return self.world.commands[number % len(self.world.commands)]

    # -- backups -------------------------------------------------------------------------------

    @initialize(
        claims=_CLAIMS,
        location=_LOCATIONS,
        count=st.sampled_from([1, 2, 2, 3, 3, 4, 6]),
        hours=st.sampled_from([1, 24]),
        policies=st.tuples(_POLICIES, st.none() | _POLICIES),
    )
    def begin(
        self,
        claims: tuple[str, ...],
        location: str,
        count: int,
        hours: int,
        policies: tuple[KeepPolicy, KeepPolicy | None],
    ) -> None:
        """Set what the schedules keep, make some backups, and let them expire."""
        self.world.policies = {
            name: one for name, one in zip(("night", "other"), policies, strict=True) if one is not None
        }
        self._make(claims, location, count, hours)

    def _make(self, claims: tuple[str, ...], location: str, count: int, hours: int) -> None:
        for _ in range(count):
            self.back_up(claims, ("Completed",) * 3, location, 1, "")
            self.wait(hours)
        self.wait(24)

    @rule(
        claims=_CLAIMS, phases=st.tuples(_PHASES, _PHASES, _PHASES), location=_LOCATIONS, ttl=_TTLS, schedule=_SCHEDULES
    )
    def back_up(self, claims: Sequence[str], phases: Sequence[str], location: str, ttl: int, schedule: str) -> None:
        """Make a backup; one of a schedule with a policy has a time to live only if it is long."""
        self.made += 1
        lives = None if schedule in self.world.policies and ttl == 1 else ttl
        self.world.back_up(f"b{self.made:03}", dict(zip(claims, phases, strict=False)), location, lives, schedule)

    @rule(
        claims=_CLAIMS,
        location=_LOCATIONS,
        ttl=_TTLS,
        hours=st.sampled_from([1, 6, 24]),
        schedule=_SCHEDULES,
        runs=st.booleans(),
    )
    def follow_a_schedule(
        self, claims: Sequence[str], location: str, ttl: int, hours: int, schedule: str, *, runs: bool
    ) -> None:
        """Make backups at fixed times; each run may also delete what is expired."""
        for _ in range(4):
            self.back_up(claims, ("Completed",) * 3, location, ttl, schedule)
            if runs and not self.world.commands:
                self._run(self.world.advance(self._run(self.world.start(schedule=True)), _WHOLE))
            self.wait(hours)

    @precondition(lambda self: self._choose(0, lambda one: one.phase == "InProgress"))
    @rule(number=_NEW, phase=st.sampled_from(["Completed", "Completed", "Failed", "Canceled"]))
    def end_transfer(self, number: int, phase: str) -> None:
        if fact := self._choose(number, lambda one: one.phase == "InProgress"):
            self.world.end_transfer(fact, phase)

    @rule(
        number=_NEW, change=st.sampled_from([*["fails", "passes", "shrinks"] * 2, "kept", "lost", "rootless", "read"])
    )
    def change_copy(self, number: int, change: str) -> None:
        """Let a copy be verified, Shrunk, acknowledged, lost or restored."""
        if fact := self._choose(number, lambda one: one.phase == "Completed"):
            match change:
                case "fails":
                    self.world.verify(fact, VerificationOutcome.FAILED)
                case "passes":
                    self.world.verify(fact, VerificationOutcome.PASSED)
                case "shrinks" | "kept":
                    self.world.shrink(fact, acknowledged=change == "kept")
                case "lost":
                    self.world.lose_snapshot(fact)
                case "rootless":
                    self.world.lose_root(fact)
                case _:
                    self.world.restore(fact)

    @precondition(lambda self: self.world.kube.pinned)
    @rule()
    def end_restores(self) -> None:
        self.world.end_restores()

    # -- the cluster ---------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(["default", "lab"]),
        state=st.sampled_from(["Available", "Available", "Unavailable", "read-only", "gone", "other"]),
    )
    def set_location(self, name: str, state: str) -> None:
        self._run(self.world.set_location(name, state))

    @rule(hours=st.sampled_from([0.001, 0.01, 0.02, 0.1, 1, 6, 23, 24, 25, 72, 720]))
    def wait(self, hours: float) -> None:
        self._run(self.world.run_time(hours * 3600.0))

    @rule(dates=_CLOCKS, pods=_CLOCKS, ahead=_CLOCKS, dated=st.sampled_from([True] * 5 + [False]))
    def set_clocks(self, dates: float, pods: float, ahead: float, *, dated: bool) -> None:
        """Set the Dates of answers and the clocks of pods, compared with the API server's; and all of them."""
        kube = self.world.kube
        kube.dates_ahead, kube.pod_ahead, kube.dated = timedelta(hours=dates), timedelta(hours=pods), dated
        self.world.set_clocks(timedelta(hours=ahead), timedelta(hours=pods))

    @rule(slow=st.booleans())
    def set_jobs(self, *, slow: bool) -> None:
        self.world.kube.slow = slow

    @precondition(lambda self: self.world.kube.running)
    @rule(number=_ANY, killed=st.booleans())
    def end_job(self, number: int, *, killed: bool) -> None:
        names = list(self.world.kube.running)
        self.world.kube.end_job(names[number % len(names)], killed=killed)

    # -- commands ------------------------------------------------------------------------------

    def _start(self, kind: str, number: int | None) -> Command | None:
        if kind == "schedule":
            return self._run(self.world.start(schedule=True))
        if kind == "expired":
            return self._run(self.world.start(most=number))
        fact = self._choose(number or 0)
        return self._run(self.world.start(name=fact.backup)) if fact is not None else None

    @precondition(lambda self: len(self.world.commands) < _MOST_COMMANDS)
    @rule(what=_COMMANDS, stop=_STOPS, fault=_FAULTS)
    def start(self, what: tuple[str, int | None], stop: str, fault: Fault) -> None:
        """Start a command, which stops before it changes something."""
        if (command := self._start(*what)) is not None:
            self._run(self.world.advance_to(command, stop, fault=fault))

    @precondition(lambda self: len(self.world.commands) < _MOST_COMMANDS)
    @rule(
        count=st.sampled_from([0, 2, 2, 3, 5]),
        commands=st.tuples(_EXPIRING, _COMMANDS),
        first_stop=st.tuples(_STOPS, _PAUSES),
        order=st.lists(st.tuples(st.booleans(), _STOPS, _FAULTS), max_size=3),
    )
    def race(
        self,
        count: int,
        commands: tuple[tuple[str, int | None], tuple[str, int | None]],
        first_stop: tuple[str, Fault],
        order: list[tuple[bool, str, Fault]],
    ) -> None:
        """Run a command while another one stands still that deletes what is expired, such as copies of a new volume."""
        self._run(self._heal())
        self._make((f"volume-{self.made}",), "default", count, 1)
        started = [one for one in itertools.starmap(self._start, commands) if one is not None]
        for which, stop, fault in [(False, *first_stop), *order]:
            for command in started[which : which + 1]:
                self._run(self.world.advance_to(command, stop, fault=fault))
        # The second one may wait for the first one.
        for command in 2 * started[::-1]:
            self._run(self.world.advance(command, _WHOLE))

    @precondition(lambda self: self.world.commands)
    @rule(number=_ANY, requests=st.integers(1, 5), fault=_FAULTS)
    def advance(self, number: int, requests: int, fault: Fault) -> None:
        command = self._choose_command(number)
        self._run(self.world.advance(command, requests, fault=None if fault == "killed" else fault))

    @precondition(lambda self: self.world.commands)
    @rule(number=_ANY, stop=_STOPS, fault=_FAULTS)
    def advance_to(self, number: int, stop: str, fault: Fault) -> None:
        self._run(self.world.advance_to(self._choose_command(number), stop, fault=fault))

    @precondition(lambda self: self.world.commands)
    @rule(number=_ANY)
    def finish(self, number: int) -> None:
        self._run(self.world.advance(self._choose_command(number), _WHOLE))

    @precondition(lambda self: self.world.commands)
    @rule(number=_ANY, killed=st.booleans())
    def end(self, number: int, *, killed: bool) -> None:
        self._run(self.world.end(self._choose_command(number), killed=killed))

    # -- what may not happen; the rest is checked at each deletion -------------------------------

    @invariant()
    def no_snapshot_goes_before_its_transfer(self) -> None:
        RetentionMachine.steps += 1
        try:
            self.world.check_bucket()
        except AssertionError:
            self.failed = True
            raise

    def teardown(self) -> None:
        """Heal everything, and let two runs finish what was interrupted."""
        try:
            if not self.failed:
                self._run(self._finish())
        finally:
            for command in self.world.commands:
                self.loop.run_until_complete(command.kill())
            self.loop.close()

    async def _finish(self) -> None:
        world = self.world
        await self._heal()
        while world.commands:
            for command in list(world.commands):
                await world.advance(command, 10)
        for _ in range(2):
            await world.run_time(120)
            command = await world.start(schedule=True)
            await world.advance(command, _WHOLE)
            assert command.task.done()
            if error := command.task.exception():
                raise AssertionError("an undisturbed run failed") from error
        world.check_end()

    async def _heal(self) -> None:
        self.world.end_restores()
        self.world.kube.slow = False
        for name in ("default", "lab"):
            await self.world.set_location(name, "Available")
        self.set_clocks(0, 0, 0, dated=True)


def run_machine(machines: int, *, seed: int) -> int:
    """Run so many machines, and return how many steps they took; the smallest sequence that fails is printed."""
    before = RetentionMachine.steps
    RetentionMachine._hypothesis_internal_use_seed = seed
    numbers = itertools.count()
    # Objects are listed by name: what failed once would not fail again if names were random.
    with patch("secrets.token_hex", lambda size: f"{next(numbers):0{2 * size}x}"):
        run_state_machine_as_test(
            RetentionMachine,
            settings=settings(
                max_examples=machines,
                stateful_step_count=STEPS_EACH,
                database=None,
                deadline=None,
                report_multiple_bugs=False,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            ),
        )
    return RetentionMachine.steps - before

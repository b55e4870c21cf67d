"""One worker of the soak: a transfer after the other, each with a random fault."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.cluster.scenes import RESOURCES, is_final
from tests.soak.deck import Deck
from tests.soak.faults import Fault, hold
from tests.soak.ground import Ground
from tests.soak.journal import Entry, Journal
from tests.testbed.api import ApiError, Json
from tests.testbed.processes import BedError

NO_FAULT = Fault("none")
_END_SECONDS = 900
"""An agent that starts again measures again how long a lost mover may still write: three minutes, undisturbed."""


@dataclass
class Worker:
    """Makes transfers on its ground until `stop` returns true.

    `kinds` and `faults` are shared by all workers, so that all come up equally often.
    """

    ground: Ground
    journal: Journal
    kinds: Deck[str]
    faults: Deck[Fault]
    chance: random.Random
    stop: Callable[[], bool]
    _patient: list[tuple[Entry, Json]] = field(default_factory=list)

    def run(self) -> None:
        """Work; a transfer whose objects cannot be made is reported, and the next one follows.

        The ends of patient faults are awaited last: each leader measures their limit from its own start, and the
        soak replaces leaders more often.
        """
        number = 0
        while not self.stop():
            number += 1
            fault, kind = self.faults.draw(), self.kinds.draw()
            if kind not in fault.kinds:
                fault = NO_FAULT
            name = f"{self.ground.name}-{number:03d}"
            entry = Entry(kind, name, fault.name, fault.ending)
            self._run_part(entry, partial(self._play, entry, fault))
            if not fault.patient:
                self.journal.report(entry)
        for entry, transfer in self._patient:
            self._run_part(entry, partial(self._end, entry, transfer))
            self.journal.report(entry)

    def _run_part(self, entry: Entry, play: Callable[[], None]) -> None:
        try:
            play()
        except (BedError, ApiError, OSError) as error:
            entry.message = entry.message or f"{error}"
            self.journal.say(f"{entry.kind} {entry.name} ({entry.fault}): {error}")

    def _play(self, entry: Entry, fault: Fault) -> None:
        """Make a transfer, let its fault happen, see how it ends, remove it."""
        ground = self.ground
        transfer = ground.make(entry.kind, entry.name)
        if fault.spoil is not None:
            fault.spoil(transfer)
            self.journal.injected(fault.name)
        if fault.holds:
            ground.gate.shut()
        try:
            ground.bed.api.create(RESOURCES[entry.kind], transfer)
            self.journal.add(entry)
            if fault.holds:
                hold(ground, transfer)
            if fault.strike is not None:
                fault.strike(ground, transfer, self.chance)
                self.journal.injected(fault.name)
        finally:
            ground.gate.open()
            if fault.patient:
                self._patient.append((entry, transfer))
            else:
                self._record_end(entry, transfer)
        if not fault.patient:
            ground.remove(transfer)

    def _end(self, entry: Entry, transfer: Json) -> None:
        self._record_end(entry, transfer)
        self.ground.remove(transfer)

    def _record_end(self, entry: Entry, transfer: Json) -> None:
        found: Json = {"status": {"phase": ""}}
        try:
            found = self.ground.wait(transfer, is_final, seconds=_END_SECONDS)
        except BedError as e:
            found["status"]["message"] = str(e)
        entry.phase = found["status"]["phase"] if found else "deleted"
        if entry.phase == "Completed":
            self.ground.keep(found)
        entry.message = found.get("status", {}).get("message", "")

"""One worker of the soak: a transfer after the other, each with the fault that chance has for it."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.cluster.scenes import is_final
from tests.cluster_full.quartet import RESOURCES
from tests.soak.journal import Entry
from tests.soak.troubles import Trouble, hold
from tests.testbed.api import ApiError
from tests.testbed.processes import BedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.soak.deck import Deck
    from tests.soak.ground import Ground
    from tests.soak.journal import Journal
    from tests.testbed.api import Json

__all__ = ["NO_TROUBLE", "Worker"]

NO_TROUBLE = Trouble("none")
_END_SECONDS = 300


@dataclass
class Worker:
    """Makes transfers on its ground until it is told to stop.

    `kinds` and `troubles` are shared by all workers, so that all come up equally often.
    """

    ground: Ground
    journal: Journal
    kinds: Deck[str]
    troubles: Deck[Trouble]
    chance: random.Random
    stop: Callable[[], bool]

    def run(self) -> None:
        """Work; what a transfer is about may be impossible to make, which is told, and the next one is tried."""
        number = 0
        while not self.stop():
            number += 1
            trouble, kind = self.troubles.draw(), self.kinds.draw()
            if kind not in trouble.kinds:
                trouble = NO_TROUBLE
            name = f"{self.ground.name}-{number:03d}"
            entry = Entry(kind, name, trouble.name, trouble.ending)
            began = time.monotonic()
            try:
                self._play(entry, trouble)
            except (BedError, ApiError, OSError) as error:
                entry.message = entry.message or f"{error}"
                self.journal.say(f"{kind} {name} ({trouble.name}): {error}")
            entry.seconds = time.monotonic() - began
            told = "" if entry.explained else f" NOT EXPLAINED: {entry.message}"
            self.journal.say(f"{kind} {name} ({trouble.name}): {entry.phase or 'not final'}{told}")

    def _play(self, entry: Entry, trouble: Trouble) -> None:
        """Make a transfer, let its fault happen, see how it ends, remove it."""
        ground = self.ground
        transfer = ground.make(entry.kind, entry.name)
        if trouble.spoil is not None:
            trouble.spoil(transfer)
            self.journal.injected(trouble.name)
        if trouble.holds:
            ground.gate.shut()
        try:
            ground.bed.api.create(RESOURCES[entry.kind], transfer)
            self.journal.add(entry)
            if trouble.holds:
                hold(ground, transfer)
            if trouble.strike is not None:
                trouble.strike(ground, transfer, self.chance)
                self.journal.injected(trouble.name)
        finally:
            ground.gate.open()
            self._note_end(entry, transfer)
        ground.remove(transfer)

    def _note_end(self, entry: Entry, transfer: Json) -> None:
        found: Json = {"status": {"phase": ""}}
        with suppress(BedError):
            found = self.ground.wait(transfer, is_final, seconds=_END_SECONDS)
        entry.phase = found["status"]["phase"] if found else "gone"
        entry.message = found.get("status", {}).get("message", "")

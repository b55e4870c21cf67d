"""`python -m tests.soak [--seconds N] [--seed N]`, inside the test bed; the last line is one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.configuration import change
from tests.cluster.conftest import Bed
from tests.cluster.gate import open_gate
from tests.cluster.scenes import Place
from tests.cluster_full.quartet import RESOURCES, wait_leaked
from tests.soak.chaos import build_chaos
from tests.soak.deck import Deck
from tests.soak.faults import FAULTS, WRONG_LOCATION
from tests.soak.ground import Ground
from tests.soak.journal import Journal
from tests.soak.memory import Memory
from tests.soak.retrying import RetryingApi
from tests.soak.worker import NO_FAULT, Worker
from tests.testbed.api import ApiError
from tests.testbed.demonstration.user import User
from tests.testbed.install import install_agent
from tests.testbed.processes import BedError

if TYPE_CHECKING:
    from collections.abc import Callable

_WORKERS = 8
_TRANSFERS_AT_A_TIME = 16
_LEAST_TRANSFERS = 200
_LEAST_FAULTS = 100
_LEAST_OF_EACH = 5
_WITHOUT_FAULT = 3
_CHAOS_ROUNDS = 8
"""In the time that the soak has; each kind of fault that affects all workers is injected once a round."""

_BACKOFF = "2s"
"""A transfer that is interrupted continues soon, so that the workers have time for others."""

_SAMPLE_SECONDS = 5.0
_MOST_GROWTH_MIB = 10.0


@dataclass
class Soak:
    """A whole run."""

    bed: Bed
    seconds: float
    seed: int
    journal: Journal = field(default_factory=Journal)
    memory: Memory = field(default_factory=Memory)
    _over: threading.Event = field(default_factory=threading.Event)
    _errors: int = 0

    def run(self) -> dict[str, object]:
        """Run it; returns its figures."""
        chance = random.Random(self.seed)
        kinds = Deck(list(RESOURCES), random.Random(chance.random()))
        faults = Deck([*FAULTS, *[NO_FAULT] * _WITHOUT_FAULT], random.Random(chance.random()))
        install_agent(self.bed.user, self.bed.env)
        # It is not restored: the kubelet may start an agent that was killed often only five minutes later.
        own = {"retry": {"initialBackoff": _BACKOFF}}
        change(self.bed, loadConcurrency={"globalConfig": _TRANSFERS_AT_A_TIME}, **{"nodeagent.io": own})
        with ExitStack() as stack:
            wrong = Place(self.bed, WRONG_LOCATION).build(secret_key="notthesecretofanybody")
            self.bed.user.apply(*wrong)
            grounds = [
                Ground(self.bed, stack.enter_context(open_gate()), f"soak-{number}") for number in range(_WORKERS)
            ]
            _all_at_once([ground.prepare for ground in grounds])
            self.journal.began = time.monotonic()
            workers = [
                Worker(ground, self.journal, kinds, faults, random.Random(chance.random()), self._over.is_set)
                for ground in grounds
            ]
            chaos = random.Random(chance.random())
            _all_at_once([lambda: self._chaos(chaos), self._watch_memory, *(worker.run for worker in workers)])
            left = wait_leaked(self.bed)
        return self._figures(left)

    def _chaos(self, chance: random.Random) -> None:
        """Inject the faults that affect all workers, until the soak is over and each kind was injected often enough."""
        chaos = build_chaos(self.bed)
        deck = Deck(list(chaos), chance)
        pause = self.seconds / (_CHAOS_ROUNDS * len(chaos))
        deadline = time.monotonic() + self.seconds
        try:
            while time.monotonic() < deadline or (not self._enough() and time.monotonic() < deadline + self.seconds):
                time.sleep(pause * chance.uniform(0.5, 1.5))
                name = deck.draw()
                chaos[name]()
                self.journal.injected(name)
        except (ApiError, BedError, OSError) as error:
            self._errors += 1
            self.journal.say(f"the soak itself failed: {error}")
        finally:
            self._over.set()

    def _enough(self) -> bool:
        journal = self.journal
        names = [*(fault.name for fault in FAULTS), *build_chaos(self.bed)]
        often = all(journal.faults[name] >= _LEAST_OF_EACH for name in names)
        return often and len(journal.entries) >= _LEAST_TRANSFERS and journal.faults.total() >= _LEAST_FAULTS

    def _watch_memory(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.memory.sample()

    def _figures(self, left: list[str]) -> dict[str, object]:
        journal = self.journal
        for name, count in sorted(journal.faults.items()):
            journal.say(f"{count:4d} x {name}")
        for kind in RESOURCES:
            ends = [entry for entry in journal.entries if entry.kind == kind]
            journal.say(f"{len(ends):4d} x {kind}")
        for entry in [*journal.not_final, *journal.unexplained]:
            journal.say(f"{entry.kind} {entry.name} ({entry.fault}): {entry.phase or 'not final'}: {entry.message}")
        for each in left:
            journal.say(f"leaked: {each}")
        return {
            "crs": len(journal.entries),
            "faults": journal.faults.total(),
            "not_final": len(journal.not_final),
            "unexplained": len(journal.unexplained),
            "leaked": len(left),
            "agent_growth_mib": self.memory.growth_mib,
            "agent_peak_mib": self.memory.peak_mib,
            "least_of_a_fault": min(journal.faults.values(), default=0),
            "soak_errors": self._errors,
            "seconds": round(time.monotonic() - journal.began),
            "seed": self.seed,
        }


def _all_at_once(works: list[Callable[[], None]]) -> None:
    """Do all of it, each in a thread; what one raised is raised when all have ended."""
    with ThreadPoolExecutor(max_workers=len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


def main() -> int:
    """Run the soak; 0 only if every transfer ended as it should and nothing is left."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0, help="how long (default: 1200)")
    parser.add_argument("--seed", type=int, default=None, help="of the random order (default: another one each time)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}, {arguments.seconds:.0f} s", flush=True)
    bed = Bed(dict(os.environ), User(RetryingApi(Path(os.environ["KUBECONFIG"]))))
    figures = Soak(bed, arguments.seconds, seed).run()
    growth = figures["agent_growth_mib"]
    well = not any(figures[key] for key in ("not_final", "unexplained", "leaked", "soak_errors"))
    well = well and isinstance(growth, float) and growth <= _MOST_GROWTH_MIB
    print(json.dumps(figures), flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())

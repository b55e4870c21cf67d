"""`python -m tests.soak [--seconds N] [--seed N]`, inside the test bed; the last line is one JSON object."""

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.bed import Bed
from tests.cluster.configuration import change
from tests.cluster.gate import open_gate
from tests.cluster.scenes import RESOURCES, Place
from tests.cluster_full.quartet import wait_leaked
from tests.soak.chaos import build_chaos
from tests.soak.deck import Deck
from tests.soak.faults import FAULTS, WRONG_LOCATION
from tests.soak.ground import Ground
from tests.soak.journal import Journal
from tests.soak.keeper import KINDS, Keeper
from tests.soak.memory import Memory
from tests.soak.retrying import RetryingApi
from tests.soak.worker import NO_FAULT, Worker
from tests.testbed.api import ApiError
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.demonstration.user import User
from tests.testbed.install import install_agent
from tests.testbed.processes import BedError

_WORKERS = 8
_BY_BLOCK = 2
"""One worker of so many has a device."""

_METHODS = ("csi-snapshot", "fs-backup")
"""One keeper backs up by each of them."""

_LEAST_OF_KEEPERS = 3
"""How often each of their actions succeeds."""

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
    bed: Bed
    seconds: float
    seed: int
    journal: Journal = field(default_factory=Journal)
    keepers: list[Keeper] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    _over: threading.Event = field(default_factory=threading.Event)
    _errors: int = 0

    def run(self) -> dict[str, object]:
        chance = random.Random(self.seed)
        kinds = Deck(list(RESOURCES), random.Random(chance.random()))
        faults = Deck([*FAULTS, *[NO_FAULT] * _WITHOUT_FAULT], random.Random(chance.random()))
        install_agent(self.bed.user, self.bed.env)
        self._maintain()
        # It is not restored: the kubelet may start an agent that was killed often only five minutes later.
        own = {"retry": {"initialBackoff": _BACKOFF}}
        change(self.bed, loadConcurrency={"globalConfig": _TRANSFERS_AT_A_TIME}, **{"nodeagent.io": own})
        with ExitStack() as stack:
            wrong = Place(self.bed, WRONG_LOCATION).build(secret_key="notthesecretofanybody")
            self.bed.user.apply(*wrong)
            names = [f"soak-{number}" for number in range(_WORKERS)] + [f"soak-keeper-{each}" for each in _METHODS]
            grounds = [Ground(self.bed, stack.enter_context(open_gate()), name) for name in names]
            for ground in grounds[:_WORKERS:_BY_BLOCK]:
                ground.by_block = True
            self.keepers = [
                Keeper(ground, self.journal, method, grounds, random.Random(chance.random()), self._over)
                for ground, method in zip(grounds[_WORKERS:], _METHODS, strict=True)
            ]
            _all_at_once([*(each.prepare for each in grounds[:_WORKERS]), *(each.prepare for each in self.keepers)])
            self.journal.began = time.monotonic()
            workers = [
                Worker(ground, self.journal, kinds, faults, random.Random(chance.random()), self._over.is_set)
                for ground in grounds[:_WORKERS]
            ]
            chaos = random.Random(chance.random())
            kept = [work for keeper in self.keepers for work in (keeper.back_up, keeper.tend, keeper.move)]
            works = [lambda: self._chaos(chaos), self._watch_memory, *(worker.run for worker in workers), *kept]
            _all_at_once(works)
            lost = [each for ground in grounds for each in ground.lost()]
            lost += [each for keeper in self.keepers for each in keeper.lost()]
            left = wait_leaked(self.bed)
            for each in left:
                # It may go meanwhile.
                with suppress(BedError):
                    self.journal.say(self.bed.user.kubectl("get", *each.split(), "-n", NAMESPACE, "-o", "yaml"))
            proven = sum(len(ground.copies) for ground in grounds) + len(self.keepers) - len(lost)
        return self._figures(left, lost) | {"volumes_proven": proven}

    def _maintain(self) -> None:
        """Have the agents maintain repositories at once, not only after an hour without a Velero server."""
        path = "/spec/template/spec/containers/0/args/-"
        patch = json.dumps([{"op": "add", "path": path, "value": "--repo-maintenance=on"}])
        own = ("daemonset/node-agent", "-n", NAMESPACE)
        self.bed.user.kubectl("patch", *own, "--type=json", f"--patch={patch}")
        self.bed.user.kubectl("rollout", "status", *own, "--timeout=240s")

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
        often = often and all(journal.count(kind, completed=True) >= _LEAST_OF_KEEPERS for kind in KINDS)
        return often and journal.count(*RESOURCES) >= _LEAST_TRANSFERS and journal.faults.total() >= _LEAST_FAULTS

    def _watch_memory(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.memory.sample()

    def _figures(self, left: list[str], lost: list[str]) -> dict[str, object]:
        journal = self.journal
        done = {kind: journal.count(kind, completed=True) for kind in KINDS}
        for name, count in sorted(journal.faults.items()):
            journal.say(f"{count:4d} x {name}")
        for kind in (*RESOURCES, *done):
            journal.say(f"{journal.count(kind):4d} x {kind}")
        for entry in [*journal.not_final, *journal.unexplained]:
            journal.say(f"{entry.kind} {entry.name} ({entry.fault}): {entry.phase or 'not final'}: {entry.message}")
        for each in (*(f"leaked: {each}" for each in left), *(f"not restorable: {each}" for each in lost)):
            journal.say(each)
        return {
            "crs": journal.count(*RESOURCES),
            "faults": journal.faults.total(),
            "not_final": len(journal.not_final),
            "unexplained": len(journal.unexplained),
            "leaked": len(left),
            "not_restorable": len(lost),
            **{f"{kind.replace(' ', '_')}s": count for kind, count in done.items()},
            "expired": sum(keeper.expired for keeper in self.keepers),
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
    well = not any(figures[key] for key in ("not_final", "unexplained", "leaked", "not_restorable", "soak_errors"))
    well = well and isinstance(growth, float) and growth <= _MOST_GROWTH_MIB
    print(json.dumps(figures), flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())

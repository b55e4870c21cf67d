"""One namespace with a schedule, and what people do about its backups and its storage location meanwhile."""

import json
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, CRON_JOBS, JOBS, PODS, SECRETS, Resource
from tests.cluster.handkopia import open_kopia
from tests.cluster.scenes import Place, Volume
from tests.soak.ground import Ground, digest_of, wait_for
from tests.soak.journal import Ending, Entry, Journal
from tests.testbed.api import ApiError, Json
from tests.testbed.demonstration.manifests import NAMESPACE, build_pod
from tests.testbed.processes import BedError
from tests.testbed.settings import S3_ADDRESS, S3_PORT

_RUN, _MANUAL, _CHANGE, _DELETION = "schedule run", "manual backup", "location change", "deletion"
KINDS = (_RUN, _MANUAL, _CHANGE, _DELETION, "verification", "restore verification", "maintenance run")
"""What a keeper does."""

_WRONG_KEYS = "wrong keys"
_CHANGES: Mapping[str, tuple[Json, str]] = {
    "another Secret": ({"credential": {"name": "cloud-credentials"}}, ""),
    "another endpoint": ({"config": {"s3Url": f"http://{S3_ADDRESS}:{S3_PORT}"}}, ""),
    _WRONG_KEYS: ({}, "secret access key is not accepted|is Unavailable"),
    "no storage": ({"config": {"s3Url": f"http://{S3_ADDRESS}:1"}}, "cannot be reached|is Unavailable"),
    "read-only": ({"accessMode": "ReadOnly"}, "is read-only"),
}
"""What a location is for a while: a patch of its spec, and what a failure meanwhile names, if one is allowed."""

_EDITED = "has changed since its snapshots were checked"
"""How a deletion may also end then: it was planned for the location as it had been."""

_AWAY = "cannot connect to host|disconnected|reset by peer|timed out|unauthorized|forbidden|: 50[0-9]"
"""What a command says while the API server is down: a person repeats it."""

_NEVER = "0 0 29 2 *"
_TTL = "40s"
_FILLED_BYTES = 2 << 20
_SECONDS = 420
_COMMAND_SECONDS = 300
_POLL_SECONDS = 1.0


@dataclass
class Keeper:
    """Backs up, deletes, verifies, maintains and changes its location, each in a thread of its own, until `over`.

    Attributes:
        ground: Its namespace, whose location nobody else uses.
        grounds: Those whose repositories it has maintained.
        contents: The digest of each of its backups.
        expired: How many backups its schedule has deleted.
    """

    ground: Ground
    journal: Journal
    method: str
    grounds: list[Ground]
    chance: random.Random
    over: threading.Event
    contents: dict[str, str] = field(default_factory=dict)
    expired: int = 0
    _changes: list["_Change"] = field(default_factory=list)

    def prepare(self) -> None:
        """Make the ground, a pod that has the claim, and the schedule."""
        self.ground.prepare()
        sleep = ["-c", "import time; time.sleep(1e6)"]
        self.ground.bed.api.create(PODS, build_pod(self.ground.name, "app", claim="data", script=sleep, folders={}))
        words = (f"--schedule={_NEVER}", f"--ttl={_TTL}", "--verify", *self._selection)
        self._command("schedule", "create", self.ground.name, *words)

    def back_up(self) -> None:
        """Back up by the schedule and by command, in turns."""
        number = 0
        while not self.over.is_set():
            number += 1
            digest = self.ground.fill(_FILLED_BYTES)
            kind, work = (_RUN, self._run_schedule) if number % 3 else (_MANUAL, self._create)
            self._do(kind, f"{self.ground.name}-{number:03d}", partial(work, digest))

    def tend(self) -> None:
        """Delete, verify and have repositories maintained: first what succeeded least often, if it can be done."""
        works: dict[str, Callable[[], bool | None]] = {
            _DELETION: self._delete,
            "verification": self._verify,
            "restore verification": partial(self._verify, "--restore"),
            "maintenance run": self._maintain,
        }
        number = 0
        while not self.over.wait(self.chance.uniform(1, 10)):
            number += 1
            kinds = self.chance.sample(list(works), len(works))
            kinds.sort(key=lambda kind: self.journal.count(kind, completed=True))
            any(self._do(kind, f"{self.ground.name}-{number:03d}", works[kind]) for kind in kinds)

    def move(self) -> None:
        """Change the location for a while, again and again; in the end it is as it was."""
        while not self.over.wait(self.chance.uniform(30, 60)):
            name = self.chance.choice(list(_CHANGES))
            change = _Change(name)
            self._changes.append(change)
            self._do(_CHANGE, f"{self.ground.name} {name}", partial(self._change, name))
            change.ended = time.monotonic()

    def lost(self) -> list[str]:
        """Restore the newest backup that is left by command; returns why its content is not as it was."""
        try:
            name, target = self._own()[0], f"{self.ground.name}-back"
            mapping = f"--namespace-mappings={self.ground.name}:{target}"
            self._command("restore", "create", target, "--from-backup", name, mapping, "--wait")
            if digest_of(Volume(self.ground.bed, target).path()) == self.contents[name]:
                return []
            failure = f"{name} has other content"
        except (BedError, OSError, IndexError) as error:
            failure = f"{error}"
        return [f"the last backup of {self.ground.name}: {failure}"]

    @property
    def _selection(self) -> tuple[str, ...]:
        name = self.ground.name
        return f"--pvc={name}/data", f"--storage-location={name}", f"--method={self.method}"

    def _do(self, kind: str, name: str, work: Callable[[], bool | None]) -> bool:
        """Do something and record how it ended; returns whether there was something to do.

        Only a change of the location at the same time explains a failure.
        """
        entry, began = Entry(kind, name, "none", Ending(frozenset({"Completed"}))), time.monotonic()
        try:
            if work() is False:
                return False
            entry.phase = "Completed"
        except (BedError, ApiError, OSError) as error:
            entry.phase, entry.message = "Failed", f"{error}"
        if changes := {each.name: _CHANGES[each.name][1] for each in self._changes if each.ended > began}:
            entry.fault = ", ".join(changes)
            pattern = "|".join(filter(None, [*changes.values(), _EDITED if kind == _DELETION else ""]))
            if kind != _CHANGE:
                entry.ending = Ending(frozenset({"Completed", "Failed"}), pattern)
        self.journal.add(entry)
        self.journal.report(entry)
        return True

    def _command(self, *words: str) -> str:
        """Run a command as a person does, who repeats it while the API server is away; returns what it printed."""
        deadline = time.monotonic() + _COMMAND_SECONDS
        while True:
            done = self.ground.bed.command(*words)
            if done.returncode == 0:
                return done.stdout
            error = f"{done.stderr.strip()} {done.stdout.strip()}"
            if not re.search(_AWAY, error, re.IGNORECASE) or time.monotonic() > deadline:
                raise BedError(f"{' '.join(words[:3])}: {error}")
            self.journal.say(f"repeated: {' '.join(words[:3])}: {error}")
            time.sleep(_POLL_SECONDS)

    def _completed(self) -> list[str]:
        """The complete backups, the newest first."""
        found = json.loads(self._command("backup", "get", "-n", self.ground.name, "-o", "json"))["backups"]
        return [each["name"] for each in found if each["phase"] == "Completed"]

    def _run_schedule(self, digest: str) -> None:
        api = self.ground.bed.api
        template = (api.get(CRON_JOBS, NAMESPACE, self.ground.name) or {})["spec"]["jobTemplate"]
        meta = {"namespace": NAMESPACE, "name": f"{self.ground.name}-{time.time_ns():x}", **template["metadata"]}
        job = api.create(JOBS, {"metadata": meta, "spec": template["spec"]})
        stamp = re.sub(r"\D", "", job["metadata"]["creationTimestamp"])
        try:
            ended = self._wait_for_work(JOBS, meta["name"], lambda job: {"Complete", "Failed"} & _conditions(job))
        except BedError as error:
            raise BedError(f"{error}; it logged: {self._log(meta['name']).strip()}") from error
        log = self._log(meta["name"])
        self.expired += log.count(" was expired, and is deleted with")
        self.contents[f"{self.ground.name}-{stamp}"] = digest
        if "Complete" not in _conditions(ended):
            raise BedError(log.strip())

    def _create(self, digest: str) -> None:
        name = f"{self.ground.name}-{time.time_ns():x}"
        try:
            self._command("backup", "create", name, *self._selection, "--wait")
        finally:
            self.contents[name] = digest

    def _own(self) -> list[str]:
        """The complete backups whose run has ended, the newest first."""
        return [name for name in self._completed() if name in self.contents]

    def _delete(self) -> bool:
        """Delete a backup that is not the last one; the schedule may delete it first."""
        own = self._own()
        return len(own) > 1 and self._act_on(self.chance.choice(own[1:]), "delete", "--yes")

    def _verify(self, *words: str) -> bool:
        """Verify the newest backup."""
        own = self._own()
        return bool(own) and self._act_on(own[0], "verify", *words)

    def _act_on(self, name: str, command: str, *words: str) -> bool:
        """Do something with a backup; whether it was done, and the backup was not deleted meanwhile."""
        try:
            self._command("backup", command, name, *words)
        except BedError:
            if name in self._completed():
                raise
            return False
        return True

    def _maintain(self) -> None:
        """Make maintenance of a repository due in kopia's schedule, and wait for it."""
        ground, mode = self.chance.choice(self.grounds), self.chance.choice(("quick", "full"))
        with open_kopia(ground.bed, ground.name, prefix=ground.name) as kopia:
            kopia.run("maintenance", "set", f"--pause-{mode}=0s")
        name = f"{ground.name}-{ground.name}-kopia"
        before = _succeeded(ground.bed.api.get(BACKUP_REPOSITORIES, NAMESPACE, name) or {})
        body = {
            "metadata": {"annotations": {"nodeagent.io/maintenance": None}},
            "spec": {"maintenanceFrequency": "10s"},
        }
        ground.bed.api.patch(BACKUP_REPOSITORIES, body, name=name, namespace=NAMESPACE)
        self._wait_for_work(BACKUP_REPOSITORIES, name, lambda found: _succeeded(found) > before)

    def _change(self, name: str) -> None:
        """Change the location for a while; returns once it is as it was, and its repository is ready."""
        place = Place(self.ground.bed, self.ground.name)
        usual = place.build(url=self.ground.gate.url, frequency="30s")
        changed, _ = place.build(secret_key="notthesecretofanybody") if name == _WRONG_KEYS else usual
        self._patch(changed, _CHANGES[name][0])
        time.sleep(self.chance.uniform(5, 25))
        self._patch(usual[0], usual[1]["spec"] | {"accessMode": None})
        self._wait(BACKUP_STORAGE_LOCATIONS, place.name, lambda found: _phase(found) == "Available")
        self._wait(BACKUP_REPOSITORIES, f"{place.name}-{place.name}-kopia", lambda found: _phase(found) == "Ready")

    def _patch(self, secret: Json, spec: Json) -> None:
        api, name = self.ground.bed.api, self.ground.name
        api.patch(SECRETS, {"stringData": secret["stringData"]}, name=f"{name}-keys", namespace=NAMESPACE)
        api.patch(BACKUP_STORAGE_LOCATIONS, {"spec": spec}, name=name, namespace=NAMESPACE)

    def _wait(self, resource: Resource, name: str, until: Callable[[Json], object]) -> Json:
        return wait_for(self.ground.bed, resource, (NAMESPACE, name), until, seconds=_SECONDS)

    def _wait_for_work(self, resource: Resource, name: str, until: Callable[[Json], object]) -> Json:
        """Wait for what needs the location; the time begins again whenever that was another one meanwhile."""
        while True:
            began = time.monotonic()
            try:
                return self._wait(resource, name, until)
            except BedError:
                if all(change.ended <= began for change in self._changes):
                    raise

    def _log(self, job: str) -> str:
        """What the pods of a Job have logged."""
        api = self.ground.bed.api
        pods = api.objects(PODS, NAMESPACE, selector=f"job-name={job}")
        return "\n".join(
            api.text("GET", PODS.path(NAMESPACE, pod["metadata"]["name"], subresource="log")) for pod in pods
        )


@dataclass
class _Change:
    """When the location was another one."""

    name: str
    ended: float = float("inf")


def _conditions(job: Json) -> set[str]:
    return {each["type"] for each in job.get("status", {}).get("conditions") or [] if each["status"] == "True"}


def _phase(found: Json) -> str:
    return str(found.get("status", {}).get("phase", ""))


def _succeeded(repository: Json) -> int:
    history = repository.get("status", {}).get("recentMaintenance") or []
    return sum(each["result"] == "Succeeded" for each in history)

"""Why a mover pod does not run, in the words of whoever knows.

Knows whom to ask when a pod's own status tells too little: the claims that it waits for, and
the Events of claim or pod. Keeps for each waiting pod what was told last, and asks rarely.
Does not know what status (`exposer.pod_status`) and Events (`exposer.causes`) mean, nor
who reads the answer.

What Events on a pod or a claim say about why it waits.

Knows which Event still holds: the newest trouble, unless something has gone on since. Pure:
does not know when Events are asked for (`exposer.causes`).
Source: Kubernetes v1.34, pkg/kubelet/events/event.go, pkg/controller/volume/events/event.go;
kubernetes-csi/external-provisioner v5, pkg/controller.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import EVENTS, PERSISTENT_VOLUME_CLAIMS
from core.logs import fields
from core.models.base import JsonDict
from core.models.reasons import PendingReason
from exposer.model import Exposed, Pending
from exposer.pod_status import diagnose_pod

__all__ = ["CauseFinder", "Words", "about_claim", "about_pod"]


_log = logging.getLogger(__name__)


_WENT_ON: Final = frozenset(
    {"Scheduled", "SuccessfulAttachVolume", "SuccessfulMountVolume", "Pulling", "Pulled", "Created", "Started"}
)
"""Steps of a pod's start: what went wrong before one of them is over."""


_PULLING: Final = "Pulling"


_BEGINS: Final = "Provisioning"


_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Words:
    """What was said: `reason` in CamelCase, `text` on one line; `blocked` is a warning."""

    reason: str
    text: str
    blocked: bool


def about_pod(events: Sequence[JsonDict]) -> Words | None:
    """Return what the Events of a pod that has its node say about its start; None: nothing of interest.

    `events` come by name, which is the order in which they began.
    """
    last = _latest([event for event in events if _warns(event) or event.get("reason") in _WENT_ON])
    if last is None or not (_warns(last) or last.get("reason") == _PULLING):
        return None
    return _words(last)


def about_claim(events: Sequence[JsonDict]) -> Words | None:
    """Return what the Events of a claim without a volume say about it; None: nothing.

    `events` come by name, which is the order in which they began.
    """
    trouble = _latest([event for event in events if _warns(event)])
    if trouble is None:
        last = _latest(events)
        return None if last is None else _words(last)
    # Whoever makes the volumes has taken it up: what others missed before is there by now.
    taken_up = [event for event in events if event.get("reason") == _BEGINS and _teller(event) != _teller(trouble)]
    last = _latest([trouble, *taken_up])
    return None if last is None else _words(last)


def _words(event: JsonDict) -> Words:
    text = " ".join(str(event.get("message") or "").split())
    return Words(str(event.get("reason") or "Unknown"), text, _warns(event))


def _warns(event: JsonDict) -> bool:
    return event.get("type") == "Warning"


def _latest(events: Sequence[JsonDict]) -> JsonDict | None:
    """Return the one that was seen last; of those of one second the one that began last."""
    order = sorted(range(len(events)), key=lambda index: (_time(events[index]), index))
    return events[order[-1]] if order else None


def _time(event: JsonDict) -> datetime:
    """Return when the event was seen last, in whole seconds: most have no finer time."""
    series = (event.get("series") or {}).get("lastObservedTime")
    created = (event.get("metadata") or {}).get("creationTimestamp")
    told = [series, event.get("lastTimestamp"), event.get("eventTime"), created]
    times = [datetime.fromisoformat(text).replace(microsecond=0) for text in told if text]
    return max(times, default=_EARLIEST)


def _teller(event: JsonDict) -> str:
    return str(event.get("reportingComponent") or (event.get("source") or {}).get("component") or "")


_UNTOLD: Final = frozenset({PendingReason.SCHEDULING, PendingReason.CONTAINER_CREATING, PendingReason.CLAIM_UNBOUND})
"""What a pod's status says while it waits for something that it does not know."""


_PATIENCE_SECONDS: Final = 3.0
"""So long every pod that is well may say nothing; a good run asks for no Events."""


_PAUSE_SECONDS: Final = 4.0
"""Between two questions about one pod: less than the 5 s between two looks at its load."""


_QUESTIONS_A_SECOND: Final = 5.0
"""All pods together: where very many wait, each is asked about less often."""


_FORGET_SECONDS: Final = 300.0
"""After so long without a look at it a pod is not waited for any more."""


@dataclass
class _Question:
    """One silent pod: since when, when it was asked about, and what the answer was."""

    silence: str
    since_seconds: float
    seen_at_seconds: float
    asked_at_seconds: float | None = None
    answer: Pending | None = None


class CauseFinder:
    """Explains pods that do not run, for one agent."""

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        """Ask through `client`, as often as `clock` allows."""
        self._client = client
        self._clock = clock
        self._questions: dict[str, _Question] = {}

    async def judge(self, pod: JsonDict | Pending) -> Exposed | Pending:
        """Return whether `pod`, if there is one already, is where its volume can be reached, or what keeps it.

        Raises:
            ExposeError: it will never be.
        """
        if isinstance(pod, Pending):
            return pod
        return await self.explain(pod) or Exposed(pod)

    async def explain(self, pod: JsonDict) -> Pending | None:
        """Return what keeps `pod` (a v1 Pod as JSON dict, just read) from running; None where nothing does.

        Raises:
            ExposeError: it will never run.
        """
        waiting = diagnose_pod(pod)
        uid = pod["metadata"]["uid"]
        if waiting is None or waiting.reason not in _UNTOLD:
            self._questions.pop(uid, None)
            return waiting
        question = self._note(uid, waiting)
        if self._is_due(question):
            question.asked_at_seconds = self._clock.monotonic()
            question.answer = await self._ask(pod, waiting)
        return question.answer or waiting

    def _note(self, uid: str, waiting: Pending) -> _Question:
        """Return what is known about that silent pod; forget those that nobody looks at any more."""
        now = self._clock.monotonic()
        gone = [key for key, one in self._questions.items() if now - one.seen_at_seconds >= _FORGET_SECONDS]
        for key in gone:
            del self._questions[key]
        found = self._questions.setdefault(uid, _Question(waiting.reason, now, now))
        if found.silence != waiting.reason:
            # It has come further: what held it up before is over, and what does now is asked for soon.
            found.silence, found.answer = waiting.reason, None
        found.seen_at_seconds = now
        return found

    def _is_due(self, question: _Question) -> bool:
        now = self._clock.monotonic()
        if now - question.since_seconds < _PATIENCE_SECONDS:
            return False
        pause = max(_PAUSE_SECONDS, len(self._questions) / _QUESTIONS_A_SECOND)
        return question.asked_at_seconds is None or now - question.asked_at_seconds >= pause

    async def _ask(self, pod: JsonDict, waiting: Pending) -> Pending | None:
        """Return what others know about a silent pod; None where they know no more, or do not answer."""
        try:
            if waiting.reason == PendingReason.CONTAINER_CREATING:
                words = about_pod(await self._events_of(pod))
                return None if words is None else _tell(waiting, words, _what_is_held_up(pod, waiting, words))
            return await self._ask_about_claims(pod)
        except KubeError as e:
            meta = pod["metadata"]
            extra = fields(kind="Pod", namespace=meta["namespace"], name=meta["name"], reason=str(e))
            _log.debug("why the pod waits could not be asked", extra=extra)
            return None

    async def _ask_about_claims(self, pod: JsonDict) -> Pending | None:
        """Return what the first claim of `pod` that has no volume waits for."""
        namespace = pod["metadata"]["namespace"]
        place = f"{namespace}/{pod['metadata']['name']}"
        for name in _claims_of(pod):
            shown = f"claim {namespace}/{name} of pod {place}"
            claim = await self._client.read(PERSISTENT_VOLUME_CLAIMS, namespace, name)
            if claim is None:
                return Pending(PendingReason.CLAIM_MISSING, f"{shown} does not exist", blocked=True)
            if claim["spec"].get("volumeName"):
                continue
            unbound = Pending(PendingReason.CLAIM_UNBOUND, f"{shown} has no volume yet")
            words = about_claim(await self._events_of(claim))
            return unbound if words is None else _tell(unbound, words, unbound.message)
        return None

    async def _events_of(self, obj: JsonDict) -> list[JsonDict]:
        meta = obj["metadata"]
        selector = f"involvedObject.uid={meta['uid']}"
        return await self._client.list(Selection(EVENTS, meta["namespace"], field_selector=selector))


def _tell(waiting: Pending, words: Words, what: str) -> Pending:
    """Return `waiting` with what was said about it; only trouble has a reason of its own."""
    reason = words.reason if words.blocked else waiting.reason
    text = f"{words.reason}: {words.text}" if words.text else words.reason
    return Pending(reason, f"{what}: {text}", blocked=words.blocked)


def _what_is_held_up(pod: JsonDict, waiting: Pending, words: Words) -> str:
    if not words.blocked:
        return waiting.message
    meta = pod["metadata"]
    return f"pod {meta['namespace']}/{meta['name']} cannot start on node {pod['spec']['nodeName']} yet"


def _claims_of(pod: JsonDict) -> list[str]:
    """Return the names of the claims that `pod` mounts."""
    volumes = pod["spec"].get("volumes") or []
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]

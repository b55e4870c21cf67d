"""What was seen of transfers and of their limits, one line each, in a file that grows.

Knows the line's format, and how far the transfers are by the lines so far. Does not know how they
were seen (`benchmarks.scale.watcher`) nor what is allowed (`benchmarks.scale.judge`). Reads
custom resources by itself: what is checked must not be read by its own code.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

HELD: Final = frozenset({"Accepted", "Prepared"})
RUNNING: Final = frozenset({"InProgress", "Canceling"})
FINAL: Final = frozenset({"Completed", "Failed", "Canceled"})

_NODE_LABEL: Final = "nodeagent.io/node"


@dataclass(frozen=True)
class Sight:
    """One version of a transfer.

    `seen_at` is Unix time in seconds. `queue` is the namespace of its volume. `marked`: its
    agent has not released it yet. `deleted`: a watch reported its deletion.
    """

    version: int
    seen_at: float
    kind: str
    uid: str
    name: str
    created: str
    queue: str
    phase: str
    node: str
    marked: bool
    message: str
    deleted: bool


@dataclass(frozen=True)
class LimitChange:
    """The limits from one resourceVersion on; `queue_length` of None is no limit."""

    version: int
    queue_length: int | None
    slots: int


def sight_of_transfer(event: dict[str, Any], *, seen_at: float) -> Sight:
    """Return what a watch event of a transfer shows."""
    transfer = event["object"]
    meta, spec, status = transfer["metadata"], transfer["spec"], transfer.get("status") or {}
    node = (meta.get("labels") or {}).get(_NODE_LABEL, "")
    volume = spec.get("targetVolume") or spec.get("pod") or {"namespace": spec.get("sourceNamespace", "")}
    return Sight(
        version=int(meta["resourceVersion"]),
        seen_at=seen_at,
        kind=transfer["kind"],
        uid=meta["uid"],
        name=meta["name"],
        created=meta["creationTimestamp"],
        queue=volume["namespace"],
        phase=status.get("phase") or "New",
        node=node,
        marked=bool(node or meta.get("finalizers")),
        message=status.get("message", ""),
        deleted=event["type"] == "DELETED",
    )


def sight_of_limits(config_map: dict[str, Any]) -> LimitChange:
    """Return the limits that a ConfigMap of the agents sets from its version on."""
    document = json.loads(next(iter(config_map["data"].values())))
    concurrency = document.get("loadConcurrency") or {}
    return LimitChange(
        version=int(config_map["metadata"]["resourceVersion"]),
        queue_length=concurrency.get("prepareQueueLength"),
        slots=concurrency.get("globalConfig") or 1,
    )


def to_line(seen: Sight | LimitChange) -> str:
    """Return the line that records what was seen."""
    return json.dumps({type(seen).__name__: asdict(seen)}) + "\n"


@dataclass
class History:
    """All lines of a file so far; `read_on` takes those that were added since."""

    path: Path
    sights: list[Sight] = field(default_factory=list)
    limits: list[LimitChange] = field(default_factory=list)
    _newest: dict[str, Sight] = field(default_factory=dict)
    _admitted: set[str] = field(default_factory=set)
    _offset: int = 0
    _rest: bytes = b""

    def read_on(self) -> None:
        """Take what was written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            piece = file.read()
        self._offset += len(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        if "LimitChange" in line:
            self.limits.append(LimitChange(**line["LimitChange"]))
            return
        sight = Sight(**line["Sight"])
        self.sights.append(sight)
        before = self._newest.get(sight.uid)
        if before is None or before.version < sight.version:
            self._newest[sight.uid] = sight
        if sight.phase not in {"New", *FINAL}:
            self._admitted.add(sight.uid)

    @property
    def transfers(self) -> int:
        """How many transfers there were."""
        return len(self._newest)

    @property
    def admitted(self) -> int:
        """How many transfers were accepted so far."""
        return len(self._admitted)

    @property
    def done(self) -> int:
        """How many transfers are final, cleaned up and released."""
        return sum(1 for sight in self._newest.values() if sight.phase in FINAL and not sight.marked)

    def newest(self) -> Iterable[Sight]:
        """Return each transfer as it was seen last."""
        return self._newest.values()

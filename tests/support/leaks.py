"""Resources that a test must release: tasks, child processes, open HTTP clients."""

import asyncio
import time
import weakref
from contextlib import suppress
from pathlib import Path

import aiohttp

_CHILD_GRACE_SECONDS = 2.0
_LOOP_PASSES = 20

_sessions: "weakref.WeakSet[aiohttp.ClientSession]" = weakref.WeakSet()


def watch_sessions() -> None:
    """Record every aiohttp session that is opened from now on."""
    original = aiohttp.ClientSession.__init__

    def recording(self: aiohttp.ClientSession, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type] # passed through
        _sessions.add(self)

    aiohttp.ClientSession.__init__ = recording  # type: ignore[method-assign] # what this is for


def open_sessions() -> set[int]:
    """Return the identities of the sessions that are open."""
    return {id(session) for session in _sessions if not session.closed}


def child_processes() -> dict[int, str]:
    """Return this process's children, including zombies: their ids and names."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile; its children are reparented to another one.
        with suppress(FileNotFoundError):
            for pid in (thread / "children").read_text().split():
                found[int(pid)] = _name_of(int(pid))
    return found


def children_left(before: dict[int, str]) -> dict[int, str]:
    """Return the children beyond `before` that do not exit within the grace period."""
    give_up = time.monotonic() + _CHILD_GRACE_SECONDS
    while True:
        left = {pid: name for pid, name in child_processes().items() if pid not in before}
        if not left or time.monotonic() > give_up:
            return left
        time.sleep(0.02)


async def tasks_left(before: set["asyncio.Task[object]"]) -> list[str]:
    """Return the names of the running loop's tasks beyond `before`, after some passes of the loop.

    The passes let canceled tasks end.
    """
    for _ in range(_LOOP_PASSES):
        left = asyncio.all_tasks() - before - {asyncio.current_task()}
        if not left:
            break
        await asyncio.sleep(0)
    return sorted(task.get_name() for task in left)


async def end_connections() -> None:
    """Abort the connections of the running loop, and let it process their end.

    A closed TLS connection waits for the other side's response, and CPython 3.11 loses one that is
    aborted right after it was opened (cpython#118950). After the loop has closed, each would cause a
    warning in the test in which it is collected. An open client is reported in any case.
    """
    # There is no public API for a loop's connections.
    connections = getattr(asyncio.get_running_loop(), "_transports", {})
    for _ in range(_LOOP_PASSES):
        if not connections:
            break
        for connection in list(connections.values()):
            connection.abort()
        await asyncio.sleep(0)


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"

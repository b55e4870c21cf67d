"""What a test may not leave behind: tasks, child processes, open HTTP clients."""

import asyncio
import time
import weakref
from contextlib import suppress
from pathlib import Path

import aiohttp

__all__ = ["child_processes", "children_left", "end_connections", "open_sessions", "tasks_left", "watch_sessions"]

_CHILD_GRACE_SECONDS = 2.0
_LOOP_PASSES = 20

_sessions: "weakref.WeakSet[aiohttp.ClientSession]" = weakref.WeakSet()


def watch_sessions() -> None:
    """Note every aiohttp session that is opened from now on."""
    original = aiohttp.ClientSession.__init__

    def noting(self: aiohttp.ClientSession, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type] # passed through
        _sessions.add(self)

    aiohttp.ClientSession.__init__ = noting  # type: ignore[method-assign] # what this is for


def open_sessions() -> set[int]:
    """Return the identities of the sessions that are open."""
    return {id(session) for session in _sessions if not session.closed}


def child_processes() -> dict[int, str]:
    """Return this process's children, ended but unreaped ones too: their ids and names."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile; its children go over to another one.
        with suppress(FileNotFoundError):
            for pid in (thread / "children").read_text().split():
                found[int(pid)] = _name_of(int(pid))
    return found


def children_left(before: dict[int, str]) -> dict[int, str]:
    """Return the children beyond `before` that do not end by themselves, given a moment."""
    give_up = time.monotonic() + _CHILD_GRACE_SECONDS
    while True:
        left = {pid: name for pid, name in child_processes().items() if pid not in before}
        if not left or time.monotonic() > give_up:
            return left
        time.sleep(0.02)


async def tasks_left(before: set["asyncio.Task[object]"]) -> list[str]:
    """Return the names of the running loop's tasks beyond `before`, after some passes of the loop.

    The passes let those end that were told to.
    """
    for _ in range(_LOOP_PASSES):
        left = asyncio.all_tasks() - before - {asyncio.current_task()}
        if not left:
            break
        await asyncio.sleep(0)
    return sorted(task.get_name() for task in left)


async def end_connections() -> None:
    """End what the running loop still has of connections, and let it see their end.

    A TLS connection that its owner has closed waits for the peer's answer, and CPython 3.11
    forgets one that is given up in its first moment (cpython#118950). With the loop gone each
    would be a warning, in whichever test it is collected. Who leaves a client open is told anyway.
    """
    # No public way leads to a loop's connections.
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

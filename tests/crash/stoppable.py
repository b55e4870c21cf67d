"""`python -m tests.crash.stoppable TREE STOP ARGUMENTS…`: a node agent of any version that stops at its own writes.

Runs `python -m nodeagent ARGUMENTS` from the source tree TREE. Knows nothing of that tree's modules,
only the HTTP library that all versions send by, and what each of them writes: STOP names a
write. After each such write its sender gets no answer, and one line goes to standard output.
"""

import asyncio
import json
import os
import runpy
import sys
from collections.abc import Callable
from http import HTTPMethod, HTTPStatus
from typing import Any

import aiohttp

_Body = dict[str, Any]
_Stop = Callable[[str, _Body], bool]


def _moves_to(phase: str) -> _Stop:
    return lambda path, body: (body.get("status") or {}).get("phase") == phase


def _annotates(key: str) -> _Stop:
    return lambda path, body: bool((body.get("metadata", {}).get("annotations") or {}).get(key))


STOPS: dict[str, _Stop] = {
    "none": lambda path, body: False,
    "reserved": lambda path, body: bool((body.get("data") or {}).get("uids")),
    "accepted": _moves_to("Accepted"),
    "exposed": lambda path, body: path.endswith("/pods"),
    "mover-lost": _annotates("nodeagent.io/mover-lost"),
    "prepared": _moves_to("Prepared"),
    "in-progress": _moves_to("InProgress"),
    "interrupted": _annotates("nodeagent.io/attempts"),
    "outcome-kept": _annotates("nodeagent.io/outcome"),
    "completed": _moves_to("Completed"),
}
"""The writes after which an agent may stop, by path and JSON body, in the order of a transfer's life."""

FOLLOWER = "NODE_AGENT_TEST_FOLLOWER"
"""Environment variable: the agent's writes of the Lease get no answer, so that it never becomes leader."""


def _install(stops: _Stop, *, follower: bool) -> None:
    send = aiohttp.ClientSession._request

    async def request(session: aiohttp.ClientSession, method: str, url: str, **options: Any) -> aiohttp.ClientResponse:
        path = url.partition("?")[0]
        writes = method in {HTTPMethod.POST, HTTPMethod.PATCH}
        if follower and writes and "/leases" in path:
            await asyncio.Event().wait()
        answer = await send(session, method, url, **options)
        body = json.loads(options.get("data") or "{}") if writes else {}
        if body and answer.status in {HTTPStatus.OK, HTTPStatus.CREATED} and stops(path, body):
            sys.stdout.write(f"{method} {path} {body['metadata'].get('name', '')}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()
        return answer

    aiohttp.ClientSession._request = request  # type: ignore[assignment,method-assign] # of every session


def main() -> None:
    tree, stop, *arguments = sys.argv[1:]
    _install(STOPS[stop], follower=FOLLOWER in os.environ)
    # The first entry is this checkout's top folder, whose packages have the same names.
    sys.path[0] = tree
    sys.argv = ["nodeagent", *arguments]
    runpy.run_module("nodeagent", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

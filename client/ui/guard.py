"""Who may see the pages: the person who started the server, in one browser.

The URL that is printed has a token that can be used once; the browser gets a cookie for it. Where the system says whose
process is connected, it must be one of the person: others can read the token in the arguments of the browser that is
started with it. Knows nothing of pages.
Source: RFC 6265bis (SameSite); Fetch Metadata Request Headers, W3C; Content Security Policy Level 3.
"""

import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from pathlib import Path
from typing import Final

from aiohttp import web

__all__ = ["BrowserGuard", "owner_of"]


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_TOKEN: Final = "token"  # noqa: S105 - the name of a parameter
_METHODS: Final = frozenset({"GET", "HEAD"})
_SAME_SITE: Final = frozenset({"", "same-origin", "none"})
"""Values of Sec-Fetch-Site: the page itself, an address that was typed, and browsers that do not say."""

# The signs of the vendored style sheet are images in it.
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class BrowserGuard:
    """Refuses every request that the one browser did not make; `port` is where the server listens."""

    def __init__(self, port: int) -> None:
        """Make a token, and the cookie that it is exchanged for."""
        self._hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}"})
        # Ports share their cookies: each server needs a name of its own.
        self._cookie = f"nodeagent-ui-{port}"
        self._token = secrets.token_urlsafe(32)
        self._value = secrets.token_urlsafe(32)
        self._used = False
        self.url = f"http://127.0.0.1:{port}/?{_TOKEN}={self._token}"

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer with what `handler` does, or refuse; both with the headers that protect the page."""
        try:
            answer = self._refuse(request) or await handler(request)
        except web.HTTPException as e:
            e.headers.update(_HEADERS)
            raise
        if not answer.prepared:
            answer.headers.update(_HEADERS)
        return answer

    def _refuse(self, request: web.Request) -> web.Response | None:
        """Return why the request is refused, or the redirect that a token leads to; None: it may pass."""
        if request.host not in self._hosts:
            # Another name that leads to this address: DNS rebinding.
            return web.Response(status=421, text="this server answers for its own address alone")
        if request.method not in _METHODS:
            return web.Response(status=405, text="these pages only show", headers={"Allow": "GET, HEAD"})
        if request.headers.get("Sec-Fetch-Site", "") not in _SAME_SITE:
            return web.Response(status=403, text="requests of other sites are refused")
        if _TOKEN in request.query:
            return self._exchange(request)
        if not compare_digest(request.cookies.get(self._cookie, "").encode(), self._value.encode()):
            return web.Response(status=403, text="open the address that nodeagent ui printed; it works once")
        return None

    def _exchange(self, request: web.Request) -> web.Response:
        token = request.query[_TOKEN]
        if _is_of_others(request):
            return web.Response(status=403, text="this address is for the user who runs nodeagent ui")
        if self._used or not compare_digest(token.encode(), self._token.encode()):
            return web.Response(status=403, text="this address was used before: run nodeagent ui again")
        self._used = True
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(self._cookie, self._value, httponly=True, samesite="Strict", path="/")
        return answer


def _is_of_others(request: web.Request) -> bool:
    """Return whether another user of this machine is connected; root is none, nor who has become root with sudo."""
    transport = request.transport
    if transport is None:
        return True
    owner = owner_of(transport.get_extra_info("peername"), transport.get_extra_info("sockname"))
    return owner is not None and str(owner) not in {"0", str(os.getuid()), os.environ.get("SUDO_UID", "")}


# Which user of this machine has opened a connection to a server on loopback, as Linux knows it.
# Source: proc_net_tcp in the documentation of the Linux kernel, Documentation/networking/proc_net_tcp.rst.

_TABLE: Final = Path("/proc/net/tcp")
_ESTABLISHED: Final = "01"
_LOCAL, _REMOTE, _STATE, _UID = 1, 2, 3, 7


def owner_of(client: tuple[str, int], server: tuple[str, int], table: Path = _TABLE) -> int | None:
    """Return the user ID of the process that has connected from address and port `client` to `server`, both IPv4.

    None: this system does not say, or the connection is closed.
    """
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    wanted = (_shown(client), _shown(server), _ESTABLISHED)
    for line in lines:
        columns = line.split()
        if (columns[_LOCAL], columns[_REMOTE], columns[_STATE]) == wanted:
            return int(columns[_UID])
    return None


def _shown(address: tuple[str, int]) -> str:
    """Return the address as the table has it: the bytes of the IP address as a number of this machine."""
    host, port = address
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"

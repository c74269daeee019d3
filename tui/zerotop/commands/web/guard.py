"""Who may see the program in a browser: whoever has the token; without one, only this user on this machine."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_WRONG_TOKEN_S = 0.3  # what a wrong token costs whoever guesses
_PROC_NET = Path("/proc/net")
NOBODY = -1

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestGuard:
    """A middleware that answers 403, with a sentence, to everybody else."""

    def __init__(self, token: str | None, *, port: int) -> None:
        self._token = token
        # Cookies know no ports: two servers of one machine keep theirs apart by name.
        self._cookie_name = f"zerotop-{port}"
        self._cookie_value = secrets.token_urlsafe(32)

    @web.middleware
    async def check_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets through or refuses."""
        why_not = _check_origin(request)
        if why_not:
            raise _make_refusal(why_not)
        if self._token is None:
            why_not = _check_client(request)
            if why_not:
                raise _make_refusal(why_not)
            return await handler(request)
        if _is_same(request.cookies.get(self._cookie_name, ""), self._cookie_value):
            return await handler(request)
        if _is_same(request.query.get("token", ""), self._token):
            return self._admit_browser(request)
        await asyncio.sleep(_WRONG_TOKEN_S)
        raise _make_refusal("The token is missing or wrong: open the address that zerotop serve printed, token and all.")

    def _admit_browser(self, request: web.Request) -> web.StreamResponse:
        """The same page without the token, which then stays in no history; the cookie is not the token either."""
        query = {name: value for name, value in request.query.items() if name != "token"}
        # Relative, as a proxy may have put us somewhere else than at the root.
        answer = web.Response(status=303, headers={"Location": str(request.rel_url.with_query(query))})
        answer.set_cookie(self._cookie_name, self._cookie_value, httponly=True, samesite="Strict", path="/")
        return answer


def _is_same(given: str, right: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), right.encode())


def _make_refusal(sentence: str) -> web.HTTPForbidden:
    return web.HTTPForbidden(text=f"{sentence}\n")


def _check_origin(request: web.Request) -> str:
    """Any page may make a browser open a websocket to us, which browsers do not hold against it: we do."""
    origin = request.headers.get("Origin")
    try:
        ours = origin is None or urlsplit(origin).netloc == request.host
    except ValueError:  # it is no address
        ours = False
    return "" if ours else "Another page may not open this one."


def _check_client(request: web.Request) -> str:
    """Without a token: a name that somebody has made point here, or somebody else who is logged in on this machine."""
    try:
        name = urlsplit(f"//{request.host}").hostname
    except ValueError:
        name = None
    if name not in _LOOPBACK:
        return f"Without --token, zerotop serve answers as {', '.join(sorted(_LOOPBACK))} only."
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if peer is not None and find_owner(peer[0], peer[1]) not in (None, 0, os.getuid()):
        return "Without --token, zerotop serve answers only the user who started it."
    return ""


def find_owner(host: str, port: int) -> int | None:
    """The user id behind the other end of a connection from this machine, by the kernel's table.

    NOBODY where no process has it any more; None where the table cannot be read.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        address = _format_kernel_address(socket.inet_pton(family, host))
        lines = (_PROC_NET / ("tcp6" if family == socket.AF_INET6 else "tcp")).read_text().splitlines()[1:]
    except (OSError, ValueError):
        return None
    rows = (line.split() for line in lines)
    # What was closed stays for a while as root's, without an inode.
    return next((int(row[7]) for row in rows if row[1] == f"{address}:{port:04X}" and row[9] != "0"), NOBODY)


def _format_kernel_address(packed: bytes) -> str:
    """Words of four bytes in the machine's own order, in hexadecimal."""
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))

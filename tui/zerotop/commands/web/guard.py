"""Who may use the web server: browsers that show its token, and none of other web pages.

Browsers send cookies to every port of a host, so that a server of somebody else on this machine sees that of a visitor. A
cookie alone therefore opens the page but no window. The key of windows is in the page that follows a visit with the token,
which the browser keeps for pages of this port.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

_WRONG_TOKEN_S = 0.3  # delay that slows down guessing
_ADMISSION_S = 60  # how long a redirect may take
_MAX_ADMISSIONS = 64

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestGuard:
    """A middleware that answers 403, with a sentence, to requests without the token or its cookie."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._one_time_token = secrets.token_urlsafe(32)
        self._cookie_value = secrets.token_urlsafe(32)
        # Each is for the one page that a redirect leads to.
        self._admissions: deque[str] = deque(maxlen=_MAX_ADMISSIONS)
        self._window_key = secrets.token_urlsafe(32)

    @property
    def one_time_token(self) -> str:
        """A token for one visit. Other users can see a browser's command line, but it is useless after that visit."""
        return self._one_time_token

    @web.middleware
    async def check_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass a request on to its handler, or refuse it."""
        if not _is_same_origin(request):
            raise _make_refusal("Requests from other web pages are refused.")
        if _is_equal(request.cookies.get(_name_cookie(request), ""), self._cookie_value):
            return await handler(request)
        token = request.query.get("token", "")
        if _is_equal(token, self._token):
            return self._admit_browser(request)
        if _is_equal(token, self._one_time_token):
            self._one_time_token = secrets.token_urlsafe(32)
            return self._admit_browser(request)
        await asyncio.sleep(_WRONG_TOKEN_S)
        raise _make_refusal("The token is missing or wrong. Open the address that zerotop serve printed, with its token.")

    def _admit_browser(self, request: web.Request) -> web.StreamResponse:
        """Set a cookie and redirect to the same page without the token, which keeps it out of the history."""
        query = {name: value for name, value in request.query.items() if name != "token"}
        # Relative: behind a proxy the server may not be at the root.
        answer = web.Response(status=303, headers={"Location": str(request.rel_url.with_query(query))})
        self._admissions.append(secrets.token_urlsafe(32))
        for name, value, age in (
            (_name_cookie(request), self._cookie_value, None),
            (_name_admission(request), self._admissions[-1], _ADMISSION_S),
        ):
            answer.set_cookie(name, value, max_age=age, httponly=True, samesite="Strict", path="/")
        return answer

    def take_window_key(self, request: web.Request) -> str:
        """Return the key of windows for the page after a visit with the token; "" for a page that has only the cookie."""
        value = request.cookies.get(_name_admission(request), "")
        for admission in self._admissions:
            if _is_equal(value, admission):
                self._admissions.remove(admission)
                return self._window_key
        return ""

    def check_window_key(self, request: web.Request) -> None:
        """Refuse the websocket of a page that does not have the key."""
        if not _is_equal(request.match_info.get("key", ""), self._window_key):
            raise _make_refusal("Open the address that zerotop serve printed, with its token.")


def _name_cookie(request: web.Request) -> str:
    """Return a name that keeps the servers of one machine apart: cookies ignore ports."""
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return f"zerotop-{address[1] if address else 0}"


def _name_admission(request: web.Request) -> str:
    return f"{_name_cookie(request)}-admission"


def _is_equal(value: str, secret: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(value.encode("utf-8", "surrogatepass"), secret.encode())


def _make_refusal(sentence: str) -> web.HTTPForbidden:
    return web.HTTPForbidden(text=f"{sentence}\n")


def _is_same_origin(request: web.Request) -> bool:
    """Return False for another page's request: browsers let any page open a websocket to this server."""
    origin = request.headers.get("Origin")
    try:
        return origin is None or urlsplit(origin).netloc == request.host
    except ValueError:  # not an address
        return False

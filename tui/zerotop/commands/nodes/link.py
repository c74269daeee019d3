"""The connection between nodes and their collector: requests and answers, by NATS or whatever else can carry them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.nodes.messages import MAX_DATA_BYTES, JobKey

SCHEMES = ("nats", "tls")
_INSTALL = "NATS needs its client: pip install 'zerotop[nodes]'"
_CONNECT_S = 5
_AGAIN_S = 0.1
# A dead connection is noticed after twice this time.
_PING_S = 2
_CLOSE_S = 2.0
_HEADER_BYTES = 1 << 18  # of a message, at most

Handler = Callable[[bytes], Awaitable[bytes]]


class LinkError(Exception):
    """The other side cannot be reached now; the text says why, without a full stop."""


class LinkRefused(LinkError):
    """The server does not take us, or is not fit; trying again will not help unless somebody changes it."""


class Link(Protocol):
    """An open connection. All methods raise LinkError."""

    async def request(self, message: bytes, timeout_s: float) -> bytes:
        """Send a message to the collector and return its answer."""

    async def answer_requests(self, handle: Handler) -> None:
        """Be the collector: answer requests until the connection is lost."""

    async def close(self) -> None:
        """Close it. Never raises."""


Connect = Callable[[], Awaitable[Link]]


def check_url(url: str) -> None:
    """Check ``--collector``, and that its client is installed. Raises Problem."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in SCHEMES and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise Problem(f"{hide_secrets(url)} is not the address of a NATS server, such as nats://head:4222", USAGE)
    try:
        import nats  # noqa: F401
    except ImportError:
        raise Problem(_INSTALL) from None


def hide_secrets(url: str) -> str:
    """Return an address without user, password or token."""
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2]


async def connect_nats(url: str, key: JobKey) -> Link:
    """Connect to a server: with the user or token of its address, else with ours. Raises LinkError."""
    import nats
    from nats import errors

    closed = asyncio.Event()

    async def note_closed(*_: Any) -> None:
        closed.set()

    causes: list[Exception] = []

    async def note_error(error: Exception) -> None:
        causes.append(error)

    place = hide_secrets(url)
    try:
        client = await nats.connect(
            url,
            token=None if "@" in url else key.token,
            allow_reconnect=False,
            max_reconnect_attempts=1,  # to connect at all
            reconnect_time_wait=_AGAIN_S,
            connect_timeout=_CONNECT_S,
            ping_interval=_PING_S,
            max_outstanding_pings=1,
            closed_cb=note_closed,
            disconnected_cb=note_closed,
            error_cb=note_error,
        )
    except (OSError, asyncio.TimeoutError, errors.NoServersError, ssl.SSLError) as error:
        cause = _describe(causes[-1] if causes else error)
        raise LinkError(f"{place} cannot be reached ({cause}): start nats-server there, or correct the address") from error
    except (errors.Error, ValueError) as error:
        if "authorization" in str(error).lower():
            raise LinkRefused(f"{place} refuses our token: give nodes, collector and server the same one") from error
        raise LinkError(f"{place} cannot be used ({_describe(error)})") from error
    link = _NatsLink(client, f"zerotop.{key.job}", closed, place)
    try:
        link.check_server()
    except LinkRefused:
        await link.close()
        raise
    return link


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


class _NatsLink:
    def __init__(self, client: Any, subject: str, closed: asyncio.Event, place: str) -> None:
        self._client, self._subject, self._closed, self._place = client, subject, closed, place

    def check_server(self) -> None:
        """Raise LinkRefused for a server to which anybody can connect, or whose messages are too small."""
        facts = self._client._server_info
        if not (facts.get("auth_required") or facts.get("tls_verify")):
            raise LinkRefused(
                f"{self._place} lets everybody in, who could read the recording:"
                ' start it with authentication, such as nats-server --auth "$ZEROTOP_TOKEN"'
            )
        least = MAX_DATA_BYTES + _HEADER_BYTES
        if self._client.max_payload < least:
            raise LinkRefused(f"{self._place} takes no messages of {least} bytes: raise its max_payload")

    async def request(self, message: bytes, timeout_s: float) -> bytes:
        from nats import errors

        try:
            answer = await self._client.request(self._subject, message, timeout=timeout_s)
        except errors.NoRespondersError as error:
            raise LinkError("no collector of this job runs yet") from error
        except (errors.Error, asyncio.TimeoutError, OSError) as error:
            raise LinkError(f"{self._place} does not answer ({_describe(error)})") from error
        return bytes(answer.data)

    async def answer_requests(self, handle: Handler) -> None:
        from nats import errors

        async def answer(message: Any) -> None:
            data = await handle(message.data)
            with contextlib.suppress(errors.Error, OSError):  # the node asks again
                await message.respond(data)

        tasks = set[asyncio.Task[None]]()

        async def start_answer(message: Any) -> None:
            """A node that waits for its list holds up no other."""
            if message.reply:
                task = asyncio.create_task(answer(message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        try:
            await self._client.subscribe(self._subject, cb=start_answer)
            await self._client.flush()
        except (errors.Error, asyncio.TimeoutError, OSError) as error:
            raise LinkError(f"{self._place} cannot be used ({_describe(error)})") from error
        await self._closed.wait()
        raise LinkError(f"the connection to {self._place} was lost")

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # whatever it is, the connection is over
            await asyncio.wait_for(self._client.close(), _CLOSE_S)

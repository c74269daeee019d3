"""The connection between nodes and their collector: requests and answers, by NATS or whatever else can carry them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.nodes.messages import MAX_DATA_BYTES, JobKey

SCHEMES = ("nats", "tls")
_INSTALL = "NATS needs its client: pip install 'zerotop[nodes]'"
_CONNECT_S = 5
_AGAIN_S = 0.1
# A dead connection is noticed after twice this time.
_PING_S = 2
_LOOK_S = 0.2
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
        _make_context(parts.fragment)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise Problem(f"{hide_secrets(url)} is not the address of a NATS server, such as nats://head:4222", USAGE)
    try:
        import nats  # noqa: F401
    except ImportError:
        raise Problem(_INSTALL) from None


def hide_secrets(url: str) -> str:
    """Return an address without user, password, token or certificate."""
    scheme, separator, rest = url.partition("#")[0].partition("://")
    return scheme + separator + rest.rpartition("@")[2]


def pin_certificate(url: str, certificate: str) -> str:
    """Return an address with the only certificate, in PEM, that its server may show."""
    return f"{url}#{base64.urlsafe_b64encode(ssl.PEM_cert_to_DER_cert(certificate)).decode()}"


def _make_context(pinned: str) -> ssl.SSLContext:
    """Return what decides whether a server is trusted. Raise ValueError."""
    # Reading the machine's authorities takes tens of milliseconds of a processor, and nodes try again twice a second.
    return _read_context(pinned, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _read_context(pinned: str, *_: str | None) -> ssl.SSLContext:
    if not pinned:
        return ssl.create_default_context()  # the machine's authorities, or those in $SSL_CERT_FILE
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it is this very certificate
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=base64.urlsafe_b64decode(pinned))
    except ssl.SSLError as error:
        raise ValueError("this is no certificate") from error
    return context


async def connect_nats(url: str, key: JobKey) -> Link:
    """Connect to a server: with the user or token of its address, else with ours. Raises LinkError."""
    from nats import errors
    from nats.aio.client import Client

    # Python warns of how nats-py reads an encrypted connection, each time that one ends.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    causes: list[Exception] = []

    async def note_error(error: Exception) -> None:
        causes.append(error)

    place, parts = hide_secrets(url), urlsplit(url)
    client: Any = Client()

    try:
        await client.connect(
            place,
            **_make_secrets(client, parts, key),
            tls=_make_context(parts.fragment),
            tls_hostname=parts.hostname,
            allow_reconnect=False,
            max_reconnect_attempts=1,  # to connect at all
            reconnect_time_wait=_AGAIN_S,
            connect_timeout=_CONNECT_S,
            ping_interval=_PING_S,
            max_outstanding_pings=1,
            error_cb=note_error,
        )
    except (OSError, asyncio.TimeoutError, errors.NoServersError) as error:
        raise _explain_unreached(place, causes[-1] if causes else error) from error
    except (errors.Error, ValueError) as error:
        if "authorization" in str(error).lower():
            raise LinkRefused(f"{place} refuses our token: give nodes, collector and server the same one") from error
        raise LinkError(f"{place} cannot be used ({_describe(error)})") from error
    except LinkRefused:
        await _close(client)
        raise
    link = _NatsLink(client, f"zerotop.{key.job}", place)
    try:
        link.check_server()
    except LinkRefused:
        await link.close()
        raise
    return link


def _make_secrets(client: Any, parts: SplitResult, key: JobKey) -> dict[str, Callable[[], str]]:
    """Return what the server wants to know of us, as functions; the client calls them once the connection is encrypted."""

    def make(secret: str) -> Callable[[], str]:
        def show() -> str:
            if parts.scheme == "tls" and not client._server_info.get("tls_required"):
                place = hide_secrets(parts.geturl())
                raise LinkRefused(f"{place} does not encrypt: use nats:// only where nobody else reads the network")
            return secret

        return show

    if parts.password is not None:
        return {"user": make(parts.username or ""), "password": make(parts.password)}
    return {"token": make(parts.username or key.token)}


def _explain_unreached(place: str, cause: Exception) -> LinkError:
    if isinstance(cause, ssl.SSLCertVerificationError):
        return LinkRefused(
            f"{place} shows a certificate that cannot be trusted here ({cause.verify_message}): name the file of its"
            " authority in SSL_CERT_FILE"
        )
    return LinkError(f"{place} cannot be reached ({_describe(cause)}): start nats-server there, or correct the address")


def _describe(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):  # its numbers are OpenSSL's
        return error.reason or str(error)
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


class _NatsLink:
    def __init__(self, client: Any, subject: str, place: str) -> None:
        self._client, self._subject, self._place = client, subject, place

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
        read_bytes = 0
        while not self._client.is_closed:  # its callbacks wait until the server has agreed to end the encryption
            await asyncio.sleep(_LOOK_S)
            if self._client.stats["in_bytes"] > read_bytes:  # the answer to a ping comes after many MB from all nodes
                read_bytes, self._client._pings_outstanding = self._client.stats["in_bytes"], 0
        raise LinkError(f"the connection to {self._place} was lost")

    async def close(self) -> None:
        await _close(self._client)


async def _close(client: Any) -> None:
    with contextlib.suppress(Exception):  # whatever it is, the connection is over
        await asyncio.wait_for(client.close(), _CLOSE_S)

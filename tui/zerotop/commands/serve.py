"""``zerotop serve``: the same program in a browser."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import ipaddress
import os
import shlex
import socket
import sys
from urllib.parse import quote

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.session import catalog
from zerotop.session.reader import Session

TOKEN_VARIABLE = "ZEROTOP_TOKEN"
"""The environment variable that says the token where other users must not see it in the list of processes."""


def serve(options: argparse.Namespace) -> int:
    """Serves until it is interrupted. Returns 0."""
    if importlib.util.find_spec("textual_serve") is None:
        raise Problem("A browser needs textual-serve: pip install 'zerotop[serve]'")
    token = _choose_token(options.token)
    _check_address(options.host, options.port, token)
    command, title = [sys.executable, "-m", "zerotop.commands.web.window"], "zerotop"
    if options.session is not None:
        path = catalog.find_session(options.session).absolute()
        title = f"zerotop: {Session.open(path).name}"
        command.append(str(path))
    from zerotop.commands.web.guard import RequestGuard
    from zerotop.commands.web.server import WebServer

    # It goes through a shell, which then gives way to it.
    server = WebServer(
        f"exec {shlex.join(command)}", options.host, options.port, RequestGuard(token, port=options.port), title=title
    )
    os.environ.pop(TOKEN_VARIABLE, None)
    try:
        asyncio.run(server.serve_until_signal(lambda port: _print_address(options.host, port, token)))
    except OSError as error:
        raise Problem(_describe_error(error, options.host, options.port)) from None
    return 0


def _choose_token(given: str | None) -> str | None:
    token = given if given is not None else os.environ.get(TOKEN_VARIABLE)
    if token is not None and (not token or not token.isascii() or not token.isprintable() or " " in token):
        raise Problem("A token is some letters, digits and signs, without spaces", USAGE)
    return token


def _check_address(host: str, port: int, token: str | None) -> None:
    if not 0 <= port <= 65535:
        raise Problem(f"There is no port {port}: they go from 1 to 65535", USAGE)
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)} if host else set()
    except (OSError, UnicodeError):
        found = set()
    if not found:
        raise Problem(f"There is no address {host!r} here", USAGE)
    if token is None and not all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
        raise Problem(
            f"On {host} others could see your jobs, stop them and delete their recordings:"
            f" choose a --token (or {TOKEN_VARIABLE}) that they have to know",
            USAGE,
        )


def _print_address(host: str, port: int, token: str | None) -> None:
    shown = f"[{host}]" if ":" in host else host
    query = f"?token={quote(token)}" if token is not None else ""
    print(f"Serving on http://{shown}:{port}/{query}", "Ctrl-C ends it; jobs go on.", sep="\n", flush=True)


def _describe_error(error: OSError, host: str, port: int) -> str:
    if isinstance(error.__cause__, OSError):
        error = error.__cause__
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return f"Cannot listen on {host}, port {port}: {reason}; choose another with --port"

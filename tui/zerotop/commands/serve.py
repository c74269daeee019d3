"""``zerotop serve``: the same program in a browser."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import secrets
import shlex
import socket
import sys
import threading
import webbrowser
from collections.abc import Mapping
from urllib.parse import quote

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.recording import catalog
from zerotop.recording.reader import Recording
from zerotop_probe.outside import own_python

TOKEN_VARIABLE = "ZEROTOP_TOKEN"
"""The environment variable with the token: unlike an option, it does not show in the list of processes."""


def serve(options: argparse.Namespace) -> int:
    """Serve until interrupted. Return 0."""
    if importlib.util.find_spec("textual_serve") is None:
        raise Problem("zerotop serve needs textual-serve: pip install 'zerotop[serve]'")
    host, port = options.host, options.port
    token = _choose_token(options.token)
    _check_address(host, port)
    command, title = own_python.build_command("zerotop.commands.web.window", str(os.getpid())), "zerotop"
    if options.recording is not None:
        path = catalog.find_recording(options.recording).absolute()
        title = f"zerotop: {Recording.open(path).name}"
        command.append(str(path))
    from zerotop.commands.web.guard import RequestGuard
    from zerotop.commands.web.server import WebServer

    guard = RequestGuard(token)
    # The command runs through a shell, which exec replaces.
    server = WebServer(f"exec {shlex.join(command)}", host, port, guard, title=title)
    os.environ.pop(TOKEN_VARIABLE, None)
    os.environ.pop("PYTHONEXECUTABLE", None)  # even isolated, the windows' Python would look at it

    def announce_address(actual_port: int) -> None:
        print(f"Serving on {_build_url(host, actual_port, token)}\nPress Ctrl-C to stop; jobs keep running.", flush=True)
        if not options.no_browser and has_local_browser(os.environ):
            address = _build_url(host, actual_port, guard.one_time_token)
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    try:
        asyncio.run(server.serve_until_signal(announce_address))
    except OSError as error:
        raise Problem(_describe_error(error, host, port)) from None
    return 0


def _choose_token(option: str | None) -> str:
    token = option if option is not None else os.environ.get(TOKEN_VARIABLE)
    if token is None:
        return secrets.token_urlsafe(24)
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise Problem("The token must be one or more ASCII letters, digits and signs, without spaces", USAGE)
    return token


def _check_address(host: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise Problem(f"Invalid port {port}: choose 1 to 65535, or 0 for any free port", USAGE)
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        addresses = []
    if not addresses:
        raise Problem(f"Unknown address {host!r}", USAGE)


def has_local_browser(environ: Mapping[str, str]) -> bool:
    """Whether opening a browser shows it to the user: not over ssh, and not without a display."""
    if "SSH_CONNECTION" in environ or "SSH_TTY" in environ:
        return False
    return sys.platform == "darwin" or "DISPLAY" in environ or "WAYLAND_DISPLAY" in environ


def _build_url(host: str, port: int, token: str) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={quote(token)}"


def _describe_error(error: OSError, host: str, port: int) -> str:
    if isinstance(error.__cause__, OSError):
        error = error.__cause__
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return f"Cannot listen on {host}, port {port}: {reason}. Choose another port with --port"

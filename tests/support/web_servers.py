"""A ``zerotop serve`` in a process of its own, and clients of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

PATIENCE_S = 60.0


@dataclass
class Serving:
    """A server of its own process."""

    process: subprocess.Popen[str]
    address: str  # as it was printed
    window_key: str = ""  # of its page

    @property
    def port(self) -> int:
        match = re.search(r":(\d+)/", self.address)
        assert match is not None
        return int(match[1])

    @property
    def plain(self) -> str:
        """The address without a token."""
        return f"http://127.0.0.1:{self.port}/"

    @property
    def window(self) -> str:
        """The address of a websocket."""
        return f"{self.plain}ws/{self.window_key}"

    @property
    def query(self) -> str:
        """The token as a query."""
        return "?" + self.address.partition("?")[2]

    def children(self) -> list[int]:
        """The processes that windows run."""
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        return [int(line) for line in found.stdout.split()]


@contextlib.contextmanager
def start_serving(state: Path, *arguments: str, complaints: list[str] | None = None, **variables: str) -> Iterator[Serving]:
    """Serves on a free port of this machine, until the end of the block. ``complaints``: gets what it has said since."""
    environment = os.environ | {"XDG_STATE_HOME": str(state), "LC_ALL": "C"} | variables
    command = [sys.executable, "-m", "zerotop", "serve", "--no-browser", "--port", "0", *arguments]
    with subprocess.Popen(
        command, env=environment, cwd=state, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match is not None, line + process.stdout.read()
        try:
            yield Serving(process, match[0])
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            hint, *said = process.stdout.read().splitlines()
            assert hint == "Press Ctrl-C to stop; jobs keep running."
            if complaints is None:
                assert said == []
            else:
                complaints += said


def read_window_key(page: str) -> str:
    match = re.search(r'data-window-key="([\w-]*)"', page)
    assert match is not None
    return match[1]


@contextlib.asynccontextmanager
async def client_of(server: Serving) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that has visited the page with the token and keeps the cookie."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
        async with client.get(server.address) as page:
            assert page.status == 200
            server.window_key = read_window_key(await page.text())
        yield client


def is_running(pid: int) -> bool:
    """Whether a process that nobody may have waited for still does anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

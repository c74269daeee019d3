"""Clients that send ``zerotop serve`` what its page never sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import browser
import recordings
from web_servers import PATIENCE_S, Serving, client_of, is_running, read_window_key, start_serving
from zerotop.commands.web import window_process
from zerotop.commands.web.guard import RequestGuard
from zerotop.commands.web.server import MAX_WINDOWS, WebServer
from zerotop.commands.web.window_process import MAX_COLUMNS, MAX_ROWS, WindowProcess

STORY = str(recordings.find_packed_file("story"))
NUMBERS = (0, -1, 1, 0.5, 10**9, 10**400, 1e308, float("inf"), float("-inf"))
NO_NUMBERS = (float("nan"), "80", None, True, [80], {"columns": 80})
INVALID = (
    "",
    "nonsense",
    "[" * 100_000,
    "{}",
    "[]",
    "7",
    '"resize"',
    '["resize"]',
    '["resize", 5]',
    '["resize", {"width": 80}]',
    '["stdin"]',
    '["stdin", 5]',
    '["ping", {}]',
    '["unknown"]',
)


async def wait_for_end(server: Serving, pids: list[int], limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while any(is_running(pid) for pid in pids) or server.children():
        assert time.monotonic() < deadline, "the window goes on"
        await asyncio.sleep(0.05)


async def wait_for_pong(window: aiohttp.ClientWebSocketResponse) -> None:
    await window.send_json(["ping", "1"])
    while (message := await window.receive(timeout=PATIENCE_S)).type is not aiohttp.WSMsgType.TEXT:
        assert message.type is aiohttp.WSMsgType.BINARY, message
    assert message.json() == ["pong", "1"]


def read_mebibytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("size", ["width=100000000&height=100000000", "width=0&height=-5", "width=NaN&height=1e400"])
async def test_no_size_fills_the_memory(size: str, tmp_path: Path) -> None:
    complaints: list[str] = []
    with start_serving(tmp_path, STORY, complaints=complaints) as server:
        async with client_of(server) as client:
            async with client.ws_connect(f"{server.window}?{size}") as window:
                await window.receive(timeout=PATIENCE_S)  # it has started
                for number in (*NUMBERS, *NO_NUMBERS):
                    for width, height in ((number, 24), (80, number), (number, number)):
                        await window.send_str(json.dumps(["resize", {"width": width, "height": height}]))
                await window.send_json(["resize", {"width": 10**6, "height": 10**6}])
                await wait_for_pong(window)
                await asyncio.sleep(3)
                pids = server.children()
                assert len(pids) == 1
                assert read_mebibytes(pids[0]) < 300
            await wait_for_end(server, pids, 10)
    assert len(complaints) == 1
    assert complaints[0] == "zerotop: A window sent an invalid message: a size that is no number"


async def test_a_window_ends_when_its_socket_is_cut(tmp_path: Path) -> None:
    with start_serving(tmp_path, STORY) as server:
        async with client_of(server) as client:
            window = await client.ws_connect(server.window)
            await window.receive(timeout=PATIENCE_S)
            pids = server.children()
            assert window._response.connection is not None
            assert window._response.connection.transport is not None
            window._response.connection.transport.abort()  # no frame says goodbye
            await wait_for_end(server, pids, 10)


async def test_a_window_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    with start_serving(tmp_path, STORY) as server:
        async with client_of(server) as client:
            async with client.ws_connect(server.window) as window:
                await window.receive(timeout=PATIENCE_S)
                pids = server.children()
                os.kill(pids[0], signal.SIGSTOP)
                for _ in range(8):  # more than a pipe and its buffer hold
                    await window.send_json(["stdin", "x" * 500_000])
            await wait_for_end(server, pids, 20)


async def test_a_window_that_crashes_closes_its_websocket(tmp_path: Path) -> None:
    complaints: list[str] = []
    with start_serving(tmp_path, STORY, complaints=complaints) as server:
        async with client_of(server) as client, client.ws_connect(server.window) as window:
            await window.receive(timeout=PATIENCE_S)
            os.kill(server.children()[0], signal.SIGKILL)
            while (await window.receive(timeout=PATIENCE_S)).type is not aiohttp.WSMsgType.CLOSE:
                pass


async def test_a_window_that_just_starts_ends_with_the_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerotop", "serve", "--no-browser", "--port", "0", STORY]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        server = Serving(process, process.stdout.readline().split()[-1])
        async with client_of(server) as client, client.ws_connect(server.window):
            while not (pids := server.children()):
                await asyncio.sleep(0.01)
            process.kill()
        await wait_for_end(server, pids)


async def test_invalid_messages_are_one_line(tmp_path: Path) -> None:
    complaints: list[str] = []
    with start_serving(tmp_path, STORY, complaints=complaints) as server:
        async with client_of(server) as client, client.ws_connect(server.window) as window:
            for text in INVALID:
                await window.send_str(text)
            await window.send_bytes(b"\x00" * 1000)
            await window.send_str(json.dumps(["stdin", "\ud800"]))
            await wait_for_pong(window)
            await window.send_str("x" * (3 << 20))
            while (message := await window.receive(timeout=PATIENCE_S)).type is not aiohttp.WSMsgType.CLOSE:
                pass
            assert message.data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
    assert len(complaints) == 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 60_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\n\x1b[31mHost a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nCookie: \xff\xfe=\x1b\r\n\r\n",
        b"GET /?token=%ff%fe HTTP/1.1\r\nHost: [\r\nOrigin: http://[\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"GET /ws/x HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: ?\r\n\r\n",
    ],
)
def test_invalid_requests_are_one_line(request_bytes: bytes, tmp_path: Path) -> None:
    complaints: list[str] = []
    with start_serving(tmp_path, STORY, complaints=complaints) as server:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
                connection.sendall(request_bytes)
                assert connection.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 403", b"HTTP/1.0 400")
    assert len(complaints) <= 1
    assert all(line.startswith("zerotop: ") and line.isprintable() and len(line) < 250 for line in complaints)


async def test_the_cookie_alone_opens_no_window(tmp_path: Path) -> None:
    """A server of somebody else on this machine gets the cookie, as cookies ignore ports."""
    stolen: dict[str, str] = {}

    async def steal(request: web.Request) -> web.Response:
        stolen.update(request.cookies)
        return web.Response(text="hello")

    thief = web.Application()
    thief.router.add_get("/", steal)
    runner = web.AppRunner(thief)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    thief_port = runner.addresses[0][1]
    with start_serving(tmp_path, STORY) as server:
        async with client_of(server) as client, client.get(f"http://127.0.0.1:{thief_port}/") as answer:
            assert await answer.text() == "hello"
        assert stolen
        async with aiohttp.ClientSession(cookies=stolen, cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
            async with client.get(server.plain) as page:
                assert page.status == 200
                assert page.headers["Cache-Control"] == "no-store"
                assert read_window_key(await page.text()) == ""
            for address in (f"{server.plain}ws", f"{server.plain}ws/", f"{server.plain}ws/{stolen.popitem()[1]}"):
                with pytest.raises(aiohttp.WSServerHandshakeError, match=r"403|404"):
                    await client.ws_connect(address, origin=server.plain.rstrip("/"))
            # With the key, from a page of another port.
            with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                await client.ws_connect(server.window, origin=f"http://127.0.0.1:{thief_port}")
        assert server.children() == []
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                await client.ws_connect(server.window)  # without the cookie
    await runner.cleanup()


async def test_a_browser_keeps_the_key_for_its_port(tmp_path: Path) -> None:
    program = browser.find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    with start_serving(tmp_path, STORY) as server, start_serving(tmp_path, STORY) as other:
        async with browser.open_page(program, tmp_path / "profile") as page:
            await page.open_address(server.address)
            await page.wait_for("LlamaForCausalLM")
            await page.call_method("Page.navigate", url=server.plain)  # as "Open again" does
            await page.wait_for("LlamaForCausalLM")
            await page.call_method("Page.navigate", url=other.address)
            await page.wait_for("LlamaForCausalLM")
            other_page = f"await fetch('{other.plain}').then(answer => answer.text(), error => 'refused')"
            await page.call_method("Page.navigate", url=server.plain)
            await page.wait_for("LlamaForCausalLM")
            assert await page.evaluate_script(f"(async () => {other_page})()") == "refused"
            opened = (
                f"new Promise(r => {{const s = new WebSocket('ws://127.0.0.1:{other.port}/ws/x'); s.onerror = () => r(0);}})"
            )
            assert await page.evaluate_script(opened) == 0
            await page.evaluate_script("localStorage.clear()")
            await page.call_method("Page.navigate", url=server.plain)
            while "-locked" not in await page.evaluate_script("document.body?.className ?? ''"):
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def serve_command(*command: str) -> AsyncIterator[tuple[aiohttp.ClientSession, str, WebServer]]:
    """A server in this process whose windows run ``command``: (client, address of a websocket, server)."""
    server = WebServer(f"exec {shlex.join(command)}", "127.0.0.1", 0, RequestGuard("token"), title="test")
    runner = web.AppRunner(await server._make_app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, server.host, 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as client, client.get(f"{address}?token=token") as page:
            yield client, f"{address}ws/{read_window_key(await page.text())}", server
    finally:
        await runner.cleanup()


async def test_the_number_of_windows_is_bounded() -> None:
    async with serve_command("cat") as (client, address, server), contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(client.ws_connect(address)) for _ in range(MAX_WINDOWS)]
        with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
            await client.ws_connect(address)
        await opened[0].close()
        deadline = time.monotonic() + PATIENCE_S
        while len(server._websockets) == MAX_WINDOWS:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        await stack.enter_async_context(client.ws_connect(address))


async def test_the_memory_of_a_window_is_bounded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(window_process, "MAX_MEMORY_BYTES", 100 << 20)
    program = "import time\nprint('__GANGLION__', flush=True)\nheld = bytearray(200 << 20)\ntime.sleep(600)"
    async with serve_command(sys.executable, "-c", program) as (client, address, _), client.ws_connect(address) as window:
        assert (await window.receive(timeout=PATIENCE_S)).type is aiohttp.WSMsgType.CLOSE
    assert "A window was ended: it took more than" in capsys.readouterr().err


async def test_the_last_words_of_a_window_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; sys.stderr.write('x' * 300_000); raise ValueError('\\x1b[2J')"
    async with serve_command(sys.executable, "-c", program) as (client, address, _), client.ws_connect(address) as window:
        assert (await window.receive(timeout=PATIENCE_S)).type is aiohttp.WSMsgType.CLOSE
    assert capsys.readouterr().err == "zerotop: A window ended with an error: ValueError: \\x1b[2J\n"


@pytest.mark.parametrize("size", NUMBERS)
async def test_sizes_are_clamped(size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[tuple[int, int]] = []

    async def keep(self: WindowProcess, width: int, height: int) -> None:
        passed.append((width, height))

    monkeypatch.setattr(WindowProcess, "set_terminal_size", keep)
    window = WindowProcess.__new__(WindowProcess)
    await window.pass_message(json.dumps(["resize", {"width": size, "height": size}]))
    ((width, height),) = passed
    assert type(width) is type(height) is int
    assert 1 <= width <= MAX_COLUMNS
    assert 1 <= height <= MAX_ROWS

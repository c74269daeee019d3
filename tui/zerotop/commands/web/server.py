"""textual-serve's web server with an access check and a page that loads nothing from other hosts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp_jinja2
import jinja2
from aiohttp import WSCloseCode, WSMsgType, web
from textual_serve.server import Server, to_int

from zerotop.commands.web.guard import RequestGuard
from zerotop.commands.web.reports import install_reports, report
from zerotop.commands.web.window_process import WindowProcess, parse_size

MAX_WINDOWS = 16
_PAGE_FILE = "page.html"
_MAX_MESSAGE_BYTES = 1 << 20
_HEARTBEAT_S = 15.0
# How long connections that the browser keeps open delay the end.
_SHUTDOWN_S = 2.0
_HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; font-src 'self' data:;"
        " img-src 'self' data: blob:; connect-src 'self' ws: wss:; frame-ancestors 'none'"
    ),
}


class WebServer(Server):
    """Runs one process of the command per browser window."""

    def __init__(self, command: str, host: str, port: int, guard: RequestGuard, *, title: str) -> None:
        super().__init__(command, host, port, title=title)
        self._guard = guard
        self._websockets: set[web.WebSocketResponse] = set()

    async def on_startup(self, app: web.Application) -> None:
        """Override textual-serve's banner, which would print the command line."""

    async def on_shutdown(self, app: web.Application) -> None:
        """Close the windows, which ends their processes."""
        closings = [socket.close(code=WSCloseCode.GOING_AWAY, drain=False) for socket in self._websockets if socket.prepared]
        await asyncio.wait_for(asyncio.gather(*closings, return_exceptions=True), _SHUTDOWN_S)

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.router.add_get("/ws/{key}", self.handle_websocket)
        app.middlewares.append(self._guard.check_request)
        app.on_response_prepare.append(_add_headers)
        page = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
        app[aiohttp_jinja2.APP_KEY] = page
        return app

    async def handle_index(self, request: web.Request) -> web.Response:
        """Return the page; with the key of its websocket if it was just opened with the token."""
        font_size = to_int(request.query.get("fontsize", "16"), 16)
        key = self._guard.take_window_key(request)
        values = {"font_size": font_size, "application": {"name": self.title}, "window_key": key}
        answer = aiohttp_jinja2.render_template(_PAGE_FILE, request, values)
        answer.headers["Cache-Control"] = "no-store"
        return answer

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run a window while its websocket is open."""
        self._guard.check_window_key(request)
        if len(self._websockets) >= MAX_WINDOWS:
            report("A window was refused", f"{MAX_WINDOWS} are open")
            raise web.HTTPServiceUnavailable(text=f"{MAX_WINDOWS} windows are open: close one.\n")
        websocket = web.WebSocketResponse(heartbeat=_HEARTBEAT_S, max_msg_size=_MAX_MESSAGE_BYTES)
        window = WindowProcess(
            self.command,
            write_bytes=websocket.send_bytes,
            write_str=websocket.send_str,
            close=partial(_close, websocket),
            download_manager=self.download_manager,
        )
        self._websockets.add(websocket)
        try:
            await websocket.prepare(request)
            await window.start(parse_size(request.query.get("width"), 80), parse_size(request.query.get("height"), 24))
            await _pass_messages(websocket, window)
        except ConnectionError:  # the browser is gone
            pass
        finally:
            await window.stop()
            self._websockets.discard(websocket)
        return websocket

    async def serve_until_signal(self, announce: Callable[[int], None]) -> None:
        """Serve until SIGINT or SIGTERM; ``announce`` gets the port. Raises OSError if the port is taken."""
        install_reports()
        runner = web.AppRunner(await self._make_app(), access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.host, self.port)
            await site.start()
            stopped = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stopped.set)
            announce(runner.addresses[0][1])
            await stopped.wait()
        finally:
            await runner.cleanup()


async def _pass_messages(websocket: web.WebSocketResponse, window: WindowProcess) -> None:
    has_reported = False
    async for message in websocket:
        try:
            if message.type is not WSMsgType.TEXT:
                raise ValueError(str(message.data) if message.type is WSMsgType.ERROR else "binary data")
            answer = await window.pass_message(message.data)
        except ValueError as error:
            if not has_reported:
                report("A window sent an invalid message", str(error))
            has_reported = True
        else:
            if answer is not None:
                await websocket.send_json(answer)


async def _close(websocket: web.WebSocketResponse) -> None:
    await websocket.close()


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)

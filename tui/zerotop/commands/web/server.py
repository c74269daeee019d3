"""The server: textual-serve's, with a page that needs nothing from elsewhere, and a guard."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp_jinja2
import jinja2
from aiohttp import web
from textual_serve.server import Server, to_int

from zerotop.commands.web.guard import RequestGuard

_PAGE_FILE = "page.html"
# A browser that does not close its end is not waited for.
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
    """Serves one command to whoever the guard lets through; each browser window has a process of its own."""

    def __init__(self, command: str, host: str, port: int, guard: RequestGuard, *, title: str) -> None:
        super().__init__(command, host, port, title=title)
        self._guard = guard

    async def on_startup(self, app: web.Application) -> None:
        """Says nothing: the command line that is run is nobody's business."""

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._guard.check_request)
        app.on_response_prepare.append(_add_headers)
        page = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
        app[aiohttp_jinja2.APP_KEY] = page
        return app

    @aiohttp_jinja2.template(_PAGE_FILE)
    async def handle_index(self, request: web.Request) -> dict[str, Any]:
        """What the page is filled in with."""
        return {"font_size": to_int(request.query.get("fontsize", "16"), 16), "application": {"name": self.title}}

    async def serve_until_signal(self, announce_port: Callable[[int], None]) -> None:
        """Serves until SIGINT or SIGTERM. ``ready`` is told the port. Raises OSError where that is not to be had."""
        runner = web.AppRunner(await self._make_app(), access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.host, self.port)
            await site.start()
            over = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, over.set)
            announce_port(runner.addresses[0][1])
            await over.wait()
        finally:
            await runner.cleanup()


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)

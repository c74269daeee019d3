"""textual-serve's web server with an access check and a page that loads nothing from other hosts."""

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

    async def on_startup(self, app: web.Application) -> None:
        """Override textual-serve's banner, which would print the command line."""

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._guard.check_request)
        app.on_response_prepare.append(_add_headers)
        page = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
        app[aiohttp_jinja2.APP_KEY] = page
        return app

    @aiohttp_jinja2.template(_PAGE_FILE)
    async def handle_index(self, request: web.Request) -> dict[str, Any]:
        """Return the values of the page template."""
        return {"font_size": to_int(request.query.get("fontsize", "16"), 16), "application": {"name": self.title}}

    async def serve_until_signal(self, announce: Callable[[int], None]) -> None:
        """Serve until SIGINT or SIGTERM; ``announce`` gets the port. Raises OSError if the port is taken."""
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


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)

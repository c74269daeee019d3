"""A real headless Chromium, spoken to in its own debugging protocol: opens a page, types, reads a terminal drawn there."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from patience import lengthen

PATIENCE_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# The page keeps its terminal to itself: whoever is given one under that name is remembered. Its text is then read from
# the terminal's own buffer, since what is seen is pixels.
_REMEMBER = """
Object.defineProperty(Object.prototype, "terminal", {
  configurable: true,
  set(value) {
    window.rememberedTerminal = value;
    Object.defineProperty(this, "terminal", {value, writable: true, configurable: true, enumerable: true});
  },
});
"""
_READ = """
(() => {
  const buffer = window.rememberedTerminal?.buffer.active;
  if (!buffer) return "";
  const rows = [];
  for (let y = 0; y < window.rememberedTerminal.rows; y++) {
    rows.push(buffer.getLine(buffer.viewportY + y).translateToString(true));
  }
  return rows.join("\\n");
})()
"""


def find_chromium() -> str | None:
    """Return the path of Chromium, or None if it is not installed."""
    return next((program for name in _NAMES if (program := shutil.which(name)) is not None), None)


class Page:
    """One page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.requested: list[str] = []
        """Every address requested by the page."""

    async def call_method(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json(timeout=lengthen(PATIENCE_S))
            if answer.get("method") == "Network.requestWillBeSent":
                self.requested.append(answer["params"]["request"]["url"])
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    async def open_address(self, address: str) -> None:
        """Go to a page."""
        await self.call_method("Page.enable")
        await self.call_method("Network.enable")
        await self.call_method("Page.addScriptToEvaluateOnNewDocument", source=_REMEMBER)
        await self.call_method("Page.navigate", url=address)

    async def evaluate_script(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = await self.call_method("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def read_screen(self) -> str:
        """Return the text of the terminal in the page."""
        return str(await self.evaluate_script(_READ))

    async def wait_for(self, text: str) -> str:
        """Wait until the terminal shows a text; return the terminal's whole text."""
        deadline = asyncio.get_running_loop().time() + lengthen(PATIENCE_S)
        while text not in (shown := await self.read_screen()):
            assert asyncio.get_running_loop().time() < deadline, f"no {text!r} in:\n{shown}"
            await asyncio.sleep(0.1)
        return shown

    async def wait_while(self, text: str) -> None:
        """Wait until the terminal no longer shows a text."""
        deadline = asyncio.get_running_loop().time() + lengthen(PATIENCE_S)
        while text in (shown := await self.read_screen()):
            assert asyncio.get_running_loop().time() < deadline, f"{text!r} still in:\n{shown}"
            await asyncio.sleep(0.1)

    async def type_text(self, text: str) -> None:
        """Type characters."""
        for character in text:
            await self.call_method("Input.dispatchKeyEvent", type="keyDown", text=character, key=character)
            await self.call_method("Input.dispatchKeyEvent", type="keyUp", key=character)

    async def press_key(self, key: str, code: int, text: str = "") -> None:
        """Press a key that has a name: ``Enter``, 13."""
        down = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call_method("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **down)
        await self.call_method("Input.dispatchKeyEvent", type="keyUp", **down)

    async def save_picture(self, path: Path) -> None:
        """Write a screenshot as PNG."""
        path.write_bytes(base64.b64decode((await self.call_method("Page.captureScreenshot"))["data"]))


@contextlib.asynccontextmanager
async def open_page(program: str, folder: Path, *, width: int = 1400, height: int = 900) -> AsyncIterator[Page]:
    """Start a browser with one page and end it afterwards; ``folder`` is for its profile."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    process = await asyncio.create_subprocess_exec(
        program,
        *options,
        f"--window-size={width},{height}",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)},
    )
    try:
        port = await wait_for_port(folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as client:
            async with client.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [found for found in json.loads(await answer.text()) if found["type"] == "page"]
            async with client.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
                yield Page(socket)
                await Page(socket).call_method("Browser.close")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def wait_for_port(path: Path) -> int:
    deadline = asyncio.get_running_loop().time() + lengthen(PATIENCE_S)
    while not path.is_file() or "\n" not in path.read_text():
        assert asyncio.get_running_loop().time() < deadline, "Chromium did not start"
        await asyncio.sleep(0.05)
    return int(path.read_text().split("\n")[0])

"""The process of a browser window: its size, its input, and its end, which is that of its websocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from pathlib import Path
from typing import Any

from textual_serve.app_service import AppService

from zerotop.commands.web.reports import report

# Larger than a screen of 8K with a small font. A window of this size takes 10 MB more than one of 80 x 24.
MAX_COLUMNS, MAX_ROWS = 600, 300
# A process that takes no input, or does not end, for so long is killed.
_PATIENCE_S = 5.0
_MAX_ERROR_BYTES = 1 << 16
# Far more than any recording takes, and watched from here: a limit of the kernel would be inherited by the window's jobs.
MAX_MEMORY_BYTES = 2 << 30
_WATCH_S = 1.0


class WindowProcess(AppService):
    """Closes its websocket when its process ends; :meth:`stop` ends the process."""

    async def start(self, width: float, height: float) -> None:
        """Start the process in a terminal of this size, or of the nearest possible one."""
        await super().start(_clamp(width, MAX_COLUMNS), _clamp(height, MAX_ROWS))

    async def pass_message(self, text: str) -> list[str] | None:
        """Pass a message of the browser on. Return the answer to it, if any. Raise ValueError if it is invalid."""
        try:
            message = json.loads(text)
            return await asyncio.wait_for(self._pass_message(message), _PATIENCE_S)
        except asyncio.TimeoutError:
            self._kill()
            return None
        except RecursionError:
            raise ValueError("too deep") from None

    async def _pass_message(self, message: Any) -> list[str] | None:
        match message:
            case ["stdin", str(data)]:
                await self.send_bytes(data.encode("utf-8", "replace"))
            case ["resize", {"width": width, "height": height}]:
                await self.set_terminal_size(_clamp(width, MAX_COLUMNS), _clamp(height, MAX_ROWS))
            case ["ping", str(stamp)]:
                return ["pong", stamp]
            case ["blur"]:
                await self.blur()
            case ["focus"]:
                await self.focus()
            case _:
                raise ValueError("unknown")
        return None

    async def stop(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        if self._process is None or self._task is None:
            return
        await self._download_manager.cancel_app_downloads(app_service_id=self.app_service_id)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ask_to_end(), _PATIENCE_S)
        self._kill()
        await self._process.wait()
        self._task.cancel()  # a job that the window has started may hold the other end of its pipes
        await asyncio.gather(self._task, return_exceptions=True)

    async def _ask_to_end(self) -> None:
        assert self._process is not None
        await self.send_meta({"type": "quit"})
        await self._process.wait()

    def _kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()

    async def run(self) -> None:
        """Pass the output of the process to the browser until it ends, then close the websocket."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(_read_last_line(process.stderr))
        watch = asyncio.create_task(self._watch_memory())
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._pass_output(process.stdout)
            await self.remote_close()
            if await process.wait() > 0:
                report("A window ended with an error", await errors)
        finally:
            errors.cancel()
            watch.cancel()

    async def _watch_memory(self) -> None:
        assert self._process is not None
        with contextlib.suppress(OSError):  # it has ended
            while _read_own_bytes(self._process.pid) <= MAX_MEMORY_BYTES:
                await asyncio.sleep(_WATCH_S)
            report("A window was ended", f"it took more than {MAX_MEMORY_BYTES >> 30} GiB")
            self._kill()

    async def _pass_output(self, stdout: asyncio.StreamReader) -> None:
        await stdout.readuntil(b"__GANGLION__\n")
        while True:
            kind = await stdout.readexactly(1)
            payload = await stdout.readexactly(int.from_bytes(await stdout.readexactly(4), "big"))
            if kind == b"D":
                await self.on_data(payload)
            elif kind == b"M":
                await self.on_meta(payload)
            elif kind == b"P":
                await self.on_packed(payload)


def parse_size(text: str | None, default: int) -> float:
    """Return a size of a query: the default if it is missing or no number."""
    try:
        size = float(text or "")
    except ValueError:
        return default
    return default if size != size else size


def _clamp(size: Any, limit: int) -> int:
    """Return the nearest possible size. Raise ValueError if it is no number."""
    if isinstance(size, bool) or not isinstance(size, (int, float)) or size != size:
        raise ValueError("a size that is no number")
    return int(max(1, min(size, limit)))


def _read_own_bytes(pid: int) -> int:
    """Return the memory of a process that is not mapped from files. Raise OSError if it has ended."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * resource.getpagesize()


async def _read_last_line(stderr: asyncio.StreamReader) -> str:
    last = b""
    while data := await stderr.read(_MAX_ERROR_BYTES):
        last = (last + data)[-_MAX_ERROR_BYTES:]
    return (last.decode(errors="replace").strip().splitlines() or ["unknown"])[-1]

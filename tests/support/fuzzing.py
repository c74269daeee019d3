"""Damaged recordings in all commands and on all screens: each must end in time, in a sentence, without a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import re
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import textual.app
import textual.pilot

from damage import ON_FOLDERS, ON_PACKS, shrink_files
from screens import read_rows
from waiting import wait_for_idle_loop
from zerotop.analysis.reports.recording_index import Overviews
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.commands.job.open_recording import open_recording
from zerotop.commands.job.recording_library import UserLibrary
from zerotop.recording import catalog
from zerotop.recording.packed.packing import unpack_files
from zerotop.recording.reader import Recording, RecordingError
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.app.start_app import StartApp
from zerotop.ui.base.tabs import TABS
from zerotop.ui.drawing.glyphs import BLOCKS

LIMIT_S = 10.0  # of processor time, which does not depend on what else the machine does
_PATIENCE_S = 300.0  # of other time, for what waits forever
LIMIT_BYTES = 1 << 30
SHRUNK = "shrunk_while_shown"
KINDS = (*ON_FOLDERS, *ON_PACKS, SHRUNK)
# What a terminal obeys, or what changes the order of a line's characters.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_KEYS = ("left", "plus", "down")


# As in tests/ui/conftest.py: Textual's own wait takes 40 ms a key at least.
for module in (textual.app, textual.pilot):
    vars(module)["wait_for_idle"] = wait_for_idle_loop


class Fault(NamedTuple):
    """An error in one command or screen."""

    step: str
    what: str  # traceback, hang, memory, or the name of another rule
    text: str


class TooLong(BaseException):
    """The time limit is over."""


def write_case(packed: Path, kind: str, seed: int, state: Path) -> Path:
    """Write a recording, damaged, and a healthy one beside it, where ``zerotop recordings`` lists them; return its path."""
    folder = state / "zerotop" / "sessions"
    folder.mkdir(parents=True)
    shutil.copy(packed, folder / "healthy.zerotop")
    chance = random.Random(seed)
    if kind in ON_PACKS:
        path = folder / "damaged.zerotop"
        shutil.copy(packed, path)
        ON_PACKS[kind](path, chance)
        return path
    path = folder / "damaged"
    path.mkdir()
    for name, content in unpack_files(packed).items():
        (path / name).write_bytes(content)
    if kind != SHRUNK:
        ON_FOLDERS[kind](path, chance)
    return path


def find_faults(path: Path, kind: str, seed: int, screens: bool = True) -> Iterator[tuple[str, float, int, Fault | None]]:
    """Try everything on a damaged recording; yield each step's name, seconds, peak memory in bytes, and fault."""
    state = path.parent.parent.parent
    os.environ["XDG_STATE_HOME"] = str(state)
    os.environ["XDG_CONFIG_HOME"] = str(state / "config")
    os.chdir(state)
    if kind == SHRUNK:
        yield _time_call("shrinking", lambda: asyncio.run(_watch_shrinking(path, seed)), limit_s=LIMIT_S * len(TABS))
    for arguments in _list_commands(path, state, seed):
        yield _time_call(arguments[0], partial(_run_command, arguments))
    if screens:
        yield _time_call("screens", lambda: asyncio.run(visit_screens(path)), limit_s=LIMIT_S * len(TABS))
        yield _time_call("start", lambda: asyncio.run(_visit_list(path)))


def _list_commands(path: Path, state: Path, seed: int) -> Iterator[list[str]]:
    """Yield all commands; every other case has them print JSON, and each a third of the formats."""
    recording, healthy = str(path), str(path.with_name("healthy.zerotop"))
    json = ["--json"] * (seed % 2)
    form = ("csv", "jsonl", "parquet")[seed % 3]
    yield ["recordings", *json]
    yield ["findings", recording, *json]
    yield ["memory", recording, *json]
    yield ["memory", recording, "--at", "3", *json]
    yield ["microscope", recording, "--wait", "1", *json]
    yield ["compare", recording, healthy, *json]
    yield ["export", recording, "--table", "all", "--format", form, "-o", str(state / form)]
    yield ["export", recording]
    yield ["export", recording, "--format", "perfetto", "-o", str(state / "trace")]
    yield ["report", recording, "-o", str(state / "report.html")]
    yield ["check", recording, "--baseline", recording, *json]
    yield ["pack", recording, "-o", str(state / "again.zerotop")]
    yield ["what-if", recording, "--micro-batch", "2", "--all", *json]
    yield ["estimate", recording, "--grade", *json]
    yield ["replay", recording]
    yield ["attach", recording]


def _run_command(arguments: list[str]) -> None:
    """Run a command; raise AssertionError if it prints what a terminal obeys, or breaks the list."""
    output, errors = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(arguments)
    output.flush()
    binary: Any = output.buffer
    text = binary.getvalue().decode()
    assert code in (0, 1, 2), f"exit code {code}"
    assert code == 0 or errors.getvalue().strip(), "it fails without a sentence"
    for said in (text, errors.getvalue()):
        obeyed = _OBEYED.search(said)
        assert obeyed is None, f"it prints {obeyed.group()!r} in {said[max(0, obeyed.start() - 60) : obeyed.end() + 20]!r}"
    assert len(errors.getvalue()) < 20_000, "its message is too long"
    if arguments[0] == "recordings":
        assert code == 0, "the list is broken"
        assert "healthy.zerotop" in text, "the list lacks the healthy recording"
        assert "damaged" in text or not Path("zerotop/sessions/damaged/session.json").exists(), "it is not listed"


async def visit_screens(path: Path) -> None:
    """Show a recording on every screen and press a few keys; raise the errors of the app."""
    try:
        opened = open_recording(path)
    except RecordingError:
        return
    app = ZerotopApp(opened.source, None, title=path.name, glyphs=BLOCKS)
    async with app.run_test(size=(120, 40)) as pilot:
        for tab in TABS:
            begin_s = time.process_time()
            app.action_switch(tab.name)
            for key in _KEYS:
                await pilot.press(key)
            await _wait_until_idle(app)
            _check_screen(app)
            seconds = time.process_time() - begin_s
            assert seconds < LIMIT_S, f"{tab.name} took {seconds:.1f} s"


async def _watch_shrinking(path: Path, seed: int) -> None:
    source = RecordingSource(Recording.open(path))
    app = ZerotopApp(source, None, title="shrinking", glyphs=BLOCKS)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        shrink_files(path, random.Random(seed))
        for tab in TABS:
            if not app.is_running:  # it has given up, with a sentence
                return
            app.action_switch(tab.name)
            for key in ("left", "end"):
                await pilot.press(key)
            await _wait_until_idle(app)
            app.run_tick()
            _check_screen(app)


async def _visit_list(path: Path) -> None:
    library = UserLibrary(Overviews(catalog.find_default_folder(), None, lambda path: False), job_finder=list)
    app = StartApp(library, glyphs=BLOCKS)
    async with app.run_test(size=(120, 40)) as pilot:
        deadline = time.monotonic() + _PATIENCE_S
        while not all(recording.overview is not None for recording in library.recordings) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await pilot.press("down", "up")
        await _wait_until_idle(app)
        text = _check_screen(app)
        assert "healthy" in text, "the list lacks the healthy recording"
        await pilot.press("enter")
        await _wait_until_idle(app)
        _check_screen(app)
        app.exit()
    library.stop()


async def _wait_until_idle(app: ZerotopApp) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while app.is_busy and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0)


def _check_screen(app: ZerotopApp) -> str:
    text = "\n".join(read_rows(app))
    obeyed = _OBEYED.search(text)
    assert obeyed is None, f"the screen shows {obeyed.group()!r}"
    return text


def _time_call(name: str, call: Callable[[], object], *, limit_s: float = LIMIT_S) -> tuple[str, float, int, Fault | None]:
    """Call a function; return its name, seconds, peak memory in bytes, and fault."""
    _reset_peak()
    resident = read_resident_bytes()  # of a test process, what other tests have left
    begin_s, fault = time.process_time(), None
    previous = signal.signal(signal.SIGALRM, _raise_too_long)
    before = signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S + limit_s)
    try:
        call()
    except TooLong:
        fault = Fault(name, "hang", traceback.format_exc(limit=-8))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        what = "rule" if isinstance(error, AssertionError) and error.args else "traceback"
        fault = Fault(name, what, traceback.format_exc(limit=-8))
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *before)
    seconds, peak = time.process_time() - begin_s, _read_peak() - resident
    if fault is None and seconds > limit_s:
        fault = Fault(name, "hang", f"{seconds:.1f} s")
    if fault is None and peak > LIMIT_BYTES:
        fault = Fault(name, "memory", f"{peak / 2**20:.0f} MiB")
    return name, seconds, peak, fault


def _raise_too_long(number: int, frame: object) -> None:
    raise TooLong


def read_resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _read_peak() -> int:
    """Return this process's highest resident memory since the last reset."""
    try:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

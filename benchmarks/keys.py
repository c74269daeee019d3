"""The time until a key answers, on every screen while records come in: from its byte in the terminal to the changed screen.

``zerotop attach`` runs in a real pseudo-terminal on a recording that another process writes meanwhile with the real writers.
A key has answered when the terminal is first written to after its action began; the picture is whole when nothing waits to
be computed, laid out or painted any more. Beside each stands the processor time that the viewer used meanwhile: on a machine
that others use too it says more, because it does not have their share in it.

    python benchmarks/keys.py [--ranks 8] [--hosts 1] [--screens 1 3 5] [--keys time zoom] [--rounds 12]
        [--size 200x50] [--stacks]
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from viewer_cost import WRITER, Terminal

UP, DOWN, LEFT, RIGHT = b"\x1b[A", b"\x1b[B", b"\x1b[D", b"\x1b[C"
GROUPS = {
    "rank": (DOWN, DOWN, UP, DOWN),
    "m": (b"m", b"m"),
    "panel": (b"z", b"z"),
    "zoom": (b"+", b"-"),
    "time": (b" ", LEFT, LEFT, RIGHT, b"<", b">", b"f"),
}
LACKING = {"m": "12467", "rank": "7", "zoom": "14567"}  # screens that have no such key
LONGEST_S = 10.0
SAMPLE_S = 0.002
SLOW_S = 0.025  # of processor time for an answer


class Answer(NamedTuple):
    """The answer to one key, in ms: since its byte was written, and of processor time."""

    wall: float
    processor: float
    whole_wall: float
    whole_processor: float


# In the viewer's process


class Inside:
    """A log of the answers to keys, written in the viewer's process, a line for each answer."""

    def __init__(self, log: str, stacks: bool) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND)
        self._acting = 0
        self._since: float | None = None  # processor time when the key came that has not answered
        self._acted = False
        self._first: tuple[float, float] | None = None  # when it was written to after that, and processor time
        self._stacks: collections.Counter[str] = collections.Counter()  # while slow keys waited
        self._waiting: collections.Counter[str] = collections.Counter()  # while this one does
        if stacks:
            threading.Thread(target=self._sample_stacks, args=(log + ".stacks",), daemon=True).start()

    def patch_textual(self) -> None:
        """Wrap the methods of Textual that receive keys, run actions and write to the terminal."""
        from textual.app import App
        from textual.driver import Driver
        from textual.drivers.linux_driver import LinuxDriver
        from textual.events import Key

        def process_message(driver: Any, message: Any, before: Any = Driver.process_message) -> None:
            if isinstance(message, Key):
                self._since, self._first, self._acted = time.process_time(), None, False
            before(driver, message)

        async def run_action(app: Any, *arguments: Any, before: Any = App.run_action, **named: Any) -> Any:
            with self._in_action(app):
                return await before(app, *arguments, **named)

        def write_timed(driver: Any, data: str, before: Any = LinuxDriver.write) -> None:
            before(driver, data)
            if self._first is None and (self._acting or self._acted):
                self._first = time.monotonic(), time.process_time()
                if self._since is not None and self._first[1] - self._since > SLOW_S:
                    self._stacks.update(self._waiting)
                self._waiting.clear()

        Driver.process_message = process_message  # type: ignore[method-assign]
        App.run_action = run_action  # type: ignore[method-assign]
        LinuxDriver.write = write_timed  # type: ignore[method-assign]

    @contextmanager
    def _in_action(self, app: Any) -> Iterator[None]:
        self._acting += 1
        yield
        self._acting -= 1
        if not self._acting and self._since is not None and not self._acted:
            self._acted = True
            self._look_for_answer(app)

    def _look_for_answer(self, app: Any) -> None:
        import asyncio

        screen = app.screen
        waits = screen._layout_required or screen._dirty_widgets or screen._compositor._dirty_regions
        waits = waits or not screen.is_mounted or bool(app._message_queue.qsize()) or screen._message_queue.qsize()
        for widget in screen.query("*"):
            waits = waits or widget._repaint_required or widget._layout_required or widget._message_queue.qsize()
        boxes = getattr(getattr(screen, "_body", None), "boxes", None)
        if boxes is not None:
            waits = waits or not boxes or not all(screen.query_one(f"#{name}")._rows for name in boxes)
        for work in (getattr(screen, "folding", None), getattr(screen, "ranking", None)):
            waits = waits or (work is not None and work.is_busy)
        if waits or getattr(app, "is_busy", False) or getattr(app, "_frame_work", None) is not None:
            asyncio.get_running_loop().call_later(0.001, self._look_for_answer, app)
        elif self._since is not None:
            now = time.monotonic(), time.process_time()
            first = self._first or now
            told = (first[0], first[1] - self._since, now[0], now[1] - self._since)
            self._since = None
            os.write(self._log, (" ".join(map(repr, told)) + "\n").encode())

    def _sample_stacks(self, path: str) -> None:
        """Write the main thread's stacks during unanswered keys to a file now and then; only of slow keys."""
        main = threading.main_thread().ident
        told = time.monotonic()
        while True:
            time.sleep(SAMPLE_S)
            if self._since is not None and self._first is None:
                codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[main or 0])]
                ours = [f"{code.co_name}:{Path(code.co_filename).stem}" for code in codes if "zerotop" in code.co_filename]
                self._waiting[" < ".join(ours[:7])] += 1
            if time.monotonic() - told > 2.0:
                told = time.monotonic()
                lines = [f"{count:6d} {where}\n" for where, count in self._stacks.copy().most_common(60)]
                Path(path).write_text("".join(lines))


def run_watched_viewer(log: str, stacks: bool, arguments: Sequence[str]) -> None:
    """Run the viewer with a log of its answers to keys."""
    from zerotop.cli import main as zerotop

    Inside(log, stacks).patch_textual()
    sys.exit(zerotop(list(arguments)))


# Outside


class Keyboard:
    """A keyboard that presses one key after another and reads the answers from the log."""

    def __init__(self, terminal: Terminal, log: Path) -> None:
        self._terminal, self._log = terminal, log
        self._read = 0

    def measure_key(self, key: bytes) -> Answer:
        """Press a key after a random pause; return its answer, or LONGEST_S in all fields if there is none."""
        self._terminal.collect_facts(random.uniform(0.12, 0.45))
        begun = time.monotonic()
        os.write(self._terminal._end, key)
        while time.monotonic() - begun < LONGEST_S:
            self._terminal.collect_facts(0.01)
            lines = self._log.read_text().splitlines()
            if len(lines) > self._read:
                self._read = len(lines)
                at, used, whole_at, whole_used = map(float, lines[-1].split())
                return Answer(*(1e3 * value for value in (at - begun, used, whole_at - begun, whole_used)))
        return Answer(*[LONGEST_S * 1e3] * 4)


def format_figures(screen: str, group: str, answers: list[Answer]) -> str:
    """Return a line of figures."""
    columns = [np.array(column) for column in zip(*answers, strict=True)]
    figures = [" ".join(f"{np.quantile(column, share):6.0f}" for share in (0.5, 0.95, 1.0)) for column in columns]
    return f"{screen:>6} {group:>6} {len(answers):5d}  " + "  ".join(figures)


def measure_screens(terminal: Terminal, log: Path, options: argparse.Namespace) -> None:
    """Print a line for each screen and kind of key."""
    keyboard = Keyboard(terminal, log)
    found: dict[tuple[str, str], list[Answer]] = collections.defaultdict(list)
    for screen in options.screens:
        found[screen, "first"].append(keyboard.measure_key(screen.encode()))
        terminal.collect_facts(2.0)
        for _ in range(options.rounds):
            for group, keys in GROUPS.items():
                if group not in options.keys or screen in LACKING.get(group, ""):
                    continue
                found[screen, group] += [keyboard.measure_key(key) for key in keys]
        print(format_figures(screen, "first", found[screen, "first"]))
        for group in GROUPS:
            if (screen, group) in found:
                print(format_figures(screen, group, found[screen, group]))
        every = [answer for (of, group), answers in found.items() if of == screen and group != "first" for answer in answers]
        if every:
            print(format_figures(screen, "all", every), flush=True)
    measure_turns(keyboard, options)


def measure_turns(keyboard: Keyboard, options: argparse.Namespace) -> None:
    """Print a line for the number keys that lead to each screen."""
    others = [screen for screen in options.screens for _ in range(max(2, options.rounds // 2))]
    random.shuffle(others)
    turns: dict[str, list[Answer]] = collections.defaultdict(list)
    for screen, before in zip(others, [options.screens[-1], *others], strict=False):
        if screen != before:
            turns[screen].append(keyboard.measure_key(screen.encode()))
    for screen, answers in sorted(turns.items()):
        print(format_figures(screen, "number", answers), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        run_watched_viewer(sys.argv[2], sys.argv[3] == "stacks", sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--hertz", type=int, default=20)
    parser.add_argument("--slower", type=float, default=1.0, help="a step takes 0.42 s times this")
    parser.add_argument("--before", type=float, default=20.0, help="seconds that are written before anybody looks")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--size", default="200x50")
    parser.add_argument("--screens", nargs="*", default=list("1234567"))
    parser.add_argument("--keys", nargs="*", default=list(GROUPS), choices=GROUPS, help="beside those that switch screens")
    parser.add_argument("--stacks", action="store_true", help="say where the program was while slow keys waited")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as zerotop has it, which here comes after NumPy
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "recording", Path(folder) / "answers"
        log.touch()
        command = [sys.executable, str(WRITER), str(path), "--hertz", str(options.hertz), "--slower", str(options.slower)]
        command += ["--ranks", str(options.ranks), "--hosts", str(options.hosts)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline()
        time.sleep(options.before)
        mode = "stacks" if options.stacks else "-"
        terminal = Terminal([sys.executable, __file__, "--inside", str(log), mode, "attach", str(path)], width, height)
        try:
            terminal.measure_key(b"", b"LIVE", 60.0)
            terminal.collect_facts(5.0)
            print(f"{options.ranks} ranks on {options.hosts} nodes, {options.size}")
            print(" " * 19 + "".join(f"  {what:<20}" for what in ("answer, ms", "its CPU", "whole, ms", "its CPU")))
            print("screen   keys count" + "     p50    p95  worst" * 4)
            measure_screens(terminal, log, options)
        finally:
            stacks = log.with_name("answers.stacks")
            if options.stacks and stacks.exists():
                print(stacks.read_text())
            terminal.close()
            writer.kill()
            writer.wait()


if __name__ == "__main__":
    main()

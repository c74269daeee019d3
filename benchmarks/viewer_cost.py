"""The cost of the viewer: processor time, memory, and the delay of a fact on screen, with 8 ranks and 8 GPUs at 20 Hz.

``zerotop attach`` runs in a real pseudo-terminal on a recording that another process writes meanwhile with the real writers.
27 times a second the job prints a number; a fact is late by the time from its record's to when that number, or a later one,
has left the terminal's other end. Processor time and memory are the kernel's figures for the viewer's process.

"others" is what everything else on the machine used meanwhile, the recording's writer and this program included: where that
is much, the viewer's figures are of a busy machine.

The numbers are not on every screen: of the others there is no lateness. Processor time depends on what else the machine
does, so two versions have to run at once: ``--other FOLDER`` names another checkout, whose viewer watches the same recording
on a terminal of its own; "ratio" is this one's processor time to that one's.

    python benchmarks/viewer_cost.py [--seconds 20] [--warm-up 5] [--size 80x24 200x50 ...] [--ranks 8]
        [--screens live timeline ...] [--other FOLDER]
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from zerotop.recording.reader import Recording

WRITER = Path(__file__).resolve().parent.parent / "tests" / "support" / "growing_recording.py"
_FACT = re.compile(rb"fact (\d{8})")
SCREENS = ("live", "timeline", "iteration", "memory", "ranks", "threads", "output")  # by the number that shows them
_TICKS = os.sysconf("SC_CLK_TCK")


class Terminal:
    """A program on a pseudo-terminal of a size."""

    def __init__(self, command: Sequence[str], width: int, height: int) -> None:
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            time.sleep(0.2)  # until the size is set
            environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
            os.execvpe(command[0], command, environment)
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.written = 0
        self._tail = b""

    def collect_facts(self, seconds: float) -> list[tuple[int, int]]:
        """Read for some seconds; return the drawn facts in order, as (number, CLOCK_MONOTONIC in nanoseconds)."""
        seen: list[tuple[int, int]] = []
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not select.select([self._end], [], [], left)[0]:
                break
            data = os.read(self._end, 65536)
            now = time.monotonic_ns()
            self.written += len(data)
            numbers = _FACT.findall(self._tail + data)
            self._tail = (self._tail + data)[-len("fact 0000000") :]
            seen.extend((int(number), now) for number in numbers[-1:])
        return seen

    def measure_key(self, key: bytes, answer: bytes, seconds: float) -> float:
        """Press a key; return the seconds until ``answer`` is drawn, at most ``seconds``."""
        begun = time.monotonic()
        os.write(self._end, key)
        seen = b""
        while (passed := time.monotonic() - begun) < seconds:
            if select.select([self._end], [], [], seconds - passed)[0]:
                seen = seen[-len(answer) :] + os.read(self._end, 65536)
                if answer in seen:
                    return time.monotonic() - begun
        return seconds

    def type_keys(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._end, keys)

    def processor_s(self) -> float:
        """Return the program's seconds of processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory_mb(self, name: str) -> float:
        """Return a memory figure of the process's status, in 10^6 bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(rf"{name}:\s+(\d+)", status)[0]) * 1024 / 1e6

    def close(self) -> None:
        """Kill the program."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._end)


def build_attach_command(recording: Path) -> list[str]:
    """Return the command that watches a recording."""
    return [sys.executable, "-m", "zerotop", "attach", str(recording)]


def read_machine_seconds() -> float:
    """Return the processor seconds that the whole machine has used so far."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:9]
    return sum(int(ticks) for ticks in (user, nice, system, irq, softirq)) / _TICKS


def read_fact_times(path: Path) -> dict[int, int]:
    """Return the time of each fact's record by the fact's number, in nanoseconds, from the recording itself."""
    (source,) = Recording.open(path).sources["output"]
    log = source.path.with_name(source.path.stem + ".log").read_bytes()
    found: dict[int, int] = {}
    for piece in source.array:
        for number in _FACT.findall(log[piece["offset"] : piece["offset"] + piece["length"]]):
            found[int(number)] = int(piece["time_ns"])
    return found


def measure_lateness_ms(seen: list[tuple[int, int]], written: dict[int, int]) -> np.ndarray:
    """Return the delay of each fact after the first seen one until it, or a later fact, was drawn, in milliseconds."""
    late: list[float] = []
    last = seen[0][0]
    for number, when in seen:
        late.extend((when - written[fact]) / 1e6 for fact in range(last + 1, number + 1))
        last = max(last, number)
    return np.array(late)


def measure_size(size: str, options: argparse.Namespace) -> Iterator[str]:
    """Yield a line of figures for each screen on a terminal of this size."""
    width, height = (int(part) for part in size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        command = [sys.executable, str(WRITER), str(path), "--ranks", str(options.ranks)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline()
        time.sleep(1.0)
        terminals = [Terminal(build_attach_command(path), width, height)]
        if options.other is not None:
            roots = f"PYTHONPATH={options.other / 'tui'}:{options.other / 'probe'}"
            terminals.append(Terminal(["env", roots, *build_attach_command(path)], width, height))
        try:
            watch_all(terminals, options.warm_up)
            for screen in options.screens:
                for terminal in terminals:
                    terminal.type_keys(str(SCREENS.index(screen) + 1).encode())
                watch_all(terminals, 2.0)
                yield f"{size:>8} {screen:>9} {format_figures(terminals, path, options.seconds)}"
        finally:
            for terminal in terminals:
                terminal.close()
            writer.kill()
            writer.wait()


def watch_all(terminals: Sequence[Terminal], seconds: float) -> list[list[tuple[int, int]]]:
    """Return the facts that each terminal draws in so many seconds."""
    with ThreadPoolExecutor(len(terminals)) as pool:
        return list(pool.map(lambda terminal: terminal.collect_facts(seconds), terminals))


def format_figures(terminals: Sequence[Terminal], path: Path, seconds: float) -> str:
    """Return the first viewer's figures over so many seconds, and the ratio of its processor time to the other's."""
    viewer = terminals[0]
    before, machine, written = [one.processor_s() for one in terminals], read_machine_seconds(), viewer.written
    since = time.monotonic()
    seen = watch_all(terminals, seconds)[0]
    passed = time.monotonic() - since
    shares = [(one.processor_s() - begun) / passed for one, begun in zip(terminals, before, strict=True)]
    others = (read_machine_seconds() - machine) / passed - shares[0]
    rate = (viewer.written - written) / 1e3 / passed
    figures = (
        f"{shares[0]:7.1%} {others:7.0%} {viewer.memory_mb('VmRSS'):7.0f} {viewer.memory_mb('RssAnon'):8.0f} {rate:6.1f}"
    )
    if len(shares) > 1:
        figures += f" {shares[0] / shares[1]:6.2f}"
    if len(seen) < 2:
        return figures
    late = measure_lateness_ms(seen, read_fact_times(path))
    p50, p99 = np.quantile(late, [0.5, 0.99])
    return f"{figures}   {len(seen) / passed:5.1f} drawn/s, late by {p50:.0f} ms p50, {p99:.0f} p99, {late.max():.0f} worst"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--size", nargs="*", default=["80x24", "120x40", "200x50"])
    parser.add_argument("--screens", nargs="*", default=["live"], choices=SCREENS)
    parser.add_argument("--other", type=Path, help="another checkout, to be measured at the same time")
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    ratio = f" {'ratio':>6}" if options.other is not None else ""
    print(f"{'size':>8} {'screen':>9} {'1 core':>7} {'others':>7} {'RSS MB':>7} {'anon MB':>8} {'kB/s':>6}{ratio}")
    for size in options.size:
        for line in measure_size(size, options):
            print(line, flush=True)


if __name__ == "__main__":
    main()

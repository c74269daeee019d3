"""What entering a running Python costs it: how long it is stopped, and whether it survives, by CPython version and by load.

Every target is busy in a way that other tools have broken: it allocates without pause, runs many threads, handles a signal
every few milliseconds, starts subprocesses, or sleeps. It counts, and says so when it is over: one that has crashed, hangs,
saw an error or counted wrong is a failure. Stops are measured by the one who stops, so the scheduler's part is in them;
the load of the machine is printed beside.

    python benchmarks/attach.py [--entries 100] [--python PATH ...]

Without --python: every CPython 3.9 to 3.13 below ~/.pyenv/versions, and the one that runs this.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from zerotop_probe.outside.attaching.injector import State, plant
from zerotop_probe.outside.attaching.target import CannotEnter, examine
from zerotop_probe.outside.proc import Process

ANSWER_S = 20.0

FRAME = """
import os, select, signal, sys, threading, time, zlib
entered = [0]
sys.modules["entered"] = entered
{before}
print("ready", flush=True)
rounds = 0
while not select.select([0], [], [], 0)[0]:
    {round}
    rounds += 1
{after}
print("over", entered[0], flush=True)
"""

LOADS = {
    "allocates": ("", "assert sum(len(x) for x in [bytearray(i % 4000) for i in range(2000)]) == 1999000", ""),
    "threads": (
        "end = threading.Event()\n"
        "def work():\n    while not end.is_set(): zlib.crc32(bytes(100000)); [{} for _ in range(500)]\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n[t.start() for t in threads]",
        "assert [i for i in range(1000)][-1] == 999",
        "end.set(); [t.join() for t in threads]",
    ),
    "signals": (
        "seen = [0]\nsignal.signal(signal.SIGALRM, lambda *a: seen.__setitem__(0, seen[0] + 1))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)",
        "assert sum(range(3000)) == 4498500",
        "signal.setitimer(signal.ITIMER_REAL, 0)",
    ),
    "children": ("import subprocess", "assert subprocess.call(['true']) == 0", ""),
    "sleeps": ("", "time.sleep(0.005)", ""),
}


class Result(NamedTuple):
    """Many entries into one target: seconds, and what went wrong."""

    stops: list[float]
    wholes: list[float]
    refused: int
    failure: str


@contextmanager
def target(python: str, load: str) -> Iterator[subprocess.Popen[str]]:
    """A busy process that has begun its work."""
    before, body, after = LOADS[load]
    program = FRAME.format(before=before, round=body, after=after)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([python, "-c", program], text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def enter_many(python: str, load: str, entries: int) -> Result:
    """Enters one target as often; every entry adds one to a number in it, which has to be right in the end."""
    stops: list[float] = []
    wholes: list[float] = []
    refused = 0
    with target(python, load) as process:
        seen = Process.of(process.pid)
        for _ in range(entries):
            began_s = time.perf_counter()
            try:
                assert seen is not None
                planted = plant(examine(seen), "import sys; sys.modules['entered'][0] += 1")
                stops.append(planted.stopped_s)
                while planted.state() is not State.DONE:
                    if time.perf_counter() - began_s > ANSWER_S:
                        return Result(stops, wholes, refused, "hang")
                    time.sleep(0.0005)
            except CannotEnter:
                refused += 1
                continue
            except ProcessLookupError:
                return Result(stops, wholes, refused, "crash")
            wholes.append(time.perf_counter() - began_s)
        return Result(stops, wholes, refused, how_it_ended(process, entries - refused))


def how_it_ended(process: subprocess.Popen[str], expected: int) -> str:
    """Lets a target end; what was wrong with it, "" if nothing."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write("end\n")
    process.stdin.flush()
    if not select.select([process.stdout], [], [], ANSWER_S)[0]:
        return "hang"
    said = process.stdout.readline()
    if said != f"over {expected}\n":
        error = (process.stderr.read().strip().splitlines() or ["no word"])[-1]
        return f"crash ({said.strip() or error})"
    return "" if process.wait(ANSWER_S) == 0 else f"exit {process.returncode}"


def pythons() -> list[str]:
    """The interpreters of this machine that are entered in this way."""
    found = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3"), key=lambda path: path.parts[-3])
    named = [str(path) for path in found if 9 <= int(path.parts[-3].split(".")[1]) <= 13]
    return named or [sys.executable]


def main() -> int:
    """Prints a line for each version and load; returns 1 if any target was harmed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100, help="into each target [100]")
    parser.add_argument("--python", nargs="*", default=None, metavar="PATH")
    options = parser.parse_args()
    harmed, stops = 0, []
    print(f"{'':<32} {'entries':>7} {'stop ms: median':>15} {'worst':>8} {'whole ms: median':>16} {'worst':>8}  harm")
    for python in options.python or pythons():
        for load in LOADS:
            result = enter_many(python, load, options.entries)
            stops += result.stops
            harmed += bool(result.failure)
            print(line(python, load, result), flush=True)
    print(
        f"{len(stops)} entries: stopped {1e3 * statistics.median(stops):.2f} ms in the middle, {1e3 * max(stops):.2f} ms at "
        f"worst; targets harmed: {harmed}; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    return 1 if harmed else 0


def line(python: str, load: str, result: Result) -> str:
    """One row."""
    name = python.replace(str(Path.home()), "~").replace("~/.pyenv/versions/", "").replace("/bin/python3", "")
    stops, wholes = ([1e3 * value for value in values] or [float("nan")] for values in (result.stops, result.wholes))
    harm = result.failure or (f"{result.refused} refused" if result.refused else "none")
    return (
        f"{name + ' ' + load:<32} {len(result.stops):>7} {statistics.median(stops):>15.2f} {max(stops):>8.2f} "
        f"{statistics.median(wholes):>16.1f} {max(wholes):>8.1f}  {harm}"
    )


if __name__ == "__main__":
    sys.exit(main())

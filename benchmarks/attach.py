"""The cost of entering a running Python: the length of the stop, and the failures, by CPython version and by load.

Every target has a load that has broken other tools: it allocates without pause, runs many threads, handles a signal every
few milliseconds, starts subprocesses, sleeps, or computes in C. The target counts its entries and prints the number at its
end. A target that crashes, hangs, meets an error or prints a wrong number is a failure. The tracer measures each stop, from
the request until it releases the thread; the waits for a core are included. Its own processor time in the stop, which does
not depend on other programs, is printed beside it. On an idle machine the two are close.

    python benchmarks/attach.py [--entries 100] [--drawing] [--python PATH ...]

CPython 3.14 and newer runs the script on request and is not stopped: only the time of the whole entry is measured there.

Without --python: every CPython from 3.9 on below ~/.pyenv/versions and python3.14, or else the one that runs this. With
--drawing a second thread of the tracer computes without pause, which is more than the thread of a screen ever does.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from zerotop_probe.outside.attaching import payload, remote_exec
from zerotop_probe.outside.attaching.injector import State, plant_code
from zerotop_probe.outside.attaching.python_process import CannotEnter, examine_process
from zerotop_probe.outside.procfs import ProcessHandle

ANSWER_S = 20.0
COUNT = "import sys; sys.modules['entered'][0] += 1"
TARGET_MEDIAN_MS, TARGET_WORST_MS = 1.0, 10.0

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
    # In C, with what it computes in the wide registers of the processor.
    "computes": (
        "import hashlib\nblock = bytes(1 << 20)\nright = hashlib.sha256(block).digest()",
        "assert hashlib.sha256(block).digest() == right",
        "",
    ),
}


class Result(NamedTuple):
    """Many entries into one target: seconds, and what went wrong."""

    stops: list[float]
    own: list[float]  # processor time of these
    wholes: list[float]
    refused: int
    failure: str


@contextmanager
def start_target(python: str, load: str) -> Iterator[subprocess.Popen[str]]:
    """Start a busy process; yield it once it works, and kill it at the end of the block."""
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


def enter_process(process: ProcessHandle) -> tuple[Callable[[], bool], float, float]:
    """Let the target count one more entry. Return a function that says whether it has, and two durations in seconds.

    The durations are the stop of the target and our processor time in it. Raises CannotEnter; the function raises
    ProcessLookupError.
    """
    seen = examine_process(process)
    if seen.entry_points is not None:
        planted = plant_code(seen, COUNT)
        return lambda: planted.read_state() is State.DONE, planted.stopped_s, planted.stopped_cpu_s
    script = Path(tempfile.gettempdir()) / f"zerotop-{process.pid}.py"
    # What is there afterwards was not executed: it removes itself last.
    script.write_text(f"{COUNT}\nimport os, signal; signal.pthread_sigmask(0, ()); os.unlink({str(script)!r})")
    remote_exec.request_script(seen, str(script))

    def is_done() -> bool:
        if not process.is_alive():
            payload.remove_file(str(script))
            raise ProcessLookupError(process.pid)
        return not script.exists()

    return is_done, 0.0, 0.0


def enter_many(python: str, load: str, entries: int) -> Result:
    """Enter one target so many times. Each entry adds one to a number in the target, which is checked at its end."""
    result = Result([], [], [], 0, "")
    with start_target(python, load) as process:
        seen = ProcessHandle.from_pid(process.pid)
        assert seen is not None
        for _ in range(entries):
            began_s = time.perf_counter()
            try:
                done, stopped_s, own_s = enter_process(seen)
                result.stops.append(stopped_s)
                result.own.append(own_s)
                while not done():
                    if time.perf_counter() - began_s > ANSWER_S:
                        return result._replace(failure="hang")
                    time.sleep(0.0005)
            except CannotEnter:
                result = result._replace(refused=result.refused + 1)
                continue
            except ProcessLookupError:
                return result._replace(failure="crash")
            result.wholes.append(time.perf_counter() - began_s)
        return result._replace(failure=end_target(process, entries - result.refused))


def end_target(process: subprocess.Popen[str], expected: int) -> str:
    """End the target; return its error, or an empty text."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write("end\n")
    process.stdin.flush()
    if not select.select([process.stdout], [], [], ANSWER_S)[0]:
        return "hang"
    line = process.stdout.readline()
    if line != f"over {expected}\n":
        error = (process.stderr.read().strip().splitlines() or ["no word"])[-1]
        return f"crash ({line.strip() or error})"
    return "" if process.wait(ANSWER_S) == 0 else f"exit {process.returncode}"


def find_pythons() -> list[str]:
    """Return the interpreters of this machine that can be entered."""
    found = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3"), key=lambda path: path.parts[-3])
    named = [str(path) for path in found if int(path.parts[-3].split(".")[1]) >= 9]
    asked = shutil.which("python3.14")
    return [*named, *([asked] if asked else [])] or [sys.executable]


def main() -> int:
    """Print a line for each version and load; return 1 if any target was harmed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100, help="into each target [100]")
    parser.add_argument("--drawing", action="store_true", help="beside a thread of ours that computes without pause")
    parser.add_argument("--python", nargs="*", default=None, metavar="PATH")
    options = parser.parse_args()
    if options.drawing:
        threading.Thread(target=keep_busy, daemon=True).start()
    harmed, all_stops, all_own = 0, [], []
    print(f"{'':<32} {'':>7} {'stop, ms':>23}  {'own, of that':>15}  {'whole, ms':>15}")
    kinds = [f"{name:>7}" for name in ("median", "99 %", "worst")]
    print(f"{'':<32} {'entries':>7} {' '.join(kinds)}  {kinds[0]} {kinds[2]}  {kinds[0]} {kinds[2]}  harm")
    for python in options.python or find_pythons():
        for load in LOADS:
            result = enter_many(python, load, options.entries)
            all_stops += result.stops
            all_own += result.own
            harmed += bool(result.failure)
            print(format_row(python, load, result), flush=True)
    for name, values in (("stopped", all_stops), ("of which own processor time", all_own)):
        middle, worst = 1e3 * statistics.median(values), 1e3 * max(values)
        print(f"{len(values)} entries, {name}: {middle:.2f} ms median, {worst:.2f} ms worst")
    print(
        f"target: {TARGET_MEDIAN_MS:.0f} ms median, {TARGET_WORST_MS:.0f} ms worst; above that: "
        f"{sum(1e3 * value > TARGET_WORST_MS for value in all_stops)} stops; targets harmed: {harmed}; "
        f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    return 1 if harmed else 0


def keep_busy() -> None:
    """Keep the interpreter busy."""
    while True:
        sum(range(2000))


def format_row(python: str, load: str, result: Result) -> str:
    """Return the row of the table for one target."""
    name = python.replace(str(Path.home()), "~").replace("~/.pyenv/versions/", "").replace("/bin/python3", "")
    stops, own, wholes = ([1e3 * value for value in values] or [float("nan")] for values in result[:3])
    harm = result.failure or (f"{result.refused} refused" if result.refused else "none")
    return (
        f"{name + ' ' + load:<32} {len(result.stops):>7} "
        f"{statistics.median(stops):>7.2f} {find_percentile_99(stops):>7.2f} {max(stops):>7.2f}"
        f"  {statistics.median(own):>7.2f} {max(own):>7.2f}  {statistics.median(wholes):>7.1f} {max(wholes):>7.1f}  {harm}"
    )


def find_percentile_99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[max(0, len(values) * 99 // 100 - 1)]


if __name__ == "__main__":
    sys.exit(main())

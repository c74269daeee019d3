"""Much output of a job through a pipe: under `zerotop run --headless` and alone, turn by turn, in the same run.

    python benchmarks/output.py [--megabytes 200] [--rounds 15]

Time is measured by the reader of the pipe, from the first byte to the last, without the start of either; the recording is
written meanwhile. Of the rounds the median counts, of both. Memory is that of all processes of zerotop together, without the
job: resident, and with each shared page counted once in all (PSS). It is measured in runs of its own, which that slows down.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from zerotop_probe.recording.directory import SESSION_VARIABLE

TIME_LIMIT, MEMORY_LIMIT_MB = 2.0, 64.0
LINE = "step 12345 loss 2.3456 grad_norm 0.789 learning_rate 0.0001 tokens 123456 seconds 1.234 memory 12.3".ljust(99)
_PYTHON = (sys.executable, "-S", "-E", "-c")
# Commands that write SIZE bytes: as fast as a program can, as a file is copied, as a script prints, and as a log is flushed
# line by line.
WRITERS = {
    "blocks of 64 KiB": (*_PYTHON, "import os\npiece = bytes(65536)\nfor _ in range(SIZE // 65536 + 1): os.write(1, piece)"),
    "head -c 200M /dev/zero": ("head", "-c", "SIZE", "/dev/zero"),
    "cat of a file": ("cat", "FILE"),
    "yes | head -c 200M": ("bash", "-c", "yes | head -c SIZE"),
    "print() of 100 bytes": (*_PYTHON, f"for _ in range(SIZE // 100): print({LINE!r})"),
    "print() and flush": (*_PYTHON, f"for _ in range(SIZE // 100): print({LINE!r}, flush=True)"),
}
_MARK = "OUTPUT_BENCHMARK"


class Passage(NamedTuple):
    """One job's output: its size, the seconds that it took, and the memory of zerotop's processes."""

    size: int
    seconds: float
    resident_mb: float
    pss_mb: float


class MemoryWatch(threading.Thread):
    """A thread that samples the memory of zerotop's own processes, without those of the job."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.resident_mb = self.pss_mb = 0.0
        self._mark = f"{_MARK}={mark}".encode()
        self._over = threading.Event()

    def run(self) -> None:
        """Look until told to stop."""
        while not self._over.wait(0.05):
            found = [pair for pid in filter(str.isdecimal, os.listdir("/proc")) if (pair := self._read_memory(pid))]
            self.resident_mb = max(self.resident_mb, sum(resident for resident, _ in found))
            self.pss_mb = max(self.pss_mb, sum(pss for _, pss in found))

    def _read_memory(self, pid: str) -> tuple[float, float] | None:
        with suppress(OSError):
            environment = Path("/proc", pid, "environ").read_bytes()
            if self._mark in environment and SESSION_VARIABLE.encode() not in environment:
                lines = Path("/proc", pid, "smaps_rollup").read_text().splitlines()[1:]
                sizes = {line.split()[0]: int(line.split()[1]) / 1024 for line in lines}
                return sizes["Rss:"], sizes["Pss:"]
        return None

    def stop(self) -> None:
        """Stop looking."""
        self._over.set()
        self.join()


def pass_output(command: list[str], folder: Path, *, recorded: bool, watched: bool = False) -> Passage:
    """Run a job and read all of its output. ``watched``: follow the memory, which slows down the reading."""
    if recorded:
        command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder), "--", *command]
    watch = MemoryWatch(str(folder))
    environment = os.environ | {_MARK: str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        size = len(os.read(descriptor, 1 << 16))
        begin = time.perf_counter()
        if watched:
            watch.start()
        while data := os.read(descriptor, 1 << 16):
            size += len(data)
            seconds = time.perf_counter() - begin
    if watched:
        watch.stop()
    return Passage(size, seconds, watch.resident_mb, watch.pss_mb)


def compare_once(command: list[str], *, ours_first: bool) -> dict[bool, Passage]:
    """Run a job alone and under zerotop, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            recorded: pass_output(command, Path(folder, "recording"), recorded=recorded)
            for recorded in (ours_first, not ours_first)
        }


def measure_memory(command: list[str]) -> tuple[float, float]:
    """Return the most memory of zerotop in a few runs: resident, and PSS."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [pass_output(command, Path(folder, str(number)), recorded=True, watched=True) for number in range(3)]
    return max(run.resident_mb for run in runs), max(run.pss_mb for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    size = options.megabytes * 1_000_000
    print(f"{options.megabytes} MB of output{'':10}{'alone':>9}{'zerotop':>10}{'ratio':>8}{'resident':>11}{'PSS':>9}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "output")
        file.write_bytes((LINE + "\n").encode() * (size // 100))
        for name, words in WRITERS.items():
            command = [word.replace("SIZE", str(size)).replace("FILE", str(file)) for word in words]
            rounds = [compare_once(command, ours_first=bool(number % 2)) for number in range(options.rounds)]
            alone, ours = (median(both[recorded].seconds for both in rounds) for recorded in (False, True))
            resident, pss = measure_memory(command)
            print(f"{name:32}{alone:7.2f} s{ours:8.2f} s{ours / alone:8.2f}{resident:8.0f} MB{pss:6.0f} MB", flush=True)
            assert all(both[True].size == both[False].size >= size for both in rounds), "output was lost"
    print(f"limits: {TIME_LIMIT:.0f} times as long, {MEMORY_LIMIT_MB:.0f} MB")


if __name__ == "__main__":
    main()

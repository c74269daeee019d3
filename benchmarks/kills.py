"""Kill parts of zerotop at random moments of real two-rank DeepSpeed jobs; count the losses afterwards.

    python benchmarks/kills.py [--kills 100] [--jobs 3] [--seed 0]

The parts are the viewer on a terminal, the sampler, and any other process of zerotop's, never one of the job. After
each kill zerotop is used as a user would: the recording is attached to again, which replaces what has died. At the end
every step of both ranks must be in the recording, the job must have ended with its own exit code, and every byte that it
printed must be in the recorded output.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import programs
import real_jobs
from agents import read_table_file
from terminals import Terminal
from zerotop import demo
from zerotop_probe.recording.directory import SESSION_VARIABLE
from zerotop_probe.recording.events import JobEnded

RANKS, EXIT_CODE = 2, 5
# The job keeps a copy of what it prints; its exit code is that of the training and EXIT_CODE.
SCRIPT = '"$@" 2>&1 | tee -p "$PRINTED"; exit $((PIPESTATUS[0] + {}))'
_MARK = "KILLS_BENCHMARK"
_PR_SET_CHILD_SUBREAPER = 36
# Seconds between two kills: a part that was replaced is killed young or old.
_SHORTEST_S, _LONGEST_S = 0.05, 1.5


class Training:
    """A job on a terminal, whose parts of zerotop are killed."""

    def __init__(self, folder: Path, steps: int, chooser: random.Random) -> None:
        self.folder = folder
        self.recording = folder / "zerotop" / "sessions" / "mine"
        self.killed: Counter[str] = Counter()
        self.steps = steps
        self._chooser = chooser
        self._printed = folder / "printed"
        options = ["--model", "tiny", "--steps", str(steps), "--seq-length", "32", "--micro-batch", "1"]
        script = [str(demo.SCRIPT_PATH), *options, "--deepspeed", str(demo.find_config("zero1_bf16"))]
        command = ["bash", "-c", SCRIPT.format(EXIT_CODE), "bash", *real_jobs.build_launch_command("bare", script)]
        self._variables = real_jobs.make_environment() | {_MARK: str(folder), "PRINTED": str(self._printed)}
        self.viewer = self._open_terminal("run", "--recording", str(self.recording), "--", *command)

    def _open_terminal(self, *arguments: str) -> Terminal:
        return programs.start_on_terminal(self.folder, *arguments, **self._variables)

    def list_parts(self) -> dict[int, str]:
        """Return zerotop's processes by PID: its own processes do not have the variable that it gives to the job's."""
        mark, found = f"{_MARK}={self.folder}".encode(), {}
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if mark in environment and SESSION_VARIABLE.encode() not in environment:
                    found[pid] = self._name_part(pid)
        return found

    def _name_part(self, pid: int) -> str:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if pid == self.viewer.pid:
            return "viewer"
        if "--daemon" in words:
            return "sampler"
        return "holder" if any("holder" in word for word in words) else "other"

    def wait_for_step(self) -> None:
        """Wait until the training has begun."""
        while not any(path.stat().st_size > 1000 for path in self.recording.glob("spans-rank*.rec")):
            self.viewer.watch_output(0.2)

    def is_training(self) -> bool:
        """Return whether ranks still run."""
        return bool(find_job(self.recording))

    def kill_one(self) -> None:
        """Wait a moment, kill a part, and attach again."""
        self.viewer.watch_output(self._chooser.uniform(_SHORTEST_S, _LONGEST_S))
        parts = self.list_parts()
        kind = self._chooser.choice(sorted(set(parts.values())))
        pid = self._chooser.choice(sorted(pid for pid, part in parts.items() if part == kind))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.killed[kind] += 1
        if kind == "viewer":
            self.viewer.close()
            self.viewer = self._open_terminal("attach", str(self.recording))
        elif kind == "sampler":
            # Without a terminal this only replaces the sampler.
            subprocess.run(
                [*programs.ZEROTOP, "attach", str(self.recording)],
                env=programs.make_environment(self.folder, **self._variables),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=60,
            )
        self._restart_closed_viewer()

    def _restart_closed_viewer(self) -> None:
        if self.viewer.has_ended():
            self.viewer.close()
            self.viewer = self._open_terminal("attach", str(self.recording))

    def check_end(self) -> list[str]:
        """Wait for the end of the job; return what is wrong."""
        root = next(int(event["pid"]) for event in read_events(self.recording) if event.get("event") == "job_started")
        status = wait_for_orphan(root, self)
        while set(self.list_parts().values()) - {"viewer"}:
            self._watch_viewer(0.1)
        self.viewer.close()
        ends = [event for event in read_events(self.recording) if event.get("event") == JobEnded.event_name]
        codes = {event["exit_code"] for event in ends} - {None}
        wrong = []
        if status is not None and status != EXIT_CODE:
            wrong.append(f"the job ended with {status}")
        if codes - {EXIT_CODE}:
            wrong.append(f"the recording says exit code {codes}")
        if status is None and not codes:
            wrong.append("nobody knows the exit code")
        wrong += self._find_missing_steps() + self._find_missing_output()
        return wrong

    def _watch_viewer(self, seconds: float) -> None:
        if self.viewer.has_ended():
            time.sleep(seconds)
        else:
            with suppress(AssertionError):
                self.viewer.watch_output(seconds)

    def _find_missing_steps(self) -> list[str]:
        exported = subprocess.run(
            [*programs.ZEROTOP, "export", str(self.recording)], capture_output=True, check=True, text=True, timeout=120
        )
        rows = Counter((int(row["rank"]), int(row["step"])) for row in csv.DictReader(io.StringIO(exported.stdout)))
        expected = {(rank, step) for rank in range(RANKS) for step in range(self.steps)}
        missing, twice = sorted(expected - set(rows)), [row for row, count in rows.items() if count > 1]
        return [f"steps missing: {missing}"] * bool(missing) + [f"steps twice: {twice}"] * bool(twice)

    def _find_missing_output(self) -> list[str]:
        printed, recorded = self._printed.read_bytes(), read_output(self.recording)
        if printed == recorded:
            return []
        return [f"output: {len(printed):,} bytes printed, {len(recorded):,} recorded"]


def find_job(recording: Path) -> list[int]:
    """Return the living processes of the job."""
    mark, found = f"{SESSION_VARIABLE}={recording}".encode(), []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if mark in Path("/proc", pid, "environ").read_bytes().split(b"\0"):
                found.append(int(pid))
    return found


def wait_for_orphan(pid: int, training: Training) -> int | None:
    """Wait for a job that we have adopted; None if its agent lived and has waited for it."""
    while True:
        with suppress(ChildProcessError):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
        if not training.is_training() and not Path(f"/proc/{pid}").exists():
            return None
        training._watch_viewer(0.1)


def read_events(recording: Path) -> list[dict[str, object]]:
    """Return the events of all samplers of a recording."""
    lines = [line for path in recording.glob("events-node-*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def read_output(recording: Path) -> bytes:
    """Return the recorded output of all samplers in the order of its times."""
    pieces = []
    for index in sorted(recording.glob("output-node-*.rec")):
        if index.stat().st_size:
            text = index.with_suffix(".log").read_bytes()
            rows = read_table_file(index)
            pieces += [(int(row["time_ns"]), text[row["offset"] : row["offset"] + row["length"]]) for row in rows]
    return b"".join(text for _, text in sorted(pieces, key=lambda piece: piece[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="of each job; kills that it outruns come in a further job")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the job is ended too
    # Jobs whose sampler was killed become our children, and so their exit codes are known.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    chooser = random.Random(options.seed)
    real_jobs.remove_stale_locks(real_jobs.make_environment())
    share, killed, wrong, jobs = -(-options.kills // options.jobs), Counter[str](), 0, 0
    while sum(killed.values()) < options.kills:
        jobs += 1
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            training = Training(Path(folder), options.steps, chooser)
            try:
                training.wait_for_step()
                while sum(training.killed.values()) < share and training.is_training():
                    training.kill_one()
                problems = training.check_end()
            finally:
                for pid in (*training.list_parts(), *find_job(training.recording)):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(training.killed.items()))
            seconds = time.monotonic() - begin
            print(f"job {jobs}: {seconds:.0f} s, killed: {kinds}: {'; '.join(problems) or 'nothing is missing'}", flush=True)
            killed += training.killed
            wrong += bool(problems)
    print(f"{sum(killed.values())} kills in {jobs} jobs; {wrong} jobs lost something")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

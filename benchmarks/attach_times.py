"""The time until ``zerotop attach`` shows a running job, and the time until the job's ranks are entered.

torchrun starts a real DeepSpeed job of --ranks ranks on the CPU, without zerotop. The benchmark then repeats, each time with
a new zerotop process, and measures the time until:

- ``attach PID`` in a real pseudo-terminal: the first picture in which every rank has a figure;
- ``attach``: the end of the command, which prints the list of jobs;
- ``attach PID --enter``, and the key E on the screen: the entry of each rank, and its first recorded allocator figure or,
  where PyTorch's allocator has none, its first recorded phase.

Times are read from the recording and the terminal, and count from the start of the command or from the key. The processor
time of the program until the first picture is printed below it: on a busy machine the rest is waiting for a core.

    python benchmarks/attach_times.py [--ranks 2] [--jobs 2] [--tries 5]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from programs import ZEROTOP, make_environment, start_on_terminal
from rank_recordings import read_event_file, read_table_file
from terminals import Terminal

FIRST_PICTURE_S, ENTERED_S = 0.5, 1.0
START_S = 600.0
TRAIN = """
import sys
import deepspeed, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would want a compiler
folder, width = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": width,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 1000000,
})[0]
while True:
    engine.backward(engine(torch.randn(width, width)).square().mean())
    engine.step()
    if engine.global_steps == 3:
        open(f"{folder}/trains-{torch.distributed.get_rank()}", "w").close()
"""
IMPORTS = {
    "Python and what attach imports": "import zerotop.cli, zerotop.commands.attach",
    "the same and the screen": "import zerotop.cli, zerotop.commands.attach, zerotop.commands.job.watch",
}
_TICKS = os.sysconf("SC_CLK_TCK")


class Seconds:
    """The measured seconds, by name, in the order of the table."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}

    def add_values(self, name: str, *values: float) -> None:
        self._found.setdefault(name, []).extend(values)

    def print_row(self, name: str, target: str = "") -> None:
        """Print one row of the table."""
        values = self._found.get(name, [])
        if values:
            print(f"{name:<58} {len(values):>5} {statistics.median(values):>8.2f} {max(values):>8.2f}  {target}")


@contextlib.contextmanager
def start_training(ranks: int, width: int) -> Iterator[int]:
    """Start the job; yield the pid of its launcher once all ranks train."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAIN)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(port)]
        own = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with open(Path(folder, "output"), "w+b") as output:
            job = subprocess.Popen(
                [*command, str(script), folder, str(width)],
                env=make_environment(Path(folder), **own), stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            try:
                wait_for(lambda: job.poll() is not None or len(list(Path(folder).glob("trains-*"))) == ranks, START_S)
                if job.poll() is not None:
                    output.seek(0)
                    sys.exit(f"the job has failed:\n{output.read().decode(errors='replace')[-3000:]}")
                yield job.pid
            finally:
                job.send_signal(signal.SIGTERM)  # torchrun ends its ranks then, which have process groups of their own
                job.wait()


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until the condition holds; exit the benchmark after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("waited in vain")
        time.sleep(0.02)


class Attached:
    """A new ``zerotop attach`` on a terminal, which is detached from the job at the end of the block."""

    def __init__(self, state: Path, job: int, ranks: int, *options: str) -> None:
        self._state, self._job, self._ranks = state, job, ranks
        self._recordings = state / "zerotop" / "sessions"
        self._before = self._list_recordings()
        self.began_s = time.monotonic()
        self.terminal: Terminal = start_on_terminal(state, "attach", str(job), *options, rows=60, columns=200)

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminal.close()
        subprocess.run(
            [*ZEROTOP, "detach", str(self._job)], env=make_environment(self._state), check=True, capture_output=True
        )

    def _list_recordings(self) -> set[Path]:
        return set(self._recordings.iterdir()) if self._recordings.is_dir() else set()

    def wait_for_picture(self) -> float:
        """Wait until every rank has a figure on the screen; return the seconds since the command."""
        wanted = [re.compile(rf"rank +{number} .*?\d\.\d") for number in range(self._ranks)]
        self.terminal.wait_until(lambda _: all(pattern.search(self.terminal.screen) for pattern in wanted))
        return time.monotonic() - self.began_s

    def cpu_s(self) -> float:
        """Return the seconds of processor time of the program so far."""
        fields = Path(f"/proc/{self.terminal.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def recording(self) -> Path:
        (path,) = self._list_recordings() - self._before
        return path

    def find_event(self, role: str, name: str) -> float:
        """Return the time of the first event of that name by the control or node role, in seconds since the command."""
        (path,) = self.recording.glob(f"events-{role}-*.jsonl")
        return next(event["time_ns"] for event in read_event_file(path) if event["event"] == name) / 1e9 - self.began_s

    def find_first_sample(self) -> float:
        """Return the time of the first sample of a process, in seconds since the command."""
        (path,) = self.recording.glob("processes-*.rec")
        return float(read_table_file(path)["time_ns"].min()) / 1e9 - self.began_s

    def wait_for_entries(self, since_s: float) -> tuple[list[float], list[float]]:
        """Wait until every rank is entered and records; return the seconds since ``since_s`` to both, for each rank."""
        at: list[int] = []
        first: list[int] = []

        def all_have(_: str) -> bool:
            at[:] = filter(None, map(_entered_ns, self.recording.glob("events-rank*.jsonl")))
            first[:] = filter(None, map(self._first_ns, range(self._ranks)))
            return len(at) == len(first) == self._ranks

        self.terminal.wait_until(all_have)
        return [value / 1e9 - since_s for value in at], [value / 1e9 - since_s for value in first]

    def _first_ns(self, rank: int) -> int:
        """Return the time of the rank's first allocator record, or else of its first phase; 0 before."""
        for name, field in (("allocator", "time_ns"), ("spans", "end_ns")):
            for path in self.recording.glob(f"{name}-rank{rank}-*.rec"):
                rows = read_table_file(path)
                if len(rows):
                    return int(rows[field][0])
        return 0

    def read_iterations(self) -> list[float]:
        """Return the durations of all ranks' iterations in seconds."""
        spans = [read_table_file(path) for path in self.recording.glob("spans-rank*.rec")]
        starts = [sorted(rows["begin_ns"][(rows["phase"] == 3) & (rows["depth"] == 0)]) for rows in spans]  # forward
        return [float(after - before) / 1e9 for found in starts for before, after in pairwise(found)]


def _entered_ns(path: Path) -> int:
    with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
        return next((int(event["time_ns"]) for event in read_event_file(path) if event["event"] == "entered"), 0)
    return 0


def first_pictures(seconds: Seconds, state: Path, job: int, ranks: int, tries: int) -> None:
    for _ in range(tries):
        with Attached(state, job, ranks) as attached:
            seconds.add_values("first picture with a figure of every rank", attached.wait_for_picture())
            seconds.add_values("  processor time of the program until then", attached.cpu_s())
            seconds.add_values("  the job found and its recording begun", attached.find_event("control", "attached"))
            seconds.add_values("  the sampler has begun", attached.find_event("node", "rank_found"))
            seconds.add_values("  its first reading of a rank", attached.find_first_sample())


def measure_lists(seconds: Seconds, state: Path, job: int, tries: int) -> None:
    for _ in range(tries):
        began_s = time.monotonic()
        done = subprocess.run([*ZEROTOP, "attach"], env=make_environment(state), check=True, capture_output=True, text=True)
        seconds.add_values("list of jobs printed", time.monotonic() - began_s)
        assert str(job) in done.stdout, done.stdout


def measure_entering(seconds: Seconds, state: Path, job: int, ranks: int, *, key: bool) -> None:
    name = "key E" if key else "--enter"
    with Attached(state, job, ranks, *([] if key else ["--enter"])) as attached:
        since_s = attached.began_s
        if key:
            attached.terminal.wait_until(lambda text: "enter ranks" in text)
            attached.terminal.watch_output(1.0)
            since_s = time.monotonic()
            attached.terminal.type_keys("E")
        else:
            seconds.add_values("--enter: first picture", attached.wait_for_picture())
        entered, first = attached.wait_for_entries(since_s)
        seconds.add_values(f"{name}: a rank is entered", *entered)
        seconds.add_values(f"{name}: it has recorded its first figure", *first)
        attached.terminal.watch_output(2.0)
        seconds.add_values("iteration of a rank", *attached.read_iterations())


def measure_imports(seconds: Seconds) -> None:
    """Measure the start of Python and its imports, from files in the page cache."""
    for name, code in IMPORTS.items():
        for _ in range(5):
            began_s = time.monotonic()
            subprocess.run([sys.executable, "-c", code], check=True)
            seconds.add_values(f"  {name}", time.monotonic() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2, help="started one after the other [2]")
    parser.add_argument("--tries", type=int, default=5, help="first pictures and lists of each [5]")
    parser.add_argument("--width", type=int, default=512, help="of the model: how long an iteration takes [512]")
    options = parser.parse_args()
    seconds = Seconds()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        for number in range(options.jobs):
            with start_training(options.ranks, options.width) as job:
                first_pictures(seconds, state, job, options.ranks, options.tries)
                measure_lists(seconds, state, job, options.tries)
                # The first time the probe is imported there, the second time it is there already.
                for key in (bool(number % 2), not number % 2):
                    measure_entering(seconds, state, job, options.ranks, key=key)
    measure_imports(seconds)
    print(f"{options.ranks} ranks{'':<{58 - len(str(options.ranks)) - 6}} {'times':>5} {'median s':>8} {'worst':>8}  target")
    seconds.print_row("first picture with a figure of every rank", f"{FIRST_PICTURE_S} s")
    for name in ("processor time of the program until then", *IMPORTS, "the job found and its recording begun"):
        seconds.print_row(f"  {name}")
    seconds.print_row("  the sampler has begun")
    seconds.print_row("  its first reading of a rank")
    seconds.print_row("list of jobs printed", f"{FIRST_PICTURE_S} s")
    seconds.print_row("--enter: first picture")
    for name in ("--enter", "key E"):
        seconds.print_row(f"{name}: a rank is entered")
        seconds.print_row(f"{name}: it has recorded its first figure", f"{ENTERED_S:.0f} s and its next return to Python")
    seconds.print_row("iteration of a rank")
    print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, of which {options.ranks} is the job's")


if __name__ == "__main__":
    main()

"""The time to open a recording of ten million records and to seek in it, beside NumPy reading the same bytes.

Two recordings: a job as it is (every table that eight ranks on a node with eight GPUs write, four steps a second), and one
of nothing but spans, in which there is the most to compute. Files are in the page cache.

python benchmarks/open_recording.py [--records 10000000]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop_probe.recording import directory, tables
from zerotop_probe.recording.events import Engine, JobEnded, JobStarted, Node
from zerotop_probe.recording.tables import BEGIN, BOUNDARY, END, PHASE_CODE, TICK
from zerotop_probe.recording.writer import EventWriter, Identity, RecordWriter

TARGET_S = 1.0
RUNS = 3
RANKS = 8
STEP_NS = 250_000_000
TICK_NS = 100_000_000
THREADS, THREADS_EVERY = 8, 5  # the busiest of each rank, every so many ticks
LAUNCHER = 999
# The phases of a step and how deep they lie, in the order in which they end: its optimizer is offloaded to the CPU.
PHASES = (
    ("data", 0),
    ("forward", 0),
    ("reduce", 1),
    ("backward", 0),
    ("grads_to_cpu", 1),
    ("cpu_optimizer", 1),
    ("params_to_gpu", 1),
    ("allgather", 1),
    ("step", 0),
)
ONLY_SPANS = (("data", 0), ("forward", 0), ("backward", 0), ("reduce", 0), ("step", 0))


class WrittenRecording:
    """A recording of made-up tables with the real writer's headers. Times are nanoseconds since its begin in the past."""

    def __init__(self, path: Path, length_ns: int) -> None:
        self.length_ns = length_ns
        self.clock = {"monotonic_ns": 0, "unix_ns": time.time_ns() - length_ns - 60 * 10**9}
        self.path = Path(directory.create_recording(["python", "train.py"], path=str(path), clock=self.clock))
        self.node = Identity.for_this_process("node")
        self.records = 0

    def identify_rank(self, number: int) -> Identity:
        """Return the identity of the rank of that number."""
        return self.node._replace(role="rank", rank=number, pid=1000 + number)

    def write_table(self, table: tables.Table, who: Identity, count: int, **columns: Any) -> None:
        """Write one writer's records; columns that are not given are 0."""
        RecordWriter(str(self.path), table, who, clock=self.clock, peaks="window").close()
        rows = np.zeros(count, np.dtype([tuple(field) for field in table.dtype]))
        for name, values in columns.items():
            rows[name] = values
        with open(self.path / f"{table.name}-{who.file_stem}.rec", "ab") as file:
            rows.tofile(file)
        self.records += count

    def write_spans(self, who: Identity, phases: tuple[tuple[str, int], ...]) -> dict[str, Any]:
        """Write a rank's spans, all phases equally long; return the columns that its begins and allocator samples share."""
        steps, each = self.length_ns // STEP_NS, len(phases)
        place = {
            "step": np.repeat(np.arange(steps), each),
            "phase": np.tile([PHASE_CODE[name] for name, _ in phases], steps),
        }
        begin = np.arange(steps * each) * (STEP_NS // each)
        forward = place["phase"] == PHASE_CODE["forward"]
        self.write_table(
            tables.SPANS,
            who,
            steps * each,
            begin_ns=begin,
            end_ns=begin + STEP_NS // each,
            depth=np.tile([depth for _, depth in phases], steps),
            flags=np.where(place["phase"] == PHASE_CODE["step"], BOUNDARY, 0),
            tokens=np.where(forward, 4096, -1),
            rows=np.where(forward, 8, -1),
            **place,
        )
        return {"time_ns": begin, **place}

    def write_allocator(self, who: Identity, begins: dict[str, Any]) -> None:
        """Write allocator samples at the begin and the end of every phase, and at the sampler's ticks."""
        times = [begins["time_ns"], begins["time_ns"] + STEP_NS // len(PHASES), self.list_ticks()]
        edges = np.repeat([BEGIN, END, TICK], [len(part) for part in times])
        order = np.argsort(joined := np.concatenate(times), kind="stable")
        held = 10**10 + joined % 10**9
        counts = dict.fromkeys(("allocated_bytes", "allocated_peak_bytes", "reserved_peak_bytes"), held[order])
        self.write_table(tables.ALLOCATOR, who, len(order), time_ns=joined[order], edge=edges[order], **counts)

    def list_ticks(self, each: int = 1, every: int = 1) -> Any:
        """Return the times of the sampler's ticks, each repeated for ``each`` sampled things."""
        return np.repeat(np.arange(0, self.length_ns, TICK_NS * every), each)

    def write_samples(self, table: tables.Table, each: int, every: int = 1, **columns: Any) -> None:
        """Write the node's samples of ``each`` things; a column is one value, or the values of one tick."""
        times = self.list_ticks(each, every)
        whole = {name: np.resize(values, len(times)) for name, values in columns.items()}
        self.write_table(table, self.node, len(times), time_ns=times, **whole)


def write_job(path: Path, records: int) -> WrittenRecording:
    """Write a recording of eight ranks and a sampler with about so many records."""
    per_step = RANKS * (4 * len(PHASES) + 1)
    per_tick = 2 * RANKS + RANKS + 1 + 1 + RANKS * (THREADS / THREADS_EVERY + 1)
    made = WrittenRecording(path, int(records / (per_step / STEP_NS + per_tick / TICK_NS)))
    for number in range(RANKS):
        who = made.identify_rank(number)
        begins = made.write_spans(who, PHASES)
        made.write_table(tables.BEGINS, who, len(begins["time_ns"]), **begins)
        made.write_allocator(who, begins)
        steps = made.length_ns // STEP_NS
        made.write_table(tables.PROBE, who, steps, time_ns=(np.arange(steps) + 1) * STEP_NS)
    numbers = np.arange(RANKS)
    pids = 1000 + numbers
    made.write_samples(tables.GPUS, RANKS, gpu=numbers, used_bytes=10**10, total_bytes=10**11)
    made.write_samples(tables.GPU_PROCESSES, RANKS, gpu=numbers, pid=pids, used_bytes=10**10)
    made.write_samples(tables.PROCESSES, RANKS + 1, pid=[*pids, LAUNCHER], rank=[*numbers, -1], rss_bytes=[*pids * 10**7, 1])
    made.write_samples(tables.THREADS, RANKS * THREADS, THREADS_EVERY, pid=np.repeat(pids, THREADS), cores_used=0.5)
    made.write_samples(tables.HOSTS, 1, cores=64, memory_total_bytes=10**12, cgroup_limit_bytes=-1)
    _write_events(made)
    return made


def _write_events(made: WrittenRecording) -> None:
    node = EventWriter(str(made.path), made.node)
    node.write(0, Node, gpus=[{"index": number, "name": "GPU", "uuid": f"GPU-{number}"} for number in range(RANKS)])
    node.write(0, JobStarted, pid=LAUNCHER)
    node.write(made.length_ns, JobEnded, exit_code=0, text="The job ended well.")
    rank = EventWriter(str(made.path), made.identify_rank(0))
    rank.write(0, Engine, world_size=RANKS, zero_stage=2, model="made up")
    for writer in (node, rank):
        writer.close()


def write_spans(path: Path, records: int) -> WrittenRecording:
    """Write a recording of spans only with about so many records."""
    made = WrittenRecording(path, records // RANKS // len(ONLY_SPANS) * STEP_NS)
    for number in range(RANKS):
        made.write_spans(made.identify_rank(number), ONLY_SPANS)
    return made


def _read_with_numpy(path: Path) -> float:
    begin = time.perf_counter()
    for file in path.glob("*.rec"):
        with open(file, "rb") as opened:
            header = json.loads(opened.readline())
            np.fromfile(opened, np.dtype([tuple(field) for field in header["dtype"]]))
    return time.perf_counter() - begin


def _read_memory(field: str) -> int:
    """Return a field of this process's status in MiB."""
    return int(re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) // 1024


def measure_opening(path: Path) -> dict[str, float]:
    """Open the recording; return the seconds and MiB. Run in a fresh process, whose memory is that of opening."""
    before = _read_memory("VmHWM")
    begin, begin_cpu = time.perf_counter(), time.process_time()
    source = RecordingSource(Recording.open(path))
    view = source.view_at(None)
    opened, processor = time.perf_counter() - begin, time.process_time() - begin_cpu
    peak, mapped = _read_memory("VmHWM") - before, _read_memory("RssFile")
    elsewhere = []
    for share in (0.5, 0.25, 0.75):
        begin = time.perf_counter()
        source.view_at(int(source.begin_ns + share * (source.end_ns - source.begin_ns)))
        elsewhere.append(time.perf_counter() - begin)
    return {
        "opened_s": opened,
        "processor_s": processor,
        "plain_s": _read_with_numpy(path),
        "elsewhere_s": max(elsewhere),
        "peak_mib": peak,
        "mapped_mib": mapped,
        "steps": len(view.iterations.step),
        "hours": view.progress.elapsed_s / 3600,
    }


def print_figures(made: WrittenRecording, name: str) -> None:
    """Measure a recording in fresh processes; print the figures of the process with the median opening time."""
    command = [sys.executable, __file__, "--measure", str(made.path)]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(RUNS)]
    runs.sort(key=lambda run: float(run["opened_s"]))
    run, slowest = runs[RUNS // 2], runs[-1]["opened_s"]
    print(f"{name}: {made.records:,} records, {run['steps']:,} steps on {RANKS} ranks in {run['hours']:.1f} h")
    print(
        f"  open to first view {run['opened_s']:.2f} s (slowest of {RUNS}: {slowest:.2f} s),"
        f" target {TARGET_S:.2f} s: ratio {run['opened_s'] / TARGET_S:.2f}"
    )
    print(f"  reading the same bytes with NumPy {run['plain_s']:.2f} s: ratio {run['opened_s'] / run['plain_s']:.1f}")
    print(f"  a view elsewhere {run['elsewhere_s'] * 1e3:.1f} ms, the slowest of three")
    print(f"  memory: at most {run['peak_mib']} MiB more than before; {run['mapped_mib']} MiB of files mapped after")


def main() -> None:
    """Write both recordings and report on each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_opening(options.measure)))
        return
    for name, write in (("a job as it is", write_job), ("nothing but spans", write_spans)):
        with tempfile.TemporaryDirectory() as folder:
            print_figures(write(Path(folder, "recording"), options.records), name)


if __name__ == "__main__":
    main()

"""A recording of 64 ranks over two weeks of training: its size, the time to open it, and the cost of folding.

The recording is as the folding process leaves it in the worst case, just before it merges steps again: on each of 8 nodes
the steps of 8 ranks use their whole share of the largest size, and so does the detail of the last hour or less.
Folding is measured on one node with 8 ranks, with the real folding process.

python benchmarks/long_recording.py [--hours 336]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from open_recording import PHASES, measure_opening

from zerotop_probe.outside.folding import folding
from zerotop_probe.outside.folding.coarse_samples import COARSE_SUFFIX
from zerotop_probe.recording import clock, directory, segments, tables
from zerotop_probe.recording.events import Engine, JobStarted, Node
from zerotop_probe.recording.tables import BEGIN, BOUNDARY, END, FOLDED, PHASE_CODE, TICK
from zerotop_probe.recording.writer import EventWriter, Identity, make_header

TARGET_S = 1.0
RUNS = 3
NODES, RANKS = 8, 8  # ranks of a node
STEP_NS, TICK_NS, HOUR_NS = 10**9, 10**8, 3600 * 10**9
THREADS, THREADS_EVERY = 8, 5  # the busiest of each rank, every so many ticks
GIB = 1 << 30


class LongRecording:
    """A recording of made-up tables in segments. Times are nanoseconds since its begin, on every node's clock."""

    def __init__(self, path: Path, length_ns: int, now_ns: int) -> None:
        """Begin a recording that ends at ``now_ns`` of CLOCK_MONOTONIC."""
        self.begin_ns = now_ns - length_ns
        pair = clock.read_clock_pair()
        self.clock = {"monotonic_ns": now_ns, "unix_ns": pair["unix_ns"]}
        began = {"monotonic_ns": self.begin_ns, "unix_ns": pair["unix_ns"] - length_ns}
        self.path = Path(directory.create_recording(["python", "train.py"], path=str(path), clock=began))
        self.length_ns = length_ns
        self.bytes: dict[str, int] = {}

    def write_records(self, table: tables.Table, who: Identity, count: int, suffix: str = "", **columns: Any) -> None:
        """Write one writer's records; times count from the begin, columns that are not given are 0."""
        rows = np.zeros(count, np.dtype([tuple(field) for field in table.dtype]))
        for name, values in columns.items():
            rows[name] = values + self.begin_ns if name in ("time_ns", "begin_ns", "end_ns") else values
        header = make_header(table.name, who, dtype=table.dtype, peaks="window", clock=self.clock)
        line = segments.pad_header(json.dumps(header).encode())
        each = segments.count_records(rows.itemsize) if table.name in tables.FOLDED_TABLES and not suffix else max(1, count)
        for number, begin in enumerate(range(0, max(1, count), each)):
            name = segments.make_name(f"{table.name}-{who.file_stem}{suffix}", number)
            with open(self.path / name, "wb") as file:
                file.write(line)
                rows[begin : begin + each].tofile(file)
        self.bytes[table.name] = self.bytes.get(table.name, 0) + rows.nbytes

    def write_node(self, number: int, detail_ns: int, steps_bytes: float, *, boot: str) -> None:
        """Write one node's part: folded steps before, and everything in the last ``detail_ns``."""
        host = clock.read_hostname() if not number else f"node{number}"
        node = Identity("node", -1, host, 100, 1, boot if not number else f"boot{number}")
        ranks = [node._replace(role="rank", rank=number * RANKS + rank, pid=1000 + rank) for rank in range(RANKS)]
        first_ns = (self.length_ns - detail_ns) // STEP_NS * STEP_NS
        for who in ranks:
            self._write_steps(who, first_ns, int(steps_bytes / RANKS / FOLDED.record_struct.size))
            self._write_phases(who, first_ns)
        self._write_samples(node, ranks, first_ns, TICK_NS, "")
        if first_ns:
            self._write_samples(node, ranks, 0, 600 * 10**9, COARSE_SUFFIX)
        self._write_events(node, ranks)

    def _write_steps(self, who: Identity, until_ns: int, records: int) -> None:
        steps = until_ns // STEP_NS
        if not steps:
            return
        single = steps if steps <= records else records * 3 // 4
        blocks = max(1, records - single)
        size = 1 << max(0, -(-(steps - single) // blocks) - 1).bit_length()
        merged = (steps - single) // size * size
        ends = np.append(np.arange(size, merged + 1, size), np.arange(merged, steps) + 1)
        counts = np.diff(ends, prepend=0)
        columns = {f"{name}_ns": counts * STEP_NS // 5 for name in ("data", "forward", "backward", "step")}
        memory = dict.fromkeys(("allocated_peak_bytes", "reserved_peak_bytes", "host_rss_bytes", "nvml_process_bytes"), GIB)
        self.write_records(
            FOLDED,
            who,
            len(ends),
            end_ns=ends * STEP_NS,
            begin_ns=(ends - counts) * STEP_NS,
            step=ends - 1,
            steps=counts,
            tokens=4096 * counts,
            rows=8 * counts,
            micro_steps=counts,
            **columns,
            **memory,
        )

    def _write_phases(self, who: Identity, first_ns: int) -> None:
        first, each = first_ns // STEP_NS, len(PHASES)
        steps = self.length_ns // STEP_NS - first
        begins = first_ns + np.arange(steps * each) * (STEP_NS // each)
        numbers = np.arange(steps * each)
        step_ends = first_ns + (numbers // each + 1) * STEP_NS
        ends = np.where(numbers % each == each - 1, step_ends, begins + STEP_NS // each)  # the last phase ends with the step
        place = {
            "step": first + np.repeat(np.arange(steps), each),
            "phase": np.tile([PHASE_CODE[name] for name, _ in PHASES], steps),
            "depth": np.tile([depth for _, depth in PHASES], steps),
        }
        forward = place["phase"] == PHASE_CODE["forward"]
        flags = np.where(place["phase"] == PHASE_CODE["step"], BOUNDARY, 0)
        sizes = {"tokens": np.where(forward, 4096, -1), "rows": np.where(forward, 8, -1)}
        self.write_records(tables.SPANS, who, len(begins), begin_ns=begins, end_ns=ends, flags=flags, **place, **sizes)
        self.write_records(tables.BEGINS, who, len(begins), time_ns=begins, **place)
        ticks = np.arange(first_ns, self.length_ns, TICK_NS)
        times = np.concatenate([begins, ends, ticks])
        order = np.argsort(times, kind="stable")
        edges = np.repeat([BEGIN, END, TICK], [len(begins), len(ends), len(ticks)])[order]
        held = 10 * GIB + times[order] % GIB
        values = dict.fromkeys(("allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "reserved_peak_bytes"), held)
        self.write_records(tables.ALLOCATOR, who, len(order), time_ns=times[order], edge=edges, **values)
        self.write_records(
            tables.DEVICE_TIMES, who, len(begins), time_ns=ends, begin_ns=begins, device_ns=STEP_NS // each, **place
        )
        self.write_records(tables.PROBE, who, steps, time_ns=first_ns + (np.arange(steps) + 1) * STEP_NS)

    def _write_samples(self, node: Identity, ranks: list[Identity], first_ns: int, period_ns: int, suffix: str) -> None:
        pids = [who.pid for who in ranks]
        numbers = np.arange(RANKS)

        def write_samples(table: tables.Table, each: int, every: int = 1, **columns: Any) -> None:
            end_ns = self.length_ns if not suffix else self.length_ns * 9 // 10
            times = np.repeat(np.arange(first_ns, end_ns, period_ns * every), each)
            whole = {name: np.resize(values, len(times)) for name, values in columns.items()}
            self.write_records(table, node, len(times), suffix, time_ns=times, **whole)

        write_samples(tables.GPUS, RANKS, gpu=numbers, used_bytes=10 * GIB, total_bytes=80 * GIB)
        write_samples(tables.GPU_PROCESSES, RANKS, 10, gpu=numbers, pid=pids, used_bytes=10 * GIB)
        rank_numbers = [*(who.rank for who in ranks), -1]
        write_samples(tables.PROCESSES, RANKS + 1, pid=[*pids, 999], rank=rank_numbers, rss_bytes=GIB)
        write_samples(tables.THREADS, RANKS * THREADS, THREADS_EVERY, pid=np.repeat(pids, THREADS), cores_used=0.5)
        write_samples(tables.HOSTS, 1, 5, cores=64, memory_total_bytes=1000 * GIB, cgroup_limit_bytes=-1)

    def _write_events(self, node: Identity, ranks: list[Identity]) -> None:
        writer = EventWriter(str(self.path), node, clock=self.clock)
        gpus = [{"index": number, "name": "GPU", "uuid": f"GPU-{node.host}-{number}"} for number in range(RANKS)]
        writer.write(self.begin_ns, Node, gpus=gpus)
        if node.host == clock.read_hostname():
            writer.write(self.begin_ns, JobStarted, pid=999)
        writer.close()
        for who in ranks:
            writer = EventWriter(str(self.path), who, clock=self.clock)
            writer.write(self.begin_ns, Engine, world_size=NODES * RANKS, zero_stage=2, model="made up")
            writer.close()


def report_opening(path: Path, hours: float) -> None:
    """Make the whole recording and open it in processes of their own."""
    limit = directory.MAX_BYTES / NODES
    length_ns = int(hours * HOUR_NS)
    made = LongRecording(path, length_ns, HOUR_NS + length_ns)  # the machine that runs this may have been up for less
    rate = measure_rate(path.parent / "rate")
    detail_ns = min(HOUR_NS, int(limit * folding._DETAIL_SHARE * folding._RECENT_SHARE / rate * HOUR_NS))
    for number in range(NODES):
        made.write_node(number, detail_ns, limit * folding._STEPS_SHARE, boot=clock.read_boot_id())
    size = sum(file.stat().st_size for file in path.iterdir())
    folded = sum(file.stat().st_size for file in path.glob("folded-*"))
    rate_mb = rate / RANKS / 1e6
    print(f"{NODES * RANKS} ranks, {hours:.0f} h, a step a second, {rate_mb:.1f} MB an hour and rank in full detail")
    files = len(list(path.iterdir()))
    print(
        f"  {size / 1e9:.2f} GB of {directory.MAX_BYTES / 1e9:.2f} GB, {files:,} files; folded steps {folded / 1e9:.2f} GB"
    )
    print(f"  full detail of the last {detail_ns / 60e9:.0f} minutes")
    runs = [json.loads(_run_self(path)) for _ in range(RUNS)]
    opened = sorted(run["opened_s"] for run in runs)
    print(f"  open to first view {opened[RUNS // 2]:.2f} s (slowest of {RUNS}: {opened[-1]:.2f} s), target {TARGET_S:.2f} s")
    print(f"  of which on a processor {min(run['processor_s'] for run in runs):.2f} s")
    print(f"  {runs[0]['steps']:,} rows of steps; a view elsewhere {max(run['elsewhere_s'] for run in runs) * 1e3:.0f} ms")
    print(f"  memory: at most {max(run['peak_mib'] for run in runs)} MiB more than before")


def _run_self(path: Path) -> bytes:
    command = [sys.executable, __file__, "--measure", str(path)]
    return subprocess.run(command, check=True, capture_output=True).stdout


def measure_rate(path: Path) -> float:
    """Return the bytes an hour that one node writes in full detail."""
    made = LongRecording(path, HOUR_NS // 60, time.monotonic_ns())
    made.write_node(0, HOUR_NS // 60, 0, boot="")
    return 60 * sum(made.bytes.values())


def report_folding(path: Path) -> None:
    """Fold two hours of one node, one of which is too old, as often as the folding process does."""
    now_ns, length_ns = time.monotonic_ns(), 2 * HOUR_NS
    made = LongRecording(path, length_ns, now_ns)
    made.write_node(0, length_ns, 0, boot=clock.read_boot_id())
    before = sum(file.stat().st_size for file in path.iterdir())
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import sys; from zerotop_probe.outside.folding.folding import fold_recording;"
        " fold_recording(sys.argv[1], int(sys.argv[2]))"
    )
    times = 30  # of 120 s each
    for number in range(1, times + 1):
        at_ns = now_ns - HOUR_NS + number * HOUR_NS // times
        subprocess.run([sys.executable, "-c", code, str(path), str(at_ns)], check=True, env=os.environ)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime - spent.ru_utime - spent.ru_stime
    after = sum(file.stat().st_size for file in path.iterdir())
    folded = sum(file.stat().st_size for kind in ("folded-*", "*.coarse.rec") for file in path.glob(kind))
    print(f"Folding an hour of {RANKS} ranks: {seconds:.1f} s of processor time, {seconds / 3600:.2%} of a core")
    print(f"  {before / 1e6:.0f} MB became {after / 1e6:.0f} MB")
    print(f"  an hour and rank of {before / 2e6 / RANKS:.1f} MB became {folded / 1e6 / RANKS:.2f} MB")


def main() -> None:
    """Make the recordings and report on each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=336.0)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_opening(options.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        report_folding(Path(folder, "folding"))
        report_opening(Path(folder, "opening"), options.hours)


if __name__ == "__main__":
    main()

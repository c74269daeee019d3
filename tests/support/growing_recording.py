"""A recording of a made-up job that grows while somebody looks at it, written with the real writers.

Ranks with a GPU each train at a steady pace on one node or several; only the figures are invented. As a program it writes
until it is ended, and is the job and the sampler of its recording, as their process ids there say:

    python growing_recording.py RECORDING [--ranks 8] [--first-rank 0] [--hosts 1] [--hertz 20] [--slower 1]
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

from zerotop_probe.recording import directory, events
from zerotop_probe.recording.tables import (
    ALLOCATOR,
    BEGIN,
    BEGINS,
    BOUNDARY,
    END,
    GPU_PROCESSES,
    GPUS,
    HOSTS,
    OUTPUT,
    PHASE_CODE,
    PROBE,
    PROCESSES,
    SPANS,
    THREADS,
    TICK,
    UNKNOWN,
    Table,
)
from zerotop_probe.recording.writer import EventWriter, Identity, RecordWriter, create_file

GIB = 1 << 30
COMMAND = ["deepspeed", "--num_gpus", "8", "train.py", "--deepspeed_config", "zero2_offload_optimizer_bf16.json"]
# Phase, depth, seconds, cores, GPU utilization; those of depth 1 lie within the one before of depth 0.
PLAN = (
    ("data", 0, 0.004, 1.0, 0),
    ("forward", 0, 0.06, 1.0, 97),
    ("backward", 0, 0.16, 1.1, 99),
    ("step", 0, 0.19, 0.0, 0),
    ("grads_to_cpu", 1, 0.02, 2.0, 5),
    ("cpu_optimizer", 1, 0.13, 15.6, 0),
    ("params_to_gpu", 1, 0.03, 2.0, 5),
)
FACT_S = 0.0371  # not a divisor of any screen's rhythm


class Rows:
    """A table whose records are written by the names of their fields; other fields are unknown."""

    def __init__(self, recording: str, table: Table, identity: Identity) -> None:
        self._places = {field.name: place for place, field in enumerate(table.fields)}
        self._unknown = [0 if field.name in ("pad", "depth", "engine", "flags") else UNKNOWN for field in table.fields]
        self._writer = RecordWriter(recording, table, identity)

    def append_record(self, **values: Any) -> None:
        """Append one record."""
        record = self._unknown.copy()
        for name, value in values.items():
            record[self._places[name]] = value
        self._writer.write(*record)
        assert not self._writer.lost


class GrowingRank:
    """One rank: its phases one after the other."""

    def __init__(self, recording: str, rank: int, world: int, *, host: str, local: int, slower: float) -> None:
        self.rank, self.local = rank, local
        self.pid = 100_000 + rank  # no process of this machine
        self.phase, self.step = "other", 0
        self._slower = slower
        self._identity = Identity.for_this_process("rank", rank)._replace(pid=self.pid, host=host)
        self._spans, self._begins, self._allocator, self._probe = (
            Rows(recording, table, self._identity) for table in (SPANS, BEGINS, ALLOCATOR, PROBE)
        )
        self._peak = 0
        self._say_hello(recording, world)

    def _say_hello(self, recording: str, world: int) -> None:
        now = time.monotonic_ns()
        writer = EventWriter(recording, self._identity)
        writer.write(now, events.Hello, rank=self.rank, local_rank=self.local, world_size=world)
        writer.write(
            now,
            events.Engine,
            engine=0,
            zero_stage=2,
            offload_optimizer="cpu",
            offload_parameters="none",
            dtype="bf16",
            micro_batch=2,
            gradient_accumulation=1,
            world_size=world,
            parameters=8_030_000_000,
            model="LlamaForCausalLM",
            devices=[{"ordinal": self.local, "uuid": _make_uuid(self.rank)}],
        )
        writer.write(now, events.TotalSteps, steps=100_000, source="trainer")
        writer.close()

    def run_steps(self) -> Iterator[float]:
        """Train forever; yield the seconds of each part before continuing."""
        while True:
            for place, (name, depth, seconds, _, _) in enumerate(PLAN):
                if depth:
                    continue
                begin = self._begin_phase(name, 0)
                for inner, inner_depth, inner_s, _, _ in PLAN[place + 1 :]:
                    if name == "step" and inner_depth:
                        inner_begin = self._begin_phase(inner, 1)
                        yield inner_s * self._slower
                        self._end_phase(inner, 1, inner_begin)
                if name != "step":
                    yield seconds * self._slower
                self._end_phase(name, 0, begin)
            cost, boundaries = self.step * 60_000, self.step * 14
            self._probe.append_record(time_ns=time.monotonic_ns(), cost_ns=cost, boundaries=boundaries, lost=0, errors=0)
            self.step += 1
            self.phase = "other"
            yield 0.002

    def _begin_phase(self, name: str, depth: int) -> int:
        self.phase, now = name, time.monotonic_ns()
        self._begins.append_record(time_ns=now, step=self.step, micro_step=0, phase=PHASE_CODE[name], depth=depth)
        self.read_allocator(now, BEGIN)
        return now

    def _end_phase(self, name: str, depth: int, begin: int) -> None:
        now = time.monotonic_ns()
        batch = {"tokens": 1024, "rows": 2, "sequence": 512} if name == "forward" else {}
        flags = BOUNDARY if name == "step" else 0
        place = {"step": self.step, "micro_step": 0, "phase": PHASE_CODE[name], "depth": depth}
        self._spans.append_record(begin_ns=begin, end_ns=now, flags=flags, **place, **batch)
        self.read_allocator(now, END)

    def read_allocator(self, now: int, edge: int = TICK) -> None:
        """One sample of what a job like this has allocated."""
        share = {"forward": 0.7, "backward": 0.95}.get(self.phase, 0.5)
        allocated = int(GIB * 40 * share + self.local * GIB // 9)
        self._peak = max(self._peak, allocated)
        self._allocator.append_record(
            time_ns=now,
            allocated_bytes=allocated,
            allocated_peak_bytes=self._peak,
            reserved_bytes=44 * GIB,
            reserved_peak_bytes=44 * GIB,
            step=self.step,
            micro_step=0,
            phase=PHASE_CODE[self.phase],
            edge=edge,
            device=self.local,
        )

    @property
    def cores(self) -> float:
        """The cores that its phase keeps busy."""
        return next((cores for name, _, _, cores, _ in PLAN if name == self.phase), 0.4)

    @property
    def utilization(self) -> float:
        """The utilization of its GPU in percent."""
        return next((percent for name, _, _, _, percent in PLAN if name == self.phase), 0)


def _make_uuid(gpu: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{gpu:012d}"


class GrowingNode:
    """The sampler's side: everything is sampled at every tick, some of it more seldom."""

    def __init__(self, recording: str, ranks: list[GrowingRank], hertz: int, host: str) -> None:
        self._ranks, self._hertz, self._tick = ranks, hertz, 0
        identity = Identity.for_this_process("node")._replace(host=host)
        self._gpus, self._held, self._processes, self._threads, self._hosts, self._output = (
            Rows(recording, table, identity) for table in (GPUS, GPU_PROCESSES, PROCESSES, THREADS, HOSTS, OUTPUT)
        )
        self._log = create_file(recording, f"output-{identity.file_stem}", ".log")
        self._written = self._facts = 0
        writer, now = EventWriter(recording, identity), time.monotonic_ns()
        writer.write(now, events.JobStarted, pid=identity.pid, start=identity.start, command=COMMAND)
        gpus = [{"index": rank.local, "uuid": _make_uuid(rank.rank), "name": "NVIDIA H200"} for rank in ranks]
        writer.write(now, events.Node, host=identity.host, cores=128, gpus=gpus, gpu_notice=None)
        writer.close()

    def take_sample(self) -> None:
        """Write the samples of one tick."""
        now, self._tick = time.monotonic_ns(), self._tick + 1
        for rank in self._ranks:
            self._sample_rank(now, rank)
        if self._tick % max(1, self._hertz // 2) == 0:
            self._hosts.append_record(
                time_ns=now,
                memory_total_bytes=2000 * GIB,
                memory_available_bytes=1300 * GIB,
                swap_used_bytes=0,
                cores_used=sum(rank.cores for rank in self._ranks) + 1,
                cores=128,
            )

    def _sample_rank(self, now: int, rank: GrowingRank) -> None:
        wave = math.sin(now / 1e9 + rank.rank)
        used, cores = int(GIB * (48 + wave / 4)), max(0.0, rank.cores + wave / 9)
        self._gpus.append_record(
            time_ns=now,
            used_bytes=used,
            total_bytes=140 * GIB,
            pcie_tx_bytes=now // 2,
            pcie_rx_bytes=now // 3,
            utilization_percent=rank.utilization,
            power_w=400 + 50 * wave,
            temperature_c=50 + 3 * wave,
            gpu=rank.local,
        )
        self._processes.append_record(
            time_ns=now,
            rss_bytes=int(GIB * (61 + wave / 9)),
            shared_bytes=18 * GIB,
            pinned_bytes=0,
            locked_bytes=24 * GIB,
            cores_used=cores,
            waiting_cores=0.1 + wave / 20,
            thread_count=207,
            busy_threads=round(cores),
            pid=rank.pid,
            rank=rank.rank,
        )
        rank.read_allocator(now)
        if self._tick % max(1, self._hertz // 5) == 0:
            self._held.append_record(time_ns=now, used_bytes=used - GIB, pid=rank.pid, gpu=rank.local)
        if self._tick % max(1, self._hertz // 2) == 0:
            self._sample_threads(now, rank, cores)

    def _sample_threads(self, now: int, rank: GrowingRank, cores: float) -> None:
        for place in range(8):
            name = b"pt_autograd_0" if place else b"python3"
            used = min(1.0, cores / (place + 1))
            self._threads.append_record(
                time_ns=now, cores_used=used, pid=rank.pid, tid=rank.pid + place, processor=place, name=name
            )

    def print_text(self, text: str) -> None:
        """Print a text as the job does."""
        data, now = text.encode(), time.monotonic_ns()
        os.write(self._log, data)
        self._output.append_record(time_ns=now, offset=self._written, length=len(data), stream=0)
        self._written += len(data)

    def print_fact(self) -> None:
        """The progress bar moves, with the fact's number in it; at times a line is finished."""
        step, self._facts = self._ranks[0].step, self._facts + 1
        if self._facts % 20 == 0:
            self.print_text(
                f"\r{{'loss': {9 - step / 1e4:.3f}, 'grad_norm': 1.25, 'learning_rate': 1e-05, 'epoch': 0.{step}}}\n"
            )
        self.print_text(f"\r  3%|{'█' * 3}{' ' * 7}| {step}/100000 [00:06<00:05,  2.42it/s] fact {self._facts:08d}")


def write_recording(recording: str, ranks: int, hosts: int, hertz: int, slower: float, first_rank: int) -> None:
    """Write the recording forever."""
    names = [Identity.for_this_process("node").host] if hosts == 1 else [f"node{host:03d}" for host in range(hosts)]
    each = -(-ranks // hosts)
    places = [(first_rank + rank, names[rank // each], rank % each) for rank in range(ranks)]
    world = first_rank + ranks
    everyone = [GrowingRank(recording, rank, world, host=host, local=local, slower=slower) for rank, host, local in places]
    nodes = [GrowingNode(recording, everyone[at * each : (at + 1) * each], hertz, name) for at, name in enumerate(names)]
    lives = [rank.run_steps() for rank in everyone]
    due = [(time.monotonic(), place) for place in range(ranks)]
    sample = fact = time.monotonic()
    while True:
        now = time.monotonic()
        while due[0][0] <= now:
            at, place = due[0]
            heapq.heapreplace(due, (at + next(lives[place]), place))
        if now >= sample:
            for node in nodes:
                node.take_sample()
            sample += 1 / hertz
        if now >= fact:
            nodes[0].print_fact()
            fact += FACT_S
        time.sleep(max(0.0, min(due[0][0], sample, fact) - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recording")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--first-rank", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--hertz", type=int, default=20)
    parser.add_argument("--slower", type=float, default=1.0, help="how much longer its phases take")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    recording = directory.create_recording(COMMAND, path=options.recording, launcher="deepspeed")
    print("writing", flush=True)
    write_recording(recording, options.ranks, options.hosts, options.hertz, options.slower, options.first_rank)


if __name__ == "__main__":
    main()

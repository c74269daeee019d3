"""Processes of the job share a GPU in turns: who holds it when, and memory that does not come back after each sleep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Evidence, Group
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.gpu_use import name_process
from zerotop.analysis.formatting import MIB, format_bytes, join_words
from zerotop.analysis.memory.gpu_turns import Cycle, find_cycles, is_growing
from zerotop.recording.samples import Ints, split_samples
from zerotop.recording.steps.growable_array import GrowingArray
from zerotop_probe.recording.events import GpuProcess

_TURNS = FindingKind(
    name="gpu_turns",
    severity=Severity.INFO,
    confidence=0.8,
    headline="GPU {gpu} is shared in turns: {short} is awake {awake_share:percent} of the time",
    details=(
        "{who} shares it with {others}. It holds {held_bytes:bytes} awake, {kept_bytes:bytes} asleep. In a cycle of"
        " {cycle_s:seconds} it holds nearly all of it for {full_s:seconds} (generation), a part for {partly_s:seconds} (as"
        " for an exchange of weights), and leaves the GPU to the training for {asleep_s:seconds}."
    ),
)
_KEPT = FindingKind(
    name="memory_kept_asleep",
    severity=Severity.WARNING,
    confidence=0.85,
    gpu_bytes="grown_bytes",
    headline="{short} keeps {per_cycle_bytes:bytes} more of GPU {gpu} after each sleep",
    details="Asleep {name} held {levels} in its last cycles. The training has that much less.",
    advice=(
        "Look for what is allocated in each cycle and not freed: copies of weights for the exchange, captured graphs, kept"
        " requests. Until then restart the engine now and then."
    ),
    fix="torch.cuda.memory._snapshot()  # in that process, asleep",
)
# Growth from sleep to sleep: more than what a library allocates once.
_LEAST_BYTES = 32 * MIB
# Cycles from which on turns are told; again at each doubling.
_FIRST_CYCLES = 2
_SHOWN_LEVELS = 5


class _Told(NamedTuple):
    """The growth that was told last, and from which cycle on."""

    begin_ns: int
    step: int | None
    first: int
    grown: int


class _State:
    """All of NVML's readings of what a process held of a GPU: a cycle lasts as long as the other processes want."""

    def __init__(self) -> None:
        self.times, self.used = GrowingArray(np.int64), GrowingArray(np.int64)
        self.cycles = 0  # that were examined
        self.told: _Told | None = None

    def add_readings(self, times: Ints, used: Ints) -> None:
        """Add readings in order."""
        self.times.add_rows(len(times))[:] = times
        self.used.add_rows(len(used))[:] = used


def detect(recording: Evidence) -> Iterator[Finding]:
    """Report turns after the second cycle of a process, and growth from the third on; again when it has doubled."""
    for group in recording.groups:
        for host in group.hosts:
            samples = group.read_new(recording.at.records("gpu_processes", host), f"{_TURNS.name} {host}")
            seen: dict[int, set[int]] = group.get_state(dict, f"{_TURNS.name} {host}")  # processes of each GPU
            for gpu, on_gpu in split_samples(samples, "gpu") if len(samples) else ():
                seen.setdefault(gpu, set()).update(np.unique(on_gpu.rows["pid"]).tolist())
                for pid, own in split_samples(on_gpu, "pid"):
                    group.get_state(_State, (host, gpu, pid)).add_readings(own.times, own.rows["used_bytes"])
                if len(seen[gpu]) > 1:
                    for pid in sorted(seen[gpu]):
                        yield from _check_process(recording, group, host, gpu, pid, seen[gpu])


def _check_process(recording: Evidence, group: Group, host: str, gpu: int, pid: int, sharing: set[int]) -> Iterator[Finding]:
    state = group.get_state(_State, (host, gpu, pid))
    cycles = find_cycles(state.times.rows, state.used.rows)
    for count in range(state.cycles + 1, len(cycles) + 1):
        state.cycles, known_ns = count, cycles[count - 1].known_ns
        names = _name_processes(recording, group, host, known_ns)
        if pid not in names or not any(other in names for other in sharing - {pid}):
            continue
        others = join_words([names[other] for other in sorted(sharing - {pid}) if other in names])
        if count >= _FIRST_CYCLES and count.bit_count() == 1:
            yield _build_turns(group, gpu, names[pid], others, cycles[:count])
        if (finding := _check_kept(group, gpu, names[pid], state, cycles[:count])) is not None:
            yield finding


def _name_processes(recording: Evidence, group: Group, host: str, known_ns: int) -> dict[int, str]:
    """Return names of the job's processes on a node, by PID: ranks, and others that it has started."""
    names = {}
    for event in recording.events_of(GpuProcess):
        if event.of_job and event.writer.host == host and event.unix_ns <= known_ns:
            names[event.pid] = name_process(event)
    return names | {process.source.pid: f"rank {process.rank}" for process in group.processes_on(host)}


def _build_turns(group: Group, gpu: int, name: str, others: str, cycles: list[Cycle]) -> Finding:
    *whole, last = cycles
    lasted = last.awake_ns - whole[0].awake_ns
    full, partly = (sum(getattr(one, name) for one in whole) for name in ("full_ns", "partly_ns"))
    count = len(whole)
    evidence = {
        "awake_share": (full + partly) / lasted,
        "held_bytes": max(one.held_bytes for one in cycles),
        "kept_bytes": last.kept_bytes,
        "cycle_s": lasted / count / 1e9,
        "full_s": full / count / 1e9,
        "partly_s": partly / count / 1e9,
        "asleep_s": (lasted - full - partly) / count / 1e9,
        "cycles": count,
    }
    return _TURNS.at(
        group, whole[0].awake_ns, last.awake_ns, evidence, known_ns=last.known_ns, ranks=group.ranks_at(last.known_ns),
        who=name[0].upper() + name[1:], others=others, gpu=gpu, short=name.partition(" (")[0],
    )  # fmt: skip


def _check_kept(group: Group, gpu: int, name: str, state: _State, cycles: list[Cycle]) -> Finding | None:
    kept = [one.kept_bytes for one in cycles]
    if not is_growing(kept, _LEAST_BYTES):
        return None
    if state.told is None:
        begin_ns = cycles[-3].asleep_ns
        state.told = _Told(begin_ns, group.step_at(begin_ns), len(cycles) - 3, 0)
    first = state.told.first
    grown, known_ns = kept[-1] - kept[first], cycles[-1].known_ns
    if grown < 2 * state.told.grown:
        return None
    state.told = state.told._replace(grown=grown)
    shown = kept[first:][-_SHOWN_LEVELS:]
    evidence = {"grown_bytes": grown, "per_cycle_bytes": grown / (len(kept) - 1 - first), "cycles": len(kept) - first}
    levels = join_words([format_bytes(size) for size in shown])
    return _KEPT.at(
        group, state.told.begin_ns, known_ns, evidence, ranks=group.ranks_at(known_ns), step=state.told.step, name=name,
        gpu=gpu, levels=levels, short=name[0].upper() + name.partition(" (")[0][1:],
    )  # fmt: skip

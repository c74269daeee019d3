"""Processes of the job share a GPU in turns: who holds it when, and memory that does not come back after each sleep."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_node
from zerotop.analysis.findings.support.gpu_use import name_process
from zerotop.analysis.formatting import MIB, format_bytes, join_words
from zerotop.analysis.memory.gpu_turns import Cycle, find_cycles, is_growing
from zerotop.recording.samples import split_samples
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


class _Readings:
    """All of NVML's readings of what a process held of a GPU: a cycle lasts as long as the other processes want."""

    def __init__(self) -> None:
        self.times, self.used = GrowingArray(np.int64), GrowingArray(np.int64)


@in_each_node(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report turns after the second cycle of a process, and growth from the third on; again when it has doubled."""
    samples = window.records(window.recording.at.records("gpu_processes", window.host))
    for gpu, on_gpu in split_samples(samples, "gpu") if len(samples) else ():
        processes: dict[int, _Readings] = window.keep(dict, gpu)  # by PID
        for pid, own in split_samples(on_gpu, "pid"):
            readings = processes.setdefault(pid, _Readings())
            readings.times.add_rows(len(own))[:], readings.used.add_rows(len(own))[:] = own.times, own.rows["used_bytes"]
        for pid, readings in sorted(processes.items()) if len(processes) > 1 else ():
            cycles = find_cycles(readings.times.rows, readings.used.rows)
            for count in range(len(cycles) - len(window.items(cycles, (gpu, pid))) + 1, len(cycles) + 1):
                names = _name_processes(window, cycles[count - 1].known_ns)
                others = [names[other] for other in sorted(processes) if other != pid and other in names]
                if pid in names and others:
                    if count >= _FIRST_CYCLES and count.bit_count() == 1:
                        yield _build_turns(window.subject, gpu, names[pid], join_words(others), cycles[:count])
                    yield _check_kept(window, (gpu, pid), names[pid], cycles[:count])


def _name_processes(window: SearchWindow[Group], known_ns: int) -> dict[int, str]:
    """Return names of the job's processes on a node, by PID: ranks, and others that it has started."""
    names = {}
    for event in window.recording.events_of(GpuProcess):
        if event.of_job and event.writer.host == window.host and event.unix_ns <= known_ns:
            names[event.pid] = name_process(event)
    return names | {process.source.pid: f"rank {process.rank}" for process in window.subject.processes_on(window.host)}


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


def _check_kept(window: SearchWindow[Group], of: tuple[int, int], name: str, cycles: list[Cycle]) -> Finding | None:
    kept, group, known_ns = [one.kept_bytes for one in cycles], window.subject, cycles[-1].known_ns
    if not is_growing(kept, _LEAST_BYTES):
        return None
    begin_ns = cycles[-3].asleep_ns
    told = window.find_once(lambda: (len(kept) - 3, begin_ns, group.step_at(begin_ns)), of)
    assert told is not None
    first, begin_ns, step = told
    grown = kept[-1] - kept[first]
    if not window.is_news(grown, lambda last, now: now >= 2 * last, of):
        return None
    evidence = {"grown_bytes": grown, "per_cycle_bytes": grown / (len(kept) - 1 - first), "cycles": len(kept) - first}
    levels = join_words([format_bytes(size) for size in kept[first:][-_SHOWN_LEVELS:]])
    return _KEPT.at(
        group, begin_ns, known_ns, evidence, ranks=group.ranks_at(known_ns), step=step, name=name,
        gpu=of[0], levels=levels, short=name[0].upper() + name.partition(" (")[0][1:],
    )  # fmt: skip

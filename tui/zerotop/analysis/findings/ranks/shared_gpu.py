"""Processes of the job share a GPU in turns: who holds it when, and memory that does not come back after each sleep.

The turns of processes that share a GPU, as a trainer and an inference engine do that sleeps while the other trains.

A process is awake while it holds more than half way between the least and the most that it has held so far. Awake, it
holds nearly all of that, or a part, as an engine does that has got room for its weights only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_node
from zerotop.analysis.findings.support.gpu_use import name_process
from zerotop.analysis.formatting import MIB, format_bytes, join_words
from zerotop.recording.samples import Ints, split_samples
from zerotop.recording.steps.growable_array import GrowingArray
from zerotop_probe.recording.events import GpuProcess

# A process takes turns if it gives back at least this share of its memory, and these bytes.
_GIVEN_BACK_SHARE, _GIVEN_BACK_BYTES = 0.3, 256 << 20
# It is fully awake while it holds at least this share of the most that it has held.
_FULL_SHARE = 0.9
# A process is awake again once it holds so much more than while it slept, as a share of its memory.
_MORE_SHARE = 0.1
# What a process holds asleep is known after this time (ns): it gives memory back in parts.
SETTLED_NS = 3_000_000_000


class Cycle(NamedTuple):
    """A time awake, and the time asleep after it. Times are unix nanoseconds."""

    awake_ns: int
    asleep_ns: int
    known_ns: int  # when ``kept_bytes`` was known
    full_ns: int  # duration awake with nearly all of its memory
    held_bytes: int  # the most awake
    kept_bytes: int  # the least asleep

    @property
    def partly_ns(self) -> int:
        """How long it was awake with a part of its memory, as while weights are exchanged."""
        return self.asleep_ns - self.awake_ns - self.full_ns


def find_cycles(times: Ints, used: Ints) -> list[Cycle]:
    """Return the cycles of a process that are known, from what it held (bytes) since each time; times ascend."""
    if len(times) < 2:
        return []
    low, high = np.minimum.accumulate(used), np.maximum.accumulate(used)
    takes_turns = high - low >= np.maximum(_GIVEN_BACK_BYTES, _GIVEN_BACK_SHARE * high)
    is_awake = (used > (low + high) / 2) & takes_turns
    edges = np.flatnonzero(np.diff(is_awake.astype(np.int8), prepend=0, append=0)).tolist()
    begins = [_find_begin(used, *bounds) for bounds in zip([0, *edges[1::2]], edges[::2], strict=False)]
    cycles = []
    for number, (woken, asleep) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        next_woken = edges[2 * number + 2] if 2 * number + 2 < len(edges) else len(times)
        settled = int(np.searchsorted(times, times[asleep] + SETTLED_NS)) if asleep < len(times) else asleep
        known = min(settled, next_woken)
        if known >= len(times):
            continue
        most, lasted = int(used[woken:asleep].max()), np.diff(times[woken : asleep + 1])
        full_ns = int(lasted[used[woken:asleep] >= _FULL_SHARE * most].sum())
        begin_ns, asleep_ns, known_ns = (int(times[at]) for at in (begins[number], asleep, known))
        kept_bytes = int(used[asleep : known + (known < next_woken)].min())
        cycles.append(Cycle(begin_ns, asleep_ns, known_ns, full_ns, most, kept_bytes))
    return cycles


def _find_begin(used: Ints, asleep: int, woken: int) -> int:
    """Return where a process began to wake, which may be in parts: it held more than the least that it held asleep."""
    before = used[asleep:woken]
    if not len(before):
        return woken
    is_more = before > before.min() + _MORE_SHARE * (used[woken] - before.min())
    return woken - int(np.argmin(is_more[::-1])) if not is_more.all() else asleep


def is_growing(kept: Sequence[int], least: int) -> bool:
    """Whether the last three values each exceed the one before, by ``least`` at least, and do not level off."""
    if len(kept) < 3:
        return False
    first, second = kept[-2] - kept[-3], kept[-1] - kept[-2]
    return min(first, second) >= least and second >= first / 2


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
        processes: dict[int, _Readings] = window.keep(dict, gpu)  # by PID: a cycle may take as long as the job
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

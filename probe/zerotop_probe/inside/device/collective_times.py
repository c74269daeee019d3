"""How long this rank's GPU spends in NCCL's collectives, the wait for other ranks included.

A collective ends on all of its ranks at the same moment, so the rank with the shortest time was the last to begin it.
PyTorch measures these times once it is asked to, and its flight recorder keeps those of the last collectives.

The measuring takes a few microseconds for each collective and cannot be switched off again: it begins only where that fits
into the budget.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zerotop_probe.inside.budget import read_budget
from zerotop_probe.inside.guard import CostMeter, Guard, now
from zerotop_probe.recording import events

NAME = "collective times"
"""The name in the probe's errors, and of its cost."""

BLOCK = 16
"""Collectives of a block, see the event ``collective_times``."""

# Nanoseconds that a timed collective takes longer on the CPU (33.0 instead of 29.3 us beside an H100), and the part of the
# budget that this may take.
_TIMED_NS, _BUDGET_PART = 4_000, 0.5
# How often it is tried while there are no collectives, or too many of them.
_TRIES = 4
# The intervals between looks (ns), once collectives are timed; the last of these is repeated. A look stops the training for
# 25 to 40 ms if the recorder holds 2,000 collectives, as it does by default. Looks are at multiples of the interval in unix
# time, so that all ranks see the same collectives, whenever they began.
_INTERVALS_NS = (10_000_000_000, 30_000_000_000, 120_000_000_000, 240_000_000_000)
_MOST_GROUPS, _MOST_BLOCKS = 4, 64
# Bytes of an element, by the name of its type.
_SIZES = {"Float": 4, "Int": 4, "Double": 8, "Long": 8, "BFloat16": 2, "Half": 2, "Short": 2}


class CollectiveTimes:
    """Looks at the collectives of one rank after a step now and then."""

    def __init__(self, write_event: Callable[..., None], meter: CostMeter) -> None:
        """``write_event`` is the recorder's."""
        self._write_event = write_event
        self._meter = meter
        self._guard = Guard(NAME, meter)
        self._next_ns = 0  # CLOCK_MONOTONIC
        self._tries = _TRIES
        self._looks = 0  # since collectives are timed
        self._is_timing = False
        self._last_record = -1  # the last collective that was seen

    def is_due(self, time_ns: int) -> bool:
        """Whether it is time to call :meth:`end_step`."""
        if not self._next_ns:
            self._plan_look()
        return self._guard.is_on and time_ns >= self._next_ns and self._tries > 0

    def end_step(self, time_ns: int, step: int) -> None:
        """Look at the last collectives, on the training thread. The time that this takes counts as a one-time cost."""
        begin_ns = now()
        try:
            self._look(begin_ns)
        except Exception as error:
            self._guard.switch_off(error)
        finally:
            self._meter.move_to_one_time(now() - begin_ns)

    def _plan_look(self) -> None:
        interval_ns, unix_ns = _INTERVALS_NS[min(self._looks, len(_INTERVALS_NS) - 1)], time.time_ns()
        # The first one is a whole interval away, at least: what the first steps do is done once.
        wait_ns = interval_ns - unix_ns % interval_ns + (0 if self._next_ns else interval_ns)
        self._next_ns = now() + wait_ns

    def _look(self, begin_ns: int) -> None:
        torch = sys.modules["torch"]
        if torch.cuda.is_current_stream_capturing():
            return  # the recorder asks for the state of events, which a capture does not survive
        recorded = read_recorder(torch)
        entries = recorded.get("entries") or []
        if self._is_timing:
            self._record(recorded, begin_ns)
            self._looks += 1
        elif fits_budget(entries, _BUDGET_PART * read_budget()):
            self._is_timing = begin_timing()
        if not self._is_timing:
            self._tries -= 1
        self._last_record = max((int(entry["record_id"]) for entry in entries), default=-1)
        self._plan_look()

    def _record(self, recorded: dict[str, Any], begin_ns: int) -> None:
        timed = max((int(entry["record_id"]) for entry in recorded.get("entries") or ()), default=-1) - self._last_record
        # What PyTorch did for it since the last look.
        self._meter.thread_ns[NAME] = self._meter.thread_ns.get(NAME, 0) + timed * _TIMED_NS
        groups = summarize_groups(recorded, now() - time.time_ns())
        if groups:
            facts = {"seconds": (now() - begin_ns) / 1e9, "timed": timed}
            self._write_event(now(), events.COLLECTIVE_TIMES, block=BLOCK, groups=groups, **facts)


def read_recorder(torch: Any) -> dict[str, Any]:
    """Return what PyTorch's flight recorder holds of NCCL's collectives; empty where it keeps no such record."""
    module = getattr(torch._C, "_distributed_c10d", None)
    dump = getattr(module, "_dump_nccl_trace", None)
    if dump is None:
        return {}
    found = pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))  # made by this process
    return found if isinstance(found, dict) else {}


def fits_budget(entries: list[dict[str, Any]], share: float) -> bool:
    """Whether timing each of these collectives would take at most this share of the time in which they were launched."""
    launched = [int(entry["time_created_ns"]) for entry in entries]
    passed_ns = max(launched, default=0) - min(launched, default=0)
    return passed_ns > 0 and len(launched) * _TIMED_NS <= share * passed_ns


def begin_timing() -> bool:
    """Let PyTorch time the collectives of all process groups from now on. Return whether it does for any."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    groups = list(getattr(getattr(distributed, "_world", None), "pg_map", ()))
    is_on = False
    for group in groups:
        # Groups of other backends have no times.
        with contextlib.suppress(AttributeError, RuntimeError):
            group._enable_collectives_timing()
            is_on = True
    return is_on


class _Call(NamedTuple):
    """One collective: its kind, when it was launched (unix ns), its bytes, and the device's time in it (ns)."""

    name: str
    launched_ns: int
    size: int
    spent_ns: float


def summarize_groups(recorded: dict[str, Any], offset_ns: int) -> list[dict[str, Any]]:
    """Return the process groups with whole blocks of timed collectives, see the event ``collective_times``.

    ``offset_ns``: what to add to the recorder's unix times for CLOCK_MONOTONIC.
    """
    calls: dict[str, dict[int, list[_Call]]] = {}
    for entry in recorded.get("entries") or ():
        number, spent_ms = entry.get("collective_seq_id"), entry.get("duration_ms")
        if entry.get("is_p2p") or not isinstance(number, int) or spent_ms is None:
            continue
        name = str(entry.get("profiling_name") or "").rpartition(":")[2]
        call = _Call(name, int(entry["time_created_ns"]), _measure_bytes(entry), 1e6 * spent_ms)
        group = str((entry.get("process_group") or [""])[0])
        calls.setdefault(group, {}).setdefault(number // BLOCK, []).append(call)
    whole = {
        group: {number: block for number, block in blocks.items() if len(block) == BLOCK} for group, blocks in calls.items()
    }
    busiest = sorted((group for group in whole if whole[group]), key=lambda group: -len(whole[group]))[:_MOST_GROUPS]
    members = recorded.get("pg_config") or {}
    return [
        {"group": group, "ranks": _read_ranks(members.get(group)), **_summarize_blocks(whole[group], offset_ns)}
        for group in busiest
    ]


def _read_ranks(facts: Any) -> list[int]:
    """Return the ranks of a group; empty if they are unknown."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return [int(rank) for rank in json.loads(facts["ranks"])]
    return []


def _summarize_blocks(blocks: dict[int, list[_Call]], offset_ns: int) -> dict[str, Any]:
    numbers = sorted(blocks)[-_MOST_BLOCKS:]
    chosen = [blocks[number] for number in numbers]
    names = sorted({call.name for block in chosen for call in block})
    return {
        "numbers": numbers,
        "launched_ns": [round(_mean(call.launched_ns for call in block)) + offset_ns for block in chosen],
        "bytes": [sum(call.size for call in block) for block in chosen],
        "spent_ns": {
            name: [round(sum(call.spent_ns for call in block if call.name == name)) for block in chosen] for name in names
        },
    }


def _mean(times: Iterable[int]) -> float:
    values = list(times)
    return values[0] + sum(value - values[0] for value in values) / len(values)  # exact to less than a microsecond


def _measure_bytes(entry: dict[str, Any]) -> int:
    """Return the bytes of the larger side of a collective: what a rank gets of a gather, gives to a scatter."""

    def measure_side(side: str) -> int:
        dtypes = entry.get(f"{side}_dtypes") or ()
        shapes = (entry.get(f"{side}_sizes") or ())[: len(dtypes)]
        return sum(int(math.prod(shape)) * _SIZES.get(dtypes[at], 1) for at, shape in enumerate(shapes))

    return max(measure_side("input"), measure_side("output"))

"""Troubles in long recordings: each kind of finding all the time, again and again, or always just short of being one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from long_recording import CORES, GAP, GIB, PHASE_NAMES, STEP_S, Trouble
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, PHASE_CODE, SKIPPED

Rows = np.ndarray[Any, Any]
Change = Callable[[Rows], None]
Pace = Callable[[Rows, int], None]

DATA, BACKWARD, STEP = (PHASE_NAMES.index(name) for name in ("data", "backward", "step"))
EVAL, SAVE, BETWEEN = (PHASE_NAMES.index(name) for name in ("eval", "checkpoint_save", GAP))


def select_periodic_rows(rows: Rows, period_s: float, share: float) -> Rows:
    """Return the mask of the records in the first ``share`` of each period, without those of the first minute."""
    seconds = rows["time_ns"] / 1e9
    return (seconds > 60) & (seconds % period_s < share * period_s)


def set_values(period_s: float = 1.0, share: float = 1.0, **columns: Any) -> Change:
    """Set columns in the first ``share`` of each period."""

    def set_columns(rows: Rows) -> None:
        chosen = select_periodic_rows(rows, period_s, share)
        for name, value in columns.items():
            rows[name][chosen] = value

    return set_columns


def prolong_phase(phase: int, period: int, length: int, seconds: float, *, only_rank: int | None = None) -> Pace:
    """Let a phase last so long in the last ``length`` of each ``period`` steps."""

    def prolong_steps(paces: Rows, rank: int) -> None:
        if only_rank in (None, rank):
            paces[np.arange(len(paces)) % period >= period - length, phase] = seconds

    return prolong_steps


def _slow_down(paces: Rows, rank: int) -> None:
    paces *= np.linspace(1, 20, len(paces))[:, None]


def _add_evaluations(paces: Rows, rank: int) -> None:
    prolong_phase(EVAL, 50, 1, 1.0)(paces, rank)
    prolong_phase(SAVE, 50, 1, 1.0)(paces, rank)
    paces[np.arange(len(paces)) % 50 == 48, SAVE] = 1.0


def _prolong_evaluations(paces: Rows, rank: int) -> None:
    evaluated = np.arange(len(paces)) % 50 == 49
    paces[evaluated, EVAL] = np.linspace(1, 4, evaluated.sum())


def _vary_evaluations(paces: Rows, rank: int) -> None:
    evaluated = np.arange(len(paces)) % 50 == 49
    paces[evaluated, EVAL] = 4 + np.arange(evaluated.sum()) % 3


def _grow_at_pauses(rows: Rows) -> None:
    """Each evaluation reserves more, up to what a device has, and leaves a little; then all is given back."""
    count = np.cumsum(np.diff(rows["phase"], prepend=0) == np.int32(PHASE_CODE["eval"])) % 40
    rows["reserved_bytes"] = rows["reserved_peak_bytes"] = (20 + 1.5 * count) * GIB
    rows["allocated_bytes"] = (10 + 0.01 * count) * GIB
    rows["allocated_peak_bytes"] = rows["allocated_bytes"]


def _alternate_owner(rows: Rows) -> None:
    owner = np.where(rows["step"] // 5 % 2, PHASE_CODE["forward"], PHASE_CODE["backward"])
    rows["allocated_peak_bytes"] = np.where(rows["phase"] == owner, 15 * GIB, 12 * GIB)


def _alternate_peaks(rows: Rows) -> None:
    rows["allocated_peak_bytes"] = np.where(rows["time_ns"] / 1e9 // 20 % 2, 15 * GIB, 10 * GIB)


def _grow_and_return(rows: Rows) -> None:
    """Memory grows for 20 steps by 5 MiB each, then returns."""
    rows["allocated_bytes"] = 10 * GIB + rows["time_ns"] // int(STEP_S * 1e9) % 20 * (5 << 20)


def _fragment_memory(rows: Rows) -> None:
    rows["reserved_bytes"] = rows["reserved_peak_bytes"] = np.where(select_periodic_rows(rows, 10, 0.2), 75 * GIB, 20 * GIB)


def _add_retries(rows: Rows) -> None:
    rows["retries"] = rows["time_ns"] // 10**10


def _grow_host_memory(rows: Rows) -> None:
    rows["rss_bytes"] += rows["time_ns"] // 10**3  # 1 GB in 1000 s


def _use_swap(rows: Rows) -> None:
    rows["swap_used_bytes"] = rows["time_ns"] // 10**9 % 600 << 20


def _add_others(rows: Rows) -> None:
    """Every other record is that of another process."""
    rows["pid"][1::2] = 5000 + np.arange(len(rows) // 2) % 50


def _skip_first_updates(rows: Rows) -> None:
    rows["flags"][(rows["flags"] & BOUNDARY != 0) & (rows["step"] < rows["step"].max() // 2)] |= SKIPPED


def _lose_steps(rows: Rows) -> None:
    rows["step"] += rows["step"] // 100  # one step of a hundred is missing


def _add_overflows(write: Callable[..., None], steps: int) -> None:
    for step in range(0, steps, 20):
        write(STEP_S * (step + 1), events.Overflow, engine=0, step=step, loss_scale_before=2.0, loss_scale_after=1.0)


def _run_out(write: Callable[..., None], steps: int) -> None:
    facts = {"device": 0, "requested_bytes": GIB, "free_bytes": 0, "phase": "forward", "micro_step": 0}
    for step in range(100, steps, 400):
        write(STEP_S * (step + 0.3), events.OutOfMemory, step=step, allocated_bytes=70 * GIB, **facts)


def _take_inventory(write: Callable[..., None], steps: int) -> None:
    host = {"master_weights": 8 * GIB, "gradients": 8 * GIB, "optimizer_state": 16 * GIB}
    facts = {"engine": 0, "host": host, "host_pinned": host, "pinned_allocator": {"allocated_bytes": 60 * GIB}}
    write(STEP_S * 0.99, events.Tensors, step=1, when="after_update", **facts)
    write(STEP_S * 0.99, events.Tensors, step=1, when="init", **facts)


def _bind_cores(write: Callable[..., None], steps: int) -> None:
    for rank in range(2):
        write(0.01, events.Affinity, on_node=True, pid=1000 + rank, cpus="0-3")


def _lose_ranks(write: Callable[..., None], steps: int) -> None:
    for number in range(steps // 200):
        write(50 * number + 1, events.RankGone, on_node=True, rank=0, pid=2000 + number)
    write(STEP_S * steps, events.RankGone, on_node=True, rank=0, pid=1000)


def _collect_garbage(write: Callable[..., None], steps: int) -> None:
    for second in range(60, int(STEP_S * steps), 60):
        write(second, events.Garbage, begin_ns=(second - 1) * 10**9, seconds=0.5, collections=3)


def switch_mode(mode: str, *changes_s: float) -> Callable[..., None]:
    """Return a function that switches a mode for debugging on and off in turn, after so many seconds."""

    def write_events(write: Callable[..., None], steps: int) -> None:
        for number, second in enumerate(changes_s):
            write(second + 0.1, events.DebugMode, mode=mode, on=number % 2 == 0, begin_ns=int(second * 1e9))

    return write_events


def empty_cache(every_s: float) -> Callable[..., None]:
    """Return a function that empties the allocator's cache at such distances, from 70 s on."""

    def write_events(write: Callable[..., None], steps: int) -> None:
        for calls in (1, 2, 4, 8, 16):
            second = 70 + every_s * (calls - 1)
            facts = {"begin_ns": 70 * 10**9, "calls": calls, "seconds": 0.01 * calls}
            write(second + 0.1, events.CacheCleared, **facts, file="train.py", line=33, function="main")

    return write_events


def _start_threads(write: Callable[..., None], steps: int) -> None:
    stacks = {"frames": [], "stacks": [], "cores": 0.9, "lock_wait_s": 0.002}
    for number in range(10):
        times = {name: int((70 + 50 * number + later_s) * 1e9) for name, later_s in (("begin_ns", 0), ("busy_ns", 1))}
        write(72 + 50 * number, events.BusyThread, thread=f"t{number}", end_ns=times["busy_ns"], **times, **stacks)


def _stop_ranks(write: Callable[..., None], steps: int) -> None:
    for second in range(60, int(STEP_S * steps), 60):
        write(second, events.RankStopped, on_node=True, rank=0, pid=1000)
        write(second + 12, events.RankContinued, on_node=True, rank=0, pid=1000)


def write_stacks(why: str, period: int, period_s: float, *seconds: float, call: str = "time.sleep") -> Callable[..., None]:
    """Return a function that writes stacks of a line between the phases, until ``seconds`` in each ``period`` steps."""
    frames = [{"file": "train.py", "line": 40, "function": "log", "own": True}]
    stacks = [{"count": 20, "seconds": 1.0, "call": call, "frames": [0]}]
    facts = {"where": "between phases", "why": why, "samples": 20, "frames": frames, "stacks": stacks}

    def write_events(write: Callable[..., None], steps: int) -> None:
        for number in range(steps // period):
            for second in seconds:
                end_s = number * period_s + second
                times = {"begin_ns": int((end_s - 1) * 1e9), "end_ns": int(end_s * 1e9), "step": int(end_s / STEP_S)}
                write(end_s + 0.01, events.Stacks, **times, **facts)

    return write_events


def _stop_often(paces: Rows, rank: int) -> None:
    step = np.arange(len(paces))
    paces[(step >= _SLOW_FROM) & (step % 3 > 0), BETWEEN] = 1.0


def _write_late_stacks(write: Callable[..., None], steps: int) -> None:
    """Write stacks of one line between the phases, from some step on: at first of two in three steps, then rarely."""

    def write_one(second: float, name: type[events.Event], **facts: Any) -> None:
        step = int(second / STEP_S)
        is_early = _SLOW_FROM <= step < _SLOW_FROM + 45
        if (is_early and step % 3) or (step > _SLOW_FROM and step % 120 == 1):
            write(second, name, **facts)

    write_stacks("slow", 1, STEP_S, STEP_S)(write_one, steps)


_SLOW_FROM = 200
_BUSY = {"cores_used": CORES * 1.0}
_WAITING = {"waiting_cores": CORES * 0.5}
# From the end of one hang to that of the next.
_HANGS_S = 500 * STEP_S + 60 - STEP_S / 6
TROUBLES: dict[str, Trouble] = {
    "allocator_retries": Trouble(tables={"allocator": _add_retries}),
    "anomaly_mode": Trouble(events=switch_mode("anomaly", 70, 80, 90)),
    "anomaly_mode, too short": Trouble(events=switch_mode("anomaly", *np.arange(70, 90).tolist())),
    "cache_emptied": Trouble(events=empty_cache(STEP_S)),
    "cache_emptied, too seldom": Trouble(events=empty_cache(3 * STEP_S)),
    "checkpoint_pause": Trouble(_add_evaluations),
    "core_binding": Trouble(events=_bind_cores, ranks=2),
    "cores_taken": Trouble(tables={"hosts": set_values(**_BUSY), "processes": set_values(**_WAITING)}),
    "cores_taken, too short": Trouble(
        tables={"hosts": set_values(4, 0.25, **_BUSY), "processes": set_values(4, 0.25, **_WAITING)}
    ),
    "crowded_cores": Trouble(tables={"processes": set_values(cores_used=CORES * 1.0, waiting_cores=CORES * 1.0)}),
    "data_stall": Trouble(prolong_phase(DATA, 10, 10, 0.3)),
    "data_stall, too short": Trouble(prolong_phase(DATA, 5, 4, 0.3)),
    "dead_rank": Trouble(events=_lose_ranks),
    "double_spike": Trouble(prolong_phase(STEP, 20, 10, 2 * STEP_S)),
    "first_real_step": Trouble(events=_take_inventory, engine={"inner_optimizer": "Adam"}),
    "fragmentation": Trouble(tables={"allocator": _fragment_memory}),
    "host_growth": Trouble(tables={"processes": _grow_host_memory}),
    "host_memory_short": Trouble(tables={"hosts": set_values(memory_available_bytes=10 * GIB)}),
    "host_memory_short, by file cache": Trouble(
        tables={"hosts": set_values(cgroup_limit_bytes=100 * GIB, cgroup_used_bytes=99 * GIB)}
    ),
    "host_memory_short, too short": Trouble(tables={"hosts": set_values(2, 0.5, memory_available_bytes=10 * GIB)}),
    "hung_ranks": Trouble(prolong_phase(BACKWARD, 500, 1, 60.0)),
    "hung_ranks with stacks": Trouble(
        prolong_phase(BACKWARD, 500, 1, 60.0),
        tables={"processes": set_values(cores_used=0.0)},
        events=write_stacks("silent", 500, _HANGS_S, *(_HANGS_S - before_s for before_s in (54, 49, 39, 19))),
    ),
    "evaluation_growth": Trouble(_prolong_evaluations),
    "evaluation_growth, too short": Trouble(_vary_evaluations),
    "iteration_drift": Trouble(_slow_down),
    "iteration_shift": Trouble(prolong_phase(BACKWARD, 200, 100, 2 * STEP_S)),
    "iteration_shift with stacks": Trouble(
        prolong_phase(BETWEEN, 200, 100, 2 * STEP_S), events=write_stacks("slow", 200, 100, 27, 28, 29)
    ),
    "iteration_shift with threads": Trouble(prolong_phase(BACKWARD, 200, 100, 2 * STEP_S), events=_start_threads),
    "iteration_shift with garbage": Trouble(prolong_phase(BETWEEN, 200, 100, 2 * STEP_S), events=_collect_garbage),
    "memory_creep": Trouble(tables={"allocator": _grow_and_return}),
    "memory_step": Trouble(tables={"allocator": _alternate_peaks}),
    "others_arrived": Trouble(tables={"gpu_processes": _add_others}),
    "others_on_gpu": Trouble(tables={"gpus": set_values(used_bytes=60 * GIB)}),
    "out_of_memory": Trouble(events=_run_out),
    "outside_pytorch": Trouble(tables={"gpu_processes": set_values(used_bytes=60 * GIB)}),
    "peak_owner": Trouble(tables={"allocator": _alternate_owner}),
    "profiler_on": Trouble(events=switch_mode("profiler", 70)),
    "rank_stopped": Trouble(events=_stop_ranks),
    "repeated_pause": Trouble(prolong_phase(BETWEEN, 40, 1, 1.0), events=write_stacks("slow", 160, 44, 11, 22, 33, 44)),
    "repeated_pause, too short": Trouble(prolong_phase(BETWEEN, 240, 1, 1.0), events=write_stacks("slow", 240, 61, 61)),
    "time_lost_in_line": Trouble(_stop_often, events=_write_late_stacks),
    "time_lost_in_line, too short": Trouble(events=_write_late_stacks),
    "skipping_ended": Trouble(tables={"spans": _skip_first_updates}, events=_add_overflows),
    "steps_not_recorded": Trouble(tables={"spans": _lose_steps}),
    "straggler": Trouble(prolong_phase(DATA, 10, 10, 0.3, only_rank=1), ranks=2),
    "straggler, too short": Trouble(prolong_phase(DATA, 5, 4, 0.3, only_rank=1), ranks=2),
    "swapping": Trouble(tables={"hosts": _use_swap}),
    "throttled": Trouble(tables={"gpus": set_values(throttle_reasons=0x20)}),
    "throttled, too short": Trouble(tables={"gpus": set_values(10, 0.4, throttle_reasons=0x20)}),
    "time_between_phases": Trouble(prolong_phase(BETWEEN, 1, 1, 0.1), events=write_stacks("share", 200, 70, 70)),
    "time_between_phases, of training": Trouble(
        prolong_phase(BETWEEN, 1, 1, 0.1), events=write_stacks("share", 200, 70, 70, call="deepspeed.step")
    ),
    "validation_jump": Trouble(_add_evaluations, tables={"allocator": _grow_at_pauses}),
    "without a probe": Trouble(has_probe=False),
    "without a probe, double_spike": Trouble(
        has_probe=False,
        tables={"processes": set_values(2, 0.5, cores_used=1.0), "gpus": set_values(2, 0.5, utilization_percent=90)},
    ),
}
"""By the name of the finding; "too short" and the like are never found, and so are looked for up to the end."""


def combine_troubles(*names: str) -> Trouble:
    """Return several troubles at once; where they change the same values the last one counts."""
    several = [TROUBLES[name] for name in names]

    def change_paces(seconds: Rows, rank: int) -> None:
        for one in several:
            one.paces(seconds, rank)

    def change_tables(name: str) -> Change:
        changes = [one.tables[name] for one in several if name in one.tables]

        def apply_changes(rows: Rows) -> None:
            for each in changes:
                each(rows)

        return apply_changes

    def write_events(write: Callable[..., None], steps: int) -> None:
        for one in several:
            one.events(write, steps)

    return Trouble(
        change_paces,
        {table: change_tables(table) for one in several for table in one.tables},
        write_events,
        {name: value for one in several for name, value in one.engine.items()},
        ranks=max(one.ranks for one in several),
        has_probe=all(one.has_probe for one in several),
    )


# Slower and slower steps would change the periods of the others, and longer ones the times of hangs.
_APART = ("iteration_drift", "hung_ranks with stacks")
_PROBED = [name for name, trouble in TROUBLES.items() if trouble.has_probe and name not in _APART]
MIXTURES: dict[str, Trouble] = {
    "all that are found": combine_troubles(*(name for name in _PROBED if "," not in name)),
    "all that are never found": combine_troubles(*(name for name in _PROBED if "," in name)),
    **{name: TROUBLES[name] for name in TROUBLES if name not in _PROBED},
}
"""All troubles in few recordings."""

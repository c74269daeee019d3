"""A rank on a CPU that began to hold up the others within forward and backward."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.findings.support.causes.host_causes import measure_change_loads
from zerotop.analysis.findings.support.causes.step_change import Advice, Cause, StepChange, count_iterations
from zerotop.analysis.findings.support.evidence import Process, Rows
from zerotop.analysis.findings.support.host_load import SLOW_TIMES, hides_slow_cores, measure_thread_use
from zerotop.analysis.findings.support.thresholds import STALL_SECONDS
from zerotop.analysis.formatting import Text

_COMPUTES: Advice = (
    "See what only this rank computes in forward and backward; if nothing, its cores are slower.",
    "py-spy dump --pid {slow_pid}",
)
_WAITS: Advice = ("See what else runs on its cores, and bind each rank to cores of its own.", "taskset -pc {slow_pid}")


def check_slow_cores(change: StepChange) -> Cause | None:
    """Return the cause that one rank began to compute longer than the others, or to wait for a core."""
    slower = float(np.median(change.after["iteration_s"]) - np.median(change.before["iteration_s"]))
    if slower <= 0 or len(change.group.processes) < 2 or not hides_slow_cores(change.group):
        return None
    own_before, own_after = change.measure_own()
    if not own_after - own_before < slower / 2:  # work between the phases, or unknown, which is NaN
        return None
    before, after = (
        [_measure_use(change, process, rows) for process in change.group.processes] for rows in (change.before, change.after)
    )
    uses = np.array([before, after])  # before and after, process, computed and waited
    if np.isnan(uses).any():
        return None
    for part, verb, advice in ((0, "computes for", _COMPUTES), (1, "waits for a core for", _WAITS)):
        rise = uses[1, :, part] - uses[0, :, part]
        index, (others, most) = int(np.argmax(rise)), np.sort(rise)[-2:].tolist()
        # Who was late before may be so still.
        after_s = np.sort(uses[1, :, part])
        if most - others >= max(STALL_SECONDS, slower / 2) and after_s[-1] >= SLOW_TIMES * after_s[-2]:
            if part == 1 and _is_by_others(change):
                return None
            culprit = change.group.processes[index]
            values = {"before": float(uses[0, index, part]), "after": float(uses[1, index, part])}
            text = Text(
                f"rank {culprit.rank} {verb} {{after:seconds}} in each iteration instead of {{before:seconds}}", values
            )
            fix = advice[1].replace("{slow_pid}", str(culprit.source.pid))
            return Cause(text, advice[0], fix, 0.85, finding="slow_cores", culprit=culprit)
    return None


def _is_by_others(change: StepChange) -> bool:
    """Whether other processes use the cores, which takes them from ranks at random; true if that is unknown."""
    return any(load is None or load.is_starved or load.is_disturbed for load in measure_change_loads(change))


def _measure_use(change: StepChange, process: Process, rows: Rows) -> tuple[float, float]:
    """Return the seconds of an iteration in which a rank computed, and in which it waited for a core; NaN if unknown."""
    window = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    use = measure_thread_use(process, *window, known_ns=change.known_ns)
    count = count_iterations(rows)
    return (use.computed / count, use.waited / count) if use is not None else (float("nan"), float("nan"))

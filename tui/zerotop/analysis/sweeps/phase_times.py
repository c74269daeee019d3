"""The times of a recorded step's phases, on the GPU where they were recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan

import numpy as np

from zerotop.analysis.findings.support.gpu_use import measure_use_in_steps
from zerotop.analysis.sweeps.recorded_moments import ChosenSteps
from zerotop.recording.keys import identify_process
from zerotop.recording.moments.rank_records import RankRecords
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Rows
from zerotop.recording.steps.step_table import RankSteps
from zerotop_probe.recording.tables import PHASE_CODE

_FEW_SHARE = 0.1  # of the steps of a stretch: fewer with phases do not tell the time of all
_GLOO = b"pt_gloo"  # the beginning of its threads' names
_MOST_SAMPLES = 0.5
_MOST_DEVICE_SHARE = 1.1  # of an iteration on the GPU: a phase that overlaps another is not added up


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of one optimizer step, of the slowest rank: of phases the median of the steps that have them.

    Where those add up to more than an iteration, as a few slow steps do, they keep their shares of it.

    Forward and backward are those of one micro-batch on the GPU where the recording has them, else those of the host.
    """

    iteration: float  # the median of all steps of the setting, also of those without phases
    forward: float
    backward: float
    update: float
    launches: tuple[float, float] | None  # the host's forward and backward, beside those on the GPU
    cpu_optimizer: float = 0.0  # a part of the update; 0 where it is on the GPU, or not known
    busy: float = nan  # share of the time in which a kernel ran on the GPU, from NVML; NaN: not known
    is_over_gloo: bool = False  # whether threads of gloo exchange gradients on the host, for which the backward waits


def measure_times(recording: Recording, process: RankSteps, chosen: ChosenSteps) -> PhaseTimes | None:
    """Return the times of one rank; None without steps."""
    steps = chosen.timed
    if not len(steps):
        return None
    iteration, count = _measure_iteration(process, chosen), int(steps[-1]["micro_steps"])
    host = tuple(float(np.median(steps[name])) / count for name in ("forward_s", "backward_s"))
    rank = identify_process(process.source)
    numbers = process.step_rows["step"]
    paced = process.step_rows[(numbers >= chosen.stretch.begin) & (numbers < chosen.stretch.end)]
    busy = measure_use_in_steps(RankRecords(recording.at(), rank), paced)
    is_over_gloo = _exchanges_over_gloo(recording, process)
    table = next((one for one in recording.sources["device_times"] if identify_process(one) == rank), None)
    if table is not None:
        rows = table.array[np.isin(table.array["step"], steps["step"]) & (table.array["micro_step"] >= 0)]
        found = [_sum_steps(rows[rows["phase"] == PHASE_CODE[phase]]) for phase in ("forward", "backward", "step")]
        forward, backward, update = found[0] / count, found[1] / count, found[2]
        if 0 < count * (forward + backward) + update <= _MOST_DEVICE_SHARE * iteration and all(found):
            on_cpu = _sum_steps(rows[rows["phase"] == PHASE_CODE["cpu_optimizer"]])
            times = PhaseTimes(iteration, forward, backward, update, (host[0], host[1]), on_cpu, busy, is_over_gloo)
            return _fit_phases(times, count)
    update = float(np.median(steps["step_s"]))
    return _fit_phases(PhaseTimes(iteration, host[0], host[1], update, None, busy=busy, is_over_gloo=is_over_gloo), count)


def _exchanges_over_gloo(recording: Recording, process: RankSteps) -> bool:
    """Whether threads of gloo run in most samples of a rank's threads while it trains."""
    rows, source = process.step_rows[1:], process.source
    if not len(rows):
        return False
    records = recording.at().records("threads", source.host, "pid", source.pid)
    sampled = records.read_window(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))
    of_gloo = sampled.times[np.char.startswith(sampled.rows["name"], _GLOO)] if len(sampled) else sampled.times
    return len(np.unique(of_gloo)) > _MOST_SAMPLES * len(np.unique(sampled.times))


def _measure_iteration(process: RankSteps, chosen: ChosenSteps) -> float:
    """Return the median iteration of the stretch where few of its steps have phases, unless their batches differ."""
    rows, stretch = process.step_rows[1:], chosen.stretch
    rows = rows[(rows["step"] >= stretch.begin) & (rows["step"] < stretch.end) & (rows["steps"] == 1) & ~rows["skipped"]]
    rows = rows[np.isfinite(rows["iteration_s"])]
    known = rows[~rows["counted"] & (rows["micro_steps"] > 0)]
    is_one_setting = all(len(np.unique(known[name])) <= 1 for name in ("micro_steps", "rows", "tokens"))
    is_few = len(chosen.timed) < _FEW_SHARE * len(rows)
    return float(np.median((rows if is_one_setting and is_few else chosen.timed)["iteration_s"]))


def _fit_phases(times: PhaseTimes, count: int) -> PhaseTimes:
    """Return the times with phases that add up to no more than an iteration. ``count``: micro-batches of a step."""
    share = times.iteration / max(count * (times.forward + times.backward) + times.update, 1e-9)
    if share >= 1:
        return times
    launches = (times.launches[0] * share, times.launches[1] * share) if times.launches is not None else None
    parts = {name: getattr(times, name) * share for name in ("forward", "backward", "update", "cpu_optimizer")}
    return replace(times, **parts, launches=launches)


def _sum_steps(rows: Rows) -> float:
    """Return the median over steps of their device times, in seconds; 0 without any."""
    if not len(rows):
        return 0.0
    steps, places = np.unique(rows["step"], return_inverse=True)
    return float(np.median(np.bincount(places, rows["device_ns"], len(steps)))) / 1e9

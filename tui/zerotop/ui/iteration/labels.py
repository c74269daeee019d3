"""A folded iteration in words."""

from __future__ import annotations

import math

from zerotop.analysis.waveform.alignment import OTHER_PACE, LongIterations
from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.idle_time import IdleTime, LaunchTime, find_idle_time, waits_for_data
from zerotop.ui.drawing.formatting import format_duration, format_significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_word

# Idling from this share of an iteration is worth a sentence, and so are long iterations with this share of the time.
_MIN_IDLE_SHARE = 0.15
_MIN_LONG_SHARE, _FEWEST_LONG = 0.15, 3
_FAR_MEAN = 1.25  # times the median
_REASONS = {
    "skipped": "skipped",
    "updated": "with an update",
    "evaluation": "with evaluation",
    "checkpoint": "with a checkpoint",
    "unrecorded": "not recorded",
    "counted": "only counted",
    "pace": "at another pace",
    "long": "outlier",
    "other": "with other phases",
}


def describe_bottleneck(fold: WaveformFold, glyphs: Glyphs, launches: LaunchTime | None = None) -> tuple[str, str]:
    """Return a description of the bottleneck and its style: ``GPUs idle 1.70 s of 2.68 s, 1.69 s of it ...``.

    ``launches``: of a job whose GPUs wait for launches.
    """
    if fold.long is not None and fold.long.count >= _FEWEST_LONG and fold.long.usual_share >= _MIN_LONG_SHARE:
        return _describe_long(fold.long, glyphs), "warn"
    idle = find_idle_time(fold)
    if math.isnan(idle.total_s):
        return _describe_cores(fold, glyphs), "value"
    gpus = "GPUs" if fold.gpu_count > 1 else "The GPU"
    verb = "idle" if fold.gpu_count > 1 else "idles"
    total = format_duration(fold.iteration_s)
    if launches is not None:
        launch, device = format_duration(launches.launch_s), format_duration(launches.device_s)
        return f"The CPU sets the pace: its phases take {launch} of {total}, kernels {device}", "warn"
    if not fold.signals["utilization"].resolved:
        busy = 1 - idle.total_s / fold.iteration_s  # with the steps in between, which the means cover, too
        text = f"{gpus} {_choose_verb(fold)} busy {busy * 100:.0f} % of the time"
        return f"{text}; NVML's means of 200 ms do not show when", "value"
    idle_s, longest_s = format_duration(idle.total_s), format_duration(idle.longest_s)
    if idle.is_optimizer:
        cores = "1 core runs the optimizer" if round(idle.cores) == 1 else f"{idle.cores:.0f} cores run the optimizer"
        return f"{gpus} {verb} {idle_s} of {total}, {longest_s} of it while {cores}", "warn"
    if idle.total_s >= _MIN_IDLE_SHARE * fold.iteration_s:
        return f"{gpus} {verb} {idle_s} of {total}{_describe_idle(idle, glyphs)}", "warn"
    busiest = max((row for row in fold.phases if row.depth == 0), key=lambda row: row.mean_s)
    work = f"{gpus} {_choose_verb(fold)} busy {format_duration(fold.iteration_s - idle.total_s)} of {total}"
    return f"{work}; {_name_phase(busiest.phase, glyphs)} takes {busiest.share * 100:.0f} %", "value"


def _describe_long(long: LongIterations, glyphs: Glyphs) -> str:
    if long.mean_s > _FAR_MEAN * long.iteration_s:  # unlike ones, which their median does not describe
        mean = format_duration(long.mean_s)
        return f"{long.count} iterations take {mean} on average, {long.share * 100:.0f} % of the time"
    where = f": {_name_phase(long.phase, glyphs)} {format_duration(long.longer_s)} longer" if long.phase else ""
    many = f"{long.count} iterations take {format_duration(long.iteration_s)}"
    return f"{many}, {long.usual_share * 100:.0f} % of the time{where}"


def _name_phase(phase: str, glyphs: Glyphs) -> str:
    """Return a phase as the subject of a sentence."""
    return "code outside the phases" if phase == "other" else phase_word(phase, glyphs)


def _choose_verb(fold: WaveformFold) -> str:
    return "are" if fold.gpu_count > 1 else "is"


def _describe_idle(idle: IdleTime, glyphs: Glyphs) -> str:
    if idle.longest is None:
        return ""
    if waits_for_data(idle):
        return f", {format_duration(idle.longest_s)} of it in data loading or your code"
    return f", {format_duration(idle.longest_s)} of it in {_name_phase(idle.longest.phase, glyphs)}"


def _describe_cores(fold: WaveformFold, glyphs: Glyphs) -> str:
    longest = max((row for row in fold.phases if row.depth == 0), key=lambda row: row.mean_s)
    phase, total = _name_phase(longest.phase, glyphs), format_duration(fold.iteration_s)
    text = f"{phase} takes {format_duration(longest.mean_s)} of {total}"
    if "cores" not in fold.signals:
        return text
    used = fold.signals["cores"].compute_mean(0.0, fold.iteration_s)
    available = f" of {fold.host_cores}" if fold.host_cores else ""
    verb = "use" if fold.process_count > 1 else "uses"
    return f"{text}; {describe_processes(fold)} {verb} {format_significant(used)}{available} cores"


def describe_processes(fold: WaveformFold) -> str:
    """Return whose cores and host memory are shown, which are more ranks than the folded ones: ``4 ranks``, ``rank 2``."""
    return f"{fold.process_count} ranks" if fold.process_count > 1 else f"rank {fold.ranks[0]}"


def describe_fold(fold: WaveformFold) -> str:
    """Return what was folded: ``mean of 21, steps 1–23``, ``skipped step 3``."""
    skipped = "skipped " if fold.skipped else ""
    if fold.first_step == fold.last_step:
        return f"{skipped}step {fold.first_step}"
    return f"mean of {fold.iterations}, {skipped}steps {fold.first_step}–{fold.last_step}"


def describe_ranks(fold: WaveformFold) -> str:
    """Return the folded ranks: ``4 ranks``, ``8 of 1024 ranks``, ``rank 2``."""
    if fold.rank is not None:
        return f"rank {fold.rank}"
    if len(fold.ranks) == fold.world:
        return f"{fold.world} ranks" if fold.world > 1 else f"rank {fold.ranks[0]}"
    return f"{len(fold.ranks)} of {fold.world} ranks"


def describe_pace(fold: WaveformFold, pace_s: float, recent: int, *, is_over: bool) -> str:
    """Return which steps the figures are of, where the header's pace is another one; "" where it is theirs.

    ``recent``: the iterations of which a running job's pace is the mean.
    """
    if not abs(fold.iteration_s / pace_s - 1) > OTHER_PACE:  # no NaN
        return ""
    folded, pace = format_duration(fold.iteration_s), format_duration(pace_s)
    present = (
        f"the median is {pace}"
        if is_over
        else f"{'the last took' if recent == 1 else f'the mean of the last {recent} is'} {pace}"
    )
    kind, is_one = "skipped " if fold.skipped else "", fold.first_step == fold.last_step
    steps = f"step {fold.first_step}" if is_one else f"steps {fold.first_step} to {fold.last_step}"
    return f"Phases: of {kind}{steps}, which took {folded}; {present}"


def describe_left_out(fold: WaveformFold) -> str:
    """Return the iterations left out: ``excluded: 2 with evaluation, 1 outlier``; "" if none were."""
    parts = [
        f"{count} {_REASONS.get(reason, reason)}{'s' * (reason == 'long' and count > 1)}"
        for reason, count in fold.left_out.items()
    ]
    return f"excluded: {', '.join(parts)}" if parts else ""

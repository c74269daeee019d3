"""A folded iteration in words."""

from __future__ import annotations

import math

from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.idle_time import Idle, idle, waits_for_data
from zerotop.ui.drawing.formatting import seconds, significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_word

# From which share of an iteration on idling is worth a sentence.
_MUCH = 0.15
_REASONS = {
    "skipped": "skipped",
    "updated": "with an update",
    "evaluation": "with evaluation",
    "checkpoint": "with a checkpoint",
    "long": "far longer",
    "other": "with other phases",
}


def sentence(fold: WaveformFold, glyphs: Glyphs) -> tuple[str, str]:
    """What takes the time, and the style to say it in: ``GPUs idle 1.70 s of 2.67 s while 62 cores run the optimizer``."""
    found = idle(fold)
    if math.isnan(found.total_s):
        return _of_cores(fold, glyphs), "value"
    gpus = "GPUs" if fold.gpus > 1 else "The GPU"
    verb = "idle" if fold.gpus > 1 else "idles"
    of = seconds(fold.iteration_s)
    if not fold.signals["utilization"].resolved:
        busy = 1 - found.total_s / fold.iteration_s
        return f"{gpus} {_are(fold)} busy {busy:.0%} of the time; where in {of}, NVML's 200 ms cannot tell", "value"
    if found.optimizer:
        cores = "1 core runs the optimizer" if round(found.cores) == 1 else f"{found.cores:.0f} cores run the optimizer"
        return f"{gpus} {verb} {seconds(found.longest_s)} of {of} while {cores}", "warn"
    if found.total_s >= _MUCH * fold.iteration_s:
        return f"{gpus} {verb} {seconds(found.total_s)} of {of}{_meanwhile(found, glyphs)}", "warn"
    busiest = max((row for row in fold.phases if row.depth == 0), key=lambda row: row.median_s)
    work = f"{gpus} {_are(fold)} busy {seconds(fold.iteration_s - found.total_s)} of {of}"
    return f"{work}; {phase_word(busiest.phase, glyphs)} takes {busiest.share:.0%}", "value"


def _are(fold: WaveformFold) -> str:
    return "are" if fold.gpus > 1 else "is"


def _meanwhile(found: Idle, glyphs: Glyphs) -> str:
    if found.longest is None:
        return ""
    if waits_for_data(found):
        return f", {seconds(found.longest_s)} of it waiting for data or outside the engine"
    return f", {seconds(found.longest_s)} of it in {phase_word(found.longest.phase, glyphs)}"


def _of_cores(fold: WaveformFold, glyphs: Glyphs) -> str:
    longest = max((row for row in fold.phases if row.depth == 0), key=lambda row: row.median_s)
    text = f"{phase_word(longest.phase, glyphs)} takes {seconds(longest.median_s)} of {seconds(fold.iteration_s)}"
    if "cores" not in fold.signals:
        return text
    used = fold.signals["cores"].mean(0.0, fold.iteration_s)
    of = f" of {fold.host_cores}" if fold.host_cores else ""
    return f"{text}; {significant(used)}{of} cores work"


def folded(fold: WaveformFold) -> str:
    """What was folded: ``median of 21, steps 1–23``, ``skipped step 3``."""
    skipped = "skipped " if fold.skipped else ""
    if fold.first_step == fold.last_step:
        return f"{skipped}step {fold.first_step}"
    return f"median of {fold.iterations}, {skipped}steps {fold.first_step}–{fold.last_step}"


def whose(fold: WaveformFold) -> str:
    """Of which ranks: ``4 ranks``, ``8 of 1024 ranks``, ``rank 2``."""
    if fold.rank is not None:
        return f"rank {fold.rank}"
    if len(fold.ranks) == fold.world:
        return f"{fold.world} ranks" if fold.world > 1 else f"rank {fold.ranks[0]}"
    return f"{len(fold.ranks)} of {fold.world} ranks"


def left_out(fold: WaveformFold) -> str:
    """What was not folded with the others: ``2 with evaluation, 1 far longer left out``; empty for nothing."""
    parts = [f"{count} {_REASONS.get(reason, reason)}" for reason, count in fold.left_out.items()]
    return f"{', '.join(parts)} left out" if parts else ""

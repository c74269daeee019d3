"""Training stands still while a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence
from zerotop.analysis.annotations.support.thresholds import PAUSE_ITERATIONS, PAUSE_SECONDS, SPIKE_SIMILAR_SHARE
from zerotop.analysis.formatting import format_seconds


def detect(facts: Evidence) -> Iterator[Annotation]:
    """The first long pause of each attempt, and later ones that are longer by SPIKE_LIKE_SHARE."""
    for group in facts.groups:
        lead, told = group.lead, 0.0
        saves = lead.read_rare_phases("checkpoint_save")
        for begin_ns, end_ns in zip(lead.compute_begins(saves).tolist(), saves.times.tolist(), strict=True):
            before = lead.steps_until(begin_ns)
            pause = (end_ns - begin_ns) / 1e9
            if not len(before) or pause < PAUSE_SECONDS or pause <= told * (1 + SPIKE_SIMILAR_SHARE):
                continue
            usual = float(np.median(before["iteration_s"][-20:]))
            if pause < PAUSE_ITERATIONS * usual:
                continue
            told, step = pause, int(before["step"][-1])
            yield Annotation(
                name="checkpoint_pause",
                begin_ns=begin_ns,
                end_ns=end_ns,
                known_ns=end_ns,
                step=step,
                ranks=group.ranks_at(end_ns),
                severity=Severity.INFO,
                confidence=0.99,
                sentence=(
                    f"Saving a checkpoint after step {step} stopped training for {format_seconds(pause)}, as long as"
                    f" {pause / usual:.0f} iterations of {format_seconds(usual)}."
                ),
                advice="Raise Trainer's save_steps, or set save_only_model=True where training will not be resumed.",
                evidence={"pause_s": pause, "iteration_s": usual, "iterations": pause / usual},
            )

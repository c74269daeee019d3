"""Stretches of steps in which many updates were skipped, whether each skipped step is known or only their number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zerotop_probe.recording.events import SkippedUpdates

# A run goes on while it has at least this share of skipped steps, and fewer others in a row than this.
_LEAST_SHARE = 0.1
_MOST_BETWEEN = 20


class SkippedStretch(NamedTuple):
    """Steps of which some were skipped, or none."""

    first_step: int
    last_step: int  # the last skipped one if that is known
    updates: int
    skipped: int  # at least so many
    scales: tuple[float, float] | None  # loss scale before and after


def read_stretch(event: SkippedUpdates) -> SkippedStretch:
    """Return the stretch that an event is about."""
    is_each_known = event.updates == event.last_step - event.first_step + 1
    last = event.last_step - event.good_last * is_each_known
    return SkippedStretch(
        event.first_step, last, event.updates, event.skipped, (event.loss_scale_before, event.loss_scale_after)
    )


@dataclass
class SkippedRun:
    """Stretches in a row with many skipped steps."""

    first_step: int
    last_step: int = -1
    skipped: int = 0
    scales: tuple[float, float] | None = None
    # The last of them, as far as all of their steps were skipped: their number, the first step, and the scales.
    all_skipped: int = 0
    all_since: int = 0
    all_scales: tuple[float, float] | None = None

    @property
    def is_scale_zero(self) -> bool:
        return self.scales is not None and self.scales[1] == 0

    def takes(self, stretch: SkippedStretch) -> bool:
        """Whether a stretch continues this run."""
        share = (self.skipped + stretch.skipped) / (stretch.last_step - self.first_step + 1)
        return share >= _LEAST_SHARE and stretch.first_step - self.last_step <= _MOST_BETWEEN

    def add(self, stretch: SkippedStretch) -> None:
        """Add a stretch with skipped steps."""
        scales = stretch.scales
        if stretch.skipped == stretch.updates:
            if not self.all_skipped or stretch.first_step > self.last_step + 1:
                self.all_skipped, self.all_since, self.all_scales = 0, stretch.first_step, scales
            self.all_skipped += stretch.updates
            self.all_scales = _join(self.all_scales, scales)
        elif scales is None or scales[1] > 0:  # else more of them may have been skipped
            self.all_skipped = 0
        self.skipped += stretch.skipped
        self.last_step = stretch.last_step
        self.scales = _join(self.scales, scales)


def _join(first: tuple[float, float] | None, last: tuple[float, float] | None) -> tuple[float, float] | None:
    return (first[0], last[1]) if first is not None and last is not None else last


class SkippedRuns:
    """Finds the run that each stretch belongs to."""

    def __init__(self) -> None:
        self.run: SkippedRun | None = None
        """The last one."""

    def add(self, stretch: SkippedStretch) -> SkippedRun | None:
        """Add the next stretch; return the last run if that changed it."""
        if stretch.skipped:
            if self.run is None or not self.run.takes(stretch):
                self.run = SkippedRun(stretch.first_step)
            self.run.add(stretch)
            return self.run
        if self.run is None or not self.run.all_skipped or self.run.is_scale_zero:
            return None
        self.run.all_skipped = 0
        return self.run

"""The step in progress when a line was printed."""

from __future__ import annotations

from zerotop.recording.reader import Recording, Source


class StepClock:
    """The step in progress at any time, counted by the lowest rank."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._count = -1
        self._sources: list[Source] = []

    def step_at(self, time_ns: int) -> int | None:
        """Return the step at a time in unix ns; None before the first one and without a probe."""
        begins = self._recording.sources["begins"]
        if len(begins) != self._count:
            self._count = len(begins)
            lowest = min((source.rank for source in begins), default=-1)
            # After a restart the later process counts.
            lowest_sources = (source for source in begins if source.rank == lowest)
            self._sources = sorted(lowest_sources, key=lambda source: source.created_ns, reverse=True)
        for source in self._sources:
            steps = source.until(time_ns)["step"][-1:]
            if len(steps):
                return int(steps[0]) if steps[0] >= 0 else None
        return None

"""Readings of a GPU's hardware that became worse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerotop_probe.outside.sampling.faults.nvml_faults import Readings

# A counter that rises all the time is written this often at first, and then once in so many seconds.
_FIRST_REPORTS = 20
_REPORT_PERIOD_NS = 60 * 10**9


class Worsening(NamedTuple):
    """A value of a GPU that became worse; the fields are those of ``GpuFault``."""

    kind: str
    value: int
    before: int | None = None
    rise: int | None = None
    seconds: float | None = None


class ReportLimit:
    """Lets what comes again and again pass some times, and then once in a while."""

    def __init__(self, time_ns: int) -> None:
        self.time_ns = time_ns
        self._reports = 0

    def is_due(self, time_ns: int) -> bool:
        """Whether it may pass."""
        return self._reports < _FIRST_REPORTS or time_ns - self.time_ns >= _REPORT_PERIOD_NS

    def note_report(self, time_ns: int) -> None:
        """Count that it has passed."""
        self.time_ns = time_ns
        self._reports += 1


class _Counter(ReportLimit):
    def __init__(self, value: int, time_ns: int) -> None:
        super().__init__(time_ns)
        self.first = self.last = value


class GpuHealth:
    """Compares the readings of one GPU with the earlier ones."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}
        self._told: dict[str, int] = {}
        self.most_links = 0
        """The most links that were active here, or are on most GPUs of the same kind."""

    def compare(self, readings: Readings, time_ns: int) -> Iterator[Worsening]:
        """Yield the values that became worse, and at first the states that are bad. What was counted earlier is no news."""
        for kind, value in readings.counters.items():
            yield from self._compare_counter(kind, value, time_ns)
        for kind, value in readings.states.items():
            yield from self._compare_state(kind, value, is_bad=value > 0)
        if readings.links is not None:
            self.most_links = max(self.most_links, readings.links)
            yield from self._compare_state("nvlinks", readings.links, is_bad=readings.links < self.most_links)
        for kind, pair in (("pcie_width", readings.lanes), ("pcie_generation", readings.generation)):
            if pair is not None:
                yield from self._compare_state(kind, pair[0], is_bad=pair[0] < pair[1], before=pair[1])

    def _compare_counter(self, kind: str, value: int, time_ns: int) -> Iterator[Worsening]:
        counter = self._counters.setdefault(kind, _Counter(value, time_ns))
        if value < counter.last:  # the driver was loaded again, or the counter wrapped
            counter.first = counter.last = value
        if value > counter.last and counter.is_due(time_ns):
            seconds = (time_ns - counter.time_ns) / 1e9
            yield Worsening(kind, value, counter.first, value - counter.last, seconds)
            counter.last = value
            counter.note_report(time_ns)

    def _compare_state(self, kind: str, value: int, *, is_bad: bool, before: int | None = None) -> Iterator[Worsening]:
        if self._told.get(kind) == value:
            return
        self._told.pop(kind, None)
        if is_bad:
            self._told[kind] = value
            yield Worsening(kind, value, self.most_links if kind == "nvlinks" else before)

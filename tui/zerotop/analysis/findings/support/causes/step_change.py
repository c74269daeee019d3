"""A change in the duration of iterations, and its possible cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from zerotop.analysis.code_line import CodeLine
from zerotop.analysis.findings.support.evidence import Floats, Group, Process, Records, Rows, Samples
from zerotop.analysis.findings.support.gpu_use import measure_gpu_use
from zerotop.analysis.findings.support.lines.line_findings import measure_between
from zerotop.analysis.findings.support.steps.growing_batches import get_batch_sizes
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.recording.events.event_files import select_events
from zerotop.recording.steps.step_dtype import has_phases
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import PHASE_CODE

T = TypeVar("T", events.Garbage, events.Compiled)

_PHASE_COLUMNS = ("data_s", "forward_s", "backward_s", "step_s")
COMPUTING_COLUMNS = ("forward_s", "backward_s", "step_s")

_BETWEEN = "between the phases (data, forward, backward, step)"

# The least and the most steps with phases that show the parts of a change.
_ENOUGH_STEPS, _MOST_STEPS = 3, 5
# Steps after a change in which others with phases show its parts.
_NEAR_STEPS = 64
# The most steps that a host may be ahead of its GPU, when its batches become larger.
_QUEUED_STEPS = 10
# A step that takes so many times as long as the others has a pause.
_PAUSE_TIMES = 4.0
# NVML looks back so long (ns), and the use of a GPU before a change is that of at least two seconds.
_LOOK_BACK_NS, _USED_NS = 200_000_000, 2_000_000_000

# Advice and fix: templates of Text.
Advice = tuple[str, str]
BREAKDOWN: Advice = ("{breakdown}", "{breakdown_fix}")


class Cause(NamedTuple):
    """A change, as the end of a sentence, and advice."""

    text: str
    advice: str
    fix: str
    confidence: float
    is_expected: bool = False  # whether the change is right: larger batches take longer
    has_own_finding: bool = False  # whether another detector reports it, and the change needs no finding
    finding: str = ""  # the kind of findings that report it too, see FindingKind.measured_cause
    culprit: Process | None = None  # the rank that the others wait for
    where: str = ""  # the place of stacks that show its line, see stack_lines; empty if none does
    callee: str = ""  # the function that this line must call
    line: CodeLine | None = None  # the line that causes it, where it is known without stacks of the delay
    is_host: bool = False  # whether ranks lacked cores, perhaps for a while only
    when: str = ""  # it was made, if that is known to be earlier, or hardly known: ``between steps 0 and 160``
    is_code: bool = False  # whether other code runs since, for which the GPU may have more work


@dataclass(frozen=True, eq=False)
class StepChange:
    """Steps of a group's lead before and after a change.

    If steps are short, most may only be counted. The parts of the change are then read from the nearest steps with phases.
    """

    group: Group
    before: Rows
    after: Rows
    known_ns: int  # until when samples may be read that say why: unix nanoseconds
    found_in: str = ""  # what showed it where the iterations did not
    shown_by: tuple[Rows, Rows] | None = None  # the steps with phases before and after that showed it, if these alone did
    _samples: dict[Records, tuple[Samples, Samples] | None] = field(default_factory=dict, init=False)

    @property
    def step(self) -> int:
        """The first step that shows it."""
        return int(self.after["step"][0])

    @property
    def latest_ns(self) -> int:
        """Until when records count: those of the last step do, too."""
        return max(self.known_ns, int(self.after["end_unix_ns"][-1]))

    @cached_property
    def before_s(self) -> float:
        """The usual iteration before, in seconds."""
        return float(np.median(self.before["iteration_s"]))

    @cached_property
    def after_s(self) -> float:
        return float(np.median(self.after["iteration_s"]))

    @property
    def added_s(self) -> float:
        """The seconds by which iterations became longer; negative if they became shorter."""
        return self.after_s - self.before_s

    @property
    def process(self) -> Process:
        """The lead process, which made these steps."""
        return self.group.lead

    def read_samples(self, records: Records) -> tuple[Samples, Samples] | None:
        """Return the records before and after; None if either is empty. They are read once."""
        if records not in self._samples:
            before, after = (
                records.read_window(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))
                for rows in (self.before, self.after)
            )
            self._samples[records] = (before, after) if len(before) and len(after) else None
        return self._samples[records]

    def read_usual_samples(self, records: Records) -> tuple[Samples, Samples] | None:
        """Return the records before and after in steps without a pause, whose samples say nothing of the others."""
        samples = self.read_samples(records)
        if samples is None:
            return None
        before, after = (_drop_pauses(*one) for one in zip(samples, (self.before, self.after), strict=True))
        return (before, after) if len(before) and len(after) else None

    @cached_property
    def phased(self) -> tuple[Rows, Rows]:
        """The steps with phases before and after; empty if there are none."""
        if self.shown_by is not None:
            return self.shown_by
        before, after = (rows[has_phases(rows)] for rows in (self.before, self.after))
        if len(before) < _ENOUGH_STEPS:
            before = self.process.phased_steps_until(int(self.before["end_unix_ns"][-1]))[-_MOST_STEPS:]
            before = before if self._are_like_before(before) else before[:0]  # they may be before another change
        if len(after) < _ENOUGH_STEPS:
            known = self.process.phased_steps_until(self.latest_ns)
            after = known[np.searchsorted(known["step"], self.step) :][:_MOST_STEPS]
            after = after[after["step"] < self.step + _NEAR_STEPS]  # later ones may be after another change
        return self._drop_queued(before, after), after

    def _drop_queued(self, before: Rows, after: Rows) -> Rows:
        """Return the steps before the change, or earlier ones if the last of them have the batches of those after it.

        A host that does not wait for its GPU takes longer only once the queue of launches is full, some steps later.
        """
        if not self.process.is_on_gpu or not len(before) or not len(after):
            return before
        known = self.process.phased_steps_until(int(before["end_unix_ns"][-1]))
        is_new = get_batch_sizes(known) == int(np.median(get_batch_sizes(after)))
        first = len(known) - int(np.argmin(is_new[::-1]))
        if not 0 < first < len(known) or is_new.all() or known["step"][first] < self.step - _QUEUED_STEPS:
            return before
        earlier = known[:first][-_MOST_STEPS:]
        is_steady = not np.ptp(get_batch_sizes(earlier))
        return earlier if is_steady and self._are_like_before(earlier) else before

    def _are_like_before(self, rows: Rows) -> bool:
        """Whether earlier steps took about as long as those before the change: they differ by less than half of it."""
        early, before, after = (compute_known_median(some["iteration_s"]) for some in (rows, self.before, self.after))
        return abs(early - before) < abs(after - before) / 2

    def read_phased(self, process: Process) -> tuple[Rows, Rows]:
        """Return the steps with phases of another rank before and after; empty if there are none."""
        rows = process.phased_steps_until(self.latest_ns)
        limits = (self.before["step"][0], self.before["step"][-1] + 1, self.step, self.after["step"][-1] + 1)
        begin, middle, again, end = np.searchsorted(rows["step"], limits)
        before = rows[begin:middle] if middle - begin >= _ENOUGH_STEPS else rows[max(0, middle - _MOST_STEPS) : middle]
        after = rows[again:end] if end - again >= _ENOUGH_STEPS else rows[again : again + _MOST_STEPS]
        return before, after

    @property
    def lacks_phases(self) -> bool:
        """Whether more steps with phases after the change would help to explain it."""
        return len(self.phased[1]) < _ENOUGH_STEPS

    def measure_levels(self) -> dict[str, tuple[float, float]]:
        """Return the seconds of each phase before and after, and those between phases as ``other_s``.

        They are medians, and do not add up: if single steps vary much, a remainder would be noise. Empty if unknown.
        """
        return self._compare_phases(*self.phased)

    def measure_levels_of(self, process: Process) -> dict[str, tuple[float, float]]:
        """Return :meth:`measure_levels` of a rank."""
        return self.measure_levels() if process is self.process else self._compare_phases(*self.read_phased(process))

    def _compare_phases(self, before: Rows, after: Rows) -> dict[str, tuple[float, float]]:
        if not len(before) or not len(after) or (before["forward_s"] > 0).any() != (after["forward_s"] > 0).any():
            return {}  # forwards that began or ceased to be seen would count as time between phases
        levels = {name: (float(np.median(before[name])), float(np.median(after[name]))) for name in _PHASE_COLUMNS}
        return {**levels, "other_s": (float(np.median(measure_between(before))), float(np.median(measure_between(after))))}

    def measure_parts(self) -> dict[str, float]:
        """Return the change of each phase in seconds, and that of the time between phases; empty if they are unknown."""
        return {name: after - before for name, (before, after) in self.measure_levels().items()}

    def measure_gpu_uses(self, process: Process) -> tuple[float, float]:
        """Return the share of the time in which a rank's GPU was busy before and after; NaN if unknown."""
        changed_ns = int(self.after["begin_unix_ns"][0])
        earlier_ns = min(int(self.before["begin_unix_ns"][0]), changed_ns - _USED_NS)
        return (
            measure_gpu_use(process, earlier_ns, changed_ns),
            measure_gpu_use(process, changed_ns + _LOOK_BACK_NS, self.latest_ns),
        )

    def measure_device_parts(self) -> dict[str, float]:
        """Return the change of the GPU's own time for each phase that computes, in seconds; empty if it is unknown."""
        before, after = (self._measure_device(rows) for rows in self.phased)
        return {name: after[name] - before[name] for name in before if name in after}

    def _measure_device(self, rows: Rows) -> dict[str, float]:
        steps = rows["step"][~rows["light"]]
        if not len(steps):
            return {}
        known_ns = self.latest_ns
        read = self.process.records("device_times").read_window(int(rows["begin_unix_ns"][0]), known_ns)
        if not len(read):
            return {}
        timed = read.rows[(read.rows["depth"] == 0) & (read.rows["engine"] == 0) & np.isin(read.rows["step"], steps)]
        seconds = {}
        for column in COMPUTING_COLUMNS:
            of_phase = timed[timed["phase"] == PHASE_CODE[column.removesuffix("_s")]]
            numbers, index = np.unique(of_phase["step"], return_inverse=True)
            if len(numbers):
                seconds[column] = float(np.median(np.bincount(index, of_phase["device_ns"]))) / 1e9
        return seconds

    def measure_own(self) -> tuple[float, float]:
        """Return the median of :func:`compute_own_seconds` before and after; NaN if it is unknown."""
        before, after = (compute_known_median(compute_own_seconds(rows)) for rows in self.phased)
        return before, after


def name_part(column: str) -> str:
    """Name where a change of measure_parts() happened: ``in the step phase``."""
    return _BETWEEN if column == "other_s" else f"in the {column.removesuffix('_s')} phase"


def count_iterations(rows: Rows) -> int:
    """Return the number of iterations from the first to the last of these steps, omitted ones included."""
    return int(rows["step"][-1]) - int(rows["step"][0]) + int(rows["steps"][0])


def _drop_pauses(samples: Samples, steps: Rows) -> Samples:
    seconds = steps["iteration_s"]
    is_pause = seconds >= _PAUSE_TIMES * np.nanmedian(seconds)
    return samples.select(~is_pause[np.minimum(np.searchsorted(steps["end_unix_ns"], samples.times), len(steps) - 1)])


def match_steps(rows: Rows, steps: Rows) -> slice:
    """Return the slice of ``rows`` from the first to the last of ``steps``."""
    low, high = np.searchsorted(rows["step"], (steps["step"][0], steps["step"][-1] + 1))
    return slice(int(low), int(high))


def measure_distance(rows: Rows) -> dict[str, float]:
    """Return ``steps_apart``, the usual distance between steps if others between them were only counted; else nothing."""
    distance = float(np.median(np.diff(rows["step"]))) if len(rows) > 1 else 1.0
    return {"steps_apart": distance} if distance > 1 else {}


def compute_own_seconds(rows: Rows) -> Floats:
    """Return the seconds of each step in which ranks do not wait for each other: data, and between phases."""
    shared = rows["forward_s"] + rows["backward_s"] + rows["step_s"]
    return np.asarray(rows["iteration_s"] - shared, np.float64)


def measure_collecting(process: Process, steps: Rows) -> float:
    """Return the seconds per iteration of Python's garbage collector, for consecutive steps."""
    return _spread_over(process, events.Garbage, lambda event: event.seconds, steps) / count_iterations(steps)


class CompilingWork(NamedTuple):
    """The work of torch.compile in some steps."""

    graphs: int
    seconds: float  # for each iteration


def measure_compiling(process: Process, steps: Rows) -> CompilingWork:
    """Return the compilations in consecutive steps."""
    graphs = _spread_over(process, events.Compiled, lambda event: event.graphs, steps)
    seconds = _spread_over(process, events.Compiled, lambda event: event.seconds or 0.0, steps)
    return CompilingWork(round(graphs), seconds / count_iterations(steps))


def _spread_over(process: Process, kind: type[T], read_total: Callable[[T], float], steps: Rows) -> float:
    """Return the part of events' totals that falls into steps; each total is spread evenly over its time."""
    begin_ns, end_ns = int(steps["begin_unix_ns"][0]), int(steps["end_unix_ns"][-1])
    offset_ns, total = process.source.offset_ns, 0.0
    for event in select_events(process.events_of(kind), begin_ns, process.at.cursor_ns):
        first_ns, last_ns = event.begin_ns + offset_ns, event.unix_ns
        if first_ns > end_ns:
            break
        shared_ns = min(last_ns, end_ns) - max(first_ns, begin_ns)
        if shared_ns >= 0:
            total += read_total(event) * (shared_ns / (last_ns - first_ns) if last_ns > first_ns else 1.0)
    return total

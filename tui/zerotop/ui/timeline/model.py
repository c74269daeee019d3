"""Builds the timeline's picture from a frame, without a terminal."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeGuard

import numpy as np

from zerotop.analysis.findings import Finding
from zerotop.analysis.hardware.gpu_faults import name_fault
from zerotop.analysis.live_view import JobState
from zerotop.analysis.timeline.range_summary import RangeSummary, summarize_range
from zerotop.analysis.timeline.timeline import MOMENT_NS, ColumnValues, LaneSubject, Timeline, TimelineBuilder, Window
from zerotop.analysis.views.last_loss import LastLogged, read_last_logged
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.moments.at import find_cores
from zerotop.ui.base import findings
from zerotop.ui.base.frame import Frame
from zerotop.ui.charts import GrowingScales
from zerotop.ui.timeline.lanes import count_ribbons, layout_lanes
from zerotop.ui.timeline.picture import Mark, Picture
from zerotop.ui.timeline.window import PlaybackState, TimelineView
from zerotop_probe.recording.events import GpuFault, JobEnded

# Reading data for a picture takes about this long; the rest is read for the next picture.
BUDGET_S = 0.04


class PictureBuilder:
    """Builds pictures of one recording."""

    def __init__(self, source: RecordingSource, view: TimelineView) -> None:
        self._source, self._view = source, view
        self._timelines = TimelineBuilder(source.recording, lambda: source.rank_steps)
        self._scales = GrowingScales()
        self._scales_key: tuple[LaneSubject, int] | None = None
        self._summary: tuple[object, RangeSummary | None] = (None, None)
        self.last_picture: Picture | None = None
        """The latest picture."""
        self.pointed_ns: int | None = None
        """The moment under the mouse, since the recording began."""

    def point_at(self, moment: int | None) -> None:
        """Show the values of this moment, or again those at the cursor."""
        self.pointed_ns = moment

    @property
    def is_busy(self) -> bool:
        """Whether the last picture lacks parts that could not be read in time."""
        return self.last_picture is not None and not self.last_picture.timeline.is_complete

    def finish_work(self) -> None:
        """Do nothing: each picture reads on."""

    def has_data(self, frame: Frame) -> bool:
        """Whether any lane has data."""
        return bool(
            self._timelines.find_rank_hosts() or self._timelines.get_lanes(self._choose_subject(frame)).find_recorded_names()
        )

    def _choose_subject(self, frame: Frame) -> LaneSubject:
        hosts = self._timelines.find_rank_hosts()
        rank = frame.rank if frame.rank in hosts else next(iter(hosts), -1)
        return self._timelines.make_subject(-1 if rank is None else rank)

    def build_picture(self, frame: Frame, cells: int, height: int) -> Picture:
        """Build the picture for charts that are ``cells`` wide."""
        origin_ns, subject = self._timelines.origin_ns, self._choose_subject(frame)
        end_ns, now = self._source.end_ns, self._build_state(frame, origin_ns)
        window = self._view.choose_window(now, 2 * cells, frame.view.progress.iteration_s)
        self._timelines.update([subject.rank])
        recorded = self._timelines.get_lanes(subject).find_recorded_names()
        marks = tuple(_make_mark(finding, origin_ns) for finding in frame.all_findings if _is_marked(finding))
        ranks = self._order_ranks(subject.rank)
        faults = tuple(
            (fault.unix_ns - origin_ns, name_fault(fault)) for fault in self._source.recording.events_of(GpuFault, end_ns)
        )
        # After a job's end the values are those of its last step.
        pointed = max(0, frame.state_view.cursor_ns - origin_ns)
        if self.pointed_ns is not None:
            pointed = min(self.pointed_ns, max(0, end_ns - origin_ns))
        logged = self._read_logged(frame, pointed)
        places = layout_lanes(height, recorded | logged.keys(), len(ranks), marks=bool(marks), faults=bool(faults))
        shown = ranks[: count_ribbons(places)]
        timeline = self._timelines.build_timeline(window, subject, shown, end_ns, budget_s=BUDGET_S)
        self._reset_scales(subject, window)
        selected = self._view.get_range()
        pointed_step = None if frame.training is None else frame.training.progress.step
        if self.pointed_ns is not None or pointed_step is None:
            pointed_step = self._timelines.find_step_at(subject.rank, origin_ns + pointed)
        self.last_picture = Picture(
            timeline=timeline,
            subject=subject,
            boxes=tuple(places),
            ranks=tuple(shown),
            other_ranks=len(ranks) - len(shown),
            cursor=now.cursor,
            pointed=pointed,
            marks=marks,
            faults=faults,
            steps=self._find_steps(timeline, subject),
            pointed_step=pointed_step,
            selected_range=selected,
            summary=self._summarize_range(subject, selected, timeline),
            host_cores=find_cores(self._source.recording.at(), subject.host) or 0,
            missing_notes=_describe_missing(
                recorded, "" if shown else _NO_ENGINE if frame.view.job.state is JobState.STARTING else _NO_PROBE
            ),
            scales=self._scales,
            values_then=self._read_values(subject, pointed) if window.column_ns > MOMENT_NS else {},
            logged=logged,
            headline=_make_mark(frame.headline, origin_ns) if _is_marked(frame.headline) else None,
            phases_now={} if self.pointed_ns is not None else _read_phases(frame, shown),
        )
        return self.last_picture

    def _read_values(self, subject: LaneSubject, pointed: int) -> dict[str, ColumnValues]:
        return self._timelines.get_lanes(subject).read_moment(self._timelines.origin_ns + pointed)

    def _read_logged(self, frame: Frame, pointed: int) -> dict[str, LastLogged]:
        """Return the last logged values up to the cursor: what the last step logged came after its end."""
        unix_ns = self._timelines.origin_ns + pointed if self.pointed_ns is not None else frame.view.cursor_ns
        return read_last_logged(self._source.recording, self._source.find_logging_steps(unix_ns), unix_ns)

    def _build_state(self, frame: Frame, origin_ns: int) -> PlaybackState:
        moment, last = frame.moment, self._source.last_step
        over_ns = (
            self._source.find_step_end(last) if last is not None and moment.is_following and not moment.is_live else None
        )
        return PlaybackState(
            cursor=max(0, frame.view.cursor_ns - origin_ns),
            end=max(0, self._source.end_ns - origin_ns),
            following=moment.is_following,
            playing=moment.is_playing,
            idle=0 if over_ns is None else max(0, self._source.end_ns - over_ns),
            is_over=frame.view.job.state.is_over,
        )

    def _order_ranks(self, chosen: int) -> list[int]:
        """Return the ranks with phases, from the chosen one on."""
        ranks = list(self._timelines.find_probed_ranks())
        place = ranks.index(chosen) if chosen in ranks else 0
        return [*ranks[place:], *ranks[:place]]

    def _find_steps(self, timeline: Timeline, subject: LaneSubject) -> tuple[tuple[int, int], ...]:
        """Return begins and numbers of the steps in the window: all, or every second, fifth, tenth and so on."""
        window, origin_ns = timeline.window, self._timelines.origin_ns
        begin_ns = origin_ns + window.first * window.column_ns
        begins, numbers = self._timelines.find_begun_steps(
            subject.rank, begin_ns, begin_ns + window.columns * window.column_ns
        )
        if len(numbers) and self._has_succeeded():  # then nothing was in progress after the last step
            borders = (times.step_borders for times in self._timelines.get_step_times(subject.rank))
            is_step = ~np.isin(begins, [each[-1] for each in borders if len(each)])
            begins, numbers = begins[is_step], numbers[is_step]
        distance = _choose_interval(len(numbers), window.columns // 2, len(str(numbers[-1])) if len(numbers) else 1)
        shown = numbers % distance == 0
        return tuple(zip((begins[shown] - origin_ns).tolist(), numbers[shown].tolist(), strict=True))

    def _has_succeeded(self) -> bool:
        return any(event.exit_code == 0 for event in self._source.recording.events_of(JobEnded))

    def _summarize_range(
        self, subject: LaneSubject, selected: tuple[int, int] | None, timeline: Timeline
    ) -> RangeSummary | None:
        if selected is None:
            return None
        key = (subject, selected, timeline if self._source.is_live else None)
        if self._summary[0] != key:
            begin_ns, end_ns = (moment + self._timelines.origin_ns for moment in selected)
            self._summary = key, summarize_range(self._timelines, subject, begin_ns, end_ns)
        return self._summary[1]

    def _reset_scales(self, subject: LaneSubject, window: Window) -> None:
        """Clear the scales for another zoom or rank. Otherwise they never shrink."""
        if self._scales_key != (subject, window.column_ns):
            self._scales_key = subject, window.column_ns
            self._scales.clear()


def _read_phases(frame: Frame, shown: Collection[int]) -> dict[int, str]:
    """Return the phases of the ranks that are shown: those of others are read only when they are asked for."""
    return {rank.rank: rank.phase for rank in frame.view.ranks if rank.alive and rank.rank in shown}


def _choose_interval(steps: int, cells: int, digits: int) -> int:
    """Return how many steps apart step numbers fit."""
    needed = steps * (digits + 3) / max(1, cells)
    power: int = 10 ** max(0, int(np.floor(np.log10(max(1.0, needed)))))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= needed)


_NO_ENGINE, _NO_PROBE = "phases (before the training)", "phases (no probe in any rank)"


def _describe_missing(recorded: Collection[str], phases: str) -> tuple[str, ...]:
    """Describe which lanes are missing and why. ``phases`` does so for phases, "" if they are there."""
    missing = [phases] if phases else []
    if "utilization" not in recorded:
        missing.append("GPU")
    else:
        missing += ["PCIe"] if "sent" not in recorded else []
        missing += ["PyTorch's memory"] if "allocated" not in recorded else []
    if "cores" not in recorded and "host_cores" not in recorded:
        missing.append("CPU (no sampler)")
    return (f"Not recorded: {', '.join(missing)}",) if missing else ()


def _is_marked(finding: Finding | None) -> TypeGuard[Finding]:
    return finding is not None and finding.confidence >= findings.MIN_CONFIDENCE


def _make_mark(finding: Finding, origin_ns: int) -> Mark:
    """Return the mark of a finding, at the moment when it was known with these numbers."""
    return Mark(
        finding.detected_ns - origin_ns, findings.choose_style(finding), findings.describe_with_name(finding), finding
    )

"""Makes a frame from a recording and the user's choices: the part of the viewer that reads the recording."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from zerotop.analysis.failures.diagnosis import find_known_failure
from zerotop.analysis.failures.end import End
from zerotop.analysis.findings import Finding, Severity, link_findings
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.ranks.delays import list_delays
from zerotop.analysis.ranks.nodes import find_wanted_nodes
from zerotop.analysis.reports.end_summary import EndSummary, summarize_end
from zerotop.analysis.reports.finding_costs import FindingCost, rank_findings
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.views.watching_cost import measure_work_in_slowest
from zerotop.ui.app.playhead import Playhead
from zerotop.ui.base.bars.footer import CursorState
from zerotop.ui.base.findings import choose_finding, find_time_marks
from zerotop.ui.base.frame import Frame, Pane
from zerotop.ui.base.interfaces import Controller
from zerotop.ui.base.tabs import TABS

_MIN_LINES, _MAX_LINES = 200, 102_400  # that are read
_NO_SAMPLER = "The sampler has stopped: CPU, host and GPU figures are out of date. r restarts it."


class Scrollback:
    """The part of the job's output that the live screen shows: its end, or lines further back that stay.

    While scrolled back, the output shows the moment when scrolling began, so that its lines do not run away.
    Belongs to the thread that reads the source.
    """

    def __init__(self, source: RecordingSource) -> None:
        self._source = source
        self._lines_back = 0
        self._anchor_ns = 0
        self._anchor_lines: tuple[str, ...] = ()
        self._seek_count = 0

    def scroll_lines(self, lines: int, room: int, cursor_ns: int) -> None:
        """Scroll towards older lines (positive) or newer ones, as far as there are any. A pane shows ``room`` lines."""
        if not self._lines_back:
            self._anchor_ns = cursor_ns
        back = max(0, self._lines_back + lines)
        if back:
            most = _MIN_LINES
            while most < min(_MAX_LINES, back + room):
                most *= 2
            self._anchor_lines = self._source.output_lines(self._anchor_ns, most)
            back = min(back, max(0, len(self._anchor_lines) - room))
        self._lines_back = back

    def follow_seeks(self, seek_count: int) -> None:
        """Return to the end if the cursor has been moved to another moment, which ``seek_count`` counts."""
        if seek_count != self._seek_count:
            self._lines_back, self._seek_count = 0, seek_count

    def make_pane(self, newest: tuple[str, ...]) -> Pane:
        """Return the lines to show; ``newest`` are the last ones at the cursor."""
        if not self._lines_back:
            return Pane(newest, seek_count=self._seek_count)
        return Pane(
            self._anchor_lines,
            self._lines_back,
            has_newer=newest[-1:] != self._anchor_lines[-1:],
            seek_count=self._seek_count,
        )


@dataclass(frozen=True, slots=True)
class FrameRequest:
    """The inputs of a frame besides the recording: the user's choices, the sampler's state, the last trace request."""

    playhead: Playhead  # a copy
    rank: int | None
    finding: Finding | None  # the one gone to
    seek_count: int  # moves of the cursor so far
    sampler_missing: bool
    trace_request: int | None


class FrameBuilder:
    """Makes frames of one recording. All of it belongs to the thread that reads the recording."""

    guide: Callable[[LiveView, tuple[Finding, ...]], str] | None = None
    """Says what to look at next, from the view and the findings so far."""

    compare_past: Callable[[str], list[str]] | None = None
    """Compares an ended recording, by its path, with the last ones of its command, in sentences."""

    def __init__(self, source: RecordingSource, controller: Controller | None) -> None:
        self._source = source
        self._controller = controller
        self._scrollback = Scrollback(source)
        self._ranking, self._all_ranking = _Ranking(), _Ranking()
        self._summary: tuple[tuple[int, int], EndSummary] | None = None  # with what it is of
        self._past: str | None = None
        self._last_step: LiveView | None = None

    def build_frame(self, request: FrameRequest) -> Frame:
        """Return the frame at the request's cursor as it is now."""
        source, head = self._source, request.playhead
        view = source.view_at(None if head.following else head.compute_cursor(source.begin_ns, source.end_ns))
        known = source.findings_at(None)
        moment = build_cursor_state(source, head, known)
        findings = source.findings_at(view.cursor_ns)
        # Nodes that send less have no samples of processes.
        is_known = any(table.rank == request.rank for table in source.recording.sources["spans"])
        rank = request.rank if is_known else find_shown_rank(view, request.rank)
        delays = list_delays(findings, len(view.ranks))
        # All columns of the chart are of one rank: if ranks wait for one another, the slowest one changes by chance.
        split = delays[-1].rank if delays and request.rank is None else rank
        if split is not None and len(view.ranks) > 1:
            view = replace(view, iterations=source.iterations_on(split, view))
        failure = find_known_failure(source.recording.at(view.cursor_ns))
        ranked = self._ranking.rank(findings, source, view.cursor_ns)
        headline = request.finding or choose_finding(ranked, view.cursor_ns, failure)
        self._scrollback.follow_seeks(request.seek_count)
        if self._controller is not None and source.is_live:
            self._controller.want_detail(find_wanted_nodes(source.recording, source.end_ns, known, request.rank))
        return Frame(
            view,
            moment,
            self._scrollback.make_pane(view.output),
            (_NO_SAMPLER,) if request.sampler_missing else (),
            findings,
            headline,
            next((linked.cause for linked in link_findings(findings) if linked.finding is headline), None),
            known,
            self._all_ranking.rank(known, source, source.end_ns),
            tabs=TABS,
            rank=rank,
            is_rank_chosen=request.rank is not None,
            failure=failure,
            summary=self._summarize(known, failure) if view.job.state.is_over and head.following else None,
            can_control=self._controller is not None and source.is_live,
            trace_request=request.trace_request,
            training=self._view_last_step() if view.job.state.is_over and head.following else None,
            tip="" if self.guide is None else self.guide(view, findings),
        )

    def _view_last_step(self) -> LiveView | None:
        source, step = self._source, self._source.last_step
        end_ns = None if step is None else source.find_step_end(step)
        if end_ns is not None and (self._last_step is None or self._last_step.cursor_ns != end_ns):
            self._last_step = replace(source.view_at(end_ns), is_last_step=True)
        return self._last_step

    def _summarize(self, findings: tuple[Finding, ...], failure: End | None) -> EndSummary:
        """Summarize an ended job. The post-mortem tells of a failure already, not of an error before it, such as a hang."""
        source = self._source

        def is_told(finding: Finding) -> bool:
            return failure is None or finding.severity is not Severity.ERROR or finding.detected_ns < failure.unix_ns

        told = tuple(filter(is_told, findings))
        key = len(told), source.end_ns
        if self._summary is None or self._summary[0] != key:
            batch_step = source.view_at(None).job.engine.batch_step
            steps, work_s = source.job_steps, measure_work_in_slowest(source.recording.sources["probe"], source.job_steps)
            summary = summarize_end(told, steps, source.job_tokens, source.end_ns, batch_step, work_s)
            self._summary = key, replace(summary, past=self._describe_past())
        return self._summary[1]

    def _describe_past(self) -> str:
        if self._past is None and self.compare_past is not None:
            self._past = " ".join(self.compare_past(str(self._source.recording.path)))
        return self._past or ""

    def scroll_output(self, lines: int, room: int, cursor_ns: int, seek_count: int) -> None:
        """Scroll the live screen's output, see :class:`Scrollback`."""
        self._scrollback.follow_seeks(seek_count)
        self._scrollback.scroll_lines(lines, room, cursor_ns)


class _Ranking:
    """Findings by their cost, computed again with other findings or when the steps are a tenth more or fewer."""

    def __init__(self) -> None:
        self._last: tuple[tuple[tuple[Finding, ...], int], tuple[FindingCost, ...]] = ((), -1), ()

    def rank(self, findings: tuple[Finding, ...], source: RecordingSource, cursor_ns: int) -> tuple[FindingCost, ...]:
        if not findings:
            return ()
        steps = source.job_steps
        count = int(np.searchsorted(steps["end_unix_ns"], cursor_ns, "right"))
        key = findings, round(math.log(count + 1, 1.1))
        if key != self._last[0]:
            self._last = key, rank_findings(findings, steps[:count], cursor_ns)
        return self._last[1]


def build_cursor_state(source: RecordingSource, head: Playhead, findings: tuple[Finding, ...]) -> CursorState:
    """Return where in the recording a playhead is. Any thread may ask."""
    begin, end = source.begin_ns, source.end_ns
    return CursorState(
        cursor_s=(head.compute_cursor(begin, end) - begin) / 1e9,
        end_s=max(0, end - begin) / 1e9,
        is_live=source.is_live,
        is_following=head.following,
        is_playing=head.playing,
        speed=head.speed,
        marks=find_time_marks(findings, begin),
    )


def find_shown_rank(view: LiveView, chosen: int | None) -> int | None:
    """Return the chosen rank, or the first one if there is no such rank."""
    ranks = [rank.rank for rank in view.ranks]
    # Without samples of processes the ranks are unknown, and any choice stands.
    return chosen if chosen in ranks or not ranks else min(ranks)

"""The recording as the screens see it: a view at any cursor, the same live and in replay."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.engine import EngineSummary, measure_batch, parse_engine, read_first_engine
from zerotop.analysis.findings import Finding
from zerotop.analysis.live_view import Iterations, Job, JobState, LiveView, Progress
from zerotop.analysis.prices import HourlyPrice, read_price
from zerotop.analysis.processes.ranks_and_hosts import read_hosts, read_ranks
from zerotop.analysis.steps.job_pace import measure_iteration, measure_mean, measure_token_rate
from zerotop.analysis.views.finding_search import Findings, SearchResult, has_ended
from zerotop.analysis.views.gpus import read_gpus
from zerotop.analysis.views.history import Histories
from zerotop.analysis.views.iterations import IterationTable
from zerotop.analysis.views.job_exit import Losses, count_losses, is_left_running
from zerotop.analysis.views.last_loss import read_last_loss
from zerotop.analysis.views.notices import describe_notices, describe_rank_files, describe_wait
from zerotop.analysis.views.restarts import group_attempts
from zerotop.analysis.views.rhythm import RhythmInference
from zerotop.analysis.views.watching_cost import measure_cost
from zerotop.recording.moments.process_exits import find_end_signal, read_exits, read_launcher
from zerotop.recording.output.transcript import Transcript
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Rows
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop.recording.steps.step_table import RankSteps, StepTable
from zerotop_probe.recording.events import Attached, JobEnded, SkippedUpdates, TotalSteps

# Iterations that a rate is taken over.
_RATE_STEPS = 10
_NEAR_STEPS = 1_000  # that tell the tokens of those among them that were only counted
_OUTPUT_LINES = 200
_NO_STEPS: Rows = np.empty(0, STEP_DTYPE)
_LOST = "The recording stops here. The job's exit status is unknown."
_DETACHED = "The recording was ended here, and the job went on."


class _Extent(NamedTuple):
    """The state of a recording after one refresh, which any thread may read."""

    is_live: bool
    has_ended: bool  # the job, as far as known
    end_ns: int
    steps: NDArray[np.int64]  # numbers of the steps that all ranks have finished, oldest first,
    step_end_ns: NDArray[np.int64]  # and when each was
    first_step_ns: int  # when the first of them began; 0 without one


class StepEnd(NamedTuple):
    step: int
    unix_ns: int  # when all ranks had finished it


class RecordingSource:
    """One recording, live or not. Times are unix nanoseconds.

    One thread at a time owns it: it refreshes it, makes views and reads the recording. Any thread may read ``is_live``,
    ``begin_ns``, ``first_step_ns``, ``end_ns``, ``last_step``, ``find_step_end`` and ``findings_at``, which are as of the
    last refresh.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        memory: bool = False,
        price: HourlyPrice | None = None,
        findings: tuple[Finding, ...] = (),
    ) -> None:
        """``memory``: read the steps' columns of memory too, which no view shows. ``price``: [the recording's].

        ``findings``: those that an earlier search has found; they count until the first search is over.
        """
        self.recording = recording
        self._price = price or read_price(recording.info)
        self._steps = StepTable(recording, memory=memory)
        self._histories = Histories(recording)
        self._iterations = IterationTable()
        self._rhythm = RhythmInference(recording)
        self._findings = Findings(recording, earlier=findings)
        self._transcript, self._older_transcript = Transcript(recording), Transcript(recording)
        self._last_view: LiveView | None = None  # of what has been read,
        self._is_end_view = False  # and whether it is of the end
        refreshed_ns = time.time_ns()
        self._steps.update()
        self._exits = read_exits(recording.at())
        self._extent = _Extent(False, False, 0, self._iterations.rows["step"], self._iterations.known_ns, 0)
        self._update_extent(refreshed_ns)
        self._join_steps()

    # Any thread may ask for these

    @property
    def is_live(self) -> bool:
        """True while the recording was being written at the last refresh."""
        return self._extent.is_live

    @property
    def begin_ns(self) -> int:
        """The earliest moment that can be shown: when the recording was made."""
        return self.recording.begin_ns

    @property
    def first_step_ns(self) -> int:
        """The begin of the first recorded step, where a replay starts; ``begin_ns`` if there is none."""
        return max(self._extent.first_step_ns, self.begin_ns)

    @property
    def end_ns(self) -> int:
        """The latest moment that can be shown. While the recording is live, it moves at each refresh."""
        return self._extent.end_ns

    @property
    def last_step(self) -> int | None:
        """The last step that all ranks have finished, in the whole recording; None before the first one."""
        steps = self._extent.steps
        return int(steps[-1]) if len(steps) else None

    @property
    def last_step_end(self) -> StepEnd | None:
        """When all ranks had finished the last step; None before the first one."""
        extent = self._extent
        return StepEnd(int(extent.steps[-1]), int(extent.step_end_ns[-1])) if len(extent.steps) else None

    def find_step_end(self, step: int) -> int | None:
        """Return the moment at which ``step`` has just finished on all ranks, or None if there is no such step."""
        extent = self._extent
        matches = np.flatnonzero(extent.steps == step)
        return int(extent.step_end_ns[matches[0]]) if len(matches) else None

    def findings_at(self, cursor_ns: int | None) -> tuple[Finding, ...]:
        """Return the findings known at the cursor, in the order in which they became known; None is the end."""
        extent = self._extent
        found = self._findings.findings_at(extent.end_ns if cursor_ns is None else cursor_ns)
        return tuple(finding.for_next_run for finding in found) if extent.has_ended else found

    # These belong to the thread that reads

    @property
    def rank_steps(self) -> list[RankSteps]:
        """The rank processes with their steps, in the order in which they created their engines."""
        return self._steps.rank_steps

    @property
    def job_steps(self) -> Rows:
        """The steps that all ranks have finished, each as on its slowest rank (STEP_DTYPE)."""
        return self._iterations.rows

    @property
    def job_tokens(self) -> NDArray[np.int64]:
        """Tokens of each of ``job_steps`` over all ranks, 0 where unknown."""
        return self._iterations.token_counts

    def refresh(self) -> bool:
        """Read the records written since the last call. True if there were any."""
        refreshed_ns, was_live = time.time_ns(), self.is_live
        fresh = self.recording.refresh()
        finished = self._steps.update()
        self._update_extent(refreshed_ns)
        fresh |= self.is_live != was_live
        if not fresh:
            self._is_end_view &= not self.is_live  # the end of one that is live has moved on
            return False
        self._findings.search_news()
        exits = read_exits(self.recording.at())
        if finished or not (was_live and self.is_live) or exits is not self._exits:
            self._exits = exits
            self._join_steps()
        self._last_view = None
        return True

    def reopen(self) -> RecordingSource:
        """Return the recording, opened again, without records deleted since. Any thread may ask. Raise RecordingError."""
        recording = type(self.recording).open(self.recording.path)
        return RecordingSource(recording, price=self._price, findings=self.findings_at(None))

    def close(self) -> None:
        """Let go of the recording's files. What was shown of them may read as zeros from now on."""
        self.recording.close()

    def _update_extent(self, refreshed_ns: int) -> None:
        is_live = self.recording.is_live
        self._extent = self._extent._replace(
            is_live=is_live,
            has_ended=has_ended(self.recording),
            end_ns=refreshed_ns if is_live else self.recording.last_written_ns,
        )

    def _join_steps(self) -> None:
        over_ns = None if self.is_live else self.end_ns
        self._iterations.extend(group_attempts(self._steps.rank_steps, self._exits, over_ns))
        rows = self._iterations.rows
        first_ns = int(rows["begin_unix_ns"][0]) if len(rows) else 0
        self._extent = self._extent._replace(
            steps=rows["step"], step_end_ns=self._iterations.known_ns, first_step_ns=first_ns
        )

    def search_findings(self) -> SearchResult:
        """Search one more piece of the recording for findings."""
        return self._findings.search_piece()

    def output_lines(self, cursor_ns: int, most: int) -> tuple[str, ...]:
        """Return the last lines of the job's output at the cursor, at most ``most``: further back than a view has."""
        return self._older_transcript.read_tail(cursor_ns, most)

    def view_at(self, cursor_ns: int | None) -> LiveView:
        """Return the values at the cursor; None is the end, which for a live recording is the last refresh."""
        view = self._last_view
        if view is None or not (self._is_end_view if cursor_ns is None else view.cursor_ns == cursor_ns):
            view = self._last_view = self._build_view(self.end_ns if cursor_ns is None else cursor_ns)
            self._is_end_view = cursor_ns is None
        return view

    def iterations_on(self, rank: int, view: LiveView) -> Iterations:
        """Return a view's iterations as one rank recorded them; without new ones, the same object as before."""
        return self._iterations.iterations_on(rank, len(view.iterations.step))

    def _build_view(self, cursor: int) -> LiveView:
        count = self._iterations.count_until(cursor)
        at = self.recording.at(cursor)
        lost = count_losses(self.recording.at(cursor))
        job = self._build_job(cursor, lost)
        gpus, ranks = read_gpus(at), read_ranks(at, ended=job.state is JobState.ENDED)
        gpu_keys = [(gpu.host, gpu.index) for gpu in gpus]
        return LiveView(
            cursor_ns=cursor,
            job=job,
            progress=self._measure_progress(cursor, count, job),
            gpus=gpus,
            hosts=read_hosts(self.recording.at(cursor)),
            ranks=ranks,
            iterations=self._iterations.first_iterations(count),
            cost=measure_cost(self.recording.at(cursor), lost),
            output=self._transcript.read_tail(cursor, _OUTPUT_LINES),
            loss=read_last_loss(self.recording, self.find_logging_steps(cursor), cursor),
            inferred=self._rhythm.infer_at(cursor) if not count and job.state is JobState.RUNNING else None,
            history=self._histories.history_at(at, ranks, gpu_keys),
        )

    def _build_job(self, cursor: int, losses: Losses) -> Job:
        facts = read_first_engine(self.recording.at(cursor))
        state, code, text = self._find_state(cursor, bool(facts))
        info = self.recording.info
        return Job(
            name=self.recording.name,
            command=_shorten_command(info.get("command") or ()),
            launcher=read_launcher(self.recording.at(cursor)),
            engine=EngineSummary(**parse_engine(facts) | measure_batch(facts, self.find_lead_steps(cursor))),
            state=state,
            exit_code=code,
            exit_signal=find_end_signal(self.recording.at(cursor)) if state is JobState.ENDED else "",
            exit_text=text,
            notices=describe_notices(self.recording.at(cursor), losses, self._steps.rank_steps),
            prints_here=not self.recording.events_of(Attached, cursor),
            price=self._price,
            rank_files=describe_rank_files(self.recording, cursor),
        )

    def find_lead_steps(self, cursor: int) -> Rows:
        """Return the steps that the rank that made its engine first had finished at the cursor."""
        steps = next((process.step_rows for process in self.rank_steps if len(process.step_rows)), _NO_STEPS)
        finished: Rows = steps[: np.searchsorted(steps["end_unix_ns"], cursor, "right")]
        return finished

    def find_logging_steps(self, cursor: int) -> Rows:
        """Return the steps that the lowest rank, whose logged values are shown, had finished at the cursor."""
        known = [process.step_rows for process in self.rank_steps if len(process.step_rows)]
        steps = min(known, key=lambda rows: int(rows["rank"][0]), default=_NO_STEPS)
        finished: Rows = steps[: np.searchsorted(steps["end_unix_ns"], cursor, "right")]
        return finished

    def _find_state(self, cursor: int, has_engine: bool) -> tuple[JobState, int | None, str]:
        ended = self.recording.events_of(JobEnded, cursor)
        if ended:
            return JobState.ENDED, ended[-1].exit_code, ended[-1].text or ""
        if not self.is_live and cursor >= self.end_ns:
            return (
                (JobState.DETACHED, None, _DETACHED)
                if is_left_running(self.recording.at(cursor))
                else (JobState.LOST, None, _LOST)
            )
        if not has_engine and not self.recording.events_of(Attached, cursor):
            return JobState.STARTING, None, describe_wait(self.recording.at(cursor))
        return JobState.RUNNING, None, ""

    def _measure_progress(self, cursor: int, count: int, job: Job) -> Progress:
        rows, counts = self._iterations.rows[:count], self._iterations.token_counts[:count]
        is_over = job.state.is_over
        near = slice(None if is_over else -_NEAR_STEPS, None)
        # Without the first iteration, in which the training starts up, once there are others.
        recent = slice(-max(1, min(_RATE_STEPS, len(rows) - 1)), None)
        seconds = measure_iteration(rows) if is_over else measure_mean(rows[recent])
        planned = self.recording.events_of(TotalSteps, cursor)
        total = int(planned[-1].steps) if planned else None
        step = int(rows["step"][-1]) if len(rows) else None
        left = total - step - 1 if total is not None and step is not None else math.nan
        ended = self.recording.events_of(JobEnded, cursor)
        return Progress(
            step=step,
            total_steps=total,
            skipped_steps=int(rows["steps"][rows["skipped"]].sum()) + self._count_skipped_on_gpu(cursor),
            iteration_s=seconds,
            recent_iterations=len(rows[recent]),
            tokens_per_s=measure_token_rate(rows[near], counts[near], None if is_over else recent),
            eta_s=math.nan if is_over else left * seconds,
            elapsed_s=max(0.0, ((ended[-1].unix_ns if ended else cursor) - self.begin_ns) / 1e9),
        )

    def _count_skipped_on_gpu(self, cursor: int) -> int:
        """Return how many steps fused optimizers are known to have skipped, on the lowest rank that reports it."""
        found = self.recording.events_of(SkippedUpdates, cursor)
        lowest = min((event.writer.rank for event in found), default=0)
        return sum(event.skipped for event in found if event.writer.rank == lowest)


def _shorten_command(command: Iterable[Any]) -> tuple[str, ...]:
    """Return the command without the folder of its program, which says little and fills the line."""
    words = [str(word) for word in command]
    return tuple(word.rpartition("/")[2] if place == 0 else word for place, word in enumerate(words))

"""The recording as the screens see it: a view at any cursor, the same live and in replay."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable
from typing import Any

import numpy as np

from zerotop.analysis.annotations import Annotation
from zerotop.analysis.engine import parse_engine, read_first_engine
from zerotop.analysis.live_view import Cost, Job, LiveView, Progress, State
from zerotop.analysis.processes import ranks_and_hosts
from zerotop.analysis.processes.process_exits import read_exits
from zerotop.analysis.processes.running_max import Peaks
from zerotop.analysis.steps.step_table import RankSteps, StepTable
from zerotop.analysis.views.annotation_runner import Findings
from zerotop.analysis.views.gpus import read_gpus
from zerotop.analysis.views.history import Histories
from zerotop.analysis.views.iterations import IterationTable
from zerotop.analysis.views.job_exit import Losses, count_losses, is_left_running
from zerotop.analysis.views.notices import describe_notices
from zerotop.analysis.views.restarts import group_attempts
from zerotop.analysis.views.rhythm import RhythmInference
from zerotop.analysis.views.startup_status import describe_wait
from zerotop.session.reader import Session, run_to_end
from zerotop.session.transcript import Transcript

# Iterations that a rate is taken over.
_RATE_STEPS = 10
_OUTPUT_LINES = 200
_TABLES_AT_ONCE = 256  # that are asked for their number of records in one go
_RATE_NS = 2_000_000_000
_SEARCHES_AT_ONCE = 2  # for findings, each a piece of reading, and one more for each so many ranks
_RANKS_PER_SEARCH = 128
_LOST = "The recording stops here: nobody saw how the job ended."
_DETACHED = "The recording was ended here, and the job went on."


class RecordingSource:
    """Implements ``zerotop.ui.base.interfaces.Source`` over a session."""

    def __init__(self, session: Session, *, memory: bool = False) -> None:
        """``memory``: the steps' columns of memory too, which no view shows."""
        self.session = session
        self._steps = StepTable(session, memory=memory)
        self._peaks = Peaks()
        self._histories = Histories(session)
        self._iterations = IterationTable()
        self._rhythm = RhythmInference(session)
        self._findings = Findings(session)
        self._view_requested = self._follows_end = False  # whether a view was asked for, and whether of the end
        self._transcript, self._older_transcript = Transcript(session), Transcript(session)
        self._refreshed_ns = time.time_ns()
        self._is_live, self._last_written_ns = session.is_live, session.last_written_ns
        self._last_view: LiveView | None = None  # the last one, until there is another of what was read since
        self._is_end_view = False  # whether it is of the end, as it was then
        self._records_before: dict[int, int] = {}  # how many records there were a little before it
        self._steps.update()
        run_to_end(self._iter_digest())

    @property
    def is_live(self) -> bool:
        """True while somebody still writes the recording, as of the last look at it."""
        return self._is_live

    @property
    def begin_ns(self) -> int:
        """When the session was made."""
        return self.session.begin_ns

    @property
    def end_ns(self) -> int:
        """The latest moment there is something to show of; while live that of the last look, up to which all is read."""
        return self._refreshed_ns if self._is_live else self._last_written_ns

    @property
    def rank_steps(self) -> list[RankSteps]:
        """The rank processes with their steps, in the order in which they made their engines."""
        return self._steps.rank_steps

    @property
    def last_step(self) -> int | None:
        """The last step that all ranks have finished."""
        rows = self._iterations.rows
        return int(rows["step"][-1]) if len(rows) else None

    def refresh(self) -> bool:
        """Reads what was written since the last call. True when there was anything."""
        return run_to_end(self.iter_refresh())

    def iter_refresh(self) -> Generator[None, None, bool]:
        """The same in pieces. Meanwhile everything is told as of the last look."""
        looked_ns, was_live = time.time_ns(), self._is_live
        fresh = yield from self.session.iter_refresh()
        finished = yield from self._steps.iter_update()
        yield
        self._refreshed_ns, self._is_live, self._last_written_ns = (
            looked_ns,
            self.session.is_live,
            self.session.last_written_ns,
        )
        fresh |= self._is_live != was_live
        if fresh and (finished or not (was_live and self._is_live) or self._exits is not read_exits(self.session)):
            yield
            yield from self._iter_digest()
            yield
        # Who presses a key while the next view is made is answered from this one.
        view = (yield from self._iter_build_view(self.end_ns)) if fresh and self._follows_end else None
        self._last_view, self._is_end_view = view, True
        yield
        found = False
        # The first picture does not wait for what there is to say about it.
        for _ in range(_SEARCHES_AT_ONCE + self._steps.process_count // _RANKS_PER_SEARCH if self._view_requested else 0):
            found |= self._findings.update(self._last_written_ns)
            yield
        return fresh or found

    def findings_at(self, cursor_ns: int | None) -> tuple[Annotation, ...]:
        """What was found that was known at the cursor, in the order in which it became known; None is the end."""
        return self._findings.findings_at(self.end_ns if cursor_ns is None else cursor_ns)

    def _iter_digest(self) -> Generator[None, None, None]:
        self._exits = read_exits(self.session)
        over_ns = None if self._is_live else self._last_written_ns
        together = yield from group_attempts(self._steps.rank_steps, self._exits, over_ns)
        yield
        yield from self._iterations.iter_extend(together)

    def find_step_end(self, step: int) -> int | None:
        """The moment at which ``step`` has just finished on all ranks."""
        found = np.flatnonzero(self._iterations.rows["step"] == step)
        return int(self._iterations.known_ns[found[0]]) if len(found) else None

    def output_lines(self, cursor_ns: int, most: int) -> tuple[str, ...]:
        """The last lines of the job's output at the cursor, at most so many: further back than a view has."""
        return self._older_transcript.read_tail(cursor_ns, most)

    def view_at(self, cursor_ns: int | None) -> LiveView:
        """What was known at the cursor; None is the end, which for a live recording is the last look at it."""
        return run_to_end(self.iter_view(cursor_ns))

    def iter_view(self, cursor_ns: int | None) -> Generator[None, None, LiveView]:
        """The same in pieces; in one where it is the view that was told last."""
        self._view_requested, self._follows_end = True, cursor_ns is None
        kept = self._last_view
        if kept is None or not (self._is_end_view if cursor_ns is None else kept.cursor_ns == cursor_ns):
            kept = yield from self._iter_build_view(self.end_ns if cursor_ns is None else cursor_ns)
            self._last_view, self._is_end_view = kept, cursor_ns is None
        return kept

    def _iter_build_view(self, cursor: int) -> Generator[None, None, LiveView]:
        yield  # what follows may wait, what is there at once need not
        count = self._iterations.count_until(cursor)
        nodes, engines = self.session.events_named("node", cursor), self.session.events_named("engine", cursor)
        lost = count_losses(self.session, cursor)
        yield
        job = self._build_job(cursor, lost)
        yield
        lies_on = yield from ranks_and_hosts.locate_allocators(self.session, nodes, engines)
        yield
        on_gpus = yield from read_gpus(self.session, cursor, nodes, lies_on, self._peaks, self._exits)
        yield
        ranks = yield from ranks_and_hosts.read_ranks(
            self.session, cursor, self._peaks, self._exits, ended=job.state is State.ENDED
        )
        yield
        cost = yield from self._measure_cost(cursor, lost)
        yield
        unseen = not count and job.state is State.RUNNING
        hosts = ranks_and_hosts.read_hosts(self.session, cursor)
        yield
        history = self._histories.history_at(cursor, ranks, [(gpu.host, gpu.index) for gpu in on_gpus], lies_on, self._exits)
        yield
        progress, iterations = self._measure_progress(cursor, count, job), self._iterations.first_iterations(count)
        yield
        return LiveView(
            cursor_ns=cursor,
            job=job,
            progress=progress,
            gpus=on_gpus,
            hosts=hosts,
            ranks=ranks,
            iterations=iterations,
            cost=cost,
            output=self._transcript.read_tail(cursor, _OUTPUT_LINES),
            inferred=self._rhythm.infer_at(cursor) if unseen else None,
            history=history,
        )

    def _build_job(self, cursor: int, losses: Losses) -> Job:
        facts = read_first_engine(self.session, cursor)
        state, code, text = self._find_state(cursor, bool(facts))
        info = self.session.info
        return Job(
            name=self.session.name,
            command=_shorten_command(info.get("command") or ()),
            launcher=str(info.get("launcher") or ""),
            state=state,
            exit_code=code,
            exit_text=text,
            **parse_engine(facts),
            notices=describe_notices(self.session, cursor, losses),
            prints_here=not self.session.events_named("attached", cursor),
        )

    def _find_state(self, cursor: int, has_engine: bool) -> tuple[State, int | None, str]:
        ended = self.session.events_named("job_ended", cursor)
        if ended:
            facts = ended[-1].facts
            return State.ENDED, facts.get("exit_code"), str(facts.get("text") or "")
        if not self._is_live and cursor >= self._last_written_ns:
            return (State.DETACHED, None, _DETACHED) if is_left_running(self.session, cursor) else (State.LOST, None, _LOST)
        if not has_engine and not self.session.events_named("attached", cursor):
            return State.STARTING, None, describe_wait(self.session, cursor)
        return State.RUNNING, None, ""

    def _measure_progress(self, cursor: int, count: int, job: Job) -> Progress:
        rows = self._iterations.rows[:count]
        last = rows[-_RATE_STEPS:]
        seconds = float(last["iteration_s"].mean()) if len(last) else math.nan
        tokens = float(self._iterations.token_counts[:count][-_RATE_STEPS:].mean()) if len(last) else math.nan
        planned = self.session.events_named("total_steps", cursor)
        total = int(planned[-1].facts["steps"]) if planned else None
        step = int(rows["step"][-1]) if len(rows) else None
        left = total - step - 1 if total is not None and step is not None else math.nan
        ended = self.session.events_named("job_ended", cursor)
        return Progress(
            step=step,
            total_steps=total,
            skipped_steps=int(rows["skipped"].sum()),
            iteration_s=seconds,
            tokens_per_s=tokens / seconds if seconds and tokens > 0 else math.nan,
            eta_s=math.nan if job.state is State.ENDED else left * seconds,
            elapsed_s=max(0.0, ((ended[-1].unix_ns if ended else cursor) - self.begin_ns) / 1e9),
        )

    def _measure_cost(self, cursor: int, losses: Losses) -> Generator[None, None, Cost]:
        per_step, shares, errors = [], [], 0
        for number, source in enumerate(self.session.sources["probe"], 1):
            if not number % ranks_and_hosts.RANKS_AT_ONCE:
                yield
            known = source.count_until(cursor)
            if known:
                first, last = source.array[max(0, known - 100)], source.array[known - 1]
                errors += int(last["errors"])
                span = int(last["time_ns"]) - int(first["time_ns"])
                if span > 0:
                    cost = int(last["cost_ns"]) - int(first["cost_ns"])
                    per_step.append(cost / 1e3 / (min(known, 101) - 1))
                    shares.append(cost / span)
        records, since_ns = (yield from self._count_records(cursor)), (cursor - _RATE_NS) // _RATE_NS * _RATE_NS
        if since_ns not in self._records_before:
            self._records_before = {since_ns: (yield from self._count_records(since_ns))}
        return Cost(
            probe_us_per_step=_compute_mean(per_step),
            probe_share=_compute_mean(shares),
            lost_records=losses.records,
            errors=errors,
            records=records,
            records_per_s=(records - self._records_before[since_ns]) / ((cursor - since_ns) / 1e9),
        )

    def _count_records(self, cursor: int) -> Generator[None, None, int]:
        count = 0
        for sources in self.session.sources.values():
            for begin in range(0, len(sources), _TABLES_AT_ONCE):
                count += sum(source.count_until(cursor) for source in sources[begin : begin + _TABLES_AT_ONCE])
                yield
        return count


def _shorten_command(command: Iterable[Any]) -> tuple[str, ...]:
    """The command without the folder of its program, which says little and takes the line."""
    words = [str(word) for word in command]
    return tuple(word.rpartition("/")[2] if place == 0 else word for place, word in enumerate(words))


def _compute_mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan

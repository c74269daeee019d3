"""The recording as the screens see it: a view at any cursor, the same live and in replay."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable
from typing import Any

import numpy as np

from zerotop.analysis.annotations import Annotation
from zerotop.analysis.live_view import Cost, Job, LiveView, Progress, State
from zerotop.analysis.processes import ranks_and_hosts
from zerotop.analysis.processes.process_exits import ends_of
from zerotop.analysis.processes.running_max import Peaks
from zerotop.analysis.steps.step_table import RankSteps, StepTable
from zerotop.analysis.views.annotation_runner import Findings
from zerotop.analysis.views.gpus import gpus
from zerotop.analysis.views.history import Histories
from zerotop.analysis.views.iterations import Joined
from zerotop.analysis.views.job_exit import Losses, left_running, losses
from zerotop.analysis.views.notices import notices
from zerotop.analysis.views.restarts import attempts
from zerotop.analysis.views.rhythm import Rhythm
from zerotop.analysis.views.startup_status import awaited
from zerotop.session.reader import Session, whole
from zerotop.session.transcript import Transcript

# Iterations that a rate is taken over.
_WINDOW = 10
_OUTPUT_LINES = 200
_TABLES = 256  # that are asked for their number of records in one go
_RATE_NS = 2_000_000_000
_SEARCHES = 2  # for findings, each a piece of reading, and one more for each so many ranks
_RANKS_OF_A_SEARCH = 128
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
        self._joined = Joined()
        self._rhythm = Rhythm(session)
        self._findings = Findings(session)
        self._shown = self._followed = False  # whether a view was asked for, and whether of the end
        self._transcript, self._older = Transcript(session), Transcript(session)
        self._looked_ns = time.time_ns()
        self._live, self._last_written_ns = session.live, session.last_written_ns
        self._view: LiveView | None = None  # the last one, until there is another of what was read since
        self._of_end = False  # whether it is of the end, as it was then
        self._before: dict[int, int] = {}  # how many records there were a little before it
        self._steps.update()
        whole(self._digesting())

    @property
    def live(self) -> bool:
        """True while somebody still writes the recording, as of the last look at it."""
        return self._live

    @property
    def begin_ns(self) -> int:
        """When the session was made."""
        return self.session.begin_ns

    @property
    def end_ns(self) -> int:
        """The latest moment there is something to show of; while live that of the last look, up to which all is read."""
        return self._looked_ns if self._live else self._last_written_ns

    @property
    def processes(self) -> list[RankSteps]:
        """The rank processes with their steps, in the order in which they made their engines."""
        return self._steps.processes

    @property
    def last_step(self) -> int | None:
        """The last step that all ranks have finished."""
        rows = self._joined.rows
        return int(rows["step"][-1]) if len(rows) else None

    def refresh(self) -> bool:
        """Reads what was written since the last call. True when there was anything."""
        return whole(self.reading())

    def reading(self) -> Generator[None, None, bool]:
        """The same in pieces. Meanwhile everything is told as of the last look."""
        looked_ns, was_live = time.time_ns(), self._live
        fresh = yield from self.session.reading()
        finished = yield from self._steps.updating()
        yield
        self._looked_ns, self._live, self._last_written_ns = looked_ns, self.session.live, self.session.last_written_ns
        fresh |= self._live != was_live
        if fresh and (finished or not (was_live and self._live) or self._ends is not ends_of(self.session)):
            yield
            yield from self._digesting()
            yield
        # Who presses a key while the next view is made is answered from this one.
        view = (yield from self._viewing(self.end_ns)) if fresh and self._followed else None
        self._view, self._of_end = view, True
        yield
        found = False
        # The first picture does not wait for what there is to say about it.
        for _ in range(_SEARCHES + self._steps.count // _RANKS_OF_A_SEARCH if self._shown else 0):
            found |= self._findings.update(self._last_written_ns)
            yield
        return fresh or found

    def findings(self, cursor_ns: int | None) -> tuple[Annotation, ...]:
        """What was found that was known at the cursor, in the order in which it became known; None is the end."""
        return self._findings.at(self.end_ns if cursor_ns is None else cursor_ns)

    def _digesting(self) -> Generator[None, None, None]:
        self._ends = ends_of(self.session)
        over_ns = None if self._live else self._last_written_ns
        together = yield from attempts(self._steps.processes, self._ends, over_ns)
        yield
        yield from self._joined.extending(together)

    def step_time(self, step: int) -> int | None:
        """The moment at which ``step`` has just finished on all ranks."""
        found = np.flatnonzero(self._joined.rows["step"] == step)
        return int(self._joined.known_ns[found[0]]) if len(found) else None

    def output(self, cursor_ns: int, most: int) -> tuple[str, ...]:
        """The last lines of the job's output at the cursor, at most so many: further back than a view has."""
        return self._older.lines(cursor_ns, most)

    def view(self, cursor_ns: int | None) -> LiveView:
        """What was known at the cursor; None is the end, which for a live recording is the last look at it."""
        return whole(self.viewing(cursor_ns))

    def viewing(self, cursor_ns: int | None) -> Generator[None, None, LiveView]:
        """The same in pieces; in one where it is the view that was told last."""
        self._shown, self._followed = True, cursor_ns is None
        kept = self._view
        if kept is None or not (self._of_end if cursor_ns is None else kept.cursor_ns == cursor_ns):
            kept = yield from self._viewing(self.end_ns if cursor_ns is None else cursor_ns)
            self._view, self._of_end = kept, cursor_ns is None
        return kept

    def _viewing(self, cursor: int) -> Generator[None, None, LiveView]:
        yield  # what follows may wait, what is there at once need not
        count = self._joined.count_known(cursor)
        nodes, engines = self.session.told("node", cursor), self.session.told("engine", cursor)
        lost = losses(self.session, cursor)
        yield
        job = self._job(cursor, lost)
        yield
        lies_on = yield from ranks_and_hosts.locating(self.session, nodes, engines)
        yield
        on_gpus = yield from gpus(self.session, cursor, nodes, lies_on, self._peaks, self._ends)
        yield
        ranks = yield from ranks_and_hosts.ranks(
            self.session, cursor, self._peaks, self._ends, ended=job.state is State.ENDED
        )
        yield
        cost = yield from self._cost(cursor, lost)
        yield
        unseen = not count and job.state is State.RUNNING
        hosts = ranks_and_hosts.hosts(self.session, cursor)
        yield
        history = self._histories.at(cursor, ranks, [(gpu.host, gpu.index) for gpu in on_gpus], lies_on, self._ends)
        yield
        progress, iterations = self._progress(cursor, count, job), self._joined.upto(count)
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
            output=self._transcript.lines(cursor, _OUTPUT_LINES),
            inferred=self._rhythm.at(cursor) if unseen else None,
            history=history,
        )

    def _first_engine(self, cursor: int) -> dict[str, Any]:
        engines = [e for e in self.session.told("engine", cursor) if not e.facts.get("engine")]
        return min(engines, key=lambda e: e.rank).facts if engines else {}

    def _job(self, cursor: int, lost: Losses) -> Job:
        facts = self._first_engine(cursor)
        state, code, text = self._state(cursor, bool(facts))
        info = self.session.info
        return Job(
            name=self.session.name,
            command=_shown(info.get("command") or ()),
            launcher=str(info.get("launcher") or ""),
            state=state,
            exit_code=code,
            exit_text=text,
            model=facts.get("model"),
            parameters=facts.get("parameters"),
            zero_stage=facts.get("zero_stage"),
            offload_optimizer=facts.get("offload_optimizer"),
            offload_parameters=facts.get("offload_parameters"),
            dtype=facts.get("dtype"),
            micro_batch=facts.get("micro_batch"),
            gradient_accumulation=facts.get("gradient_accumulation"),
            ranks=facts.get("world_size"),
            notices=notices(self.session, cursor, lost),
            prints_here=not self.session.told("attached", cursor),
        )

    def _state(self, cursor: int, engine: bool) -> tuple[State, int | None, str]:
        ended = self.session.told("job_ended", cursor)
        if ended:
            facts = ended[-1].facts
            return State.ENDED, facts.get("exit_code"), str(facts.get("text") or "")
        if not self._live and cursor >= self._last_written_ns:
            return (State.DETACHED, None, _DETACHED) if left_running(self.session, cursor) else (State.LOST, None, _LOST)
        if not engine and not self.session.told("attached", cursor):
            return State.STARTING, None, awaited(self.session, cursor)
        return State.RUNNING, None, ""

    def _progress(self, cursor: int, count: int, job: Job) -> Progress:
        rows = self._joined.rows[:count]
        last = rows[-_WINDOW:]
        seconds = float(last["iteration_s"].mean()) if len(last) else math.nan
        tokens = float(self._joined.tokens[:count][-_WINDOW:].mean()) if len(last) else math.nan
        planned = self.session.told("total_steps", cursor)
        total = int(planned[-1].facts["steps"]) if planned else None
        step = int(rows["step"][-1]) if len(rows) else None
        left = total - step - 1 if total is not None and step is not None else math.nan
        ended = self.session.told("job_ended", cursor)
        return Progress(
            step=step,
            total_steps=total,
            skipped_steps=int(rows["skipped"].sum()),
            iteration_s=seconds,
            tokens_per_s=tokens / seconds if seconds and tokens > 0 else math.nan,
            eta_s=math.nan if job.state is State.ENDED else left * seconds,
            elapsed_s=max(0.0, ((ended[-1].unix_ns if ended else cursor) - self.begin_ns) / 1e9),
        )

    def _cost(self, cursor: int, lost: Losses) -> Generator[None, None, Cost]:
        per_step, shares, errors = [], [], 0
        for number, source in enumerate(self.session.sources["probe"], 1):
            if not number % ranks_and_hosts.RANKS:
                yield
            known = source.count_known(cursor)
            if known:
                first, last = source.array[max(0, known - 100)], source.array[known - 1]
                errors += int(last["errors"])
                span = int(last["time_ns"]) - int(first["time_ns"])
                if span > 0:
                    cost = int(last["cost_ns"]) - int(first["cost_ns"])
                    per_step.append(cost / 1e3 / (min(known, 101) - 1))
                    shares.append(cost / span)
        records, since_ns = (yield from self._records(cursor)), (cursor - _RATE_NS) // _RATE_NS * _RATE_NS
        if since_ns not in self._before:
            self._before = {since_ns: (yield from self._records(since_ns))}
        return Cost(
            probe_us_per_step=_mean(per_step),
            probe_share=_mean(shares),
            lost_records=lost.records,
            errors=errors,
            records=records,
            records_per_s=(records - self._before[since_ns]) / ((cursor - since_ns) / 1e9),
        )

    def _records(self, cursor: int) -> Generator[None, None, int]:
        count = 0
        for sources in self.session.sources.values():
            for begin in range(0, len(sources), _TABLES):
                count += sum(source.count_known(cursor) for source in sources[begin : begin + _TABLES])
                yield
        return count


def _shown(command: Iterable[Any]) -> tuple[str, ...]:
    """The command without the folder of its program, which says little and takes the line."""
    words = [str(word) for word in command]
    return tuple(word.rpartition("/")[2] if place == 0 else word for place, word in enumerate(words))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan

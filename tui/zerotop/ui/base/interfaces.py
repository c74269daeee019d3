"""The interfaces of the screens: the recording to show, the running job to control, and computations that take long."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from zerotop.analysis.annotations import Annotation
from zerotop.analysis.live_view import Iterations, LiveView
from zerotop.analysis.views.annotation_runner import SearchResult
from zerotop.session.reader import Session
from zerotop.session.samples import Ints, Rows
from zerotop.session.steps.step_table import RankSteps


class Source(Protocol):
    """One recording, live or not. Times are unix nanoseconds.

    One thread at a time owns it: it refreshes it, makes views and reads the session. Any thread may read ``is_live``,
    ``begin_ns``, ``first_step_ns``, ``end_ns``, ``last_step``, ``find_step_end`` and ``findings_at``, which are as of the
    last refresh.
    """

    @property
    def session(self) -> Session:
        """The tables and events, as far as they were read."""

    @property
    def job_steps(self) -> Rows:
        """The steps that all ranks have finished, each as on its slowest rank (STEP_DTYPE)."""

    @property
    def job_tokens(self) -> Ints:
        """Tokens of each of ``job_steps`` over all ranks, 0 where unknown."""

    @property
    def rank_steps(self) -> Sequence[RankSteps]:
        """The rank processes with their finished steps, as far as they were read."""

    @property
    def is_live(self) -> bool:
        """True while the recording is being written."""

    @property
    def begin_ns(self) -> int:
        """The earliest moment that can be shown."""

    @property
    def first_step_ns(self) -> int:
        """The begin of the first recorded step, where a replay starts; ``begin_ns`` if there is none."""

    @property
    def end_ns(self) -> int:
        """The latest moment that can be shown. It grows while the recording is live."""

    @property
    def last_step(self) -> int | None:
        """The last finished step in the whole recording, None before the first one."""

    def refresh(self) -> bool:
        """Read the records written since the last call. True if there were any."""

    def reopen(self) -> Source:
        """Return the recording, opened again, without records deleted since. Raise SessionError."""

    def close(self) -> None:
        """Let go of the recording's files; nothing is read any more."""

    def search_findings(self) -> SearchResult:
        """Search one more piece of the recording for findings."""

    def view_at(self, cursor_ns: int | None) -> LiveView:
        """Return the values at the cursor; None is the end, which for a live recording is the last refresh."""

    def iterations_on(self, rank: int, view: LiveView) -> Iterations:
        """Return a view's iterations as one rank recorded them; without new ones, the same object as before."""

    def findings_at(self, cursor_ns: int | None) -> tuple[Annotation, ...]:
        """Return the findings known at the cursor, in the order in which they became known; None is the end."""

    def output_lines(self, cursor_ns: int, most: int) -> tuple[str, ...]:
        """Return the last lines of the job's output at the cursor, at most ``most``: further back than a view has."""

    def find_step_end(self, step: int) -> int | None:
        """Return the moment at which ``step`` has just finished on all ranks, or None when there is no such step."""


class Controller(Protocol):
    """The running job. A replay has none."""

    @property
    def attach_command(self) -> str:
        """The command that comes back after leaving, for example ``zerotop attach brisk-otter``."""

    @property
    def stop_description(self) -> str:
        """The effect of ``stop_job`` and the nodes that it reaches, as a sentence."""

    def stop_job(self) -> str:
        """Ask the job to end; the second call kills it. Returns a sentence about unreachable nodes; may take seconds.

        Raises:
            OSError: the job cannot be reached; the text says why.
        """

    def request_trace(self, steps: int, stacks: bool) -> int:
        """Ask every rank to record all allocations of its next ``steps`` steps, with Python stacks or without.

        Returns at once, with the number that the resulting traces have.

        Raises:
            OSError: the request cannot be written; the text says why.
        """

    def is_sampler_alive(self) -> bool:
        """False if the sampler of this node has died while the job still runs."""

    def restart_sampler(self) -> None:
        """Start another sampler on the running job.

        Raises:
            OSError: it cannot be started; the text says why.
        """

    def can_enter(self) -> bool:
        """True while ranks of a job attached to from outside lack the probe."""

    def enter_ranks(self) -> str:
        """Inject the probe into those ranks; return the result in sentences. May take seconds."""


class Leaving(Enum):
    """The way in which the user left the screen; the program returns it."""

    QUIT = "quit"  # nothing was running
    DETACHED = "detached"  # the job goes on
    STOPPED = "stopped"  # the user stopped the job


class LongWork(Protocol):
    """A computation that takes so long that a picture without its result is shown first."""

    @property
    def is_busy(self) -> bool:
        """Whether the last picture lacks the result."""

    def finish_work(self) -> None:
        """Compute the result for the next picture."""

"""What the screens need from the rest: something to look at, and, while a job runs, something to steer it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import Enum
from typing import Protocol

from zerotop.analysis.annotations import Annotation
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.steps.step_table import RankSteps
from zerotop.session.reader import Session


class Source(Protocol):
    """One recording, live or not. Times are unix nanoseconds."""

    @property
    def session(self) -> Session:
        """Its tables and events, as far as they were read."""

    @property
    def rank_steps(self) -> Sequence[RankSteps]:
        """The rank processes with their finished steps, as far as they were read."""

    @property
    def is_live(self) -> bool:
        """True while somebody still writes the recording."""

    @property
    def begin_ns(self) -> int:
        """The earliest moment there is something to show of."""

    @property
    def end_ns(self) -> int:
        """The latest one. It grows while the recording is live."""

    @property
    def last_step(self) -> int | None:
        """The last finished step in the whole recording, None before the first one."""

    def refresh(self) -> bool:
        """Reads what was written since the last call. True when there was anything."""

    def iter_refresh(self) -> Generator[None, None, bool]:
        """The same in pieces, for who has keys to answer in between."""

    def view_at(self, cursor_ns: int | None) -> LiveView:
        """What is known at the cursor; None is the end, which for a live recording is now."""

    def iter_view(self, cursor_ns: int | None) -> Generator[None, None, LiveView]:
        """The same in pieces."""

    def findings_at(self, cursor_ns: int | None) -> tuple[Annotation, ...]:
        """What was found that was known at the cursor, in the order in which it became known; None is the end."""

    def output_lines(self, cursor_ns: int, most: int) -> tuple[str, ...]:
        """The last lines of the job's output at the cursor, at most ``most``: further back than a view has."""

    def find_step_end(self, step: int) -> int | None:
        """The moment at which ``step`` has just finished on all ranks, or None when there is no such step."""


class Controller(Protocol):
    """The running job. A replay has none."""

    @property
    def attach_command(self) -> str:
        """What to type to come back after leaving, for example ``zerotop attach brisk-otter``."""

    @property
    def stop_description(self) -> str:
        """What ``stop`` does, as a sentence: on which nodes."""

    def stop_job(self) -> str:
        """Asks the job to end; the second call ends it hard. Says where it was not asked; may take seconds.

        Raises:
            OSError: the job cannot be reached; the text says why.
        """

    def request_trace(self, steps: int, stacks: bool) -> int:
        """Asks every rank to record all allocations of its next ``steps`` steps, with Python stacks or without.

        Returns the request's number, which the looks that answer it have. Returns at once.

        Raises:
            OSError: it cannot be asked; the text says why.
        """

    def is_sampler_alive(self) -> bool:
        """False when the process that samples this node is gone while the job still runs."""

    def restart_sampler(self) -> None:
        """Starts another sampler on the running job.

        Raises:
            OSError: it cannot be started; the text says why.
        """

    def can_enter(self) -> bool:
        """True while ranks of a job that was attached to from outside are without the probe."""

    def enter_ranks(self) -> str:
        """Puts the probe into those ranks; says what came of it, in sentences. May take seconds."""


class Leaving(Enum):
    """How the user left the screen: what the program returns."""

    QUIT = "quit"  # nothing was running
    DETACHED = "detached"  # the job goes on
    STOPPED = "stopped"  # the user stopped the job

"""The interfaces of the screens: the running job to control, and computations that take long."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Protocol


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

    def want_detail(self, hosts: Collection[str]) -> None:
        """Ask nodes for full detail, where only some send it all the time."""

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
    FOR_STORY = "for story"  # to look at the demo's recording, and to come back


class LongWork(Protocol):
    """A computation that takes so long that a picture without its result is shown first."""

    @property
    def is_busy(self) -> bool:
        """Whether the last picture lacks the result."""

    def finish_work(self) -> None:
        """Compute the result for the next picture."""

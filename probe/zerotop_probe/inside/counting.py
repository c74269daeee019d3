"""Steps of which only the end is recorded: where even light detail costs too much, most steps are counted, not looked at."""

from __future__ import annotations

from zerotop_probe.inside.engines import LoopState


class StepCounting:
    """What the hooks of one process need to know in a counted step. They read it first, and most then do nothing.

    The recorder changes it at the ends of steps. Any thread may call :meth:`stop`.
    """

    __slots__ = (
        "backwards",
        "begin_ns",
        "first_step",
        "is_on",
        "longest_ns",
        "loop",
        "shortest_ns",
        "uncounted_step",
        "was_on",
    )

    def __init__(self) -> None:
        self.is_on = False
        """Whether phases of training are left out now."""
        self.loop: LoopState | None = None
        """The loop whose steps are counted; None if an engine's are, or none."""
        self.was_on = False
        """Whether phases of the step in progress may have been left out."""
        self.backwards = 0
        """Backwards in counted steps since the last step of an optimizer."""
        self.begin_ns = 0
        """Begin of the step in progress, if it began as a counted one."""
        self.first_step = 0
        """Number of the first of the counted steps in a row."""
        self.uncounted_step = 0
        """Number of the next step with phases."""
        # A step of another duration is unlike the others.
        self.shortest_ns = self.longest_ns = 0.0

    def stop(self) -> None:
        """Leave out no more phases from now on: something unusual happens."""
        self.is_on = False
        self.loop = None

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
        "cost_ns",
        "depth",
        "first_step",
        "is_on",
        "longest_ns",
        "loop",
        "optimizer",
        "seen_backwards",
        "shortest_ns",
        "uncounted_step",
        "update_backwards",
        "update_ns",
        "updates",
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
        """Backwards that the loop does not know of yet."""
        self.seen_backwards = 0
        """How many of these came before the last update."""
        self.optimizer = 0
        """The loop's only optimizer, by id(); 0 if it has several, or its updates need more than their end."""
        self.updates = 0
        """Updates of this optimizer that the loop does not know of yet."""
        self.update_ns = 0
        """Begin of its update in progress; 0 without one."""
        self.update_backwards = 0
        """Backwards before that."""
        self.depth = 0
        """Further calls of its ``step()`` within it, as from a subclass."""
        self.cost_ns = 0
        """What the hooks have cost in counted steps, and the meter does not know of yet."""
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

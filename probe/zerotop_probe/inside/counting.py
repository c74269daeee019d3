"""Counted steps, of which only the end is recorded: most steps are counted if even light detail costs too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerotop_probe.inside import native
from zerotop_probe.inside.engines import LoopState


class StepCounting:
    """The state that the hooks of one process read in a counted step. They read it first, and most then do nothing.

    The recorder changes it at the ends of steps. Any thread may call :meth:`stop`.
    """

    __slots__ = (
        "backwards",
        "begin_ns",
        "cost_ns",
        "depth",
        "engine",
        "first_step",
        "is_on",
        "last_slot",
        "longest_ns",
        "loop",
        "optimizer",
        "seen_backwards",
        "shortest_ns",
        "table_end",
        "uncounted_step",
        "update_backwards",
        "update_ns",
        "updates",
        "was_on",
        "writes_records",
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
        """The number of these that came before the last update."""
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
        """The cost of the hooks in counted steps (ns) that has not been added to the meter yet."""
        self.begin_ns = 0
        """Begin of the step in progress, if it began as a counted one."""
        self.first_step = 0
        """Number of the first of the counted steps in a row."""
        self.uncounted_step = 0
        """Number of the next step with phases."""
        # A step of another duration is unlike the others.
        self.shortest_ns = self.longest_ns = 0.0
        self.engine = 0
        """Number of the loop whose steps are counted."""
        # Used by the C code only:
        self.writes_records = False
        """Whether the C code may write the ends of steps."""
        self.last_slot = self.table_end = 0
        """The last slot of the ring that the C code took, and the first one that it must not take."""

    def stop(self) -> None:
        """Record phases again from now on, because something unusual happens."""
        self.is_on = False
        self.loop = None

    def use_ring(
        self,
        owner: object,
        address: int,
        layout: tuple[int, int, int, int, int, int, int],
        files: object,
        take_slot: Callable[[], int],
        recorder: object,
        end_run: Callable[[int, int, int, int, int, int], None],
    ) -> None:
        """Let the C code write the ends of counted steps into a ring. The Python class does nothing here.

        Args:
            owner: keeps the ring's memory mapped.
            address: of this memory.
            layout: its bytes; the number of slots, the bytes of each, and where the first one is; the number of the table
                of spans; the code of the phase, and the flags of each record.
            files: ``position`` becomes the last slot taken.
            take_slot: returns the next slot.
            recorder: ``last_step`` becomes the number of each step.
            end_run: is called as ``CountedSteps._end_run`` when it is time to decide whether to count further steps.
        """

    def leave_ring(self) -> None:
        """Stop writing: the ring's memory may be unmapped."""


def make_counting() -> StepCounting:
    """Create the counting state of one process, of the C class if that was compiled."""
    return StepCounting() if native.counted_steps is None else native.counted_steps.StepCounting()


def wrap_counted(
    counting: StepCounting,
    original: Callable[..., Any],
    otherwise: Callable[..., Any],
    note_failure: Callable[..., None],
) -> Any:
    """Return a function or method that calls ``original`` in the steps that ``counting`` counts, else ``otherwise``.

    ``note_failure(subject, args, kwargs)`` is called where the original raises in a counted step. Without C code return
    None: then ``otherwise`` does it all.
    """
    module = native.counted_steps
    if module is None or not isinstance(counting, module.StepCounting):
        return None
    return module.CountedCall(counting, otherwise, original, note_failure)

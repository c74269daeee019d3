"""Add to findings the line that takes the time, if it is known."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerotop.analysis.findings.support.evidence import Group
from zerotop.analysis.findings.support.finding import FindingKind
from zerotop.analysis.findings.support.lines.stack_lines import BETWEEN, Delay, StackLine
from zerotop.recording.samples import Floats, Rows

PLACES = {"data_s": "data", "forward_s": "forward", "backward_s": "backward", "step_s": "step", "other_s": BETWEEN}
"""The place of stacks for each column of steps, and for the rest of the iteration."""

_ADVICE = "Run {location} in fewer iterations, if training does not depend on it in each."
_PYTHON_ADVICE = (
    "Let {location} compute with whole tensors or arrays instead of single values in Python; or run it in fewer iterations,"
    " if training does not depend on it in each."
)
_NEW_ADVICE = "See what {location} does: it took hardly any time before."
_COPY_ADVICE = "Copy less from the GPU at {location}, or only now and then: the GPU has nothing to do meanwhile."

# Functions as stacks name them; the last one is that of a SimpleQueue, which is in C.
_WAITS_FOR_THREADS = frozenset(
    ("queue.Queue.get", "threading.Event.wait", "threading.Condition.wait", "threading.Condition.wait_for", "get")
)
# Functions of Python that take long only of many single values.
_OF_VALUES = frozenset(
    (*("float", "int", "str", "ord", "hash", "abs", "round", "pow", "sum", "min", "max", "any", "all"), *("sorted", "range"))
)
# The share of the samples that is called most of the time.
_MOST_SHARE = 0.5


# Phases that are a call of the script.
_CALLED = ("backward", "step")


def is_cause(line: StackLine, delay: Delay) -> bool:
    """Whether the line itself takes the time, instead of waiting for a GPU that computes."""
    known = line.known_call
    if delay.where in _CALLED and line.callees and line.callees[0].rpartition(".")[2] == delay.where:
        return False  # the call that is the phase: what takes the time in it is not known
    if not delay.process.is_on_gpu:
        return True
    if line.is_new:
        return delay.is_gpu_idle or not is_wait(line)
    if known is None:
        return delay.where not in ("forward", "backward", "step")  # there a line may be where the GPU's queue was full
    return not known.waits_for_gpu or delay.is_gpu_idle


def is_wait(line: StackLine | None) -> bool:
    """Whether a line only waits for the GPU's work."""
    return line is not None and line.known_call is not None and line.known_call.waits_for_gpu


def name_line(kind: FindingKind, line: StackLine, *, in_headline: bool = True) -> FindingKind:
    """Return the kind with the line in its headline, and advice about the line. The templates need :func:`line_values`."""
    known = line.known_call
    each = _PYTHON_ADVICE if _OF_VALUES.intersection(line.callees[:1]) else _ADVICE
    usual = _NEW_ADVICE if line.is_new else "" if kind.lost_once else each
    advice = known.advice if known is not None else usual
    return kind.with_changes(
        headline=f"{kind.headline}: {{place}}" if in_headline else kind.headline,
        advice=_COPY_ADVICE if known is not None and known.waits_for_gpu and line.is_gpu_idle else advice,
        fix=known.fix if known is not None else "{location}",
        names_line=True,
    )


def is_named(group: Group, line: StackLine, known_ns: int) -> bool:
    """Whether a finding known at that time (unix nanoseconds) names the line."""
    return any(one.named_line == line.location and one.known_ns <= known_ns for one in group.findings)


def line_values(line: StackLine | None) -> dict[str, Any]:
    """Return the template values of a line: ``place`` for a headline, ``line``, ``location`` and ``most`` for sentences.

    ``awaits_thread`` is for links: whether the line waits for another thread to fill a queue or to set an event.
    """
    if line is None:
        return {"place": None, "line": None, "location": None, "most": None, "awaits_thread": False}
    most = "most" if line.share >= _MOST_SHARE else "a part"
    names = {"place": line.place, "line": line.text, "location": line.location, "most": most}
    return {**names, "awaits_thread": not _WAITS_FOR_THREADS.isdisjoint(line.callees)}


def measure_between(rows: Rows) -> Floats:
    """Return the seconds of each step outside all phases."""
    phases = rows["data_s"] + rows["forward_s"] + rows["backward_s"] + rows["step_s"]
    return np.asarray(rows["iteration_s"] - phases, np.float64)


def read_part(rows: Rows, name: str) -> Floats:
    """Return the seconds of each step in a phase, as ``data_s``, or outside all phases: ``other_s``."""
    return measure_between(rows) if name == "other_s" else np.asarray(rows[name], np.float64)

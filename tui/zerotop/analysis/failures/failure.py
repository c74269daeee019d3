"""A job's failure as screens and reports show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zerotop.analysis.failures.last_moments import LastSpan
from zerotop.analysis.failures.out_of_memory import PostMortem
from zerotop.session.moments.host_memory import HostMemory

MEMORY, SIGNAL, ERROR = "memory", "signal", "error"


class ByteFigure(NamedTuple):
    """One labelled figure in bytes."""

    label: str
    bytes: int
    of_bytes: int | None = None  # the whole that it is a part of


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure. Sentences end with a full stop."""

    kind: str  # MEMORY, SIGNAL or ERROR
    unix_ns: int  # of the failure itself
    rank: int | None  # the first one that failed
    what: str  # sentence: the rank, what happened, in which phase of which step
    where: str  # words: GPU, node, micro-batch; "" where not known
    why: str  # sentence or two that follow from the figures
    numbers: tuple[ByteFigure, ...]
    advice: str  # sentence
    setting: str  # exact name of the setting that the advice changes; "" if there is none
    spans: tuple[LastSpan, ...]  # the rank's last phases, oldest first
    host_memory: tuple[HostMemory, ...]  # the last seconds before, oldest first
    last_words: str  # the error as printed; "" where the output has none
    final: bool  # False while the rank may still live on
    memory: PostMortem | None  # of a failure for lack of memory


def describe_place(phase: str, outer: str, step: int | None) -> str:
    """Return `` in backward of step 24`` or `` in the forward of the evaluation before step 4``; "" where not known."""
    if outer == "eval":
        inside = f"the {phase} of the evaluation" if phase not in ("", "eval") else "the evaluation"
        return f" in {inside}" + (f" before step {step}" if step is not None else "")
    if phase == "init":
        return " during engine initialization"
    if not phase:
        return f" in step {step}" if step is not None else ""
    name = "step()" if phase == "step" else phase.replace("_", " ")
    return f" in {name}" + (f" of step {step}" if step is not None else "")

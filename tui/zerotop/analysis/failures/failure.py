"""What is told of a job that died, whatever it died of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zerotop.analysis.failures.last_spans import LastSpan
from zerotop.analysis.failures.out_of_memory import PostMortem
from zerotop.analysis.processes.host_memory import HostMemory

MEMORY, SIGNAL, ERROR = "memory", "signal", "error"


class ByteFigure(NamedTuple):
    """One figure of the block, in bytes."""

    label: str
    bytes: int
    of_bytes: int | None = None  # what it is a part of


@dataclass(frozen=True, slots=True)
class Failure:
    """One death. Sentences end with a full stop."""

    kind: str  # MEMORY, SIGNAL or ERROR
    unix_ns: int  # of the failure itself
    rank: int | None  # the first one it happened to
    what: str  # sentence: who, what, in which phase of which step
    where: str  # words: GPU, node, micro-batch; "" where nothing is known
    why: str  # sentence or two that follow from the numbers
    numbers: tuple[ByteFigure, ...]
    advice: str  # sentence
    setting: str  # what the advice is to change, by its exact name; "" where it names none
    spans: tuple[LastSpan, ...]  # the rank's last phases, oldest first
    host_memory: tuple[HostMemory, ...]  # the last seconds before, oldest first
    last_words: str  # the error as printed; "" where the output has none
    final: bool  # False while the rank may still live on
    memory: PostMortem | None  # all about it where it was for want of memory


def describe_place(phase: str, outer: str, step: int | None) -> str:
    """`` in backward of step 24``, `` in the forward of the evaluation before step 4``; "" where nothing is known."""
    if outer == "eval":
        inside = f"the {phase} of the evaluation" if phase not in ("", "eval") else "the evaluation"
        return f" in {inside}" + (f" before step {step}" if step is not None else "")
    at = f" of step {step}" if step is not None and phase != "init" else ""
    if not phase:
        return f" in step {step}" if step is not None else ""
    if phase == "init":
        return " while its engine was made"
    return f" in {phase.replace('_', ' ')}{at}"

"""The end of a job or a rank that came too early. Screens, reports and findings show this record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zerotop.analysis.failures.end_causes import EndCause
from zerotop.analysis.failures.last_moments import LastSpan
from zerotop.analysis.failures.out_of_memory import PostMortem
from zerotop.analysis.formatting import Text
from zerotop.recording.moments.host_memory import HostMemory

MEMORY, SIGNAL, ERROR = "memory", "signal", "error"


class ByteFigure(NamedTuple):
    """One labelled figure in bytes."""

    label: str
    bytes: int
    of_bytes: int | None = None  # the whole that it is a part of


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Who ended, when, why, with which evidence, and what to do. Sentences end with a full stop."""

    kind: str  # MEMORY, SIGNAL or ERROR
    ranks: tuple[int, ...]  # the one that failed first; several if it is one of them; () if it is not known
    unix_ns: int  # of the failure itself
    exit_code: int | None = None  # of the job's command; None while it runs, and where nobody saw it
    what: str  # sentence: the rank, what happened, in which phase of which step
    where: str  # words: GPU, node, micro-batch; "" where not known
    why: str  # sentence or two that follow from the figures
    advice: str  # sentence
    setting: str = ""  # exact name of the setting that the advice changes; "" if there is none
    numbers: tuple[ByteFigure, ...] = ()
    spans: tuple[LastSpan, ...] = ()  # the rank's last phases, oldest first
    host_memory: tuple[HostMemory, ...] = ()  # the last seconds before, oldest first
    last_words: str = ""  # the error as printed; "" where the output has none
    final: bool = True  # False while the rank may still live on
    memory: PostMortem | None = None  # of a failure for lack of memory
    cause: EndCause | None = None  # of any other one, with its
    evidence: Mapping[str, int | None] = field(default_factory=dict)  # and
    values: Mapping[str, Any] = field(default_factory=dict)  # of the templates

    @property
    def rank(self) -> int | None:
        """The rank that failed first; None where that is not known."""
        return self.ranks[0] if len(self.ranks) == 1 else None

    @property
    def fix(self) -> str:
        """The setting, command or line to copy; "" if there is none."""
        if self.memory is not None:
            return self.memory.fix
        return Text(self.cause.fix, self.values) if self.cause is not None else ""

    @property
    def is_shortage(self) -> bool:
        """Whether an exception named what was short, other than memory."""
        return self.cause is not None and self.cause.is_shortage


def build_host_figures(samples: Sequence[HostMemory], limit_bytes: int | None = None) -> list[ByteFigure]:
    """Return the most memory of a node that was in use in its last seconds, of its limit or another one."""
    if not samples:
        return []
    most, seconds = max(samples, key=lambda sample: sample.used_bytes), (samples[-1].unix_ns - samples[0].unix_ns) / 1e9
    return [ByteFigure(f"host peak in last {seconds:.0f} s", most.used_bytes, limit_bytes or most.limit_bytes)]

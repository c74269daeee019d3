"""A finding, and the kind of finding that a detector declares.

Advice of a finding once its job has ended: what to do in the next run, if the fix needs a live process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from zerotop.analysis.formatting import Text
from zerotop.analysis.script_terms import read_terms, use_names
from zerotop_probe.recording.events import EngineFacts


class _Advice(NamedTuple):
    """Advice for the next run. ``advice`` is None if that of the finding still applies."""

    advice: str | None
    fix: str


_RECORD_STACKS = _Advice(None, "py-spy record --subprocesses -o stacks.svg -- {command}")
_SEE_STACKS = _Advice(
    "Record the next run, too: if it hangs, the Ranks screen shows the line of each rank.",
    "zerotop run -- {command}",
)
_CHOOSE_GPU = _Advice(
    "Before the next run, see who uses the GPUs, and choose free ones with CUDA_VISIBLE_DEVICES.", "nvidia-smi"
)
# By the name of the finding ("" for any) and how its fix begins. The first one counts.
_BY_FIX = (
    ("hung_ranks", "py-spy dump", _SEE_STACKS),
    ("", "py-spy dump", _RECORD_STACKS),
    ("", "py-spy record --pid", _RECORD_STACKS),
    ("", "ps -o", _CHOOSE_GPU),
    ("others_on_gpu", "nvidia-smi", _CHOOSE_GPU),
    ("", "kill -CONT", _Advice("Find out what sent SIGSTOP: a scheduler that suspends jobs, or Ctrl-Z in a terminal.", "")),
    (
        "",
        "taskset",
        _Advice("Give each rank cores of its own in the next run, and keep other processes off them.", "{own_cores_fix}"),
    ),
)


def advise_next_run(name: str, advice: str, fix: str) -> tuple[str, str]:
    """Return advice and fix (templates) for the next run; unchanged if they need no live process."""
    for finding, begin, later in _BY_FIX:
        if finding in ("", name) and fix.startswith(begin):
            return advice if later.advice is None else later.advice, later.fix
    return advice, fix


class Severity(str, Enum):
    """The urgency of a finding."""

    INFO = "info"  # an explanation; nothing needs to be done
    WARNING = "warning"  # costs time or memory, or may end the job
    ERROR = "error"  # the job, a rank or an allocation has failed


@dataclass(frozen=True)
class Finding:
    """One finding. It never changes: facts that become known later make another finding, which may be of the same event.

    Times are unix nanoseconds. Its four texts are Text if a FindingKind made it, and can then be rendered in other units.
    """

    name: str  # for example "double_spike"
    begin_ns: int
    end_ns: int
    known_ns: int  # a live viewer could have shown it from then on: everything it rests on was recorded
    step: int | None  # the optimizer step in which it begins
    ranks: tuple[int, ...]  # concerned, in order; empty for example for the host
    severity: Severity
    confidence: float  # 0 to 1: how sure the cause is; the measured numbers are not in doubt
    headline: str  # at most 80 characters, with the number and the effect, without a full stop
    details: str = ""  # the numbers behind it, in sentences
    advice: str = ""  # what to do, in a sentence; empty where nothing needs to be done
    fix: str = ""  # the setting, command or line to copy; empty where there is none
    evidence: dict[str, float] = field(default_factory=dict)  # the numbers, with units in their names as in tables
    cost: float = 0.0  # share of the training time that it costs from its begin on, or puts at risk: 0 to 1
    kind: FindingKind | None = None
    first_known_ns: int | None = field(default=None, compare=False)  # when its event was first known, if told again since

    @property
    def detected_ns(self) -> int:
        """When it was first known, perhaps with smaller numbers."""
        return self.known_ns if self.first_known_ns is None else self.first_known_ns

    @property
    def event(self) -> tuple[str, int, int | None, tuple[int, ...]]:
        """What it is about. A later finding about the same event takes its place, with newer numbers or with its end."""
        return self.name, self.begin_ns, self.step, self.ranks

    @property
    def named_line(self) -> str:
        """The line that takes the time, as ``train.py:10``; empty if it is no finding about a line."""
        is_of_line = self.kind is not None and self.kind.names_line
        return str(self.headline.values["location"]) if is_of_line and isinstance(self.headline, Text) else ""

    @cached_property
    def for_next_run(self) -> Finding:
        """Return the finding for a job that has ended: without a fix that needs a live process."""
        advice, fix = advise_next_run(self.name, self.advice, self.fix)
        if (advice, fix) == (self.advice, self.fix):
            return self
        values = self.fix.values if isinstance(self.fix, Text) else {}
        return dataclasses.replace(self, advice=advice, fix=Text(fix, values))


class Subject(Protocol):
    """A process, or the processes of an attempt."""

    @property
    def engine(self) -> EngineFacts: ...

    @property
    def command(self) -> str: ...

    def ranks_at(self, known_ns: int) -> tuple[int, ...]: ...

    def step_at(self, time_ns: int) -> int | None: ...


class Kinds:
    """Kinds of findings that are linked to another one where ``agrees(other, one)``, and they share ranks or share none."""

    def __init__(self, agrees: Callable[[Finding, Finding], bool], *names: str, shares_ranks: bool = True) -> None:
        self.agrees, self.names, self.shares_ranks = agrees, names, shares_ranks


@dataclass(frozen=True, kw_only=True)
class FindingKind:
    """The properties that all findings of a kind share. The texts are templates of Text, see :class:`Finding`.

    ``lost_once`` (seconds), ``gpu_bytes`` and ``host_bytes`` name the evidence with what a finding costs, or ``a - b``.
    Findings to which it has links explain it, tell the same and were known before, or tell more and take its place.
    """

    name: str
    severity: Severity = Severity.WARNING
    confidence: float
    headline: str
    details: str = ""
    advice: str = ""
    fix: str = ""
    names_line: bool = False  # whether it tells of a line that takes the time, which no other finding then repeats
    costs_other_steps: bool = False  # whether its headline names only some of the steps that it costs: all since its own
    measured_cause: str = ""  # the kind of findings that report what its detector measured as its cause
    lost_once: str = ""
    gpu_bytes: str = ""
    host_bytes: str = ""
    lasts: bool = False  # whether it is about a state that continues: as a cause, it was measured again later
    explained_by: tuple[Kinds, ...] = ()
    repeats: tuple[Kinds, ...] = ()
    superseded_by: tuple[Kinds, ...] = ()

    def with_changes(self, **changes: Any) -> FindingKind:
        """Return the kind with other fields."""
        return dataclasses.replace(self, **changes)

    def at_steps(
        self,
        subject: Subject,
        rows: NDArray[Any],
        evidence: Mapping[str, float | None],
        *,
        known_ns: int | None = None,
        **values: Any,
    ) -> Finding:
        """Return a finding about steps (STEP_DTYPE), known at the end of the last of them by default."""
        end_ns = int(rows["end_unix_ns"][-1]) if known_ns is None else known_ns
        return self.at(subject, int(rows["begin_unix_ns"][0]), end_ns, evidence, step=int(rows["step"][0]), **values)

    def at(
        self,
        subject: Subject | None,
        begin_ns: int,
        end_ns: int,
        evidence: Mapping[str, float | None],
        *,
        known_ns: int | None = None,
        ranks: Sequence[int] | None = None,
        cost: float = 0.0,
        **values: Any,
    ) -> Finding:
        """Return a finding. By default it is known at its end; ranks, and ``step`` among the values, are the subject's.

        The templates get ``evidence``, ``rank`` (the first one), ``values`` and the terms of the script at hand
        (:mod:`zerotop.analysis.script_terms`). Evidence that is None is left out.
        """
        known_ns = end_ns if known_ns is None else known_ns
        step = values.pop("step", ...)
        if step is ...:
            step = subject.step_at(begin_ns) if subject is not None else None
        if ranks is None:
            ranks = subject.ranks_at(known_ns) if subject is not None else ()
        numbers = {name: float(value) for name, value in evidence.items() if value is not None}
        engine = subject.engine if subject is not None else EngineFacts({})
        terms = read_terms(engine)
        terms["command"] = (subject.command if subject is not None else "") or "COMMAND"
        values = {**terms, **numbers, "step": step, "rank": next(iter(ranks), None), **values}
        headline, details, advice, fix = (
            Text(template, values) for template in (self.headline, self.details, self.advice, use_names(self.fix, engine))
        )
        head = self.name, begin_ns, end_ns, known_ns, step, tuple(ranks), self.severity, self.confidence
        return Finding(*head, headline, details, advice, fix, numbers, min(1.0, max(0.0, cost)), self)

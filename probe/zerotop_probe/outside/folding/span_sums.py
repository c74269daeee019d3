"""Sums over the spans of each step of a rank: the durations and counts of the table FOLDED."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from zerotop_probe.outside.folding.table_files import Record
from zerotop_probe.recording.tables import (
    BOUNDARY,
    COUNTED,
    EVAL,
    INCOMPLETE,
    OUTERMOST_PHASES,
    PHASE_CODE,
    SKIPPED,
    SPANS,
    STEP_SUMS,
    UNKNOWN,
)

_NAMES = tuple(STEP_SUMS)
_FORWARD, _BACKWARD = _NAMES.index("forward"), _NAMES.index("backward")
_PAUSES = ("eval", "checkpoint")  # recorded in every step
_STEP = PHASE_CODE["step"]
_BEGIN, _END, _TOKENS, _NUMBER, _ROWS, _PHASE, _FLAGS, _DEPTH, _ENGINE = (
    [column.name for column in SPANS.fields].index(name)
    for name in ("begin_ns", "end_ns", "tokens", "step", "rows", "phase", "flags", "depth", "engine")
)
# Sums by phase, for outermost and for nested spans.
_OUTER = {PHASE_CODE[phase]: index for index, name in enumerate(_NAMES) for phase in STEP_SUMS[name]}
_NESTED = {code: index for code, index in _OUTER.items() if code not in {PHASE_CODE[name] for name in OUTERMOST_PHASES}}
_LOAD = PHASE_CODE["checkpoint_load"]
_NOT_TRAINING = (_LOAD, PHASE_CODE["init"])


@dataclass
class FoldedStep:
    """The sums of one step; ``previous_ns`` is the end of the step before, or the begin of the first step."""

    step: int
    begin_ns: int
    previous_ns: int
    end_ns: int
    sums_ns: list[int]
    loading_ns: int
    skipped: bool
    is_complete: bool  # false if spans of it were lost, or all of the step before
    micro_steps: int
    rows: int
    tokens: int
    counted: bool = False  # only its end was recorded

    @property
    def iteration_ns(self) -> int:
        """Duration without evaluation and checkpoints."""
        paused_ns = self.sums_ns[_NAMES.index("eval")] + self.sums_ns[_NAMES.index("checkpoint")]
        return self.end_ns - self.previous_ns - paused_ns + self.loading_ns


@dataclass
class _OpenStep:
    """The step in progress."""

    begin_ns: int | None = None
    number: int | None = None  # of the step in its first phase
    loads: list[tuple[int, int]] = field(default_factory=list)  # outermost loading of checkpoints
    sums_ns: list[int] = field(default_factory=lambda: [0] * len(_NAMES))
    micro_steps: int = 0
    rows: int = UNKNOWN
    tokens: int = UNKNOWN


def sum_steps(spans: Iterable[Record], previous_ns: int | None, previous_step: int) -> list[FoldedStep]:
    """Return the steps that these spans finish.

    Args:
        spans: of one process, by their ends.
        previous_ns: the end of the last step before, None at the begin.
        previous_step: its number.
    """
    steps: list[FoldedStep] = []
    current = _OpenStep()
    for span in spans:
        _add_span(current, span)
        if span[_PHASE] == _STEP and span[_FLAGS] & BOUNDARY and span[_ENGINE] == 0:
            if previous_ns is None and current.number is not None:
                previous_step = current.number - 1
            steps.append(_finish_step(current, span, previous_ns, previous_step))
            previous_ns, previous_step, current = span[_END], span[_NUMBER], _OpenStep()
    return steps


def _add_span(current: _OpenStep, span: Record) -> None:
    begin_ns, end_ns, phase, depth = span[_BEGIN], span[_END], span[_PHASE], span[_DEPTH]
    if phase not in _NOT_TRAINING and (current.begin_ns is None or begin_ns < current.begin_ns):
        current.begin_ns = begin_ns
        if span[_ENGINE] == 0:
            current.number = span[_NUMBER]
    if phase == _LOAD and depth == 0:
        current.loads.append((begin_ns, end_ns))
    index = (_NESTED if depth else _OUTER).get(phase)
    if index is None or span[_FLAGS] & EVAL:
        return
    current.sums_ns[index] += end_ns - begin_ns
    current.micro_steps += index == _BACKWARD
    if index == _FORWARD:
        if span[_ROWS] >= 0:
            current.rows = max(current.rows, 0) + span[_ROWS]
        if span[_TOKENS] >= 0:
            current.tokens = max(current.tokens, 0) + span[_TOKENS]


def _finish_step(current: _OpenStep, closing: Record, previous_ns: int | None, previous_step: int) -> FoldedStep:
    begin_ns = closing[_BEGIN] if current.begin_ns is None else current.begin_ns
    loading_ns = 0
    if previous_ns is None:
        previous_ns = begin_ns
        loading_ns = sum(end_ns - load_ns for load_ns, end_ns in current.loads if end_ns <= begin_ns)
    if closing[_FLAGS] & COUNTED:  # of its phases at most a part was recorded
        current.micro_steps, current.rows, current.tokens = 0, UNKNOWN, UNKNOWN
        current.sums_ns = [sum_ns if name in _PAUSES else 0 for name, sum_ns in zip(_NAMES, current.sums_ns, strict=True)]
    # Numbers also jump when a checkpoint is loaded.
    is_next = closing[_NUMBER] <= previous_step + 1 or current.sums_ns[_NAMES.index("checkpoint")] > 0
    return FoldedStep(
        step=closing[_NUMBER],
        begin_ns=begin_ns,
        previous_ns=previous_ns,
        end_ns=closing[_END],
        sums_ns=current.sums_ns,
        loading_ns=loading_ns,
        skipped=bool(closing[_FLAGS] & SKIPPED),
        is_complete=is_next and not closing[_FLAGS] & INCOMPLETE,
        micro_steps=current.micro_steps,
        rows=current.rows,
        tokens=current.tokens,
        counted=bool(closing[_FLAGS] & COUNTED),
    )

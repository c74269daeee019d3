"""What a rank was doing when something went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zerotop.analysis.processes.alive_ranks import RankProcess, find_table
from zerotop.session.reader import Session
from zerotop_probe.recording.tables import EVAL, FAILED, PHASE_CODE, PHASES

# A failure is recorded before Python unwinds the phases in progress: spans that end failed in this time were those.
_UNWINDING_NS = 2_000_000_000
# Spans looked back through: a step has a few for each micro-step.
_TAIL = 512
_MOST_SPANS = 12
_WORK = tuple(PHASE_CODE[name] for name in ("forward", "backward", "step"))


@dataclass(frozen=True, slots=True)
class LastSpan:
    """A phase before a failure, or one that it was in."""

    phase: str
    begin_ns: int  # unix time
    seconds: float
    step: int
    micro_step: int
    depth: int
    failed: bool  # left by the exception


def read_last_spans(session: Session, process: RankProcess, at_ns: int, cursor_ns: int) -> tuple[LastSpan, ...]:
    """The last phases that a rank had left at a moment, and those that it was in if they are over at the cursor."""
    source = find_table(session, "spans", process, at_ns)
    if source is None:
        return ()
    own_ns, found = at_ns - source.offset_ns, []
    for span in source.until(min(cursor_ns, at_ns + _UNWINDING_NS))[-_TAIL:]:
        if span["end_ns"] <= own_ns or (span["flags"] & FAILED and span["begin_ns"] <= own_ns):
            found.append(_build_span(span, source.offset_ns))
    return tuple(sorted(found[-_MOST_SPANS:], key=lambda span: span.begin_ns))


def _build_span(span: Any, offset_ns: int) -> LastSpan:
    code = int(span["phase"])
    return LastSpan(
        phase=PHASES[code] if code < len(PHASES) else "other",
        begin_ns=int(span["begin_ns"]) + offset_ns,
        seconds=(int(span["end_ns"]) - int(span["begin_ns"])) / 1e9,
        step=int(span["step"]),
        micro_step=int(span["micro_step"]),
        depth=int(span["depth"]),
        failed=bool(span["flags"] & FAILED),
    )


def find_outermost(session: Session, process: RankProcess, at_ns: int, cursor_ns: int) -> str:
    """The outermost phase that a rank was in at a moment; "" between phases."""
    begins, spans = find_table(session, "begins", process, at_ns), find_table(session, "spans", process, at_ns)
    if begins is None:
        return ""
    known = begins.until(at_ns)[-_TAIL:]
    known = known[known["depth"] == 0]
    if not len(known):
        return ""
    last = known[-1]
    if spans is not None:
        over = spans.until(min(at_ns, cursor_ns))[-_TAIL:]
        if ((over["begin_ns"] == last["time_ns"]) & (over["depth"] == 0)).any():
            return ""
    code = int(last["phase"])
    return PHASES[code] if code < len(PHASES) else "other"


def has_worked_after(session: Session, process: RankProcess, at_ns: int, cursor_ns: int) -> bool:
    """Whether a rank has begun and ended a forward, backward or step after a moment."""
    source = find_table(session, "spans", process, cursor_ns)
    if source is None:
        return False
    later = source.between(at_ns, cursor_ns)
    later = later[(later["begin_ns"] > at_ns - source.offset_ns) & (later["flags"] & FAILED == 0)]
    return any(int(code) in _WORK for code in later["phase"][:_TAIL])


def find_largest_batch(session: Session, process: RankProcess, until_ns: int) -> dict[str, int]:
    """rows, sequence and tokens of the largest training micro-batch that was over by then; nothing where there was none."""
    source = find_table(session, "spans", process, until_ns)
    if source is None:
        return {}
    spans = source.until(until_ns - 1)
    forwards = np.flatnonzero((spans["phase"] == PHASE_CODE["forward"]) & (spans["flags"] & EVAL == 0) & (spans["rows"] > 0))
    if not len(forwards):
        return {}
    place = forwards[np.argmax(np.maximum(spans["tokens"][forwards], spans["rows"][forwards]))]
    return {name: int(spans[name][place]) for name in ("rows", "sequence", "tokens") if spans[name][place] > 0}


def find_last_batch(session: Session, process: RankProcess, cursor_ns: int) -> dict[str, int]:
    """rows, sequence and tokens of the last micro-batch that was looked at; what is not known is missing."""
    source = find_table(session, "spans", process, cursor_ns)
    if source is None:
        return {}
    for span in source.until(cursor_ns)[: -_TAIL - 1 : -1]:
        if span["rows"] >= 0:
            return {name: int(span[name]) for name in ("rows", "sequence", "tokens") if span[name] >= 0}
    return {}

"""The last moments before a failure: a rank's last phases and micro-batch, and its host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.phases import find_open_phases, find_phase_name
from zerotop.recording.keys import RankProcess, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.host_memory import HostMemory, read_host_memory
from zerotop.recording.moments.moment import keep
from zerotop_probe.recording.events import OutOfMemoryFacts
from zerotop_probe.recording.tables import EVAL, FAILED, PHASE_CODE

# A failure is recorded before Python unwinds its phases: spans that end as failed within this time belong to it.
_UNWINDING_NS = 2_000_000_000
# A phase that is shorter was not seen to begin.
_NO_DURATION_NS = 1_000_000
# Spans to look back through; a step has a few for each micro-step.
_TAIL = 512
_MOST_SPANS = 12
_WORK = tuple(PHASE_CODE[name] for name in ("forward", "backward", "step"))
_HOST_SECONDS = 10
_SHORT_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class LastSpan:
    """A phase that ended before a failure or with it."""

    phase: str
    begin_ns: int  # unix time
    seconds: float
    step: int
    micro_step: int
    depth: int
    failed: bool  # left by the exception


class FailureScene(NamedTuple):
    """Time and place of a failure, as far as known."""

    process: RankProcess | None
    at_ns: int
    phase: str
    outer_phase: str
    facts: OutOfMemoryFacts  # step, micro_step, rows, sequence, tokens, device
    spans: tuple[LastSpan, ...]


# --- the host ------------------------------------------------------------------------------------------------------------


def read_last_seconds(at: At, host: str) -> tuple[HostMemory, ...]:
    """Return a node's memory in the last seconds before a moment, oldest first."""
    samples = []
    for source in at.host_sources("hosts", host):
        rows = source.between(at.cursor_ns - _HOST_SECONDS * 10**9, at.cursor_ns)
        times_ns = source.unix_times(rows).tolist()
        samples += [read_host_memory(row, time_ns) for row, time_ns in zip(rows, times_ns, strict=True)]
    return tuple(sorted(samples, key=lambda sample: sample.unix_ns))


def is_memory_short(samples: Sequence[HostMemory]) -> bool:
    """Return whether nearly all of the node's memory was in use at any of the samples."""
    return any(sample.used_bytes >= _SHORT_SHARE * sample.limit_bytes for sample in samples)


# --- the rank's phases ---------------------------------------------------------------------------------------------------


def read_last_spans(at: At, process: RankProcess, at_ns: int) -> tuple[LastSpan, ...]:
    """Return the phases that had ended at a moment, and the phases in progress then that have failed by the cursor.

    In a counted step a phase is recorded only if it fails, and has no duration.
    """
    source = at.at(at_ns).find_table("spans", process)
    if source is None:
        return ()
    own_ns = at_ns - source.offset_ns
    rows = source.until(min(at.cursor_ns, at_ns + _UNWINDING_NS))[-_TAIL:]
    is_unseen = rows["end_ns"] - rows["begin_ns"] < _NO_DURATION_NS
    was_begun = (rows["begin_ns"] <= own_ns) | is_unseen
    rows = rows[(rows["end_ns"] <= own_ns) | ((rows["flags"] & FAILED != 0) & was_begun)]
    spans = [_build_span(row, source.offset_ns) for row in rows[-_MOST_SPANS:]]
    return tuple(sorted(spans, key=lambda span: span.begin_ns))


def _build_span(row: Any, offset_ns: int) -> LastSpan:
    return LastSpan(
        phase=find_phase_name(int(row["phase"])),
        begin_ns=int(row["begin_ns"]) + offset_ns,
        seconds=(int(row["end_ns"]) - int(row["begin_ns"])) / 1e9,
        step=int(row["step"]),
        micro_step=int(row["micro_step"]),
        depth=int(row["depth"]),
        failed=bool(row["flags"] & FAILED),
    )


def find_failed_spans(spans: Sequence[LastSpan]) -> tuple[LastSpan, LastSpan] | None:
    """Return the innermost and the outermost of the spans that an exception left; None where none was."""
    failed = [span for span in spans if span.failed]
    if not failed:
        return None
    return max(failed, key=lambda span: span.depth), min(failed, key=lambda span: span.depth)


def find_outermost(at: At, process: RankProcess) -> str:
    """Return the outermost phase in progress at a moment; "" between phases."""
    begins = at.find_table("begins", process)
    if begins is None:
        return ""
    phases = find_open_phases(begins, at.find_table("spans", process), at.cursor_ns)
    return find_phase_name(phases[0].phase) if phases and not phases[0].depth else ""


def has_worked_after(at: At, process: RankProcess, at_ns: int) -> bool:
    """Return whether the rank has begun and ended a forward, backward or step after a moment."""
    source = at.find_table("spans", process)
    if source is None:
        return False
    later = source.between(at_ns, at.cursor_ns)
    later = later[(later["begin_ns"] > at_ns - source.offset_ns) & (later["flags"] & FAILED == 0)]
    return bool(np.isin(later["phase"][:_TAIL], _WORK).any())


def read_last_place(at: At, process: RankProcess, at_ns: int) -> tuple[tuple[LastSpan, ...], str]:
    """Return the last phases of a process, and a description of the phase in or after which it vanished."""
    spans = read_last_spans(at, process, at_ns)
    begins = at.at(at_ns).find_table("begins", process)
    begun = begins.until(at_ns) if begins is not None else None
    if begun is None or not len(begun):
        return spans, ""
    phase = find_outermost(at.at(at_ns), process)
    if phase:
        return spans, describe_place(phase, phase, int(begun[-1]["step"]))
    return spans, describe_failed_place(spans)


def describe_failed_place(spans: Sequence[LastSpan]) -> str:
    """Return in words the phase that an exception left, or the last one before."""
    if (failed := find_failed_spans(spans)) is not None:
        inner, outer = failed
        return describe_place(inner.phase, outer.phase, inner.step)
    last = next((span for span in reversed(spans) if not span.depth), None)
    place = describe_place(last.phase, last.phase, last.step) if last is not None else ""
    return f" after{place.removeprefix(' in').removeprefix(' during')}" if place else ""


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


# --- the rank's micro-batches --------------------------------------------------------------------------------------------


_GROWN_BATCH = 1.1  # from this ratio on batches explain outputs that are larger


def find_largest_batch(at: At, process: RankProcess) -> dict[str, int]:
    """Return rows, sequence and tokens of the largest training micro-batch that ended before a moment; {} without any."""
    source = at.at(at.cursor_ns - 1).find_table("spans", process)
    if source is None:
        return {}
    end = source.count_until(at.cursor_ns - 1)
    known = keep(source, _LargestBatch)
    begin, largest = (known.looked_through, known.place) if known.looked_through <= end else (0, None)
    spans = source.array[begin:end]
    fresh = np.flatnonzero((spans["phase"] == PHASE_CODE["forward"]) & (spans["flags"] & EVAL == 0) & (spans["rows"] > 0))
    if len(fresh):
        place = begin + int(fresh[np.argmax(_measure_batches(spans[fresh]))])
        if largest is None or _measure_batches(source.array[place]) > _measure_batches(source.array[largest]):
            largest = place
    known.looked_through, known.place = end, largest
    return {} if largest is None else _read_batch(source.array[largest], 1)


def have_batches_grown(at: At, process: RankProcess, since_step: int) -> bool:
    """Return whether training's micro-batches are notably larger than in a step, as far as their sizes are known."""
    source = at.find_table("spans", process)
    if source is None:
        return False
    spans = source.until(at.cursor_ns)
    spans = spans[(spans["phase"] == PHASE_CODE["forward"]) & (spans["flags"] & EVAL == 0) & (spans["rows"] > 0)]
    before, since = (_measure_batches(spans[part]) for part in (spans["step"] <= since_step, spans["step"] > since_step))
    return bool(len(before) and len(since) and since[-1] > _GROWN_BATCH * before[-1])


class _LargestBatch:
    looked_through = 0  # spans
    place: int | None = None  # of the one with the largest batch


def _measure_batches(spans: Any) -> Any:
    return np.maximum(spans["tokens"], spans["rows"])


def find_failed_batch(at: At, process: RankProcess, at_ns: int) -> dict[str, int]:
    """Return the micro-batch of the forward that an error at a moment left, as recorded by the cursor; {} if unknown."""
    source = at.find_table("spans", process)
    if source is None:
        return {}
    rows = source.between(at_ns - 1, min(at.cursor_ns, at_ns + _UNWINDING_NS))
    rows = rows[(rows["phase"] == PHASE_CODE["forward"]) & (rows["flags"] & FAILED != 0) & (rows["rows"] > 0)]
    return _read_batch(rows[0], 1) if len(rows) else {}


def find_evaluated_batch(at: At, process: RankProcess, at_ns: int) -> dict[str, int]:
    """Return the micro-batch of the last forward of the evaluation in progress at a moment; {} if unknown."""
    begins, spans = at.at(at_ns).find_table("begins", process), at.at(at_ns).find_table("spans", process)
    if begins is None or spans is None:
        return {}
    begun = begins.until(at_ns)
    begun = begun[(begun["phase"] == PHASE_CODE["eval"]) & (begun["depth"] == 0)]
    rows = spans.until(at_ns)[-_TAIL:]
    rows = rows[(rows["phase"] == PHASE_CODE["forward"]) & (rows["flags"] & EVAL != 0) & (rows["rows"] > 0)]
    is_own = len(begun) and len(rows) and rows["begin_ns"][-1] >= begun["time_ns"][-1]
    return _read_batch(rows[-1], 1) if is_own else {}


def find_cut_batch(at: At, process: RankProcess, facts: OutOfMemoryFacts) -> dict[str, int]:
    """Return the last micro-batch that the model got, if one has a token per row more: labels are shifted inputs."""
    last = find_last_batch(at, process)
    sequence = last.get("sequence")
    return last if sequence and (facts.rows, facts.sequence) == (last["rows"], sequence + 1) else {}


def find_last_batch(at: At, process: RankProcess) -> dict[str, int]:
    """Return rows, sequence and tokens of the last micro-batch of known size; unknown values are left out."""
    rows = _read_spans(at, process)[-_TAIL:]
    rows = rows[rows["rows"] >= 0]
    return _read_batch(rows[-1], 0) if len(rows) else {}


def _read_spans(at: At, process: RankProcess) -> NDArray[Any]:
    source = at.find_table("spans", process)
    if source is None:
        return np.empty(0, [(name, np.int64) for name in ("phase", "flags", "rows", "tokens")])
    return source.until(at.cursor_ns)


def _read_batch(row: Any, least: int) -> dict[str, int]:
    return {name: int(row[name]) for name in ("rows", "sequence", "tokens") if row[name] >= least}


def find_last_scene(at: At, rank: int | None, device: int | None) -> FailureScene:
    """Return the last recorded moments of a rank; without ``rank``, of the only one."""
    sources = [s for s in at.sources["spans"] if s.created_ns <= at.cursor_ns and rank in (None, s.rank)]
    if not sources or (rank is None and len({source.rank for source in sources}) > 1):
        return FailureScene(None, at.cursor_ns, "", "", OutOfMemoryFacts({}), ())
    source = max(sources, key=lambda source: source.created_ns)
    process, count = identify_process(source), source.count_until(at.cursor_ns)
    ends = [int(source.array["end_ns"][count - 1]) + source.offset_ns] if count else [0]
    begins = [s.last_ns or 0 for s in at.sources["begins"] if identify_process(s) == process]
    at_ns = min(at.cursor_ns, max(ends + begins))
    spans = read_last_spans(at, process, at_ns)
    facts = find_last_batch(at, process) | ({} if device is None else {"device": device})
    if spans:
        inner, outer = find_failed_spans(spans) or (spans[-1], None)
        known = {"step": inner.step, "micro_step": inner.micro_step}
        facts |= {name: number for name, number in known.items() if number >= 0}
        if outer is not None:
            return FailureScene(process, at_ns, inner.phase, outer.phase, OutOfMemoryFacts(facts), spans)
    phase = find_outermost(at.at(at_ns), process)
    return FailureScene(process, at_ns, phase, phase, OutOfMemoryFacts(facts), spans)

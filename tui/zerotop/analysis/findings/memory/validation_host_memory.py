"""Evaluation needs more host memory than training did, and releases it: if memory is short, the kernel kills a rank then.

Read from the sampled memory without pages of files. Memory that stays in use afterwards was loaded once, and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.host_load import read_memory
from zerotop.analysis.findings.support.links import Kinds, is_simultaneous
from zerotop.analysis.findings.support.memory import evaluation_batches
from zerotop.analysis.findings.support.thresholds import HOST_GROWTH_BYTES, USED_SHARE
from zerotop.recording.steps.step_memory import measure_held_bytes
from zerotop_probe.recording.tables import FAILED

_KIND = FindingKind(
    name="validation_host_memory",
    severity=Severity.INFO,
    confidence=0.7,
    host_bytes="added_bytes",
    headline="Evaluation raised host memory by {added_bytes:bytes} to {resident_bytes:bytes} on {concerned:ranks}",
    details=(
        "It took {evaluation_s:seconds}"
        f"{evaluation_batches.BATCHES}"
        "; afterwards {released_bytes:bytes} were released[, and {free_bytes:bytes} were free on the node at the peak[, for"
        " {node_ranks} ranks]]."
    ),
    advice="Keep fewer outputs in the evaluation, or evaluate in smaller batches.",
    explained_by=(Kinds(is_simultaneous, "unused_graphs"),),
)
# Memory added to the rank's previous maximum, as a share of it or of the node's memory, beside HOST_GROWTH_BYTES.
_OWN_SHARE, _NODE_SHARE = 0.5, 0.05
# The part of it that is released again.
_RELEASED_SHARE = 0.5
# Number of samples after an evaluation that show the released memory: half a second.
_AFTER = 5
# A peak that is reported again.
_HIGHER = 1.25


class _Peak(NamedTuple):
    """An evaluation of a rank, and its host memory in bytes."""

    number: int
    begin_ns: int
    end_ns: int
    known_ns: int
    step: int
    has_failed: bool
    before: int  # at most, outside evaluations
    highest: int
    highest_ns: int  # when that was
    left: int  # afterwards


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report an evaluation with larger batches, or the second one that needs more; again if a later one needs still more."""
    lead = window.subject.lead
    for peak in window.extend(partial(_read_next, lead), 0):
        if peak.has_failed or not _is_notable(lead, peak):
            continue
        first = window.find_once(partial(_Peak, *peak))
        shapes = evaluation_batches.measure_batches(lead, peak.begin_ns, peak.end_ns)
        is_cause = evaluation_batches.is_batch_larger(shapes) or peak != first  # the first one may load what it needs
        if is_cause and window.is_news(peak.highest, lambda last, now: now >= _HIGHER * last):
            yield _build_finding(window.subject, peak, shapes)


def _read_next(lead: Process, last: _Peak | None) -> _Peak | None:
    """Return the next evaluation as soon as the memory left after it is known."""
    number, before, until_ns = (0, 0, 0) if last is None else (last.number + 1, last.before, last.known_ns)
    spans = lead.read_rare_phases("eval").skip(number)
    if not len(spans):
        return None
    begin_ns, end_ns, span = int(lead.compute_begins(spans)[0]), int(spans.times[0]), spans.rows[0]
    after = lead.host_samples.read_window(end_ns, lead.at.cursor_ns)
    if len(after) < _AFTER:
        return None
    known_ns = int(after.times[_AFTER - 1])
    before = max(before, _find_highest(lead, until_ns, begin_ns)[0])
    highest, left = _find_highest(lead, begin_ns, end_ns), int(measure_held_bytes(after.rows)[:_AFTER].min())
    has_failed = bool(span["flags"] & FAILED)
    return _Peak(number, begin_ns, end_ns, max(until_ns, known_ns), int(span["step"]), has_failed, before, *highest, left)


def _find_highest(process: Process, begin_ns: int, end_ns: int) -> tuple[int, int]:
    """Return the highest host memory in a time window, and its time."""
    samples = process.host_samples.read_window(begin_ns, end_ns)
    if not len(samples):
        return 0, end_ns
    held = measure_held_bytes(samples.rows)
    at = int(held.argmax())
    return int(held[at]), int(samples.times[at])


def _is_notable(lead: Process, peak: _Peak) -> bool:
    """Whether the evaluation needed notably more than training had in use before, and released it."""
    memory = read_memory(lead.recording, lead.host, peak.highest_ns)
    share = _OWN_SHARE * peak.before
    least = max(HOST_GROWTH_BYTES, share if memory is None else min(share, _NODE_SHARE * memory.limit_bytes))
    added = peak.highest - peak.before
    return peak.before > 0 and added >= least and peak.highest - peak.left >= _RELEASED_SHARE * added


def _build_finding(group: Group, peak: _Peak, shapes: dict[str, float]) -> Finding:
    lead, kind = group.lead, _KIND
    memory = read_memory(lead.recording, lead.host, peak.highest_ns)
    node_ranks = len(group.processes_on(lead.host))
    free = memory.limit_bytes - memory.used_bytes if memory is not None else None
    if evaluation_batches.is_batch_larger(shapes):
        kind = kind.with_changes(confidence=0.9, advice=evaluation_batches.BATCH_ADVICE, fix=evaluation_batches.BATCH_FIX)
    if memory is not None and memory.used_bytes < USED_SHARE * memory.limit_bytes:
        kind = kind.with_changes(advice="", fix="")
    else:
        kind = kind.with_changes(severity=Severity.WARNING)
    evidence = {
        "added_bytes": peak.highest - peak.before,
        "resident_bytes": peak.highest,
        "before_bytes": peak.before,
        "released_bytes": peak.highest - peak.left,
        "evaluation_s": (peak.end_ns - peak.begin_ns) / 1e9,
        "free_bytes": free,
        **shapes,
    }
    return kind.at(
        lead,
        peak.begin_ns,
        peak.end_ns,
        evidence,
        known_ns=peak.known_ns,
        step=peak.step,
        concerned=(lead.rank,),
        node_ranks=node_ranks if node_ranks > 1 else None,
        **evaluation_batches.describe_batches(shapes),
    )

"""Logits and their float32 copies take a large part of the memory peak of a language model's backward.

Counted when the first backward begins: blocks of rows x tokens x vocabulary elements, see ``support.memory.block_shapes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.memory.block_shapes import (
    LOGITS,
    BlockGroup,
    find_first_backward,
    read_groups,
    recognize_block,
)
from zerotop.analysis.findings.support.memory.looks import FoundLook, await_look
from zerotop.analysis.findings.support.memory.phase_peaks import SettledPeaks, find_settled_peaks
from zerotop.analysis.formatting import join_words
from zerotop.analysis.memory.block_lines import Look
from zerotop.recording.moments.rank_records import TRAINER
from zerotop_probe.recording.event_values import PEAK

_KIND = FindingKind(
    name="logits_peak",
    severity=Severity.INFO,
    confidence=0.95,
    headline="Logits take {logits_bytes:bytes} of the memory peak of {backward_peak_bytes:bytes} in backward",
    details=(
        "When backward begins, logits or copies of them take {blocks:count block} of {most}{block_bytes:bytes} with"
        " {rows:.0f} x {tokens:.0f} x {vocabulary:,.0f} elements[, allocated at {lines}]. The backward of the loss adds two"
        " more.{default} Gradient checkpointing does not free them."
    ),
    advice=(
        "Lower {batch_size} from {rows:.0f} to {fewer_rows:.0f} and accumulate over as many more micro-batches: that needs"
        " {saved_bytes:bytes} less. A fused linear cross entropy, as in Liger Kernel, never holds all logits."
    ),
    fix="{fused_loss_fix}",
)
_ONE_ROW_ADVICE = "Compute the loss with a fused linear cross entropy, as in Liger Kernel: it never holds all logits."
_DEFAULT = " 8 rows are the Trainer's default."
_DEFAULT_ROWS = 8
# The share of the peak from which logits are its main part: no other tensors of a transformer are as large.
_OWNER_SHARE = 0.25
_LEAST_BYTES = 64 << 20
_MOST_LINES = 3


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt of the job, when the optimizer's state is there."""
    lead = window.subject.lead
    peaks = window.find_once(partial(find_settled_peaks, lead))
    found = _await_look(lead, peaks) if peaks is not None else None
    if peaks is not None and found is not None:
        window.is_closed = True
        yield from _find_logits(window.subject, peaks, found)


def _await_look(lead: Process, peaks: SettledPeaks) -> FoundLook | None:
    """Return a look at a later step; at once if there are no logits."""
    known_ns = int(peaks.steps["end_unix_ns"][-1])
    if not _find_blocks(lead) or peaks.owner != "backward":
        return FoundLook(None, known_ns)
    return await_look(lead, PEAK, lambda look: True, known_ns)


def _find_blocks(lead: Process) -> list[BlockGroup]:
    return [blocks for blocks in read_groups(lead.engine, find_first_backward(lead)) if blocks.width == LOGITS]


def _name_lines(look: Look | None, lead: Process) -> str:
    """Return the lines that allocated logits; empty where they are unknown."""
    if look is None:
        return ""
    inventory = find_first_backward(lead)
    lines = [
        blocks.line.text
        for blocks in look.blocks
        if blocks.line is not None
        and any(recognize_block(lead.engine, inventory, size).width == LOGITS for size, _ in blocks.sizes)
    ]
    return join_words(lines[:_MOST_LINES])


def _find_logits(group: Group, peaks: SettledPeaks, look: FoundLook) -> Iterator[Finding]:
    lead = group.lead
    inventory, found = find_first_backward(lead), _find_blocks(lead)
    output = inventory.output_shape if inventory is not None else None
    if not found or output is None or peaks.owner != "backward":
        return
    rows, tokens, vocabulary = output
    largest = max(blocks.size for blocks in found)
    # The backward of log-softmax and cross entropy allocates two more of this size: the gradients of its output and input.
    logits = sum(blocks.total_bytes for blocks in found) + 2 * largest
    if largest < _LEAST_BYTES or logits < _OWNER_SHARE * peaks.highest_bytes:
        return
    fewer = max(1, rows // 4)
    evidence = {
        "rows": rows,
        "tokens": tokens,
        "vocabulary": vocabulary,
        "blocks": sum(blocks.count for blocks in found),
        "block_bytes": largest,
        "logits_bytes": logits,
        "backward_peak_bytes": peaks.highest_bytes,
        "fewer_rows": fewer,
        "saved_bytes": logits * (1 - fewer / rows),
    }
    is_default = lead.engine.library == TRAINER and lead.engine.micro_batch == _DEFAULT_ROWS == rows
    kind = _KIND if rows > 1 else _KIND.with_changes(advice=_ONE_ROW_ADVICE)
    kind = group.keep_saving_advice(kind, look.known_ns)
    most = "up to " if min(blocks.size for blocks in found) < largest else ""
    values = {"most": most, "default": _DEFAULT if is_default else "", "lines": _name_lines(look.look, lead) or None}
    yield kind.at_steps(group, peaks.steps, evidence, known_ns=look.known_ns, **values)

"""An optimizer on the CPU takes more host memory for each parameter than it has to: pinned buffers are rounded up.

Ideal are 16 bytes: master weights, gradients and Adam's two moments, 4 each. Read from the inventory after the first update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerotop.analysis.annotations.support.annotation import Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Facts, Group, Process
from zerotop.analysis.annotations.support.fp16_warmup import inventory, sharers
from zerotop.analysis.annotations.support.thresholds import IDEAL_BYTES, PINNED_BYTES, PINNED_SHARE
from zerotop.analysis.formatting import size
from zerotop.session.reader import Event

_STATES = ("master_weights", "gradients", "optimizer_state")


@dataclass
class _Told:
    """Whether an attempt was looked at."""

    done: bool = False


def detect(facts: Facts) -> Iterator[Annotation]:
    """At most one finding for each attempt."""
    for group in facts.groups:
        told = inventory(group.lead, "after_update")
        if told is not None and not group.kept(_Told).done:
            group.kept(_Told).done = True
            yield from _of_group(group, told)


def _of_group(group: Group, told: Event) -> Iterator[Annotation]:
    lead, host, pinned = group.lead, told.facts.get("host"), told.facts.get("host_pinned")
    held = (told.facts.get("pinned_allocator") or {}).get("allocated_bytes")
    total = lead.engine.get("trainable_parameters")
    if (
        lead.engine.get("offload_optimizer") != "cpu"
        or not isinstance(host, dict)
        or not isinstance(total, int)
        or not total
    ):
        return
    updated = total / sharers(lead.engine)
    states = sum(int(host.get(name, 0)) for name in _STATES)
    spare = max(0, held - sum(pinned.values())) if isinstance(held, int) and isinstance(pinned, dict) else 0
    excess = states + spare - IDEAL_BYTES * updated
    if states and excess >= max(PINNED_BYTES, PINNED_SHARE * IDEAL_BYTES * updated):
        yield _annotation(group, lead, told, (states, spare, held or 0), updated)


def _annotation(group: Group, lead: Process, told: Event, sizes: tuple[int, int, int], updated: float) -> Annotation:
    states, spare, held = sizes
    each = (states + spare) / updated
    text = f"Each rank's offloaded optimizer takes {each:.1f} bytes of host memory for each of its parameters, where"
    text += f" {IDEAL_BYTES} would do: {size(states + spare)} instead of {size(IDEAL_BYTES * updated)}"
    if spare:
        text += f"; of {size(held)} that are pinned {size(spare)} are rounding to powers of two, or kept for reuse"
    return Annotation(
        name="pinned_overhead",
        begin_ns=told.unix_ns,
        end_ns=told.unix_ns,
        known_ns=told.unix_ns,
        # The inventory says how many steps were done.
        step=max(0, int(told.facts.get("step", 1)) - 1),
        ranks=group.ranks(told.unix_ns),
        severity=Severity.INFO,
        confidence=0.9,
        sentence=text + ".",
        advice='Set "offload_optimizer.pin_memory": false where host memory is short: copies are then slower.',
        evidence={
            "bytes_per_parameter": each,
            "states_bytes": float(states),
            "pinned_spare_bytes": float(spare),
            "pinned_bytes": float(held),
        },
    )

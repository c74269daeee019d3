"""An optimizer on the CPU takes more host memory for each parameter than it has to: pinned buffers are rounded up.

Ideal are 16 bytes: master weights, gradients and Adam's two moments, 4 each. Read from the inventory after the first update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerotop.analysis.annotations.support.annotation import Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.fp16_warmup import count_sharers, find_inventory
from zerotop.analysis.annotations.support.thresholds import IDEAL_BYTES, PINNED_BYTES, PINNED_SHARE
from zerotop.analysis.formatting import format_bytes
from zerotop.session.reader import Event

_STATES = ("master_weights", "gradients", "optimizer_state")


@dataclass
class _State:
    """Whether an attempt was looked at."""

    is_checked: bool = False


def detect(facts: Evidence) -> Iterator[Annotation]:
    """At most one finding for each attempt."""
    for group in facts.groups:
        told = find_inventory(group.lead, "after_update")
        if told is not None and not group.get_state(_State).is_checked:
            group.get_state(_State).is_checked = True
            yield from _check_group(group, told)


def _check_group(group: Group, inventory: Event) -> Iterator[Annotation]:
    lead, host, pinned = group.lead, inventory.facts.get("host"), inventory.facts.get("host_pinned")
    held = (inventory.facts.get("pinned_allocator") or {}).get("allocated_bytes")
    total = lead.engine.get("trainable_parameters")
    if (
        lead.engine.get("offload_optimizer") != "cpu"
        or not isinstance(host, dict)
        or not isinstance(total, int)
        or not total
    ):
        return
    updated = total / count_sharers(lead.engine)
    states = sum(int(host.get(name, 0)) for name in _STATES)
    spare = max(0, held - sum(pinned.values())) if isinstance(held, int) and isinstance(pinned, dict) else 0
    excess = states + spare - IDEAL_BYTES * updated
    if states and excess >= max(PINNED_BYTES, PINNED_SHARE * IDEAL_BYTES * updated):
        yield _build_finding(group, lead, inventory, (states, spare, held or 0), updated)


def _build_finding(group: Group, lead: Process, inventory: Event, sizes: tuple[int, int, int], updated: float) -> Annotation:
    states, spare, held = sizes
    each = (states + spare) / updated
    text = f"Each rank's offloaded optimizer takes {each:.1f} bytes of host memory for each of its parameters, where"
    text += f" {IDEAL_BYTES} would do: {format_bytes(states + spare)} instead of {format_bytes(IDEAL_BYTES * updated)}"
    if spare:
        text += f"; of {format_bytes(held)} that are pinned {format_bytes(spare)} are rounding to powers of two, or kept for reuse"
    return Annotation(
        name="pinned_overhead",
        begin_ns=inventory.unix_ns,
        end_ns=inventory.unix_ns,
        known_ns=inventory.unix_ns,
        # The inventory says how many steps were done.
        step=max(0, int(inventory.facts.get("step", 1)) - 1),
        ranks=group.ranks_at(inventory.unix_ns),
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

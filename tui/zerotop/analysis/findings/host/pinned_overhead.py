"""An optimizer on the CPU takes more host memory per parameter than it needs: pinned buffers are rounded up.

It needs 16 bytes per parameter: 4 each for master weight, gradient and Adam's two moments. Read from the inventory after the
first update.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.host_load import is_host_short
from zerotop.analysis.findings.support.steps.fp16_warmup import count_sharers, find_inventory
from zerotop.analysis.formatting import GIB
from zerotop.analysis.memory.allocator_settings import choose_variable, parse_version
from zerotop_probe.recording.events import Tensors

_KIND = FindingKind(
    name="pinned_overhead",
    severity=Severity.INFO,
    confidence=0.9,
    host_bytes="pinned_spare_bytes",
    headline="The CPU optimizer takes {bytes_per_parameter:.1f} bytes of host memory per parameter, not {ideal}",
    details=(
        "It holds {used:bytes} on each rank, where {needed:bytes} would do[. Of {pinned_bytes:bytes} pinned, {spare:bytes}"
        " come from rounding up to powers of two, or are kept for reuse]."
    ),
    advice="Turn pinning off; copies become slower.",
    fix='"offload_optimizer": {"device": "cpu", "pin_memory": false}',
)
# The first PyTorch that can leave large pinned buffers at their requested size.
_UNROUNDED_SINCE = (2, 13)
_UNROUNDED = "Pin without rounding sizes up: copies stay as fast."
_UNROUNDED_FIX = "export {variable}=pinned_max_round_threshold_mb:64"
# Bytes needed for each parameter, and the excess that is worth a finding: both the share and the bytes.
IDEAL_BYTES = 16
PINNED_SHARE = 0.15
PINNED_BYTES = 1 * GIB

_STATES = ("master_weights", "gradients", "optimizer_state")


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report at most once for each attempt."""
    inventory = find_inventory(window.subject.lead, "after_update")
    if inventory is not None:
        window.is_closed = True
        yield _check_group(window.subject, inventory)


def _check_group(group: Group, inventory: Tensors) -> Finding | None:
    engine, host, pinned = group.lead.engine, inventory.host, inventory.host_pinned or {}
    held = (inventory.pinned_allocator or {}).get("allocated_bytes")
    total = engine.trainable_parameters
    if engine.offload_optimizer != "cpu" or host is None or not total:
        return None
    updated = total / count_sharers(engine)
    states = sum(host.get(name, 0) for name in _STATES)
    spare = max(0, held - sum(pinned.values())) if held is not None else 0
    excess = states + spare - IDEAL_BYTES * updated
    if not states or excess < max(PINNED_BYTES, PINNED_SHARE * IDEAL_BYTES * updated):
        return None
    kind, torch = _KIND, group.lead.torch
    if not is_host_short(group.lead, inventory.unix_ns):
        kind = _KIND.with_changes(advice="", fix="")
    elif parse_version(torch) >= _UNROUNDED_SINCE:
        kind = _KIND.with_changes(advice=_UNROUNDED, fix=_UNROUNDED_FIX)
    evidence = {
        "bytes_per_parameter": (states + spare) / updated,
        "states_bytes": states,
        "pinned_spare_bytes": spare,
        "pinned_bytes": held or 0,
    }
    return kind.at(
        group,
        inventory.unix_ns,
        inventory.unix_ns,
        evidence,
        # The inventory has the count of finished steps.
        step=max(0, (inventory.step or 1) - 1),
        ideal=IDEAL_BYTES,
        used=states + spare,
        needed=IDEAL_BYTES * updated,
        spare=spare or None,
        variable=choose_variable(torch),
    )

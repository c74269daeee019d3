"""The first steps: the ones that fp16 skipped, and the allocations of the first real one."""

from __future__ import annotations

from zerotop.analysis.engine import LOOP
from zerotop.analysis.findings.support.evidence import Process, Rows
from zerotop.analysis.memory.expected.zero_model import compute_expected, parse_setup
from zerotop.analysis.memory.tensor_inventory import OPTIMIZER_STATE
from zerotop_probe.recording.events import EngineFacts, Overflow, Tensors

SKIPPED_STEPS = 3
"""Skipped steps in a row, from the first step on, that are worth a finding: one or two are normal with any loss scale."""


def count_skipped_first(process: Process) -> int:
    """Return how many steps were skipped before the first real one."""
    return next((count for count, is_skipped in enumerate(process.steps["skipped"]) if not is_skipped), len(process.steps))


def read_loss_scales(process: Process, skipped: Rows) -> tuple[float, ...]:
    """Return the loss scale before each of these skipped steps and after the last; empty if one is unknown."""
    steps = set(skipped["step"].tolist())
    events = [event for event in process.events_of(Overflow) if event.step in steps]
    values = [*(event.loss_scale_before for event in events), *(event.loss_scale_after for event in events[-1:])]
    scales = tuple(float(value) for value in values if value is not None)
    return scales if len(scales) == len(skipped) + 1 else ()


def read_state_bytes(event: Tensors | None) -> dict[str, int]:
    """Return the bytes of optimizer state in an inventory of tensors, by place: ``device`` and ``host``."""
    if event is None:
        return {}
    sizes: dict[str, int] = {}
    for place, table in (("device", event.device), ("host", event.host)):
        size = (table or {}).get(OPTIMIZER_STATE, 0)
        if size > 0:
            sizes[place] = size
    # Step counters are on the host, a few bytes each.
    return {place: size for place, size in sizes.items() if size * 100 > max(sizes.values())}


def find_inventory(process: Process, when: str) -> Tensors | None:
    """Return the first inventory of the first engine's tensors that was taken at ``when``."""
    events = [event for event in process.events_of(Tensors) if not event.engine]
    return next((event for event in events if event.when == when), None)


def estimate_state_bytes(engine: EngineFacts) -> int | None:
    """Return each rank's bytes of optimizer state; None if they are unknown.

    With DeepSpeed these are Adam's two moments in fp32: 8 a parameter, divided among the ranks from stage 1 on.
    """
    if engine.kind == LOOP:
        setup = parse_setup(engine)
        expected = compute_expected(setup) if setup is not None else None
        return None if expected is None else expected.gpu.get(OPTIMIZER_STATE, expected.host.get(OPTIMIZER_STATE))
    parameters, optimizer = engine.trainable_parameters, (engine.inner_optimizer or "")
    if not isinstance(parameters, int) or "adam" not in optimizer.lower():
        return None
    return 8 * parameters // count_sharers(engine)


def count_sharers(engine: EngineFacts) -> int:
    """Return the number of ranks among which the optimizer state is divided."""
    if engine.sharding is not None and engine.sharding.ranks:
        return engine.sharding.ranks  # fewer than all with hybrid sharding
    is_divided = engine.zero_stage or (engine.parallelism or "").startswith("FSDP")
    count = engine.data_parallel if is_divided else 1
    return count if isinstance(count, int) and count > 0 else 1

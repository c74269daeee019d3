"""What the first steps were: which ones fp16 skipped, and which one was the first real one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zerotop.analysis.annotations.support.evidence import Process
from zerotop.session.reader import Event


@dataclass
class _State:
    """How many steps were read, all of which were skipped but for the last once ``real``."""

    skipped_steps: int = 0
    has_real_step: bool = False


def count_skipped_first(process: Process) -> int:
    """How many steps were skipped before any was real."""
    seen = process.get_state(_State)
    if not seen.has_real_step:
        fresh = process.steps["skipped"][seen.skipped_steps :]
        seen.has_real_step = not fresh.all()
        seen.skipped_steps += int(np.argmin(fresh)) if seen.has_real_step else len(fresh)
    return seen.skipped_steps


def read_loss_scales(process: Process, count: int) -> tuple[float, ...]:
    """The loss scale before each of the first ``count`` steps, and after the last of them; empty where not told."""
    steps = set(process.steps["step"][:count].tolist())
    events = [event.facts for event in process.events_named("overflow") if event.facts.get("step") in steps]
    found = [_parse_number(facts.get("loss_scale_before")) for facts in events]
    found += [_parse_number(facts.get("loss_scale_after")) for facts in events[-1:]]
    known = [scale for scale in found if scale is not None]
    return tuple(known) if len(known) == count + 1 else ()


def read_state_bytes(event: Event | None) -> dict[str, int]:
    """Bytes of optimizer state in an inventory of tensors, by where: ``device`` and ``host``."""
    if event is None:
        return {}
    tables: dict[str, Any] = {where: event.facts.get(where) for where in ("device", "host")}
    sizes = {where: table.get("optimizer_state") for where, table in tables.items() if isinstance(table, dict)}
    known = {where: size for where, size in sizes.items() if isinstance(size, int) and size > 0}
    # Counters of steps lie on the host, a few bytes each.
    return {where: size for where, size in known.items() if size * 100 > max(known.values())}


def find_inventory(process: Process, when: str) -> Event | None:
    """The first inventory of the first engine's tensors that was made at ``when``."""
    found = [event for event in process.events_named("tensors") if not event.facts.get("engine")]
    return next((event for event in found if event.facts.get("when") == when), None)


def estimate_state_bytes(engine: dict[str, Any]) -> int | None:
    """What two moments of Adam in fp32 take on each rank: 8 bytes a parameter, shared by the ranks from stage 1 on."""
    parameters, optimizer = engine.get("trainable_parameters"), str(engine.get("inner_optimizer") or "")
    if not isinstance(parameters, int) or "adam" not in optimizer.lower():
        return None
    return 8 * parameters // count_sharers(engine)


def count_sharers(engine: dict[str, Any]) -> int:
    """Among how many ranks the optimizer's state is divided."""
    shared_by = engine.get("data_parallel") if engine.get("zero_stage") else 1
    return shared_by if isinstance(shared_by, int) and shared_by > 0 else 1


def _parse_number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None

"""Which inventory of tensors tells whose the bytes of a rank are at a cursor.

A rank looks three times: when its engine is made, before its first update, and after its first real one. Between two looks
only gradients come and go: they live from the end of a step's first backward to the end of its update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zerotop.analysis.processes.alive_ranks import RankProcess, find_table, read_events
from zerotop.session.reader import Event, Session
from zerotop_probe.recording.events import TENSORS
from zerotop_probe.recording.tables import BOUNDARY, EVAL, FAILED, PHASE_CODE

PARAMETERS, GRADIENTS = "parameters", "gradients"
MASTER_WEIGHTS, OPTIMIZER_STATE, BUFFERS = "master_weights", "optimizer_state", "buffers"
CATEGORIES = (PARAMETERS, GRADIENTS, MASTER_WEIGHTS, OPTIMIZER_STATE, BUFFERS)

NO_INVENTORY = (
    "Whose the bytes are is not recorded up to here: that begins when the engine is ready, and older zerotops did not."
)

INIT, BEFORE_UPDATE, AFTER_UPDATE = "init", "before_update", "after_update"
MOMENT_TEXTS = {
    INIT: "when the engine was made",
    BEFORE_UPDATE: "before the first update",
    AFTER_UPDATE: "after the first update",
}
# What PyTorch allocates for each stream that cuBLAS works on (aten/src/ATen/cuda/CublasHandlePool.cpp): 4096 x 8 KiB from
# Hopper on, 4096 x 2 KiB + 16 x 8 KiB before.
_CUBLAS_WORKSPACES = (33_554_432, 8_519_680)
# Spans looked back through for the last backward: an evaluation in between has many.
_TAIL = 4096
_BACKWARD, _STEP = PHASE_CODE["backward"], PHASE_CODE["step"]


@dataclass(frozen=True, slots=True)
class Inventory:
    """Whose the bytes of one rank are, its engines together. Categories are those of :data:`CATEGORIES`."""

    device: dict[str, int]  # bytes on its GPU in blocks of PyTorch's allocator; empty where the allocator has none
    host: dict[str, int]  # bytes in host memory
    host_pinned: dict[str, int]  # of which pinned
    basis: str  # words for when all but gradients were looked at
    gradients_basis: str  # words for when those were
    gradients_alive: int  # bytes of gradients on its GPU before the first update; 0 before that
    cublas_bytes: int  # on the GPU, in no category, in blocks of just the size of cuBLAS's workspaces
    unclaimed_bytes: int  # on the GPU, in no category, beside those
    unclaimed_largest: tuple[int, ...]  # the sizes of its largest blocks, largest first
    pinned_allocator: dict[str, int] | None  # allocated_bytes, active_bytes; None where this torch does not tell
    blocks_bytes: int | None  # all blocks in use at that moment; None without CUDA


def read_inventory(session: Session, process: RankProcess, cursor_ns: int) -> Inventory | None:
    """What applies at the cursor; None before the first look."""
    by_engine: dict[int, list[Event]] = {}
    for event in read_events(session, TENSORS, process, cursor_ns):
        by_engine.setdefault(_parse_integer(event.facts.get("engine")), []).append(event)
    if not by_engine:
        return None
    looks = [_choose_events(session, process, engine, events, cursor_ns) for engine, events in sorted(by_engine.items())]
    # The allocator is one: what nobody claims is what no engine does, told by the engine that was looked at last.
    latest = max((static for static, _ in looks), key=lambda event: event.unix_ns)
    by_others = sum(_sum_sizes(static, "device") for static, _ in looks if static is not latest)
    unclaimed = max(0, _parse_integer(latest.facts.get("unclaimed_bytes")) - by_others)
    largest = _parse_sizes(latest.facts.get("unclaimed_largest"))
    cublas = min(unclaimed, sum(size for size in largest if size in _CUBLAS_WORKSPACES))
    blocks = latest.facts.get("allocated_bytes")
    return Inventory(
        device=_sum_categories(looks, "device"),
        host=_sum_categories(looks, "host"),
        host_pinned=_sum_categories(looks, "host_pinned"),
        basis=_describe_moment(latest),
        gradients_basis=_describe_moment(max((gradients for _, gradients in looks), key=lambda event: event.unix_ns)),
        gradients_alive=sum(
            _read_sizes(event, "device").get(GRADIENTS, 0)
            for events in by_engine.values()
            for event in events
            if event.facts.get("when") == BEFORE_UPDATE
        ),
        cublas_bytes=cublas,
        unclaimed_bytes=unclaimed - cublas,
        unclaimed_largest=tuple(size for size in largest if size not in _CUBLAS_WORKSPACES) if not by_others else (),
        pinned_allocator=_parse_pinned(latest.facts.get("pinned_allocator")),
        blocks_bytes=blocks if isinstance(blocks, int) else None,
    )


def _choose_events(
    session: Session, process: RankProcess, engine: int, events: list[Event], cursor_ns: int
) -> tuple[Event, Event]:
    """Of one engine: the look for all that stays, and the look for gradients."""
    by_moment = {str(event.facts.get("when")): event for event in events}
    known = [by_moment[moment] for moment in (AFTER_UPDATE, BEFORE_UPDATE, INIT) if moment in by_moment] or [events[-1]]
    if BEFORE_UPDATE in by_moment and has_gradients(session, process, engine, cursor_ns):
        return known[0], by_moment[BEFORE_UPDATE]
    return known[0], by_moment.get(AFTER_UPDATE, by_moment.get(INIT, known[0]))


def has_gradients(session: Session, process: RankProcess, engine: int, cursor_ns: int) -> bool:
    """Whether a backward has ended since the engine's last update."""
    spans = find_table(session, "spans", process, cursor_ns)
    if spans is None:
        return False
    known = spans.count_until(cursor_ns)
    tail = spans.array[max(0, known - _TAIL) : known]
    update = (tail["phase"] == _STEP) & (tail["flags"] & BOUNDARY != 0)
    either = (update | (tail["phase"] == _BACKWARD)) & (tail["flags"] & (EVAL | FAILED) == 0) & (tail["engine"] == engine)
    turns = np.flatnonzero(either)
    return len(turns) > 0 and not update[turns[-1]]


def _sum_categories(chosen_events: list[tuple[Event, Event]], table: str) -> dict[str, int]:
    """Bytes by category over all engines."""
    found: dict[str, int] = {}
    for static, gradients in chosen_events:
        for category in CATEGORIES:
            sizes = _read_sizes(gradients if category == GRADIENTS else static, table)
            if category in sizes:
                found[category] = found.get(category, 0) + sizes[category]
    return found


def _read_sizes(event: Event, table: str) -> dict[str, int]:
    told = event.facts.get(table)
    return {name: size for name, size in told.items() if isinstance(size, int)} if isinstance(told, dict) else {}


def _sum_sizes(event: Event, table: str) -> int:
    return sum(_read_sizes(event, table).values())


def _describe_moment(event: Event) -> str:
    when = str(event.facts.get("when"))
    # The engine counts a step when its update is over.
    step = _parse_integer(event.facts.get("step")) - (when == AFTER_UPDATE)
    at = "" if when == INIT else f", of step {step}"
    return f"tensors counted {MOMENT_TEXTS.get(when, when)}{at}"


def _parse_integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _parse_sizes(value: Any) -> tuple[int, ...]:
    return tuple(size for size in value if isinstance(size, int)) if isinstance(value, list) else ()


def _parse_pinned(value: Any) -> dict[str, int] | None:
    if not isinstance(value, dict):
        return None
    found = {str(name): size for name, size in value.items() if isinstance(size, int)}
    return found or None

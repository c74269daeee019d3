"""A recording with a trace of the microscope, written with ``memory_recording``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memory_recording import PlantedRecording, gib_to_bytes, record_two_steps
from small_recording import S, make_identity
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.tables import HISTORY_ACTIONS

_ALLOC, _FREE = HISTORY_ACTIONS.index("alloc"), HISTORY_ACTIONS.index("free_completed")
LAYERS = 24


def record_trace(folder: Path, request: int = 1) -> PlantedRecording:
    """Record two steps and a trace of step 1, whose forward allocates a block per layer and whose backward frees them."""
    recording, who = record_two_steps(folder), make_identity(0)
    rows: list[tuple[Any, ...]] = []

    def add_action(at: float, place: int, size: float, action: int) -> None:
        rows.append((int(at * S), place, gib_to_bytes(size), request, action, 0))

    for layer in range(LAYERS):
        add_action(20.1 + layer * 0.1, layer, 0.125, _ALLOC)
    add_action(22.9, 99, 1.5, _ALLOC)
    for layer in reversed(range(LAYERS)):
        at = 23.1 + (LAYERS - layer) * 0.15
        add_action(at, 200 + layer, 0.25, _ALLOC)
        add_action(at + 0.05, layer, 0.125, _FREE)
        add_action(at + 0.1, 200 + layer, 0.25, _FREE)
    add_action(26.9, 99, 1.5, _FREE)
    recording.write_records(tables.HISTORY, who, rows, born=1)
    facts = {"first_step": 1, "steps": 1, "begin_ns": 20 * S, "end_ns": 29 * S, "entries": len(rows), "snapshot": None}
    baseline = {
        "allocated_bytes": gib_to_bytes(14.75),
        "requested_bytes": gib_to_bytes(14.5),
        "reserved_bytes": gib_to_bytes(22),
    }
    recording.write_event(who, 29.1, events.Microscope, request=request, state="recorded", baseline=baseline, **facts)
    return recording

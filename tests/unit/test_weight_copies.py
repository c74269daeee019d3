"""Copies of the weights that stay on the GPU beside the model from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory_recording import GIB, HELD_LIST, PlantedRecording, gib_to_bytes, make_reading, make_record
from small_recording import make_identity, make_span
from zerotop.analysis.findings import Finding, detect_findings
from zerotop_probe.recording import tables
from zerotop_probe.recording.tables import PHASE_CODE

# Weights of 1 GiB in fp32: 16 matrices of 4096 x 4096.
KINDS = [{"shape": [4096, 4096], "dtype": "fp32", "count": 16, "state_bits": None}]
BLOCK = 4096 * 4096 * 4


def find_copies(
    folder: Path, unclaimed: float, groups: list[list[int]], *, left: float, reserved: float = 10, **facts: Any
) -> list[Finding]:
    """Return the findings where so many GiB are in no category before the first step, and ``left`` after it."""
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.node_event()
    optimizer = {"class": "AdamW", "package": "torch", "parameters": GIB // 4, "tensors": KINDS, "settings": {}}
    recording.write_engine(kind="loop", zero_stage=None, device="cuda:0", dtype="fp32", optimizers=[optimizer])
    spans, begins, readings = [], [], []
    for step in range(20):
        begin, end = 10 + step, 10.9 + step
        spans.append(make_span(begin, end, "step", step, tables.BOUNDARY))
        begins.append(make_record(tables.BEGINS, begin, step=step, phase=PHASE_CODE["step"]))
        peaks = {"reserved_peak_bytes": gib_to_bytes(reserved)}
        readings.append(make_reading(end, 6, reserved, phase="step", edge="end", step=step, **peaks))
    for table, records in ((tables.SPANS, spans), (tables.BEGINS, begins)):
        recording.write_records(table, who, records, born=1)
    recording.write_records(tables.ALLOCATOR, who, readings, born=1, peaks="window")
    recording.write_inventory(9.5, "init", {"parameters": 1}, unclaimed=unclaimed, unclaimed_groups=groups, **facts)
    states = {"parameters": 1.0, "optimizer_state": 2.0}
    recording.write_inventory(10.95, "after_update", states, unclaimed=left, unclaimed_groups=groups)
    opened = recording.open_recording()
    return [one for one in detect_findings(opened, opened.end_ns) if one.name == "weight_copies"]


def test_blocks_of_the_sizes_of_the_parameters_are_copies(tmp_path: Path) -> None:
    (finding,) = find_copies(tmp_path, 2.01, [[BLOCK, 30], [BLOCK + 4096, 2]], left=2.1)
    assert finding.headline == "Tensors as large as the model's weights are on the GPU twice beside them: 2.00 GiB"
    assert (finding.severity.value, finding.advice) == ("info", "")


def test_copies_are_advised_against_where_memory_is_short(tmp_path: Path) -> None:
    (finding,) = find_copies(tmp_path, 2.01, [[BLOCK, 32]], left=2.1, reserved=70)
    assert finding.advice.startswith("del the copies that nothing uses")


@pytest.mark.parametrize(
    ("unclaimed", "groups", "left"),
    [
        (2.01, [[GIB, 2]], 2.1),  # flat buffers
        (2.01, [[BLOCK, 31]], 2.1),
        (2.5, [[BLOCK, 32]], 2.5),  # other memory beside them
        (2.01, [[BLOCK, 32]], 0.1),  # let go before the first update
        (0.1, [[BLOCK, 1]], 2.1),
    ],
)
def test_other_memory_is_no_copy(unclaimed: float, groups: list[list[int]], left: float, tmp_path: Path) -> None:
    assert find_copies(tmp_path, unclaimed, groups, left=left) == []


@pytest.mark.parametrize(("gib", "count", "is_told"), [(2.0, 298, True), (1.9, 298, False), (2.0, 2, False)])
def test_a_variable_that_holds_as_many_bytes_is_named(gib: float, count: int, is_told: bool, tmp_path: Path) -> None:
    held = HELD_LIST | {"name": "loaded", "count": count, "bytes": gib_to_bytes(gib)}
    found = find_copies(tmp_path, 3.5, [[GIB, 3]], left=3.5, held=[held])
    assert bool(found) is is_told
    assert all("The list loaded in main() (train.py) keeps them, in 298 tensors" in one.details for one in found)
    assert all("a script's own states of an optimizer look alike" in one.details for one in found)


def test_a_variable_may_be_needed(tmp_path: Path) -> None:
    """As the average of the weights, of which a script keeps a tensor for each parameter."""
    held = HELD_LIST | {"name": "loaded", "count": 298, "bytes": gib_to_bytes(2)}
    (finding,) = find_copies(tmp_path, 3.5, [[GIB, 3]], left=3.5, held=[held], reserved=70)
    assert finding.advice.startswith("If loaded is there only to copy its weights")

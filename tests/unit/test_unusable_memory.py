"""Memory of the allocator that only a stream or a CUDA graph can use, and that no step can have used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory_recording import GIB, PlantedRecording, gib_to_bytes, make_reading, make_record
from small_recording import make_identity, make_span
from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop_probe.recording import tables
from zerotop_probe.recording.tables import PHASE_CODE

LASTING = 6


def find_unusable(
    folder: Path, peak: float, *, side: float = 20, used: float = 0, private: bool = False, reserved: float = 30
) -> list[Finding]:
    """Return the findings of 40 steps that peak at so many GiB, 6 of which last.

    ``side``: GiB of another stream, or private pool, ``used`` of them after steps 4 and 24.
    """
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.node_event()
    recording.write_engine(kind="loop", zero_stage=None, device="cuda:0")
    spans, begins, readings = [], [], []
    for step in range(40):
        begin, end = 10 + step, 10.9 + step
        spans.append(make_span(begin, end, "step", step, tables.BOUNDARY))
        begins.append(make_record(tables.BEGINS, begin, step=step, phase=PHASE_CODE["step"]))
        peaks = {"allocated_peak_bytes": gib_to_bytes(peak), "reserved_peak_bytes": gib_to_bytes(reserved)}
        readings.append(make_reading(end, LASTING, reserved, phase="step", edge="end", step=step, **peaks))
    recording.write_records(tables.SPANS, who, spans, born=1)
    recording.write_records(tables.BEGINS, who, begins, born=1)
    recording.write_records(tables.ALLOCATOR, who, readings, born=1, peaks="window")
    pools: list[dict[str, Any]] = [
        {"stream": 0, "private": False, "reserved": 10 * GIB, "allocated": LASTING * GIB, "sparse": 0},
        {
            "stream": 0 if private else 7,
            "private": private,
            "reserved": gib_to_bytes(side),
            "allocated": gib_to_bytes(used),
            "sparse": 0,
        },
    ]
    for step in (4, 24):
        recording.write_inventory(10.95 + step, "again", {"parameters": LASTING}, step=step, pools=pools, stream=0)
    opened = recording.open_recording()
    return [one for one in detect_findings(opened, opened.end_ns) if one.name == "unusable_memory"]


def test_a_stream_that_steps_cannot_have_used_is_idle(tmp_path: Path) -> None:
    (finding,) = find_unusable(tmp_path, 8)
    assert finding.headline == "20.00 GiB of GPU memory on rank 0 can only be used by an idle stream"
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(("peak", "used"), [(25.0, 0.0), (40.0, 0.0), (8.0, 5.0)])
def test_a_stream_that_may_work_within_each_step_is_not_idle(tmp_path: Path, peak: float, used: float) -> None:
    """As that which gathers parameters of FSDP or ZeRO-3: it has given them back when the step ends."""
    assert find_unusable(tmp_path, peak, used=used) == []


def test_memory_of_graphs_is_told_whatever_steps_allocate(tmp_path: Path) -> None:
    """What replays use is not allocated."""
    (finding,) = find_unusable(tmp_path, 40, private=True)
    assert finding.headline.endswith("can only be used by CUDA graphs or pools")


def test_it_is_a_warning_where_memory_is_short(tmp_path: Path) -> None:
    (finding,) = find_unusable(tmp_path, 8, reserved=75)
    assert finding.severity is Severity.WARNING
    assert finding.fix

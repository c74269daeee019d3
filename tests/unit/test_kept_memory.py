"""What is still allocated after a step is called that, on the screen and by ``zerotop memory``."""

from __future__ import annotations

from recordings import open_recording
from zerotop.analysis.memory.ledger_rows import ACTIVATIONS, GROWN
from zerotop.analysis.memory.memory_table import MemoryLine
from zerotop.analysis.reports.memory import read_report
from zerotop.analysis.views.memory_view import read_memory_view
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.memory_text import format_report
from zerotop.ui.drawing.units import DECIMAL


def read_lines(name: str, step: int) -> dict[str, MemoryLine]:
    source = RecordingSource(open_recording(name))
    end_ns = source.find_step_end(step)
    assert end_ns is not None
    return {line.key: line for line in read_memory_view(source.recording.at(end_ns + 1)).lines}


def test_a_leak_is_named_with_its_growth() -> None:
    lines = read_lines("gpu-leak", 30)
    line = lines[GROWN]
    assert line.describe().startswith("grown, +")
    assert line.describe().endswith(" MiB/step")
    assert line.describe(DECIMAL[:3]).endswith(" MB/step")
    assert line.basis == "allocated after step 30 less that counted in step 0"
    assert lines[ACTIVATIONS].describe() == "activations, temporaries"


def test_a_healthy_job_s_row_keeps_its_name() -> None:
    lines = read_lines("gpu-clean", 12)
    assert lines[ACTIVATIONS].describe() == "activations, temporaries"
    assert GROWN not in lines


def test_the_command_uses_the_same_names() -> None:
    recording = open_recording("gpu-leak")
    report = read_report(recording)
    assert report is not None
    names = {line.describe() for line in report.view.lines if line.row is not None}
    text = format_report(report)
    assert any(name.startswith("grown, +") for name in names)
    assert all(any(line.strip().startswith(name) for line in text) for name in names)

"""What is still allocated after a step is called that, on the screen and by ``zerotop memory``."""

from __future__ import annotations

from recordings import open_recording
from zerotop.analysis.memory.ledger_rows import ACTIVATIONS
from zerotop.analysis.memory.memory_table import MemoryLine
from zerotop.analysis.reports.memory import read_report
from zerotop.analysis.views.memory_view import read_memory_view
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.memory_text import format_report
from zerotop.ui.drawing.units import DECIMAL


def read_line(name: str, step: int) -> MemoryLine:
    source = RecordingSource(open_recording(name))
    end_ns = source.find_step_end(step)
    assert end_ns is not None
    lines = read_memory_view(source.recording.at(end_ns + 1)).lines
    return next(line for line in lines if line.key == ACTIVATIONS)


def test_a_leak_is_named_with_its_growth() -> None:
    line = read_line("gpu-leak", 30)
    assert line.describe().startswith("still alive, +")
    assert line.describe().endswith(" MiB/step")
    assert line.describe(DECIMAL[:3]).endswith(" MB/step")


def test_a_healthy_job_s_row_keeps_its_name() -> None:
    assert read_line("gpu-clean", 12).describe() == "activations, temporaries"


def test_the_command_uses_the_same_names() -> None:
    recording = open_recording("gpu-leak")
    report = read_report(recording)
    assert report is not None
    names = {line.describe() for line in report.view.lines if line.row is not None}
    text = format_report(report)
    assert any(name.startswith("still alive") for name in names)
    assert all(any(line.strip().startswith(name) for line in text) for name in names)

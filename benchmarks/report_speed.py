"""The time to write the report and the trace of a recording of 100,000 steps, and their sizes.

    python benchmarks/report_speed.py [STEPS]

Limits: the page 2 s and 2 MB, the trace 10 s. Times are of the processor, since other programs may run beside this one.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import long_recording
from zerotop.analysis.reports.recording_report import read_recording_report
from zerotop.analysis.trace.perfetto import write_trace
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_steps
from zerotop.report.recording_page import write_recording_page


def main() -> None:
    """Measure and print."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        path = long_recording.write_recording(Path(folder) / "long", steps)
        begin = time.process_time()
        read_steps(Recording.open(path))
        reading_s = time.process_time() - begin
        begin = time.process_time()
        page = write_recording_page(read_recording_report(Recording.open(path)))
        page_s = time.process_time() - begin
        begin = time.process_time()
        with (Path(folder) / "trace").open("wb") as stream:
            packets = write_trace(Recording.open(path), stream)
        trace_s = time.process_time() - begin
        size = (Path(folder) / "trace").stat().st_size
    print(f"{steps:,} steps; reading all steps: {reading_s:.2f} s")
    print(f"report: {page_s:.2f} s, {page_s / reading_s:.1f} times reading the steps, {len(page) / 1e6:.2f} MB")
    print(
        f"trace: {trace_s:.2f} s, {trace_s / reading_s:.1f} times reading the steps, {size / 1e6:.0f} MB, {packets:,} parts"
    )


if __name__ == "__main__":
    main()

"""The speed of the timeline on a recording of ten million records: seeking, zooming, panning, painting.

The recording is ``open_recording.py``'s of a job as it is, eight ranks on a GPU each; files are in the page cache.
"first" is a picture of a place that was not looked at before, at 200x50: telling its columns and drawing its rows, all lanes
complete, however many frames that takes; "first rows" is the first of them. "again" is the next frame of the same place,
"pan" one cell further, as when a live job is followed.

    python benchmarks/timeline.py [--records 10000000]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import open_recording

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.timeline.drawing import chart_cells, draw_timeline
from zerotop.ui.timeline.model import PictureBuilder
from zerotop.ui.timeline.window import LEVELS_NS, TimelineView
from zerotop_probe.recording.events import Engine
from zerotop_probe.recording.writer import EventWriter

WIDTH, HEIGHT = 198, 42  # of the panel in a terminal of 200x50
FIRST_MS, FRAME_MS, MEMORY_MIB = 100.0, 16.0, 300
SECONDS = 1_000_000_000


@dataclass
class Costs:
    """The milliseconds of the first complete picture, its first rows, a repeated frame and a panned frame."""

    first: float
    rows: float
    again: float
    pan: float


def write_recording(path: Path, records: int) -> None:
    """Write the recording, in which every rank has a GPU of its own."""
    made = open_recording.write_job(path, records)
    for number in range(open_recording.RANKS):
        writer = EventWriter(str(made.path), made.identify_rank(number))
        writer.write(1, Engine, world_size=open_recording.RANKS, devices=[{"ordinal": 0, "uuid": str(number)}])
        writer.close()


class Watching:
    """The timeline of a recording without a terminal."""

    def __init__(self, path: Path) -> None:
        self.source = RecordingSource(Recording.open(path))
        self.viewer = Viewer(self.source, None, time.monotonic)
        self.view = TimelineView()
        self.pictures = PictureBuilder(self.source, self.view)

    def draw_frame(self) -> bool:
        """Draw one frame; return whether it was complete."""
        picture = self.pictures.build_picture(self.frame, chart_cells(WIDTH), HEIGHT)
        draw_timeline(picture, WIDTH, HEIGHT, BLOCKS)
        return picture.timeline.is_complete

    def look_at(self, share: float, column_ns: int) -> Costs:
        """Go to a share of the recording, with columns of about that length; return the costs of drawing there."""
        self.viewer.go_to_share(share)
        self.frame = self.viewer.make_frame()
        self.view.set_column_ns(column_ns)
        begin = time.perf_counter()
        complete = self.draw_frame()
        rows = time.perf_counter() - begin
        while not complete:
            complete = self.draw_frame()
        first = time.perf_counter() - begin
        again, pan = [], []
        for _ in range(5):
            again.append(self._time_frame())
            self.view.pan_columns(2)
            pan.append(self._time_frame())
        return Costs(first * 1e3, rows * 1e3, float(np.median(again)) * 1e3, max(pan) * 1e3)

    def _time_frame(self) -> float:
        begin = time.perf_counter()
        self.draw_frame()
        return time.perf_counter() - begin


def memory_mib(field: str) -> int:
    """Return a field of this process's status in MiB."""
    return int(re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) // 1024


def measure_recording(path: Path) -> None:
    """Seek to a new place with every fourth length of columns, and print the costs."""
    watching = Watching(path)
    for share in (1.0, 0.1, 0.5, 0.9):  # what a view of any screen costs is not the timeline's
        watching.viewer.go_to_share(share)
        watching.viewer.make_frame()
    before = memory_mib("VmHWM")
    shares = iter(np.random.default_rng(1).permutation(np.linspace(0.05, 0.9, len(LEVELS_NS))))
    found: dict[int, Costs] = {}
    for column_ns in [level for level in LEVELS_NS if level >= 1000][::4]:
        costs = watching.look_at(float(next(shares)), column_ns)
        found[watching.view.column_ns] = costs
    print(f"{'column':>10} {'first ms':>9} {'first rows':>11} {'again':>7} {'pan':>7}")
    for column_ns, costs in found.items():
        print(f"{column_ns / SECONDS:10.6g} {costs.first:9.1f} {costs.rows:11.1f} {costs.again:7.1f} {costs.pan:7.1f}")
    first, frame = max(cost.first for cost in found.values()), max(cost.again for cost in found.values())
    pan, more = max(cost.pan for cost in found.values()), memory_mib("VmHWM") - before
    print(f"a complete first picture at most {first:.0f} ms, target {FIRST_MS:.0f}: ratio {first / FIRST_MS:.2f}")
    print(
        f"a frame at most {frame:.1f} ms, one cell further {pan:.1f} ms, target {FRAME_MS:.0f}: ratio {frame / FRAME_MS:.2f}"
    )
    print(f"memory: at most {more} MiB more than the opened recording, target {MEMORY_MIB}: ratio {more / MEMORY_MIB:.2f}")


def main() -> None:
    """Write the recording and measure in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure_recording(options.measure)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recording")
        write_recording(path, options.records)
        subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True)


if __name__ == "__main__":
    main()

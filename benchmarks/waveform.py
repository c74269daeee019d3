"""The cost of the iteration screen: folding 1,000 iterations of 8 GPUs, and drawing, on a terminal of 200x50.

"fold" is the time of a whole fold from the recording's files; "grown" that of a fold after new iterations of a live job,
which happens at most once a second; "still" that of a frame in which nothing changed. "redraw" is the time to draw the whole
screen with another signal first, from the frame to strips of text. "plain" is the time of a simple fold that ignores the
length of the windows: it sorts the middles of all samples' windows into 100 places and takes the median of each. All are
medians of processor time in the same run.

    python benchmarks/waveform.py [--ranks 1 8] [--iterations 1000] [--seconds 0.34 2.7] [--size 200x50]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import zerotop.analysis.waveform.samples as samples  # first, before NumPy: see zerotop.recording

import numpy as np  # isort: skip

from sensor_recording import PLAN, Job
from small_recording import read_recording
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.waveform.alignment import align_iterations, choose_iterations
from zerotop.analysis.waveform.fold_cache import WaveformCache
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.iteration.screen import IterationScreen

TIMES = 5
GRAIN = 40


def median_ms(work: Callable[[], object]) -> float:
    """Return the median processor time in milliseconds."""
    found = []
    for _ in range(TIMES):
        before = time.process_time()
        work()
        found.append((time.process_time() - before) * 1e3)
    return sorted(found)[TIMES // 2]


def fold_simply(source: RecordingSource, recording: Recording) -> None:
    """Fold as the simple peer: sort samples by the middles of their windows, and take the median at each of 100 places."""
    for process in source.rank_steps:
        aligned = align_iterations(process.source, process.step_rows, choose_iterations(process.step_rows, None).indices)
        assert aligned is not None
        reference = aligned.median_bounds
        begin, end = aligned.base_ns, aligned.base_ns + int(aligned.bounds[-1, -1] * 1e9)
        pids = [process.source.pid]
        gpu_windows = samples.read_gpu_windows(recording, process.source.host, process.source.rank, begin, end)
        gpu_windows |= samples.read_process_windows(recording, process.source.host, pids, begin, end)
        for windows in gpu_windows.values():
            middles = (windows.begins_ns + windows.ends_ns) // 2
            whole, places, _ = aligned.fold_windows(middles, middles + 1, reference)
            of = (places / reference[-1] * 100).astype(int)
            order = np.argsort(of, kind="stable")
            for part in np.split(windows.values[whole][order], np.flatnonzero(np.diff(of[order])) + 1):
                np.median(part) if len(part) else None


async def measure_screen(recording: Recording, width: int, height: int) -> dict[str, float]:
    """Return the figures of the screen."""
    app = ZerotopApp(RecordingSource(recording), title="waveform", glyphs=BLOCKS)
    async with app.run_test(size=(width, height)) as pilot:
        await pilot.pause()
        app.action_switch(IterationScreen.NAME)
        await pilot.pause()
        screen = app.screen
        assert isinstance(screen, IterationScreen)
        while screen.folding.is_busy:
            await pilot.pause(0.01)
        frame = app.viewer.make_frame()

        def redraw_lanes() -> None:
            screen.folding.choose_next_lane()
            screen.frame = frame
            screen._compositor.render_strips()

        def redraw_same() -> None:
            screen.frame = app.viewer.make_frame()

        redraw_lanes()
        return {"redraw": median_ms(redraw_lanes), "still": median_ms(redraw_same)}


def measure_recording(recording: Recording, width: int, height: int) -> dict[str, float]:
    """Return all figures of one recording."""
    source, end, now = RecordingSource(recording), recording.last_written_ns, [0.0]
    found = {"fold": median_ms(lambda: WaveformCache(recording, lambda: source.rank_steps).fold_at(end))}
    live = WaveformCache(recording, lambda: source.rank_steps, clock=lambda: now[0])
    # So far apart that there is something new to fold each time.
    ends = iter(source.rank_steps[0].step_rows["end_unix_ns"][::-GRAIN][TIMES::-1].tolist())
    live.fold_at(next(ends), hurry=False)

    def fold_longer() -> None:
        now[0] += 1000.0
        live.fold_at(next(ends), hurry=False)

    found["grown"] = median_ms(fold_longer)
    found |= asyncio.run(measure_screen(recording, width, height))
    found["plain"] = median_ms(lambda: fold_simply(source, recording))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.34, 2.7], help="of an iteration")
    parser.add_argument("--size", default="200x50")
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    for ranks in given.ranks:
        for seconds in given.seconds:
            job = Job(given.iterations, scale=seconds / sum(lasts for lasts, *_ in PLAN.values()))
            with tempfile.TemporaryDirectory() as folder:
                job.write_recording(Path(folder), ranks=ranks)
                found = measure_recording(read_recording(Path(folder)), width, height)
            figures = "  ".join(f"{name} {value:.1f}" for name, value in found.items())
            against = found["fold"] / found["plain"]
            print(f"{ranks} ranks, {given.iterations} of {seconds} s, ms: {figures}  fold/plain {against:.1f}", flush=True)


if __name__ == "__main__":
    main()

"""The cost of the ranks screen on a terminal of 200x50, with few ranks and with a thousand: medians of processor time.

"step" is what is computed when some rank has finished another step, the matrix of all times anew; "peak", "free" and "cores"
are looked up for 120 steps of all ranks when they are asked for first, and only for what is new after that. "redraw" is the
screen with another metric, from the frame to strips of text; "key" the same with another rank chosen.

    python benchmarks/ranks_screen.py [--ranks 8 64 1024] [--steps 120] [--size 200x50]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from small_recording import read_recording
from uneven_ranks import GIB, write_ranks
from zerotop.analysis.ranks.matrix import RankMetric
from zerotop.analysis.ranks.samples import RankSamples
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.tabs import TABS
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.ranks.model import Ranking
from zerotop.ui.ranks.screen import RanksScreen

TIMES = 9


def median_ms(work: Callable[[], object]) -> float:
    """Return the median processor time in milliseconds."""
    found = []
    for _ in range(TIMES):
        before = time.process_time()
        work()
        found.append((time.process_time() - before) * 1e3)
    return sorted(found)[TIMES // 2]


async def measure_recording(folder: Path, width: int, height: int) -> dict[str, float]:
    """Return the figures of one recording."""
    source = RecordingSource(read_recording(folder))
    app = ZerotopApp(source, title="ranks", glyphs=BLOCKS)
    found: dict[str, float] = {}
    async with app.run_test(size=(width, height)) as pilot:
        await pilot.pause()
        app.action_switch(RanksScreen.NAME)
        await pilot.pause()
        screen = app.screen
        assert isinstance(screen, RanksScreen)
        frame = replace(app.viewer.make_frame(), tabs=TABS)
        found["step"] = median_ms(lambda: Ranking(source).make_picture(frame, width))
        matrix = Ranking(source).make_picture(frame, width).matrix
        for metric in (RankMetric.PEAK, RankMetric.FREE, RankMetric.CORES):
            found[metric.value] = median_ms(lambda metric=metric: RankSamples(source.recording).read_metric(metric, matrix))

        def redraw_matrix() -> None:
            screen.ranking.metric = (
                RankMetric.WAIT if screen.ranking.metric is RankMetric.ITERATION else RankMetric.ITERATION
            )
            screen.frame = frame
            screen._compositor.render_strips()

        found["redraw"] = median_ms(redraw_matrix)
        ranks = [rank.rank for rank in frame.view.ranks]

        def choose_next_rank() -> None:
            ranks.append(ranks.pop(0))
            screen.frame = replace(frame, rank=ranks[0])
            screen._compositor.render_strips()

        found["key"] = median_ms(choose_next_rank)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--size", default="200x50")
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            write_ranks(Path(folder), ranks, given.steps, late_s={ranks // 2: 0.1}, more_bytes={ranks // 3: 4 * GIB})
            figures = asyncio.run(measure_recording(Path(folder), width, height))
        print(f"{ranks:5} ranks, ms:", "  ".join(f"{name} {value:.1f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()

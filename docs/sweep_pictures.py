"""Take the pictures of the sweeps in ``docs/sweeps`` anew, and print their tables.

``benchmarks/sweep_story.py`` ran them on one GPU and brought them here: ``docs/sweeps/NAME/sweep.json`` with its tables.
``docs/sweeps/fit`` was searched before the formulas counted the loss's copies of the logits: its predictions are those of
that search, and a search of today would try fewer lengths.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zerotop.analysis.sweeps.line_report import describe_line, report_lines
from zerotop.analysis.sweeps.search import LargestResult, LargestSearch, Line, SearchShortage
from zerotop.commands.common.model_config import find_shape
from zerotop.commands.sweeping.runner import SweepRunner
from zerotop.recording.sweeps import OK, SKIPPED, Point, Sweep, read_sweep
from zerotop.ui.app.sweep_app import SweepApp
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.sweep.model import SweepModel

HERE = Path(__file__).parent
SIZE = (120, 40)
GIB = 1 << 30
LIMIT_BYTES = 78.36 * GIB  # of the H100, without CUDA's context
FORMULAS = {"none": Line(4 * 3_208_000, 7.36 * GIB), "optimizer": Line(4 * 3_207_400, 0.92 * GIB)}


async def take_picture(name: str) -> None:
    """Write one picture, and print the sweep's table and lines."""
    sweep = read_sweep(HERE / "sweeps" / name)
    points = [point for point in sweep.finished if point.result is not None and point.result.outcome != SKIPPED]
    sweep = replace(sweep, points=tuple(points))
    runner = SweepRunner(sweep)
    runner.run()  # nothing is left to run: it is over at once
    search = RecordedSearch(sweep) if name == "fit" else None
    app = SweepApp(SweepModel(runner, find_shape(sweep.plan.model), search), glyphs=BLOCKS)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(1.0)
        (HERE / f"sweep-{name}.svg").write_text(app.export_screenshot(title=""))
    print(f"docs/sweep-{name}.svg\n", *format_markdown(sweep), sep="\n")
    for report in report_lines(sweep, find_shape(sweep.plan.model)):
        print("", *describe_line(report), sep="\n")


class RecordedSearch:
    """What ``zerotop fit`` knew at the end of a search without and with the optimizer offloaded, on one GPU."""

    searched = "seq_length"
    most_runs = 10

    def __init__(self, sweep: Sweep) -> None:
        self.runs = len(sweep.points)
        self.results = tuple(self._read_result(sweep, *pair) for pair in (("none", 14_245.0), ("optimizer", 6_439.0)))
        self.series_count = len(self.results)

    def _read_result(self, sweep: Sweep, offload: str, predicted: float) -> LargestResult:
        search = LargestSearch([int(value) for value in sweep.plan.settings[self.searched]], LIMIT_BYTES, FORMULAS[offload])
        runs = {
            int(point.settings[self.searched]): point.result
            for point in sweep.points
            if point.settings["offload"] == offload and point.result is not None
        }
        for value, result in runs.items():
            if result.outcome == OK:
                search.note_fitting(value, result.allocated_peak_bytes)
            else:
                search.note_failing(value, SearchShortage(result.needed_bytes or 0, result.unusable_bytes or 0))
        largest, failing = (search.values[at] for at in (search.largest_fitting, search.smallest_failing))
        is_fragmented = (runs[failing].needed_bytes or 0) < LIMIT_BYTES
        return LargestResult(
            {"offload": offload},
            largest,
            failing,
            search.is_over,
            predicted,
            runs[largest].allocated_peak_bytes,
            len(runs),
            expected=search.predict_largest(),
            line=search.line,
            limit_bytes=LIMIT_BYTES,
            fragmented_bytes=runs[failing].unusable_bytes if is_fragmented else None,
        )


def format_markdown(sweep: Sweep) -> Iterator[str]:
    """Yield the lines of a table with what was varied, and sizes in GiB."""
    varied = sweep.plan.varied
    heads = [name.replace("_", "-") for name in varied]
    yield "| " + " | ".join([*heads, "allocated", "reserved", "NVML", "host", "cores in step()", "it/s", "tokens/s"]) + " |"
    yield "|" + "---|" * (len(varied) + 7)
    for point in sweep.finished:
        if point.result is not None and point.result.outcome != "skipped":
            yield "| " + " | ".join([*(str(point.settings[name]) for name in varied), *format_result(point)]) + " |"


def format_result(point: Point) -> list[str]:
    """Return the cells of one point."""
    result = point.result
    assert result is not None
    if result.outcome != "ok":
        return [result.outcome.replace("_", " "), *[""] * 6]
    sizes = (result.allocated_peak_bytes, result.reserved_peak_bytes, result.nvml_peak_bytes, result.host_peak_bytes)
    rates = ((result.step_cores, ".1f"), (result.iterations_per_s, ".2f"), (result.tokens_per_s, ",.0f"))
    return [
        *(f"{size / GIB:.2f} GiB" if size else "" for size in sizes),
        *(format(value, style) if value else "" for value, style in rates),
    ]


if __name__ == "__main__":
    for folder in sorted((HERE / "sweeps").iterdir()):
        asyncio.run(take_picture(folder.name))

"""``zerotop fit``: the largest sequence length or micro-batch that fits, for each stage and offload mode."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from zerotop.analysis.formatting import format_bytes, format_count, format_parameters
from zerotop.analysis.sweeps.baseline import NoBaselineError, read_baseline
from zerotop.analysis.sweeps.search import LargestResult, describe_fragmentation
from zerotop.analysis.sweeps.series import choose_axis
from zerotop.analysis.sweeps.settings import MICRO_BATCH, SEQ_LENGTH, build_points, describe_settings
from zerotop.analysis.text_tables import align_columns
from zerotop.commands.common.errors import FAILED, INTERRUPTED, USAGE, Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.model_config import find_shape
from zerotop.commands.common.open_recording import open_named
from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.job.training_machine import read_gpu_bytes
from zerotop.commands.sweeping.fit_runner import FitRunner
from zerotop.commands.sweeping.fit_start import Knowledge
from zerotop.commands.sweeping.progress_lines import describe_cost, describe_result
from zerotop.commands.sweeping.sweep_folder import lock_folder, make_folder, reopen_sweep, stop_on_signals
from zerotop.commands.sweeping.sweep_plan import build_plan, find_limits
from zerotop.recording import sweeps
from zerotop.recording.sweeps import OK, Plan, Point, Sweep, write_sweep

_SAME_MODEL = 0.01  # of the parameters, in which formulas and a recording of one model differ


def fit(options: argparse.Namespace) -> int:
    """Search and print the largest values. Return 0; 1 if a series has none, 130 if it was interrupted."""
    plan = build_plan(options)
    searched = choose_axis(plan)
    if searched not in (SEQ_LENGTH, MICRO_BATCH) or searched not in plan.varied:
        raise Problem("Say what to maximize, as a range: --seq-length 128:32768:128 or --micro-batch 1:64", USAGE)
    limits = find_limits(plan)
    plan = _limit_values(plan, searched, limits.get(searched))
    folder = make_folder(options.output, plan)
    with lock_folder(folder):
        runner = _make_runner(_open_search(folder, plan), _list_series(plan, searched, limits), options)
        with stop_on_signals(runner.stop):
            if options.headless or options.json or not has_terminal():
                runner.run()
            else:
                from zerotop.commands.sweeping.beside_screen import run_beside_screen

                run_beside_screen(runner, runner, runner)
    _print_results(runner, options)
    if runner.was_interrupted:
        print(escape_unprintable(f"To continue, run the same command with -o {shlex.quote(str(folder))}"), file=sys.stderr)
        return INTERRUPTED
    if runner.problem:
        raise Problem(runner.problem)
    return FAILED if any(result.largest is None for result in runner.results) else 0


def _open_search(folder: Path, plan: Plan) -> Sweep:
    """Return the search that was interrupted in a folder, or a new one."""
    if not sweeps.is_sweep(folder):
        return Sweep(folder, plan, ())
    opened = reopen_sweep(folder, plan)
    if len(opened.finished) < len(opened.points):
        raise Problem(f"{folder} holds a sweep. Choose another folder with -o DIR")
    return replace(opened, plan=plan)


def _make_runner(sweep: Sweep, series: Sequence[Point], options: argparse.Namespace) -> FitRunner:
    stream = sys.stderr if options.json else sys.stdout
    is_shown = has_terminal() and not (options.headless or options.json)

    def print_result(point: Point) -> None:
        if point.result is not None and not is_shown:
            line = f"[run {runner.runs}] {describe_settings(sweep.plan, point.settings)}: {describe_result(point.result)}"
            print(escape_unprintable(line), file=stream, flush=True)

    write_sweep(sweep)
    runner = FitRunner(
        sweep,
        series,
        choose_axis(sweep.plan),
        most_runs=options.most_runs,
        gpu_bytes=options.gpu_memory or read_gpu_bytes(),
        known=_find_knowledge(sweep.plan, options.recording),
        on_result=print_result,
    )
    return runner


def _find_knowledge(plan: Plan, recording: str | None) -> Knowledge:
    """Return the model's shape, and what a recording measured. Raises Problem."""
    shape = find_shape(plan.model)
    if recording is None:
        return Knowledge(shape, None)
    with open_named(recording) as opened:
        try:
            base = read_baseline(opened)
        except NoBaselineError as error:
            raise Problem(f"--from {recording}: {error}") from error
    if (
        shape is not None
        and shape.parameters is not None
        and abs(shape.parameters / base.setup.parameters - 1) > _SAME_MODEL
    ):
        sizes = (
            f"{format_parameters(base.setup.parameters)} parameters, and {plan.model} {format_parameters(shape.parameters)}"
        )
        raise Problem(f"--from {recording}: it has {sizes}, so it tells nothing of this model")
    return Knowledge(shape, base)


def _limit_values(plan: Plan, searched: str, most: int | None) -> Plan:
    """Return the plan without values that the model does not support."""
    values = [value for value in plan.settings[searched] if most is None or int(value) <= most]
    if not values:
        raise Problem(f"The model supports {most:,} tokens at most: give smaller values", USAGE)
    return replace(plan, settings={**plan.settings, searched: values})


def _list_series(plan: Plan, searched: str, limits: Mapping[str, int]) -> Sequence[Point]:
    """Return the combinations of the other settings; impossible ones with their reason."""
    others = {name: values for name, values in plan.settings.items() if name != searched}
    points = build_points(others, limits)
    if points and all(point.result is not None for point in points):
        raise Problem(f"No combination can work: {points[0].result.reason if points[0].result else ''}", USAGE)
    return points


def _print_results(runner: FitRunner, options: argparse.Namespace) -> None:
    results, searched = runner.results, runner.searched
    if options.json:
        content = {"path": str(runner.sweep.path), "searched": searched, "runs": runner.runs}
        notes = [*filter(None, _explain_results(runner))]
        print(json.dumps({**content, "series": [asdict(result) for result in results], "notes": notes}, indent=1))
        return
    names = list(results[0].settings) if results else []
    title = searched.replace("_", "-")
    cells = [(*(name.replace("_", "-") for name in names), f"largest {title}", "predicted", "allocated", "runs", "")]
    for result in results:
        size = format_bytes(result.allocated_bytes) if result.allocated_bytes is not None else "-"
        cells.append(
            (
                *(str(result.settings[name]) for name in names),
                *_format_largest(result),
                size,
                str(result.runs),
                _explain_certainty(result),
            )
        )
    lines = align_columns(cells, ">" * (len(names) + 4) + "<")
    lines += _explain_results(runner)
    print("", *map(escape_unprintable, lines), sep="\n")
    runs = f"{format_count(runner.runs, 'run')}{describe_cost(runner.sweep)}"
    print(f"{runs}. Results: {runner.sweep.path}/results.csv", file=sys.stderr)


def _explain_results(runner: FitRunner) -> list[str]:
    """Return which series fragmentation ended, and what is missing in the measurements of runs that fit, each once."""
    reasons = dict.fromkeys(
        point.result.reason for point in runner.sweep.points if point.result and point.result.outcome == OK
    )
    fragmented = describe_fragmentation(runner.results, runner.searched)
    return [*fragmented, *(["", *filter(None, reasons)] if any(reasons) else [])]


def _format_largest(result: LargestResult) -> tuple[str, str]:
    predicted = f"{result.predicted:,.0f}" if result.predicted is not None else "-"
    unknown = "not known" if result.problem else "none"
    return (f"{result.largest:,}" if result.largest is not None else unknown, predicted)


def _explain_certainty(result: LargestResult) -> str:
    """Return how sure the result is."""
    if result.problem:
        return result.problem
    if result.largest is None:
        return f"{result.failing:,} does not fit either" if result.failing is not None else ""
    return f"{result.failing:,} does not fit" if result.failing is not None else "it is the largest value of the range"

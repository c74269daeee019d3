"""``zerotop sweep``: measure memory and pace for every combination of settings."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from zerotop.analysis.formatting import format_count
from zerotop.analysis.sweeps.line_report import describe_line, report_lines
from zerotop.analysis.sweeps.settings import MOST_VALUES, build_points, count_points, describe_settings
from zerotop.commands.common.errors import FAILED, INTERRUPTED, USAGE, Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.model_config import find_shape
from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.job.training_machine import list_visible_gpus, torch_has_cuda
from zerotop.commands.sweeping.progress_lines import describe_end, describe_result, format_table
from zerotop.commands.sweeping.runner import SweepRunner
from zerotop.commands.sweeping.sweep_folder import lock_folder, make_folder, reopen_sweep, stop_on_signals
from zerotop.commands.sweeping.sweep_plan import build_plan, find_limits, has_settings, set_price
from zerotop.recording import sweeps
from zerotop.recording.sweeps import CRASHED, Plan, Sweep

_ASK_FROM = 500  # points
# Options that a resumed sweep has already stored, with their defaults.
_PLANNED = {
    "output": None,
    "model": None,
    "config": None,
    "dtype": "bf16",
    "nvme_path": None,
    "steps": 8,
    "warmup": 3,
    "retries": 5,
    "hang_after": 300,
}
_POLL_S = 0.2


def sweep(options: argparse.Namespace) -> int:
    """Run or continue a sweep. Return 0; 1 if points crashed or nothing can be written, 130 if it was interrupted."""
    if options.resume:
        _check_resumed(options)
    if options.slurm and options.executor != "slurm":
        raise Problem("--slurm goes with --executor slurm", USAGE)
    plan = None if options.resume else build_plan(options)
    path = _choose_folder(options, plan)
    with lock_folder(path):
        opened = _open_sweep(path, plan, options)
        runner = _make_runner(opened, options)
        with stop_on_signals(runner.stop):
            if options.headless or options.json or not has_terminal():
                _run_with_lines(runner, quiet=options.json)
            else:
                from zerotop.commands.sweeping.beside_screen import run_beside_screen

                run_beside_screen(runner, runner)
    if options.json:
        print(json.dumps(build_json(runner.sweep), indent=1))
    elif runner.sweep.finished:
        _print_results(runner.sweep)
    print(escape_unprintable(describe_end(runner.sweep, runner.problem)), file=sys.stderr)
    if runner.was_interrupted:
        return INTERRUPTED
    has_crashed = any(point.result is not None and point.result.outcome == CRASHED for point in runner.sweep.points)
    return FAILED if runner.problem or has_crashed else 0


def _check_resumed(options: argparse.Namespace) -> None:
    """Raise Problem if an option is given that the resumed sweep has already stored."""
    if options.command or has_settings(options):
        raise Problem("--resume uses the sweep's own settings and command: omit them", USAGE)
    for name, default in _PLANNED.items():
        if getattr(options, name) != default:
            raise Problem(f"--resume cannot change --{name.replace('_', '-')} of the sweep: omit it", USAGE)


def _make_runner(opened: Sweep, options: argparse.Namespace) -> SweepRunner:
    if options.executor == "local":
        return SweepRunner(opened, gpus=[] if options.one_at_a_time else _list_gpus(opened.plan))
    from zerotop.commands.sweeping.cluster_runner import ClusterRunner, parse_parameters

    return ClusterRunner(opened, parse_parameters(options.slurm))


def _list_gpus(plan: Plan) -> list[str]:
    """Return the GPUs to share out among points."""
    return list_visible_gpus() if plan.command or torch_has_cuda() else []


def build_json(sweep: Sweep) -> dict[str, object]:
    """Return a sweep's results and fitted lines as plain values."""
    reports = report_lines(sweep, find_shape(sweep.plan.model))
    lines = [
        {
            **report.line.series.settings,
            "measurement": report.line.measurement,
            "bytes_per_token": report.line.fit.slope,
            "intercept_bytes": report.line.fit.intercept,
            "r_squared": report.line.fit.r_squared,
            "points": report.line.fit.line_points,
            "knee_tokens": report.knee_tokens,
            "flat_bytes": report.line.fit.flat_level,
            "deepspeed_estimate_bytes": report.estimate_bytes,
            "zero_formula_bytes": report.formula_bytes,
            "heuristic_bytes_per_token": report.heuristic_bytes,
        }
        for report in reports
    ]
    return {"path": str(sweep.path), "results": sweeps.build_table(sweep).to_dicts(), "lines": lines}


def _print_results(sweep: Sweep) -> None:
    reports = report_lines(sweep, find_shape(sweep.plan.model))
    lines = [line for report in reports for line in ("", *describe_line(report))]
    print("", *map(escape_unprintable, (*format_table(sweep), *lines)), sep="\n")


def _choose_folder(options: argparse.Namespace, plan: Plan | None) -> Path:
    """Return the sweep's folder, which exists then."""
    if plan is None:
        path = sweeps.find_sweep(options.resume)
        if path is None:
            raise Problem(f"There is no sweep {options.resume!r} to resume")
        return path.absolute()
    return make_folder(options.output, plan)


def _open_sweep(path: Path, plan: Plan | None, options: argparse.Namespace) -> Sweep:
    """Read the sweep that is there, or write a new one."""
    if sweeps.is_sweep(path):
        opened = reopen_sweep(path, plan)
        if options.price_per_hour is not None:
            opened = replace(opened, plan=set_price(opened.plan, options.price_per_hour))
        return opened
    assert plan is not None
    _check_size(count_points(plan.settings), options)
    opened = Sweep(path, plan, build_points(plan.settings, find_limits(plan) if options.executor == "local" else {}))
    if all(point.result is not None for point in opened.points):
        reasons = dict.fromkeys(point.result.reason for point in opened.points if point.result)
        raise Problem(f"No combination can work: {' '.join(reasons)}", USAGE)
    sweeps.write_sweep(opened)
    return opened


def _check_size(count: int, options: argparse.Namespace) -> None:
    if count > MOST_VALUES:
        raise Problem(f"A matrix of {count:,} points is too large; the limit is {MOST_VALUES:,}", USAGE)
    if count < _ASK_FROM or options.yes:
        return
    question = f"This is a matrix of {count:,} points; at 30 s each it takes {count * 30 / 3600:,.0f} hours."
    if not has_terminal():
        raise Problem(f"{question} Add --yes to start it where nobody can answer", USAGE)
    try:
        answer = input(f"{question} Start? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise Problem("Not started")


def _run_with_lines(runner: SweepRunner, *, quiet: bool) -> None:
    """Run the sweep and print a line for each result."""
    stream = sys.stderr if quiet else sys.stdout
    total = len(runner.sweep.points)
    thread = threading.Thread(target=runner.run, name="sweep")
    printed = {point.number for point in runner.sweep.finished}
    already = f"{len(printed)} of them done or skipped, " if printed else ""
    print(f"{format_count(total, 'point')}, {already}in {runner.sweep.path}", file=stream, flush=True)
    thread.start()
    try:
        _print_progress(runner, thread, printed, stream)
    except BaseException:  # nobody reads the lines any more
        runner.stop()
        thread.join()
        raise


def _print_progress(runner: SweepRunner, thread: threading.Thread, printed: set[int], stream: TextIO) -> None:
    """Print until the thread ends. ``printed``: the numbers of points whose results need no line."""
    plan, total = runner.sweep.plan, len(runner.sweep.points)
    compiling: set[int] = set()  # points
    while thread.is_alive():
        thread.join(_POLL_S)
        for number in [number for number, attempt in runner.attempts.items() if attempt.is_compiling]:
            if number not in compiling:
                compiling.add(number)
                settings = describe_settings(plan, runner.sweep.points[number].settings)
                print(escape_unprintable(f"{settings}: compiling DeepSpeed's operators"), file=stream, flush=True)
        for point in runner.sweep.finished:
            if point.number not in printed and point.result is not None:
                printed.add(point.number)
                line = f"[{len(printed)}/{total}] {describe_settings(plan, point.settings)}: {describe_result(point.result)}"
                print(escape_unprintable(line), file=stream, flush=True)

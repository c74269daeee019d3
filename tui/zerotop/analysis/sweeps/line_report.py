"""The fitted lines of a sweep beside DeepSpeed's estimate, ZeRO's formulas and a rule of thumb for activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerotop.analysis.engine import read_first_engine
from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.zero_model import compute_expected, estimate_job, is_for_setup, parse_setup
from zerotop.analysis.sweeps.series import ALLOCATED, SeriesMemory, fit_lines
from zerotop.analysis.sweeps.settings import CHECKPOINTING, SEQ_LENGTH
from zerotop.recording.reader import Recording, RecordingError
from zerotop.recording.sweeps import Point, Sweep, find_point_recording


@dataclass(frozen=True, slots=True)
class LineReport:
    """One line and its comparison. Bytes of one GPU, without activations unless noted; None: not known."""

    line: SeriesMemory
    estimate_bytes: int | None  # DeepSpeed's own estimate for these options; it has none for stages 0 and 1
    formula_bytes: int | None  # of ZeRO's paper: parameters, gradients, master weights and optimizer state
    heuristic_bytes: float | None  # activations for each token, see ``ModelShape.estimate_activations``
    counted_bytes: float | None = None  # the same by ``count_activations``; None for other families

    @property
    def knee_tokens(self) -> float | None:
        """Tokens of a micro-batch at which the flat part ends; None without a flat part."""
        return self.line.fit.knee_x


def report_lines(sweep: Sweep, shape: ModelShape | None = None) -> list[LineReport]:
    """Fit and compare the lines of all series. ``shape``: of the model; None where it is not known."""
    return [_compare_line(sweep, line, shape) for line in fit_lines(sweep)]


def _compare_line(sweep: Sweep, line: SeriesMemory, shape: ModelShape | None) -> LineReport:
    estimate = formula = None
    setup = None
    for point in reversed(line.series.points):
        if (recording := _open_recording(sweep.path, point)) is not None:
            setup = parse_setup(read_first_engine(recording.at()))
            break
    if setup is not None and line.measurement == ALLOCATED:
        formula = sum(compute_expected(setup).gpu.values())
        own = [one for one in estimate_job(setup) if is_for_setup(one, setup)]
        # With and without zero.Init the same on each GPU.
        estimate = own[0].gpu_bytes if own else None
    if shape is None:
        return LineReport(line, estimate, formula, None)
    settings = line.series.points[-1].settings
    recompute = settings.get(CHECKPOINTING) == "on"
    heuristic = shape.estimate_activations(int(settings.get(SEQ_LENGTH, 0)), recompute=recompute)
    counted = shape.count_activations(recompute=recompute).total if shape.kept is not None else None
    return LineReport(line, estimate, formula, heuristic, counted)


def _open_recording(folder: Path, point: Point) -> Recording | None:
    path = find_point_recording(folder, point.result)
    try:
        return None if path is None else Recording.open(path)
    except RecordingError:
        return None


def describe_line(report: LineReport) -> list[str]:
    """Return sentences about one line: the knee, the line, and both comparisons."""
    fit, line = report.line.fit, report.line
    what = "Allocated memory" if line.measurement == ALLOCATED else "Host memory"
    head = f"{line.series.label}: " if line.series.label else ""
    sentences = []
    if fit.knee_x is not None and fit.flat_level is not None:
        sentences.append(
            f"{head}{what} is flat at {format_bytes(fit.flat_level)} up to {fit.knee_x:,.0f} tokens a micro-batch."
        )
        head = ""
    beyond = "Beyond, it is" if fit.knee_x is not None else f"{head}{what} is"
    # Any line goes through two points: R2 would say nothing.
    points = f"{fit.line_points} points, R2 {fit.r_squared:.4f}" if fit.line_points > 2 else "through only 2 points"
    sentences.append(f"{beyond} {format_bytes(fit.slope)} a token on top of {format_bytes(fit.intercept)} ({points}).")
    sentences += _describe_comparison(report)
    return sentences


def _describe_comparison(report: LineReport) -> Sequence[str]:
    sentences = []
    if report.estimate_bytes is not None:
        ratio = report.line.fit.intercept / report.estimate_bytes if report.estimate_bytes else 0.0
        sentences.append(
            f"DeepSpeed's estimator says {format_bytes(report.estimate_bytes)} without activations:"
            f" the measured base is {ratio:.2f} times that."
        )
    elif report.formula_bytes:
        sentences.append(
            f"ZeRO's formulas say {format_bytes(report.formula_bytes)} for model states; DeepSpeed has no estimate."
        )
    if report.heuristic_bytes is not None and report.line.measurement == ALLOCATED:
        ratio = report.line.fit.slope / report.heuristic_bytes
        sentences.append(
            f"Korthikanti et al. (2022) expect {format_bytes(report.heuristic_bytes)} of activations a token:"
            f" measured is {ratio:.2f} times that."
        )
    if report.counted_bytes is not None and report.line.measurement == ALLOCATED:
        ratio = report.line.fit.slope / report.counted_bytes
        sentences.append(
            f"The model's own layers and the loss's copies of the logits add up to {format_bytes(report.counted_bytes)}:"
            f" measured is {ratio:.2f} times that."
        )
    return sentences

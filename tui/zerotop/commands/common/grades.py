"""``zerotop estimate --grade``: the errors of predictions over recordings, and what was kept at their launch."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from zerotop.analysis.formatting import format_count, format_percent
from zerotop.analysis.sweeps.baseline import Baseline, NoBaselineError, read_baseline
from zerotop.analysis.sweeps.grading import (
    FIGURES,
    FORMULAS,
    KEPT,
    WHAT_IF,
    Ends,
    Grade,
    grade_formulas,
    grade_kept,
    grade_pairs,
    read_expectation,
)
from zerotop.analysis.text_tables import align_columns
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.recording import catalog, sweeps
from zerotop.recording.reader import Recording, RecordingError

_MOST_NAMES = 6  # that share a reason


def print_grades(options: argparse.Namespace) -> int:
    """Print the errors over all recordings of this machine, or those in a folder. Return 0."""
    grades = list(grade_recordings(list_paths(options.model)))
    if options.json:
        print(json.dumps([asdict(grade) for grade in grades], indent=1))
    else:
        print(*map(escape_unprintable, format_grades(grades, explain=options.explain)), sep="\n")
    return 0


def list_paths(name: str | None) -> list[Path]:
    """Return the recordings of this machine, of its sweeps, too; or the one of that name, or those in a folder.

    Raises Problem without any.
    """
    if name is None:
        points = sweeps.find_default_folder().glob(f"*/{sweeps.POINTS_FOLDER}")
        found = [path for root in (None, *points) for path in catalog.list_recordings(root)]
        if not found:
            raise Problem("There are no recordings to grade. Record a job with: zerotop run -- COMMAND")
        return found
    if (sweep := sweeps.find_sweep(name)) is not None:
        return catalog.list_recordings(sweep / sweeps.POINTS_FOLDER)
    if Path(name).is_dir() and (within := catalog.list_recordings(Path(name))):
        return within
    try:
        return [catalog.find_recording(name)]
    except RecordingError as error:
        raise Problem(str(error).rstrip(".")) from error


def grade_recordings(paths: Sequence[Path]) -> Iterator[Grade]:
    """Yield the grades of each recording, then those of what-if between them."""
    bases: list[Baseline] = []
    for path in paths:
        try:
            recording = Recording.open(path)
            base = read_baseline(recording)
        except (NoBaselineError, RecordingError) as error:
            yield Grade(path.stem, FORMULAS, refusal=str(error).rstrip("."))
            continue
        bases.append(base)
        yield grade_formulas(base)
        if (kept := read_expectation(recording)) is not None:
            yield grade_kept(base, kept)
    yield from grade_pairs(bases)


def format_grades(grades: Sequence[Grade], *, explain: bool) -> Iterator[str]:
    """Yield the table of errors, each recording, and those without a prediction. ``explain``: each pair of a what-if."""
    shown = [grade for grade in grades if explain or grade.source != WHAT_IF]
    parts = (_format_errors(grades), _format_recordings(shown), _format_refusals(shown, explain=explain))
    for number, part in enumerate(filter(None, map(list, parts))):
        yield from [""] if number else []
        yield from part


def _format_errors(grades: Sequence[Grade]) -> Iterator[str]:
    cells: list[tuple[str, ...]] = [("errors of", "", "predictions", "mean", "median", "worst", "in the interval")]
    for source, figure in product(_SOURCES, FIGURES):
        pairs = [grade.figures[figure] for grade in grades if grade.source == source and figure in grade.figures]
        if pairs:
            errors = sorted(abs(ends[1] / truth - 1) for ends, truth in pairs)
            inside = statistics.mean(_is_inside(*pair) for pair in pairs)
            sizes = (statistics.mean(errors), statistics.median(errors), errors[-1])
            text = [format_percent(size, 1) for size in sizes]
            cells.append((_SOURCES[source], figure, str(len(pairs)), *text, f"{inside:.0%}"))
    if len(cells) > 1:
        yield from align_columns(cells, "<<>>>>>")


def _format_recordings(grades: Sequence[Grade]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("recording", "predicted by", *FIGURES)]
    for grade in grades:
        if grade.figures:
            errors = (_format_error(grade, figure) for figure in FIGURES)
            rows.append((grade.recording, " ".join(filter(None, (_SOURCES[grade.source], grade.asked))), *errors))
    if len(rows) > 1:
        yield from align_columns(rows, "<<>>>>>")
        yield "Predicted less measured, in shares of measured; * outside of the interval that was given."


def _format_refusals(grades: Sequence[Grade], *, explain: bool) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for grade in grades:
        if grade.refusal:
            reasons.setdefault(grade.refusal.removeprefix(f"{grade.recording} "), []).append(grade.recording)
    if reasons:
        yield f"{format_count(sum(map(len, reasons.values())), 'prediction')} not made:"
    for reason, names in reasons.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES and not explain else ""
        yield f"  {', '.join(names if explain else names[:_MOST_NAMES])}{more}: {reason}"


_SOURCES = {KEPT: "run --expect", FORMULAS: "estimate", WHAT_IF: "what-if"}


def _format_error(grade: Grade, figure: str) -> str:
    if figure not in grade.figures:
        return "-"
    (low, likely, high), truth = grade.figures[figure]
    return f"{likely / truth - 1:+.1%}{'' if _is_inside((low, likely, high), truth) else ' *'}"


def _is_inside(ends: Ends, truth: float) -> bool:
    return 0.999 * ends[0] <= truth <= 1.001 * ends[2]

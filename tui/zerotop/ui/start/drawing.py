"""The list of recordings, with a strip of iteration times each, and details of the chosen one."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from zerotop.analysis.formatting import format_count, pluralize
from zerotop.analysis.reports.cost_text import describe_share
from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.analysis.reports.recording_summary import OUT_OF_GPU_MEMORY, OUT_OF_HOST_MEMORY, Overview
from zerotop.ui.base.start_interfaces import LibraryItem, RunningJob
from zerotop.ui.drawing.formatting import format_duration, format_grouped, format_number, format_rough_time, is_known
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, align_ends, fit_row, highlight_row, row_text, row_width
from zerotop.ui.drawing.table import PlacedColumns, draw_rule, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.drawing.units import convert_sizes
from zerotop.ui.start.columns import ListLine, build_columns, build_few_columns, describe_state, format_offload

DETAIL_ROWS = 5
_RAN_OUT_OF = {OUT_OF_GPU_MEMORY: "GPU memory", OUT_OF_HOST_MEMORY: "host memory"}


def draw_head(left: str, right: str, width: int, glyphs: Glyphs) -> Row:
    """Draw the top row: a summary of the list, and its folder."""
    brand: Row = ((" ", "band"), ("zerotop", "brand"), ("  ", "band"), (glyphs.to_plain(left), "name"))
    room = width - row_width(brand) - 3
    where = fit_text(sanitize(right, glyphs), room, glyphs, at_words=False) if room > 12 else ""
    return align_ends(brand, ((where, "band-muted"), (" ", "band")), width, glyphs, "band")


def draw_list(lines: Sequence[ListLine], title: Row, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw the headings and a row for each line, ``height`` rows in all."""
    placed: PlacedColumns[ListLine] = place_columns(build_columns(width, glyphs), width)
    rows = [draw_rule(title, width, glyphs, placed)]
    for line in lines[: height - 1]:
        damaged = bool(line.overview.problem)
        row = _draw_damaged(line, placed, width, glyphs) if damaged else placed.draw_row(line, width, glyphs)
        rows.append(highlight_row(row) if line.is_chosen and glyphs.smooth else row)
    return [*rows, *(fit_row((), width, glyphs) for _ in range(height - len(rows)))]


def format_recording(recording: ListedRecording, width: int, glyphs: Glyphs) -> str:
    """Return a recording as a line of text, for a short list under :func:`format_headings`."""
    return row_text(
        _place_few_columns(width, glyphs).draw_row(ListLine(recording, False, False, time.time_ns()), width, glyphs)
    )


def format_headings(width: int, glyphs: Glyphs) -> str:
    """Return the headings of :func:`format_recording`."""
    return row_text(draw_rule((), width, glyphs, _place_few_columns(width, glyphs))).replace(glyphs.rule, " ")


def _place_few_columns(width: int, glyphs: Glyphs) -> PlacedColumns[ListLine]:
    return place_columns(build_few_columns(glyphs), width)


def _draw_damaged(line: ListLine, placed: PlacedColumns[ListLine], width: int, glyphs: Glyphs) -> Row:
    """Draw a damaged recording, with the problem instead of figures."""
    first = PlacedColumns(placed.columns[:3])
    begin = sum(size + 1 for _, _, size in first.columns)
    sentence = fit_text(sanitize(_describe_problem(line.item), glyphs), max(0, width - begin), glyphs)
    return fit_row((*first.draw_row(line, begin, glyphs), (sentence, "muted")), width, glyphs)


def _describe_problem(item: LibraryItem) -> str:
    """Return why a recording cannot be read, without its path, which stands below the list."""
    if isinstance(item, RunningJob) or item.overview is None:
        return ""
    return item.overview.problem.removeprefix(str(item.path)).lstrip("/ ")


def draw_detail(item: LibraryItem | None, width: int, glyphs: Glyphs) -> list[Row]:
    """Draw ``DETAIL_ROWS`` rows about the chosen recording: its end, model, command and path."""
    texts = (
        [] if item is None else _describe_job(item) if isinstance(item, RunningJob) else _describe_recording(item, glyphs)
    )
    rows = [_draw_sentence(text, style, width, glyphs) for text, style in texts]
    return [*rows, *(fit_row((), width, glyphs) for _ in range(DETAIL_ROWS - len(rows)))]


def _draw_sentence(text: str, style: str, width: int, glyphs: Glyphs) -> Row:
    return fit_row(((" ", "text"), (fit_text(sanitize(text, glyphs), width - 2, glyphs), style)), width, glyphs)


def _describe_job(job: RunningJob) -> list[tuple[str, str]]:
    gpus = f" on GPU {', '.join(job.gpus)}" if job.gpus else ""
    started = f"Process {job.pid}, started by {job.launcher} {format_rough_time(job.age_s)} ago"
    return [
        (f"{started}: {format_count(job.ranks, 'rank')}{gpus}.", "text"),
        ("Not being recorded. Enter records it from outside from now on: memory, CPU, GPUs.", "text"),
        (f"To see phases too: zerotop attach {job.pid} --enter", "muted"),
    ]


def _describe_recording(recording: ListedRecording, glyphs: Glyphs) -> list[tuple[str, str]]:
    overview = recording.overview
    if overview is None:
        return [("Reading …", "muted")]
    if overview.problem:
        return [(_describe_problem(recording), "alert"), (str(recording.path), "muted")]
    _, style = describe_state(recording, glyphs)
    return [
        (_describe_end(recording, overview), "text" if style in ("good", "text") else style),
        (_describe_worst(overview), "warn"),
        (_describe_training(overview, glyphs), "text"),
        (shlex.join(overview.command), "muted"),
        (str(recording.path), "muted"),
    ]


def _describe_end(recording: ListedRecording, overview: Overview) -> str:
    if recording.is_live:
        return (
            "Running. Enter shows it; when you leave, you can stop the job or let it run."
            if not overview.end
            else overview.end
        )
    ran_out = f"It ran out of {_RAN_OUT_OF[overview.why]}. " if overview.why in _RAN_OUT_OF else ""
    records = f"{format_grouped(overview.lost_records)} {pluralize(overview.lost_records, 'record')}"
    lost = f" {records} could not be written." if overview.lost_records else ""
    return ran_out + (overview.end or "The recording stops there; exit status unknown.") + lost


def _describe_worst(overview: Overview) -> str:
    """Return the finding that costs most, with its cost."""
    if not overview.worst:
        return "" if overview.worst is None else "Nothing found that costs time or memory."
    cost = f"{describe_share(overview.worst_share, overview.worst_name)}: " if is_known(overview.worst_share) else ""
    return convert_sizes(f"{cost}{overview.worst}")


def _describe_training(overview: Overview, glyphs: Glyphs) -> str:
    if not overview.has_begun:
        return "No steps were recorded: only memory, CPU and output."
    size_text = f" of {format_number(overview.parameters)} parameters" if overview.parameters else ""
    offload = format_offload(overview, glyphs)
    precision = "" if overview.is_loop else overview.precision_text  # the setup of a loop contains it
    parts = [f"{overview.model}{size_text}", f"{overview.setup_text} {offload}".strip(), precision]
    parts.append(format_count(overview.ranks, "rank") if overview.ranks else "")
    if overview.iterations:
        took = f"median {format_duration(overview.iteration_s)}, longest {format_duration(max(overview.iterations))}"
        parts.append(f"{format_grouped(overview.steps)} {pluralize(overview.steps, 'step')}, {took}")
    return ", ".join(part for part in parts if part)

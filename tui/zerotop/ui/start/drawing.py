"""The list of recordings: a row each, with a strip of its iteration times, and more about the chosen one."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from zerotop.analysis.formatting import called, plural
from zerotop.analysis.reports.recording_index import Recording
from zerotop.analysis.reports.recording_summary import Overview
from zerotop.ui.base.start_interfaces import Item, RunningJob
from zerotop.ui.drawing.formatting import about, count, grouped, seconds
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, both_ends, filled, merged, row_text, row_width
from zerotop.ui.drawing.table import Placed, place, rule
from zerotop.ui.drawing.text import fit, literal
from zerotop.ui.start.columns import Line, columns, few_columns, short_offload, state

DETAIL_ROWS = 4


def head(left: str, right: str, width: int, glyphs: Glyphs) -> Row:
    """The top row: what is listed, and where it lies."""
    brand: Row = ((" ", "band"), ("zerotop", "brand"), ("  ", "band"), (glyphs.plain(left), "name"))
    room = width - row_width(brand) - 3
    where = fit(literal(right, glyphs), room, glyphs, words=False) if room > 12 else ""
    return both_ends(brand, ((where, "band-muted"), (" ", "band")), width, glyphs, "band")


def listing(lines: Sequence[Line], title: Row, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """The headings and a row for each line, ``height`` rows in all."""
    placed: Placed[Line] = place(columns(glyphs), width)
    rows = [rule(title, width, glyphs, placed)]
    for line in lines[: height - 1]:
        damaged = bool(line.about.problem)
        row = _with_problem(line, placed, width, glyphs) if damaged else placed.row(line, width, glyphs)
        rows.append(_raised(row) if line.chosen and glyphs.smooth else row)
    return [*rows, *(filled((), width, glyphs) for _ in range(height - len(rows)))]


def one_line(recording: Recording, width: int, glyphs: Glyphs) -> str:
    """A recording in a line of text, for a short list of them under :func:`names`."""
    return row_text(_short(width, glyphs).row(Line(recording, False, False, time.time_ns()), width, glyphs))


def names(width: int, glyphs: Glyphs) -> str:
    """What the columns of that are called."""
    return row_text(rule((), width, glyphs, _short(width, glyphs))).replace(glyphs.rule, " ")


def _short(width: int, glyphs: Glyphs) -> Placed[Line]:
    return place(few_columns(glyphs), width)


def _with_problem(line: Line, placed: Placed[Line], width: int, glyphs: Glyphs) -> Row:
    """A damaged recording's sentence in the place of its figures."""
    first = Placed(placed.columns[:3])
    begin = sum(size + 1 for _, _, size in first.columns)
    sentence = fit(literal(line.about.problem, glyphs), max(0, width - begin), glyphs)
    return filled((*first.row(line, begin, glyphs), (sentence, "muted")), width, glyphs)


def _raised(row: Row) -> Row:
    """The row under the cursor: on a ground of its own."""
    return merged((text, style if "/" in style else f"{style}/cursor-ground") for text, style in row)


def detail(item: Item | None, width: int, glyphs: Glyphs) -> list[Row]:
    """``DETAIL_ROWS`` rows about the chosen one: how it ended, what was trained, by which command, where it lies."""
    texts = [] if item is None else _of_job(item) if isinstance(item, RunningJob) else _of_recording(item, glyphs)
    rows = [_sentence(text, style, width, glyphs) for text, style in texts]
    return [*rows, *(filled((), width, glyphs) for _ in range(DETAIL_ROWS - len(rows)))]


def _sentence(text: str, style: str, width: int, glyphs: Glyphs) -> Row:
    return filled(((" ", "text"), (fit(literal(text, glyphs), width - 2, glyphs), style)), width, glyphs)


def _of_job(job: RunningJob) -> list[tuple[str, str]]:
    gpus = f" on GPU {', '.join(job.gpus)}" if job.gpus else ""
    what = f"Process {job.pid}, started by {job.launcher} {about(job.age_s)} ago: {plural(job.ranks, 'rank')}{gpus}."
    return [
        (what, "text"),
        ("Nobody records it. Enter watches it from outside from now on: memory, processors, GPUs.", "text"),
        (f"To see phases too: zerotop attach {job.pid} --enter", "muted"),
    ]


def _of_recording(recording: Recording, glyphs: Glyphs) -> list[tuple[str, str]]:
    known = recording.about
    if known is None:
        return [("Being read.", "muted")]
    if known.problem:
        return [(known.problem, "alert"), (str(recording.path), "muted")]
    _, style = state(recording, glyphs)
    return [
        (_ending(recording, known), "text" if style in ("good", "text") else style),
        (_trained(known, glyphs), "text"),
        (shlex.join(known.command), "muted"),
        (str(recording.path), "muted"),
    ]


def _ending(recording: Recording, known: Overview) -> str:
    if recording.live:
        return "It runs. Enter watches it; leaving that asks what becomes of it." if not known.end else known.end
    ran_out = f"It ran out of {known.why}. " if known.why in ("GPU memory", "host memory") else ""
    records = f"{grouped(known.lost_records)} {called(known.lost_records, 'record')}"
    lost = f" {records} could not be written." if known.lost_records else ""
    return ran_out + (known.end or "The recording stops there: nobody saw how the job ended.") + lost


def _trained(known: Overview, glyphs: Glyphs) -> str:
    if known.zero_stage is None:
        return "No rank made a DeepSpeed engine: memory, processors and output are what was recorded."
    size_text = f" of {count(known.parameters)} parameters" if known.parameters else ""
    offload = short_offload(known, glyphs)
    parts = [f"{known.model}{size_text}", f"ZeRO-{known.zero_stage} {offload}".strip(), known.dtype]
    parts.append(plural(known.ranks, "rank") if known.ranks else "")
    if known.iterations:
        took = f"median {seconds(known.iteration_s)}, longest {seconds(max(known.iterations))}"
        parts.append(f"{grouped(known.steps)} {called(known.steps, 'step')}, {took}")
    return ", ".join(part for part in parts if part)

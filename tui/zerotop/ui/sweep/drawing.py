"""The whole screen: progress, table, charts, and sentences about the fitted lines."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.analysis.formatting import format_count
from zerotop.analysis.reports.sweep_verdict import describe_answer
from zerotop.analysis.sweeps.line_report import describe_line
from zerotop.analysis.sweeps.search import describe_fragmentation
from zerotop.analysis.sweeps.series import TOKENS
from zerotop.recording.sweeps import Point
from zerotop.ui.drawing.formatting import format_clock
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, align_ends, choose_items, fit_row, join_rows, merge_spans, row_width
from zerotop.ui.drawing.text import sanitize, wrap_text
from zerotop.ui.sweep.charts import draw_chart, draw_legend
from zerotop.ui.sweep.model import PlacedChart, SweepModel
from zerotop.ui.sweep.searches import count_rows, draw_searches, measure_progress
from zerotop.ui.sweep.table import draw_table

_MIN_CHART_WIDTH = 38
_MIN_CHART_HEIGHT, _MAX_CHART_HEIGHT = 8, 24
_MIN_TABLE = 5
_GAP = 2


def draw_sweep(model: SweepModel, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw ``height`` rows without the keys."""
    model.place_cursor()  # before all that describes the chosen point
    head = [_draw_head(model, width, glyphs), _draw_progress(model, width, glyphs)]
    if model.search is None and model.progress.is_over and (answer := describe_answer(model.sweep)):
        head.append(fit_row(((" ", "text"), (sanitize(glyphs.to_plain(answer), glyphs), "value")), width, glyphs))
    if model.search is not None:
        most = min(count_rows(model.search), max(2, height // 4))
        head += draw_searches(model, model.search, width, most, glyphs)
    model.table_top = len(head) + 1
    model.placed_charts = []
    room = height - len(head)
    sentences = _draw_sentences(model, width, 2 if height < 30 else 4, glyphs)
    grid = _choose_grid(model.charts, width, room - len(sentences) - _MIN_TABLE - 1) if model.series else []
    wanted = len(model.sweep.points) + 1
    if not grid:
        table = max(1, room - len(sentences))
        return [*head, *draw_table(model, width, table, glyphs), *sentences][:height]
    least = len(grid) * _MIN_CHART_HEIGHT
    table = max(_MIN_TABLE, min(wanted, room - len(sentences) - 1 - least, max(_MIN_TABLE, room // 2)))
    chart_height = min(_MAX_CHART_HEIGHT, (room - len(sentences) - 1 - table) // len(grid))
    table = room - len(sentences) - 1 - chart_height * len(grid)
    rows = [*head, *draw_table(model, width, table, glyphs)]
    for line in grid:
        rows += _draw_chart_row(model, line, len(rows), width, chart_height, glyphs)
    return [*rows, draw_legend(model, width, glyphs), *sentences][:height]


def _choose_grid(charts: Sequence[str], width: int, height: int) -> list[list[str]]:
    """Return rows of charts that fit; where not all do, memory and tokens per second come first."""
    columns = max(1, min(len(charts), (width + _GAP) // (_MIN_CHART_WIDTH + _GAP)))
    columns = -(-len(charts) // -(-len(charts) // columns))  # four charts as two and two, not as three and one
    lines = min(-(-len(charts) // columns), height // _MIN_CHART_HEIGHT)
    if lines < 1:
        return []
    most = columns * lines
    first = [charts[0], TOKENS, *(name for name in charts[1:] if name != TOKENS)][:most]
    shown = [name for name in charts if name in first]
    return [shown[begin : begin + columns] for begin in range(0, len(shown), columns)]


def _draw_chart_row(
    model: SweepModel, charts: Sequence[str], top: int, width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    each = (width - _GAP * (len(charts) - 1)) // len(charts)
    lefts = [number * (each + _GAP) for number in range(len(charts))]
    ends = [left + each for left in lefts[:-1]] + [width]
    placed = [PlacedChart(name, left, top, end - left, height) for name, left, end in zip(charts, lefts, ends, strict=True)]
    model.placed_charts += placed
    return [join_rows(parts, _GAP) for parts in zip(*(draw_chart(model, one, glyphs) for one in placed), strict=True)]


def _draw_head(model: SweepModel, width: int, glyphs: Glyphs) -> Row:
    sweep = model.sweep
    what = sweep.plan.model or next((word for word in sweep.plan.command if word.endswith(".py")), "")
    left: Row = (
        (" ", "band"),
        (f"zerotop {'fit' if model.search else 'sweep'}", "brand"),
        ("  ", "band"),
        (sanitize(what, glyphs), "name"),
    )
    return align_ends(left, ((sanitize(sweep.name, glyphs), "band-muted"), (" ", "band")), width, glyphs, "band")


def _draw_progress(model: SweepModel, width: int, glyphs: Glyphs) -> Row:
    """Draw how far the sweep is, and how long and how much the rest takes."""
    progress, sweep = model.progress, model.sweep
    done, total = float(len(sweep.finished)), float(len(sweep.points))
    if model.search is not None:
        done, total = measure_progress(model, model.search), 1.0
    texts = _describe_progress(model)
    parts = join_rows(choose_items([(importance, ((text, style),)) for importance, text, style in texts], width - 24, 3), 3)
    bar = max(10, width - row_width(parts) - 5)
    filled = round(bar * done / max(1, total))
    style = "good" if progress.is_over and done == total else "accent"
    spans: list[Span] = [
        (" ", "text"),
        (glyphs.track * filled, style),
        (glyphs.rest * (bar - filled), "rule"),
        ("  ", "text"),
    ]
    return fit_row(merge_spans((*spans, *parts)), width, glyphs)


def _describe_progress(model: SweepModel) -> list[tuple[int, str, str]]:
    """Return (importance, text, style)."""
    progress, price = model.progress, model.price
    elapsed, left = progress.elapsed_s, progress.estimate_left_s()
    texts = [(9, _count_runs(model), "value")]
    if progress.is_over:
        texts.append((8, progress.problem or "done", "warn" if progress.problem else "good"))
    else:
        texts.append((4, f"{format_clock(elapsed)} elapsed", "muted"))
        waiting = "measuring the first point" if model.search is None else ""
        texts += [(8, text, "value") for text in (f"{format_clock(left)} left" if left is not None else waiting,) if text]
    if price is not None:
        if progress.is_over:  # the elapsed time is that since the sweep went on, if it was interrupted
            cost = price.format_cost(sum(point.result.machine_seconds for point in model.sweep.points if point.result))
        else:
            total_cost = f" of about {price.format_cost(elapsed + left)}" if left is not None else ""
            cost = f"{price.format_cost(elapsed)}{total_cost}"
        texts.append((7, cost, "value"))
    return texts


def _count_runs(model: SweepModel) -> str:
    search, sweep = model.search, model.sweep
    if search is None:
        return f"{len(sweep.finished)} of {format_count(len(sweep.points), 'point')}"
    runs = format_count(search.runs, "run")
    return runs if model.progress.is_over else f"{runs}, {search.most_runs - search.runs} more at most"


def _draw_sentences(model: SweepModel, width: int, most: int, glyphs: Glyphs) -> list[Row]:
    """Draw the possible cost of fragmentation for a search, and why the chosen point failed, else its series' line."""
    points, search = model.listed_points, model.search
    chosen = points[model.cursor_row] if model.cursor_row < len(points) else None
    texts = [(text, "accent") for text in describe_fragmentation(search.results, search.searched)] if search else []
    rows: list[Row] = []
    for text, style in [*texts, _describe_point(model, chosen)]:
        room = most - len(rows)
        lines = wrap_text(sanitize(glyphs.to_plain(text), glyphs), width - 2, room, glyphs) if text and room else []
        rows += [fit_row(((" ", "text"), (line, style)), width, glyphs) for line in lines]
    return rows + [fit_row((), width, glyphs)] * (most - len(rows))


def _describe_point(model: SweepModel, point: Point | None) -> tuple[str, str]:
    if point is not None and point.result is not None and point.result.reason:
        return f"Point {point.number}: {point.result.reason}", "warn"
    reports = list(model.reports)
    if point is not None:
        own = [
            report
            for report in reports
            if all(point.settings[name] == value for name, value in report.line.series.settings.items())
        ]
        reports = own or reports
    return (" ".join(describe_line(reports[0])), "text") if reports else ("", "text")

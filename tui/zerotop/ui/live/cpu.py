"""The CPU use of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from statistics import median

from zerotop.analysis.formatting import format_count
from zerotop.analysis.live_view import GpuHistory, Job, JobState, LiveView, Rank, RankHistory
from zerotop.ui.charts import AXIS_WIDTH
from zerotop.ui.charts.strips import draw_strip, find_pieces
from zerotop.ui.drawing.formatting import (
    MISSING,
    choose_decimals,
    format_fixed,
    format_giga,
    format_range,
    format_rough_time,
)
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import (
    choose_exit_style,
    describe_no_ranks,
    draw_last_step,
    format_cores_used,
    phase_style,
    phase_word,
    rank_name,
)
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import Column, PlacedColumns, draw_rule, panel_title, place_columns
from zerotop.ui.drawing.text import cell_width, fit_text, sanitize
from zerotop.ui.drawing.units import giga_unit
from zerotop.ui.live.memory import choose_shown

_BUSIEST_HEADING = "busiest threads"


def draw_cpu(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw for each rank its phase, cores, threads and busiest threads, and the cores over the last while.

    With enough room each rank has a tall strip under its figures, at the same times as the memory chart above it.
    """
    shown, hidden = choose_shown_ranks(view, height)
    rows_per_rank = rows_per_strip(height, len(view.ranks))
    placed = place_rank_columns(view, width, rows_per_rank, glyphs)
    rows = [draw_rule(_draw_cpu_title(view, width, focused), width, glyphs, placed)]
    has_threads = rows_per_rank < 3 or any(column.heading == _BUSIEST_HEADING for column, _, _ in placed.columns)
    strip_width = width - AXIS_WIDTH
    for rank in shown:
        rows.append(placed.draw_row(rank, width, glyphs))
        if rows_per_rank > 1:
            threads = [] if has_threads else [draw_busiest_threads(rank, strip_width, glyphs)]
            strip = _draw_cores_strip(view, rank, strip_width, rows_per_rank - 1 - len(threads), glyphs)
            rows.extend(indent_strip([*threads, *strip], width, glyphs))
    if hidden:
        used = format_range((rank.cores_used for rank in hidden), 1)
        text = f"{glyphs.ellipsis} {format_count(len(hidden), 'more rank')}, {used} cores each"
        rows.append(fit_row(((text, "muted"),), width, glyphs))
    if not view.ranks:
        rows.append(fit_row(((f"  {describe_no_ranks(view)}", "muted"),), width, glyphs))
    return fit_height(rows, width, height, glyphs)


def choose_shown_ranks(view: LiveView, height: int) -> tuple[list[Rank], list[Rank]]:
    """Return the (shown, hidden) ranks in a panel of this height."""
    return choose_shown(view.ranks, height - 1, _score_ranks(view.ranks))


def place_rank_columns(view: LiveView, width: int, rows_per_rank: int, glyphs: Glyphs) -> PlacedColumns[Rank]:
    """Place the columns; without a growing one, the spare width goes between words and figures."""
    placed = place_columns(_build_rank_columns(view, width, rows_per_rank, glyphs), width)
    chosen = [column for column, _, _ in placed.columns]
    last, begin, size = placed.columns[-1]
    if last.left or any(column.grows for column in chosen) or begin + size >= width:
        return placed
    words = next(index for index, column in enumerate(chosen) if column.heading and not column.left)
    filler: Column[Rank] = Column("", 0, 9, lambda rank, _: (), grows=True, left=True)
    return place_columns([*chosen[:words], filler, *chosen[words:]], width)


def rows_per_strip(height: int, count: int) -> int:
    """Return the rows for each of ``count`` strips with its figures, in a panel of ``height``."""
    return max(1, (height - 1) // max(1, count))


def indent_strip(strip: Sequence[Row], width: int, glyphs: Glyphs) -> list[Row]:
    return [fit_row(((" " * AXIS_WIDTH, "text"), *row), width, glyphs) for row in strip]


def draw_strip_heading(piece_s: float, length: int, width: int) -> Row:
    """Draw ``last 24 s``, the time that a strip of this width covers; nothing if it does not fit.

    ``length`` is the number of pieces that there are, see :class:`History`.
    """
    text = f"last {format_rough_time(min(length, width) * piece_s)}"
    return ((text, "heading"),) if len(text) <= width else ()


def _draw_cores_strip(view: LiveView, rank: Rank, width: int, height: int, glyphs: Glyphs) -> Sequence[Row]:
    """Draw the cores in use on a scale to the rank's fair share of the host's cores."""
    ranks = sum(other.host == rank.host for other in view.ranks)
    cores = sum(host.cores for host in view.hosts if host.name == rank.host)
    top = cores / max(1, ranks) or 1.0
    return draw_history_strip(view.history.ranks.get(rank.rank), top, view.history.length, width, height, glyphs)


@lru_cache(maxsize=512)  # most frames bring no new sample
def draw_history_strip(
    history: RankHistory | GpuHistory | None, top: float, length: int, width: int, height: int, glyphs: Glyphs
) -> Sequence[Row]:
    """Draw a rank's cores in the colours of its phases, or a GPU's utilization; empty without a history.

    ``length`` is the number of pieces that there are: fewer than ``width`` fill it.
    """
    if history is None:
        return draw_strip((), (), top, width, height, glyphs)
    if isinstance(history, GpuHistory):
        values, styles = history.utilization_percent, ["load"] * len(history.utilization_percent)
    else:
        values, styles = history.cores_used, [phase_style(phase) for phase in history.phase]
    shown = [len(values) - 1 - back for back in find_pieces(length, width).tolist() if back < len(values)]
    return draw_strip(values[shown], [styles[place] for place in shown], top, width, height, glyphs)


def _draw_cpu_title(view: LiveView, width: int, focused: bool) -> Row:
    """Draw ``CPU 63.1 of 64 cores``."""
    used = format_cores_used(view, width)
    return (*panel_title("CPU", focused), (f" {used}" if used else "", "title-value"), *draw_last_step(view))


def _score_ranks(ranks: Sequence[Rank]) -> list[int]:
    """Score dead ranks highest, then those a step behind, then those with much more memory than the others."""
    steps = [rank.step for rank in ranks if rank.step is not None]
    usual = median([rank.rss_peak_bytes for rank in ranks]) if ranks else 0
    newest = max(steps, default=0)

    def score_rank(rank: Rank) -> int:
        if not rank.alive:
            return 3
        if rank.step is not None and rank.step < newest - 1:
            return 2
        return 1 if rank.rss_peak_bytes > usual * 1.2 else 0

    return [score_rank(rank) for rank in ranks]


def _build_rank_columns(view: LiveView, width: int, rows_per_rank: int, glyphs: Glyphs) -> list[Column[Rank]]:
    ranks, is_starting = view.ranks, view.job.state is JobState.STARTING
    names = {rank.rank: rank_name(rank.rank, short=width < 46) for rank in ranks}
    longest = max([1, *(len(name) for name in names.values())])
    decimals = choose_decimals(max([0, *(rank.rss_peak_bytes for rank in ranks)]) / giga_unit().bytes)

    def draw_phase(rank: Rank, cells: int) -> Row:
        return draw_phase_now(rank, view.job, cells, glyphs)

    def draw_since(rank: Rank, cells: int) -> Row:
        is_known = rank.alive and (rank.phase or is_starting)
        return ((f"{format_fixed(rank.phase_s, 1, cells - 2)} s" if is_known else " " * cells, "muted"),)

    def draw_host(rank: Rank, cells: int) -> Row:
        return ((sanitize(rank.host, glyphs).ljust(cells), "muted"),)

    def draw_load(rank: Rank, cells: int) -> Row:
        return _draw_cores_strip(view, rank, cells, 1, glyphs)[0]

    draw_busiest = partial(draw_busiest_threads, glyphs=glyphs)
    figure = partial(build_figure_column, glyphs=glyphs)
    columns = [Column[Rank]("", longest, 9, lambda rank, _: ((names[rank.rank].rjust(longest), "label"),), left=True)]
    if len(view.hosts) > 1:
        longest_host = min(16, max([4, *(len(rank.host) for rank in ranks)]))
        columns.append(Column("host", longest_host, 4, draw_host, left=True))
    if is_starting or any(rank.phase or not rank.alive for rank in ranks):  # ranks without a probe have no phases
        columns += [Column("now", 12, 8, draw_phase, left=True), Column("", 7, 3, draw_since)]
    if rows_per_rank > 1:
        columns.append(Column(_BUSIEST_HEADING, 13, 3, draw_busiest, grows=True, left=True))
    else:
        heading = partial(draw_strip_heading, view.history.piece_s, view.history.length)
        columns.append(Column(heading, 7, 7, draw_load, grows=True, left=True))
    columns += [
        figure("cores", 5, 9, lambda rank, cells: format_fixed(rank.cores_used, 1, cells)),
        build_runnable_column(6, glyphs),
        figure("threads", 7, 4, lambda rank, _: str(rank.thread_count), "muted"),
    ]
    if view.gpus:  # without GPUs host memory has its own panel
        columns += [
            figure("RSS", 5, 7, lambda rank, cells: format_giga(rank.rss_bytes, decimals, cells)),
            figure("pinned", 6, 4, lambda rank, cells: format_giga(rank.pinned_bytes, decimals, cells), "muted"),
        ]
    if rows_per_rank == 1:
        busiest_width = 14 if width < 100 else 30 if width < 140 else 56
        columns.append(Column(_BUSIEST_HEADING, busiest_width, 2, draw_busiest, left=True))
    return columns


def build_figure_column(
    heading: str,
    width: int,
    importance: int,
    format_figure: Callable[[Rank, int], str],
    style: str | Callable[[Rank], str] = "value",
    *,
    glyphs: Glyphs,
) -> Column[Rank]:
    """Return a column for a figure of a process, with a dash for ranks that have exited."""

    def draw_figure(rank: Rank, cells: int) -> Row:
        if not rank.alive:
            return ((glyphs.to_plain(MISSING).rjust(cells), "muted"),)
        return ((format_figure(rank, cells).rjust(cells), style(rank) if callable(style) else style),)

    return Column(heading, width, importance, draw_figure)


def build_runnable_column(importance: int, glyphs: Glyphs) -> Column[Rank]:
    """Return the column for threads that run or wait for a core: a warning where more than one waits."""

    def choose_style(rank: Rank) -> str:
        return "warn" if rank.waiting_cores > 1 else "text"

    return build_figure_column(
        "runnable",
        8,
        importance,
        lambda rank, cells: format_fixed(rank.runnable_threads, 1, cells),
        choose_style,
        glyphs=glyphs,
    )


def draw_phase_now(rank: Rank, job: Job, width: int, glyphs: Glyphs) -> Row:
    """Draw a rank's phase, a dash for a rank without a probe, or that it exited."""
    if not rank.alive:
        is_good = job.state is JobState.ENDED and choose_exit_style(job) != "alert"
        return (("ended".ljust(width), "muted"),) if is_good else (("exited".ljust(width), "alert"),)
    if not rank.phase and job.state is not JobState.STARTING:
        return ((glyphs.to_plain(MISSING), "muted"),)
    style = phase_style(rank.phase)
    return ((f"{glyphs.swatch} ", style), (phase_word(rank.phase, glyphs).ljust(width - 2), "text"))


def draw_busiest_threads(rank: Rank, width: int, glyphs: Glyphs) -> Row:
    """Draw ``16 × OpenMP team 4.8  autograd 1.0``: as many names as fit; only the first name is shortened."""
    text = ""
    named = _group_threads(rank.busiest, glyphs) if rank.alive else []
    others = rank.cores_used - sum(used for _, used in named)
    for name, used in [*named, ("others", others)] if named and others >= 1 else named:
        figure = f" {used:.1f}"
        if not text:
            text = fit_text(sanitize(name, glyphs), max(0, width - len(figure)), glyphs, at_words=False) + figure
        elif cell_width(f"{text}  {sanitize(name, glyphs)}{figure}") <= width:
            text += f"  {sanitize(name, glyphs)}{figure}"
        else:
            break
    return ((text, "muted"),)


def _group_threads(busiest: Sequence[tuple[str, float]], glyphs: Glyphs) -> list[tuple[str, float]]:
    """Return (name, cores) with threads of one name as one, busiest first."""
    cores: dict[str, list[float]] = {}
    for name, used in busiest:
        cores.setdefault(name, []).append(used)
    named = {f"{len(each)} {glyphs.times} {name}" if len(each) > 1 else name: sum(each) for name, each in cores.items()}
    return sorted(named.items(), key=lambda item: -item[1])

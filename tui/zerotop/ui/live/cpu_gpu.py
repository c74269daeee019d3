"""Who computes: the CPU side of each rank, and each GPU's utilization."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

from zerotop.analysis.formatting import format_count
from zerotop.analysis.live_view import Gpu, Job, LiveView, Rank, State
from zerotop.ui.charts.step_axis import LABEL_WIDTH
from zerotop.ui.charts.strips import draw_cores_strip, draw_empty_strip, draw_strip_heading, draw_utilization_strip
from zerotop.ui.drawing.formatting import MISSING, choose_decimals, format_fixed, format_giga, format_range
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import choose_exit_style, format_cores_used, phase_style, phase_word, rank_name
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import Column, PlacedColumns, draw_rule, place_columns
from zerotop.ui.drawing.text import cell_width, fit_text, sanitize
from zerotop.ui.drawing.units import giga_unit
from zerotop.ui.live.memory import choose_shown, gpu_name, panel_title

STRIP_BEGIN = LABEL_WIDTH + 1  # where a tall strip begins: under a chart's plot
_BUSIEST_HEADING: Row = (("busiest threads", "heading"),)


def draw_cpu(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Each rank: what it does now, with how many cores and threads, and which threads, over the last while.

    Where there is room, a rank has its strip to itself under its figures, at the same times as the memory's chart above.
    """
    shown, hidden = choose_shown(view.ranks, height - 1, _score_ranks(view.ranks))
    tall = rows_per_strip(height, len(view.ranks))
    placed = _place_rank_columns(_build_rank_columns(view, width, tall, glyphs), width)
    rows = [draw_rule(_draw_cpu_title(view, width, focused), width, glyphs, placed)]
    told = tall < 3 or any(column.heading == _BUSIEST_HEADING for column, _, _ in placed.columns)
    for rank in shown:
        rows.append(placed.draw_row(rank, width, glyphs))
        if tall > 1:
            under = [] if told else [draw_busiest_threads(rank, width - STRIP_BEGIN, glyphs)]
            strip = _draw_cores_strip(view, rank, width - STRIP_BEGIN, tall - 1 - len(under), glyphs)
            rows.extend(_indent_strip([*under, *strip], width, glyphs))
    if hidden:
        rows.append(fit_row(((_describe_hidden(hidden, glyphs), "muted"),), width, glyphs))
    if not view.ranks:
        rows.append(fit_row((("  no rank has said hello yet", "muted"),), width, glyphs))
    return fit_height(rows, width, height, glyphs)


def _place_rank_columns(columns: list[Column[Rank]], width: int) -> PlacedColumns[Rank]:
    """The columns; where none that grows has room, what is left is between words and figures."""
    placed = place_columns(columns, width)
    kept = [column for column, _, _ in placed.columns]
    last, begin, size = placed.columns[-1]
    if last.left or any(column.grows for column in kept) or begin + size >= width:
        return placed
    words = next(place for place, column in enumerate(kept) if column.heading and not column.left)
    between: Column[Rank] = Column((), 0, 9, lambda rank, _: (), grows=True, left=True)
    return place_columns([*kept[:words], between, *kept[words:]], width)


def rows_per_strip(height: int, count: int) -> int:
    """Rows for each of ``count`` strips with its figures, in a panel of ``height``."""
    return max(1, (height - 1) // max(1, count))


def _indent_strip(strip: Sequence[Row], width: int, glyphs: Glyphs) -> list[Row]:
    return [fit_row(((" " * STRIP_BEGIN, "text"), *cells), width, glyphs) for cells in strip]


def _draw_cores_strip(view: LiveView, rank: Rank, width: int, tall: int, glyphs: Glyphs) -> Sequence[Row]:
    """Cores in use, on a scale to the rank's fair share of the host's."""
    history = view.history.ranks.get(rank.rank)
    if history is None or width <= 0:
        return draw_empty_strip(width, tall, glyphs)
    ranks = sum(other.host == rank.host for other in view.ranks)
    there = sum(host.cores for host in view.hosts if host.name == rank.host)
    return draw_cores_strip(history, there / max(1, ranks) or 1.0, width, tall, glyphs)


def _draw_cpu_title(view: LiveView, width: int, focused: bool) -> Row:
    """``CPU 63.1 of 64 cores``; the figure is the whole host's."""
    used = format_cores_used(view)
    text = f" {used}{' cores' if width >= 50 else ''}" if used else ""
    return (*panel_title("CPU", focused), (text, "title-value"))


def _describe_hidden(hidden: Sequence[Rank], glyphs: Glyphs) -> str:
    used = format_range((rank.cores_used for rank in hidden), 1)
    return f"{glyphs.ellipsis} {format_count(len(hidden), 'more rank')}, {used} cores each"


def _score_ranks(ranks: Sequence[Rank]) -> list[int]:
    """Dead ranks first, then those a step behind, then those with much more memory than the others."""
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


def _build_rank_columns(view: LiveView, width: int, tall: int, glyphs: Glyphs) -> list[Column[Rank]]:
    ranks = view.ranks
    several = len(view.hosts) > 1
    starting = view.job.state is State.STARTING
    told = starting or any(rank.phase or not rank.alive for rank in ranks)  # not of ranks that are only watched from outside
    names = {rank.rank: rank_name(rank.rank, short=width < 46) for rank in ranks}
    longest = max([1, *(len(name) for name in names.values())])
    decimals = choose_decimals(max([0, *(rank.rss_peak_bytes for rank in ranks)]) / giga_unit().bytes)

    def draw_phase(rank: Rank, cells: int) -> Row:
        return draw_phase_now(rank, view.job, cells, glyphs)

    def draw_since(rank: Rank, cells: int) -> Row:
        known = rank.alive and (rank.phase or starting)
        return ((f"{format_fixed(rank.phase_s, 1, cells - 2)} s" if known else " " * cells, "muted"),)

    def draw_load(rank: Rank, cells: int) -> Row:
        return _draw_cores_strip(view, rank, cells, 1, glyphs)[0]

    def draw_figure(text: str, rank: Rank, cells: int, style: str = "value") -> Row:
        """What a process does, if there is one."""
        return ((text.rjust(cells), style) if rank.alive else (glyphs.to_plain(MISSING).rjust(cells), "muted"),)

    def draw_waiting(rank: Rank, cells: int) -> Row:
        return draw_figure(
            format_fixed(rank.waiting_cores, 1, cells), rank, cells, "warn" if rank.waiting_cores > 1 else "muted"
        )

    def draw_busiest(rank: Rank, room: int) -> Row:
        return draw_busiest_threads(rank, room, glyphs)

    def draw_host(rank: Rank, cells: int) -> Row:
        return ((sanitize(rank.host, glyphs).ljust(cells), "muted"),)

    def draw_resident(rank: Rank, cells: int) -> Row:
        return draw_figure(format_giga(rank.rss_bytes, decimals, cells), rank, cells)

    def draw_pinned(rank: Rank, cells: int) -> Row:
        return draw_figure(format_giga(rank.pinned_bytes, decimals, cells), rank, cells, "muted")

    # Without GPUs host memory has a panel of its own.
    memory = (
        [Column((("RSS", "heading"),), 5, 7, draw_resident), Column((("pinned", "heading"),), 6, 4, draw_pinned)]
        if view.gpus
        else []
    )
    host_width = min(16, max([4, *(len(rank.host) for rank in ranks)]))
    busy_width = 14 if width < 100 else 30 if width < 140 else 56
    return [
        Column((), longest, 9, lambda rank, _: ((names[rank.rank].rjust(longest), "label"),), left=True),
        *([Column((("host", "heading"),), host_width, 4, draw_host, left=True)] if several else []),
        *([Column((("now", "heading"),), 12, 8, draw_phase, left=True), Column((), 7, 3, draw_since)] if told else []),
        *(
            []
            if tall > 1
            else [Column(partial(draw_strip_heading, view.history.piece_s), 7, 7, draw_load, grows=True, left=True)]
        ),
        *([Column(_BUSIEST_HEADING, 13, 3, draw_busiest, grows=True, left=True)] if tall > 1 else []),
        Column(
            (("cores", "heading"),),
            5,
            9,
            lambda rank, cells: draw_figure(format_fixed(rank.cores_used, 1, cells), rank, cells),
        ),
        Column((("wait", "heading"),), 4, 1, draw_waiting),
        Column((("busy", "heading"),), 4, 6, lambda rank, cells: draw_figure(str(rank.busy_threads), rank, cells)),
        Column((("thr", "heading"),), 4, 4, lambda rank, cells: draw_figure(str(rank.thread_count), rank, cells, "muted")),
        *memory,
        *([] if tall > 1 else [Column(_BUSIEST_HEADING, busy_width, 2, draw_busiest, left=True)]),
    ]


def draw_phase_now(rank: Rank, job: Job, width: int, glyphs: Glyphs) -> Row:
    """What a rank does now; nothing is claimed of one that is only watched from outside."""
    if not rank.alive:
        well = job.state is State.ENDED and choose_exit_style(job) != "alert"
        return (("ended".ljust(width), "muted"),) if well else (("exited".ljust(width), "alert"),)
    if not rank.phase and job.state is not State.STARTING:
        return ((glyphs.to_plain(MISSING), "muted"),)
    style = phase_style(rank.phase)
    return ((f"{glyphs.swatch} ", style), (phase_word(rank.phase, glyphs).ljust(width - 2), "text"))


def draw_busiest_threads(rank: Rank, width: int, glyphs: Glyphs) -> Row:
    """``pt_autograd_0 1.0  python 0.9``: as many whole ones as fit; the first one's name gives way."""
    text = ""
    for name, used in rank.busiest if rank.alive else ():
        figure = f" {used:.1f}"
        if not text:
            text = fit_text(sanitize(name, glyphs), max(0, width - len(figure)), glyphs, at_words=False) + figure
        elif cell_width(f"{text}  {sanitize(name, glyphs)}{figure}") <= width:
            text += f"  {sanitize(name, glyphs)}{figure}"
        else:
            break
    return ((text, "muted"),)


def draw_gpu(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Each GPU: utilization over the last while, power, temperature, PCIe each way."""
    shown, hidden = choose_shown(view.gpus, height - 1, [0] * len(view.gpus))
    tall = rows_per_strip(height, max(len(view.gpus), len(view.ranks)))
    placed = place_columns(_build_gpu_columns(view, width, tall, glyphs), width)
    rows = [draw_rule(panel_title("GPU", focused), width, glyphs, placed)]
    for gpu in shown:
        rows.append(placed.draw_row(gpu, width, glyphs))
        if tall > 1:
            rows.extend(
                _indent_strip(_draw_utilization_strip(view, gpu, width - STRIP_BEGIN, tall - 1, glyphs), width, glyphs)
            )
    if hidden:
        text = f"{glyphs.ellipsis} {len(hidden)} more, {format_range((gpu.utilization_percent for gpu in hidden), 0)} %"
        rows.append(fit_row(((text, "muted"),), width, glyphs))
    return fit_height(rows, width, height, glyphs)


def _draw_utilization_strip(view: LiveView, gpu: Gpu, width: int, tall: int, glyphs: Glyphs) -> Sequence[Row]:
    history = view.history.gpus.get((gpu.host, gpu.index))
    return (
        draw_utilization_strip(history, width, tall, glyphs)
        if history and width > 0
        else draw_empty_strip(width, tall, glyphs)
    )


def _build_gpu_columns(view: LiveView, width: int, tall: int, glyphs: Glyphs) -> list[Column[Gpu]]:
    gpus = view.gpus
    several = len({gpu.host for gpu in gpus}) > 1
    names = {id(gpu): gpu_name(gpu, several, width < 46, glyphs) for gpu in gpus}
    longest = max([1, *(len(name) for name in names.values())])

    def draw_load(gpu: Gpu, cells: int) -> Row:
        if tall > 1:
            return ((fit_text(sanitize(gpu.name, glyphs), cells, glyphs), "muted"),)
        return _draw_utilization_strip(view, gpu, cells, 1, glyphs)[0]

    def draw_rate(value: float, cells: int) -> Row:
        return ((format_fixed(value / 1e9, 1, cells), "value"),)

    return [
        Column((), longest, 9, lambda gpu, _: ((names[id(gpu)].rjust(longest), "label"),), left=True),
        Column(
            () if tall > 1 else partial(draw_strip_heading, view.history.piece_s), 6, 9, draw_load, grows=True, left=True
        ),
        Column(
            (("%", "heading"),),
            3,
            9,
            lambda gpu, cells: ((format_fixed(gpu.utilization_percent, 0, cells), "value"),),
        ),
        Column((("W", "heading"),), 4, 7, lambda gpu, cells: ((format_fixed(gpu.sample["power_w"], 0, cells), "value"),)),
        Column(
            ((f"{glyphs.degree}C", "heading"),),
            3,
            5,
            lambda gpu, cells: ((format_fixed(gpu.sample["temperature_c"], 0, cells), "muted"),),
        ),
        Column(
            ((f"{glyphs.sent}GB/s", "heading"),),
            5,
            6,
            lambda gpu, cells: draw_rate(gpu.pcie_tx_bytes_per_s, cells),
        ),
        Column(
            ((f"{glyphs.received}GB/s", "heading"),),
            5,
            6,
            lambda gpu, cells: draw_rate(gpu.pcie_rx_bytes_per_s, cells),
        ),
    ]

"""Who computes: the CPU side of each rank, and each GPU's utilization."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

from zerotop.analysis.formatting import plural
from zerotop.analysis.live_view import Gpu, Job, LiveView, Rank, State
from zerotop.ui.charts.step_axis import LABEL_WIDTH
from zerotop.ui.charts.strips import cores_strip, empty_strip, strip_heading, utilization_strip
from zerotop.ui.drawing.formatting import MISSING, amount, between, decimals_for, fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import cores, fared, phase_style, phase_word, rank_name
from zerotop.ui.drawing.rows import Row, filled, to_height
from zerotop.ui.drawing.table import Column, Placed, place, rule
from zerotop.ui.drawing.text import cells, fit, literal
from zerotop.ui.drawing.units import giga
from zerotop.ui.live.memory import gpu_name, most_telling, panel_title

STRIP_FROM = LABEL_WIDTH + 1  # where a tall strip begins: under a chart's plot
_BUSIEST: Row = (("busiest threads", "heading"),)


def draw_cpu(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Each rank: what it does now, with how many cores and threads, and which threads, over the last while.

    Where there is room, a rank has its strip to itself under its figures, at the same times as the memory's chart above.
    """
    shown, hidden = most_telling(view.ranks, height - 1, _tellings(view.ranks))
    tall = tallness(height, len(view.ranks))
    placed = _placed(_rank_columns(view, width, tall, glyphs), width)
    rows = [rule(_cpu_title(view, width, focused), width, glyphs, placed)]
    told = tall < 3 or any(column.heading == _BUSIEST for column, _, _ in placed.columns)
    for rank in shown:
        rows.append(placed.row(rank, width, glyphs))
        if tall > 1:
            under = [] if told else [busiest_threads(rank, width - STRIP_FROM, glyphs)]
            strip = _cores_strip(view, rank, width - STRIP_FROM, tall - 1 - len(under), glyphs)
            rows.extend(_under([*under, *strip], width, glyphs))
    if hidden:
        rows.append(filled(((_more(hidden, glyphs), "muted"),), width, glyphs))
    if not view.ranks:
        rows.append(filled((("  no rank has said hello yet", "muted"),), width, glyphs))
    return to_height(rows, width, height, glyphs)


def _placed(columns: list[Column[Rank]], width: int) -> Placed[Rank]:
    """The columns; where none that grows has room, what is left is between words and figures."""
    placed = place(columns, width)
    kept = [column for column, _, _ in placed.columns]
    last, begin, size = placed.columns[-1]
    if last.left or any(column.grows for column in kept) or begin + size >= width:
        return placed
    words = next(place for place, column in enumerate(kept) if column.heading and not column.left)
    between: Column[Rank] = Column((), 0, 9, lambda rank, _: (), grows=True, left=True)
    return place([*kept[:words], between, *kept[words:]], width)


def tallness(height: int, count: int) -> int:
    """Rows for each of ``count`` strips with its figures, in a panel of ``height``."""
    return max(1, (height - 1) // max(1, count))


def _under(strip: Sequence[Row], width: int, glyphs: Glyphs) -> list[Row]:
    return [filled(((" " * STRIP_FROM, "text"), *cells), width, glyphs) for cells in strip]


def _cores_strip(view: LiveView, rank: Rank, width: int, tall: int, glyphs: Glyphs) -> Sequence[Row]:
    """Cores in use, on a scale to the rank's fair share of the host's."""
    history = view.history.ranks.get(rank.rank)
    if history is None or width <= 0:
        return empty_strip(width, tall, glyphs)
    ranks = sum(other.host == rank.host for other in view.ranks)
    there = sum(host.cores for host in view.hosts if host.name == rank.host)
    return cores_strip(history, there / max(1, ranks) or 1.0, width, tall, glyphs)


def _cpu_title(view: LiveView, width: int, focused: bool) -> Row:
    """``CPU 63.1 of 64 cores``; the figure is the whole host's."""
    used = cores(view)
    text = f" {used}{' cores' if width >= 50 else ''}" if used else ""
    return (*panel_title("CPU", focused), (text, "title-value"))


def _more(hidden: Sequence[Rank], glyphs: Glyphs) -> str:
    used = between((rank.cores_used for rank in hidden), 1)
    return f"{glyphs.ellipsis} {plural(len(hidden), 'more rank')}, {used} cores each"


def _tellings(ranks: Sequence[Rank]) -> list[int]:
    """Dead ranks first, then those a step behind, then those with much more memory than the others."""
    steps = [rank.step for rank in ranks if rank.step is not None]
    usual = median([rank.rss_peak_bytes for rank in ranks]) if ranks else 0
    newest = max(steps, default=0)

    def telling(rank: Rank) -> int:
        if not rank.alive:
            return 3
        if rank.step is not None and rank.step < newest - 1:
            return 2
        return 1 if rank.rss_peak_bytes > usual * 1.2 else 0

    return [telling(rank) for rank in ranks]


def _rank_columns(view: LiveView, width: int, tall: int, glyphs: Glyphs) -> list[Column[Rank]]:
    ranks = view.ranks
    several = len(view.hosts) > 1
    starting = view.job.state is State.STARTING
    told = starting or any(rank.phase or not rank.alive for rank in ranks)  # not of ranks that are only watched from outside
    names = {rank.rank: rank_name(rank.rank, short=width < 46) for rank in ranks}
    longest = max([1, *(len(name) for name in names.values())])
    decimals = decimals_for(max([0, *(rank.rss_peak_bytes for rank in ranks)]) / giga().bytes)

    def phase(rank: Rank, cells: int) -> Row:
        return phase_now(rank, view.job, cells, glyphs)

    def since(rank: Rank, cells: int) -> Row:
        known = rank.alive and (rank.phase or starting)
        return ((f"{fixed(rank.phase_s, 1, cells - 2)} s" if known else " " * cells, "muted"),)

    def load(rank: Rank, cells: int) -> Row:
        return _cores_strip(view, rank, cells, 1, glyphs)[0]

    def figure(text: str, rank: Rank, cells: int, style: str = "value") -> Row:
        """What a process does, if there is one."""
        return ((text.rjust(cells), style) if rank.alive else (glyphs.plain(MISSING).rjust(cells), "muted"),)

    def waiting(rank: Rank, cells: int) -> Row:
        return figure(fixed(rank.waiting_cores, 1, cells), rank, cells, "warn" if rank.waiting_cores > 1 else "muted")

    def busiest(rank: Rank, room: int) -> Row:
        return busiest_threads(rank, room, glyphs)

    def host(rank: Rank, cells: int) -> Row:
        return ((literal(rank.host, glyphs).ljust(cells), "muted"),)

    def resident(rank: Rank, cells: int) -> Row:
        return figure(amount(rank.rss_bytes, decimals, cells), rank, cells)

    def pinned(rank: Rank, cells: int) -> Row:
        return figure(amount(rank.pinned_bytes, decimals, cells), rank, cells, "muted")

    # Without GPUs host memory has a panel of its own.
    memory = (
        [Column((("RSS", "heading"),), 5, 7, resident), Column((("pinned", "heading"),), 6, 4, pinned)] if view.gpus else []
    )
    host_width = min(16, max([4, *(len(rank.host) for rank in ranks)]))
    busy_width = 14 if width < 100 else 30 if width < 140 else 56
    return [
        Column((), longest, 9, lambda rank, _: ((names[rank.rank].rjust(longest), "label"),), left=True),
        *([Column((("host", "heading"),), host_width, 4, host, left=True)] if several else []),
        *([Column((("now", "heading"),), 12, 8, phase, left=True), Column((), 7, 3, since)] if told else []),
        *([] if tall > 1 else [Column(partial(strip_heading, view.history.piece_s), 7, 7, load, grows=True, left=True)]),
        *([Column(_BUSIEST, 13, 3, busiest, grows=True, left=True)] if tall > 1 else []),
        Column((("cores", "heading"),), 5, 9, lambda rank, cells: figure(fixed(rank.cores_used, 1, cells), rank, cells)),
        Column((("wait", "heading"),), 4, 1, waiting),
        Column((("busy", "heading"),), 4, 6, lambda rank, cells: figure(str(rank.busy_threads), rank, cells)),
        Column((("thr", "heading"),), 4, 4, lambda rank, cells: figure(str(rank.thread_count), rank, cells, "muted")),
        *memory,
        *([] if tall > 1 else [Column(_BUSIEST, busy_width, 2, busiest, left=True)]),
    ]


def phase_now(rank: Rank, job: Job, width: int, glyphs: Glyphs) -> Row:
    """What a rank does now; nothing is claimed of one that is only watched from outside."""
    if not rank.alive:
        well = job.state is State.ENDED and fared(job) != "alert"
        return (("ended".ljust(width), "muted"),) if well else (("exited".ljust(width), "alert"),)
    if not rank.phase and job.state is not State.STARTING:
        return ((glyphs.plain(MISSING), "muted"),)
    style = phase_style(rank.phase)
    return ((f"{glyphs.swatch} ", style), (phase_word(rank.phase, glyphs).ljust(width - 2), "text"))


def busiest_threads(rank: Rank, width: int, glyphs: Glyphs) -> Row:
    """``pt_autograd_0 1.0  python 0.9``: as many whole ones as fit; the first one's name gives way."""
    text = ""
    for name, used in rank.busiest if rank.alive else ():
        figure = f" {used:.1f}"
        if not text:
            text = fit(literal(name, glyphs), max(0, width - len(figure)), glyphs, words=False) + figure
        elif cells(f"{text}  {literal(name, glyphs)}{figure}") <= width:
            text += f"  {literal(name, glyphs)}{figure}"
        else:
            break
    return ((text, "muted"),)


def draw_gpu(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Each GPU: utilization over the last while, power, temperature, PCIe each way."""
    shown, hidden = most_telling(view.gpus, height - 1, [0] * len(view.gpus))
    tall = tallness(height, max(len(view.gpus), len(view.ranks)))
    placed = place(_gpu_columns(view, width, tall, glyphs), width)
    rows = [rule(panel_title("GPU", focused), width, glyphs, placed)]
    for gpu in shown:
        rows.append(placed.row(gpu, width, glyphs))
        if tall > 1:
            rows.extend(_under(_utilization_strip(view, gpu, width - STRIP_FROM, tall - 1, glyphs), width, glyphs))
    if hidden:
        text = f"{glyphs.ellipsis} {len(hidden)} more, {between((gpu.utilization_percent for gpu in hidden), 0)} %"
        rows.append(filled(((text, "muted"),), width, glyphs))
    return to_height(rows, width, height, glyphs)


def _utilization_strip(view: LiveView, gpu: Gpu, width: int, tall: int, glyphs: Glyphs) -> Sequence[Row]:
    history = view.history.gpus.get((gpu.host, gpu.index))
    return utilization_strip(history, width, tall, glyphs) if history and width > 0 else empty_strip(width, tall, glyphs)


def _gpu_columns(view: LiveView, width: int, tall: int, glyphs: Glyphs) -> list[Column[Gpu]]:
    gpus = view.gpus
    several = len({gpu.host for gpu in gpus}) > 1
    names = {id(gpu): gpu_name(gpu, several, width < 46, glyphs) for gpu in gpus}
    longest = max([1, *(len(name) for name in names.values())])

    def load(gpu: Gpu, cells: int) -> Row:
        if tall > 1:
            return ((fit(literal(gpu.name, glyphs), cells, glyphs), "muted"),)
        return _utilization_strip(view, gpu, cells, 1, glyphs)[0]

    def rate(value: float, cells: int) -> Row:
        return ((fixed(value / 1e9, 1, cells), "value"),)

    return [
        Column((), longest, 9, lambda gpu, _: ((names[id(gpu)].rjust(longest), "label"),), left=True),
        Column(() if tall > 1 else partial(strip_heading, view.history.piece_s), 6, 9, load, grows=True, left=True),
        Column(
            (("%", "heading"),),
            3,
            9,
            lambda gpu, cells: ((fixed(gpu.utilization_percent, 0, cells), "value"),),
        ),
        Column((("W", "heading"),), 4, 7, lambda gpu, cells: ((fixed(gpu.power_w, 0, cells), "value"),)),
        Column(
            ((f"{glyphs.degree}C", "heading"),),
            3,
            5,
            lambda gpu, cells: ((fixed(gpu.temperature_c, 0, cells), "muted"),),
        ),
        Column(
            ((f"{glyphs.sent}GB/s", "heading"),),
            5,
            6,
            lambda gpu, cells: rate(gpu.pcie_tx_bytes_per_s, cells),
        ),
        Column(
            ((f"{glyphs.received}GB/s", "heading"),),
            5,
            6,
            lambda gpu, cells: rate(gpu.pcie_rx_bytes_per_s, cells),
        ),
    ]

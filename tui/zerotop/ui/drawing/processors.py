"""Who computes: the CPU side of each rank, and each GPU's utilization."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from zerotop.analysis.view import Gpu, LiveView, Rank
from zerotop.ui.drawing.bars import stacked_bar
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.memory import gpu_name, most_telling, panel_title
from zerotop.ui.drawing.rows import Row, filled
from zerotop.ui.drawing.table import Column, place, rule
from zerotop.ui.drawing.text import literal
from zerotop.ui.drawing.words import cores, phase_style, phase_word
from zerotop.ui.format import GIB, decimals_for, fixed, gib

_BUSIEST: Row = (("busiest threads", "heading"),)


def draw_cpu(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """One row for each rank: what it does now, with how many cores and threads, and which threads."""
    placed = place(_rank_columns(view, width, glyphs), width)
    rows = [rule(_cpu_title(view, width, focused), width, glyphs, placed)]
    shown, hidden = most_telling(view.ranks, height - 1, _tellings(view.ranks))
    threads = len(shown) * 2 < height and all(column.heading != _BUSIEST for column, _, _ in placed.columns)
    for rank in shown:
        rows.append(placed.row(rank, width, glyphs))
        if threads and rank.alive:
            rows.append(filled((("    ", "text"), *_busiest(rank, width - 4, glyphs)), width, glyphs))
    if hidden:
        rows.append(filled(((_more(hidden, glyphs), "muted"),), width, glyphs))
    if not view.ranks:
        rows.append(filled((("  no rank has said hello yet", "muted"),), width, glyphs))
    return (rows + [filled((), width, glyphs)] * height)[:height]


def _cpu_title(view: LiveView, width: int, focused: bool) -> Row:
    """``CPU 63.1 of 64 cores``; the figure is the whole host's."""
    used, there = cores(view)
    if not there:
        return panel_title("CPU", focused)
    text = f" {used:.1f} of {there}" + (" cores" if width >= 50 else "")
    return (*panel_title("CPU", focused), (text, "title-value"))


def _more(hidden: Sequence[Rank], glyphs: Glyphs) -> str:
    used = [rank.cores_used for rank in hidden]
    least, most = f"{min(used):.1f}", f"{max(used):.1f}"
    between = least if least == most else f"{least} to {most}"
    return f"{glyphs.ellipsis} {len(hidden)} more ranks, {between} cores each"


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


def _rank_columns(view: LiveView, width: int, glyphs: Glyphs) -> list[Column[Rank]]:
    ranks = view.ranks
    several = len(view.hosts) > 1
    label = "" if width < 46 else "rank "
    names = {rank.rank: f"{label}{rank.rank}" for rank in ranks}
    longest = max([1, *(len(name) for name in names.values())])
    decimals = decimals_for(max([0, *(rank.rss_peak_bytes for rank in ranks)]) / GIB)
    fair = {
        host.name: host.cores / max(1, sum(rank.host == host.name for rank in ranks)) for host in view.hosts
    }

    def phase(rank: Rank, cells: int) -> Row:
        if not rank.alive:
            return (("exited".ljust(cells), "alert"),)
        style = phase_style(rank.phase)
        return ((f"{glyphs.swatch} ", style), (phase_word(rank.phase, glyphs).ljust(cells - 2), "text"))

    def since(rank: Rank, cells: int) -> Row:
        return ((fixed(rank.phase_s, 1, cells) if rank.alive else " " * cells, "muted"),)

    def load(rank: Rank, cells: int) -> Row:
        whole = fair.get(rank.host, 0.0) or max(1.0, rank.cores_used)
        return stacked_bar([("load", rank.cores_used)], whole, cells, glyphs, rest="load-free")

    def memory(rank: Rank, cells: int) -> Row:
        return ((gib(rank.rss_bytes, decimals, cells), "value"),)

    def waiting(rank: Rank, cells: int) -> Row:
        return ((fixed(rank.waiting_cores, 1, cells), "warn" if rank.waiting_cores > 1 else "muted"),)

    def busiest(rank: Rank, cells: int) -> Row:
        return _busiest(rank, cells, glyphs)

    def host(rank: Rank, cells: int) -> Row:
        return ((literal(rank.host, glyphs).ljust(cells), "muted"),)

    host_width = min(16, max([4, *(len(rank.host) for rank in ranks)]))
    busy_width = 14 if width < 100 else 30 if width < 140 else 56
    return [
        Column((), longest, 9, lambda rank, _: ((names[rank.rank].rjust(longest), "label"),), left=True),
        *([Column((("host", "heading"),), host_width, 4, host, left=True)] if several else []),
        Column((("now", "heading"),), 12, 8, phase, left=True),
        Column((("for s", "heading"),), 5, 3, since),
        Column((), 4, 5 if several or width >= 56 else 1, load, grows=True),
        Column(
            (("cores", "heading"),), 5, 9, lambda rank, cells: ((fixed(rank.cores_used, 1, cells), "value"),)
        ),
        Column((("wait", "heading"),), 4, 1, waiting),
        Column(
            (("busy", "heading"),),
            4,
            6,
            lambda rank, cells: ((str(rank.busy_threads).rjust(cells), "value"),),
        ),
        Column(
            (("thr", "heading"),), 4, 4, lambda rank, cells: ((str(rank.thread_count).rjust(cells), "muted"),)
        ),
        Column((("RSS", "heading"),), 5, 7, memory),
        Column(
            (("pinned", "heading"),),
            6,
            4,
            lambda rank, cells: ((gib(rank.pinned_bytes, decimals, cells), "muted"),),
        ),
        Column(_BUSIEST, busy_width, 2, busiest, left=True),
    ]


def _busiest(rank: Rank, width: int, glyphs: Glyphs) -> Row:
    """``pt_autograd_0 1.0  python 0.9``: as many whole ones as fit."""
    text = ""
    for name, used in rank.busiest:
        entry = f"{literal(name, glyphs)} {used:.1f}"
        longer = f"{text}  {entry}" if text else entry
        if len(longer) > width:
            break
        text = longer
    return ((text, "muted"),)


def draw_gpu(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """One row for each GPU: utilization, power, temperature, PCIe each way."""
    placed = place(_gpu_columns(view.gpus, width, glyphs), width)
    rows = [rule(panel_title("GPU", focused), width, glyphs, placed)]
    shown, hidden = most_telling(view.gpus, height - 1, [0] * len(view.gpus))
    rows.extend(placed.row(gpu, width, glyphs) for gpu in shown)
    if hidden:
        used = [gpu.utilization_percent for gpu in hidden]
        text = f"{glyphs.ellipsis} {len(hidden)} more, {min(used):.0f} to {max(used):.0f} %"
        rows.append(filled(((text, "muted"),), width, glyphs))
    return (rows + [filled((), width, glyphs)] * height)[:height]


def _gpu_columns(gpus: Sequence[Gpu], width: int, glyphs: Glyphs) -> list[Column[Gpu]]:
    several = len({gpu.host for gpu in gpus}) > 1
    names = {id(gpu): gpu_name(gpu, several, width < 46, glyphs) for gpu in gpus}
    longest = max([1, *(len(name) for name in names.values())])

    def bar(gpu: Gpu, cells: int) -> Row:
        return stacked_bar([("load", gpu.utilization_percent)], 100.0, cells, glyphs, rest="load-free")

    def rate(value: float, cells: int) -> Row:
        return ((fixed(value / 1e9, 1, cells), "value"),)

    return [
        Column((), longest, 9, lambda gpu, _: ((names[id(gpu)].rjust(longest), "label"),), left=True),
        Column((), 6, 9, bar, grows=True),
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

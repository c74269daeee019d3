"""Memory as a bar for each GPU, or for each rank on the host if there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from zerotop.analysis.formatting import format_count
from zerotop.analysis.live_view import Gpu, Host, LiveView, Rank
from zerotop.ui.charts.bars import draw_stacked_bar
from zerotop.ui.drawing.formatting import choose_decimals, format_giga, format_range
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import draw_last_step, rank_name
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import Column, PlacedColumns, draw_rule, panel_title, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.drawing.units import giga_unit
from zerotop.ui.memory.memory_history import MIN_HEIGHT, describe_history, draw_history

_NARROWEST_WITH_HOST = 39  # cells in which "host" fits beside a GPU's figures: half of a terminal of 80
_MIN_SWAP_BYTES = (1 << 30) // 20  # less swap is not shown


def draw_memory(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw the title and a row for each GPU, then the hosts; without GPUs the hosts and a row for each rank."""
    if view.gpus:
        return draw_gpu_memory(view, width, height, glyphs, focused=focused)
    return draw_host_memory(view, width, height, glyphs, focused=focused)


def draw_gpu_memory(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw allocated, reserved, other and free memory of each GPU, with the peaks as thin lines."""
    placed = place_columns(_build_gpu_columns(view.gpus, width, bool(_choose_hosts(view, height)), glyphs), width)
    rows = [draw_rule(_draw_title(view, "GPU memory", width, focused), width, glyphs, placed)]
    room = height - 1
    hosts = _choose_hosts(view, height)
    shown, hidden = choose_shown(view.gpus, room - len(hosts), _score_gpus(view.gpus))
    rows.extend(placed.draw_row(gpu, width, glyphs) for gpu in shown)
    if hidden:
        used = format_range((gpu.used_bytes / giga_unit().bytes for gpu in hidden), 1)
        text = f"{glyphs.ellipsis} {len(hidden)} more, {used} {giga_unit().name} used"
        rows.append(fit_row(((text, "muted"),), width, glyphs))
    host_columns = _place_host_columns(view.hosts, placed, width, glyphs)
    rows.extend(host_columns.draw_row(host, width, glyphs) for host in hosts)
    fullest = _find_fullest(view.gpus)
    name = gpu_name(fullest, len({gpu.host for gpu in view.gpus}) > 1, False, glyphs)
    return _add_history(rows, view, name, fullest, width, height, glyphs)


def _choose_hosts(view: LiveView, height: int) -> tuple[Host, ...]:
    """Return the hosts that are shown under the GPUs: all if all fit."""
    return tuple(view.hosts) if height - 1 >= len(view.gpus) + len(view.hosts) else ()


def find_memory_gpu(view: LiveView, height: int, y: int) -> Gpu | None:
    """Return the GPU at a row of the panel of memory; None above and below them."""
    shown, _ = choose_shown(view.gpus, height - 1 - len(_choose_hosts(view, height)), _score_gpus(view.gpus))
    return shown[y - 1] if 1 <= y <= len(shown) else None


def describe_memory(view: LiveView, width: int, height: int, x: int, y: int) -> str:
    """Return the amounts at a cell of the chart under the bars; empty elsewhere."""
    items = len(view.gpus) or len(view.ranks)
    if y <= items + len(view.hosts) or height - 1 - items - len(view.hosts) < MIN_HEIGHT or not items:
        return ""
    return describe_history(view, _find_fullest(view.gpus) if view.gpus else None, width, x)


def _draw_title(view: LiveView, text: str, width: int, focused: bool) -> Row:
    title = panel_title(f"{text if width >= 46 else text.split()[0]} {giga_unit().name}", focused)
    return (*title, *draw_last_step(view))


def _find_fullest(gpus: Sequence[Gpu]) -> Gpu:
    """Return the first GPU whose peak is about the highest."""
    highest = max(gpu.reserved_peak_bytes or 0 for gpu in gpus)
    return next(gpu for gpu in gpus if (gpu.reserved_peak_bytes or 0) >= highest * 0.98)


def _add_history(
    rows: list[Row], view: LiveView, name: str, gpu: Gpu | None, width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """Add the chart of the last while if there is room for it under the rows."""
    room = height - len(rows)
    if room >= MIN_HEIGHT and width >= 24:
        rows += draw_history(view, name, gpu, width, room, glyphs)
    return fit_height(rows, width, height, glyphs)


def draw_host_memory(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw the memory of each host, then the resident and shared memory of each rank on the same scale."""
    limit = max((host.memory_limit_bytes for host in view.hosts), default=0)
    largest = max((rank.rss_peak_bytes for rank in view.ranks), default=0)
    placed = place_columns(_build_rank_columns(view.ranks, limit or largest, largest, glyphs), width)
    rows = [draw_rule(_draw_title(view, "Host memory", width, focused), width, glyphs, placed)]
    host_columns = _place_host_columns(view.hosts, placed, width, glyphs)
    hosts = view.hosts[: max(1, height - 2)] if height > 2 else ()
    rows.extend(host_columns.draw_row(host, width, glyphs) for host in hosts)
    shown, hidden = choose_shown(view.ranks, height - len(rows), _score_ranks(view.ranks))
    rows.extend(placed.draw_row(rank, width, glyphs) for rank in shown)
    if hidden:
        most = f"{format_giga(max(rank.rss_bytes for rank in hidden)).strip()} {giga_unit().name}"
        text = f"{glyphs.ellipsis} {format_count(len(hidden), 'more rank')}, at most {most} each"
        rows.append(fit_row(((text, "muted"),), width, glyphs))
    if not view.ranks:
        return fit_height(rows, width, height, glyphs)
    return _add_history(rows, view, "all ranks", None, width, height, glyphs)


def choose_shown(items: Sequence[object], room: int, scores: Sequence[int]) -> tuple[list, list]:  # type: ignore[type-arg]
    """Return (shown, hidden) items: all if they fit, else those with the highest scores, with one row left for "more".

    A score of 0 means that the item does not stand out. Items of the same score stay in order.
    """
    if len(items) <= room:
        return list(items), []
    order = sorted(range(len(items)), key=lambda index: (-scores[index], index))
    room = max(0, room - 1)
    return [items[index] for index in order[:room]], [items[index] for index in sorted(order[room:])]


def _score_gpus(gpus: Sequence[Gpu]) -> list[int]:
    usual = median([gpu.reserved_peak_bytes or 0 for gpu in gpus]) if gpus else 0
    return [1 if (gpu.reserved_peak_bytes or 0) > usual * 1.05 else 0 for gpu in gpus]


def _score_ranks(ranks: Sequence[Rank]) -> list[int]:
    usual = median([rank.rss_peak_bytes for rank in ranks]) if ranks else 0
    return [2 if not rank.alive else 1 if rank.rss_peak_bytes > usual * 1.2 else 0 for rank in ranks]


def gpu_name(gpu: Gpu, with_host: bool, short: bool, glyphs: Glyphs) -> str:
    """Return ``GPU 3``, ``3`` if short, or ``node2:3`` with the host."""
    if with_host:
        return f"{fit_text(sanitize(gpu.host, glyphs), 12, glyphs, at_words=False)}:{gpu.index}"
    return str(gpu.index) if short else f"GPU {gpu.index}"


def _build_gpu_columns(gpus: Sequence[Gpu], width: int, names_host: bool, glyphs: Glyphs) -> list[Column[Gpu]]:
    """Return the columns; ``names_host``: rows of hosts follow, whose names have the same column."""
    has_hosts = len({gpu.host for gpu in gpus}) > 1
    names = {id(gpu): gpu_name(gpu, has_hosts, width < 46, glyphs) for gpu in gpus}
    names_host &= width >= _NARROWEST_WITH_HOST
    longest = max(len("host") if names_host else 1, *(len(name) for name in names.values()))
    decimals = choose_decimals(max(gpu.total_bytes for gpu in gpus) / giga_unit().bytes / 10)

    def draw_bar(gpu: Gpu, cells: int) -> Row:
        allocated, reserved = gpu.allocated_bytes or 0, gpu.reserved_bytes or 0
        parts = [
            ("memory-allocated", float(allocated)),
            ("memory-reserved", float(reserved - allocated)),
            ("memory-other", float(gpu.other_bytes)),
        ]
        marks = [float(peak) for peak in (gpu.allocated_peak_bytes, gpu.reserved_peak_bytes) if peak]
        return draw_stacked_bar(parts, gpu.total_bytes, cells, glyphs, marks=marks)

    def make_amount_column(
        heading: str | Row, cells: int, importance: int, size: Callable[[Gpu], int | None], style: str = "value"
    ) -> Column[Gpu]:
        def draw_amount(gpu: Gpu, cells: int) -> Row:
            return ((format_giga(size(gpu), decimals).rjust(cells), style),)

        return Column(heading, cells, importance, draw_amount)

    peak = _draw_peak_heading(glyphs)
    return [
        Column("", longest, 9, lambda gpu, _: ((names[id(gpu)].rjust(longest), "label"),), left=True),
        Column("", (7 if names_host else 8) if width < 46 else width * 2 // 7, 9, draw_bar, grows=True),
        make_amount_column(_draw_swatch("memory-allocated", "allocated", glyphs), 10, 8, lambda gpu: gpu.allocated_bytes),
        make_amount_column(peak, 5, 3, lambda gpu: gpu.allocated_peak_bytes, "muted"),
        make_amount_column(_draw_swatch("memory-reserved", "reserved", glyphs), 9, 7, lambda gpu: gpu.reserved_bytes),
        make_amount_column(peak, 5, 2, lambda gpu: gpu.reserved_peak_bytes, "muted"),
        make_amount_column("job", 5, 1, lambda gpu: gpu.process_bytes, "muted"),
        make_amount_column(_draw_swatch("memory-other", "used", glyphs), 5, 9, lambda gpu: gpu.used_bytes),
        make_amount_column("total", 5, 5, lambda gpu: gpu.total_bytes, "muted"),
    ]


def _draw_swatch(style: str, text: str, glyphs: Glyphs) -> Row:
    return ((glyphs.find_sample(style), style), (text, "heading"))


def _draw_peak_heading(glyphs: Glyphs) -> Row:
    return ((glyphs.peak, "peak"), ("peak", "heading"))


def shorten_name(name: str, names: Sequence[str], width: int, glyphs: Glyphs) -> str:
    """Return the beginning of a name in ``width`` cells, or its end if several of ``names`` have the same beginning."""
    short = fit_text(name, width, glyphs, at_words=False)
    if sum(fit_text(other, width, glyphs, at_words=False) == short for other in names) < 2:
        return short
    room = width - len(glyphs.ellipsis)
    return glyphs.ellipsis + name[-room:] if room > 0 and len(name) > width else short


def _place_host_columns(
    hosts: Sequence[Host], above: PlacedColumns[Gpu] | PlacedColumns[Rank], width: int, glyphs: Glyphs
) -> PlacedColumns[Host]:
    """Place a name and a bar, as wide as those of the rows above, and the amount."""
    names = [sanitize(host.name, glyphs) for host in hosts]

    def draw_name(host: Host, cells: int) -> Row:
        text = shorten_name(sanitize(host.name, glyphs), names, cells, glyphs) if len(names) > 1 else "host"
        return ((fit_text(text, cells, glyphs, at_words=False).rjust(cells), "label"),)

    def draw_bar(host: Host, cells: int) -> Row:
        return draw_stacked_bar([("memory-other", float(host.memory_used_bytes))], host.memory_limit_bytes, cells, glyphs)

    def draw_used(host: Host, cells: int) -> Row:
        decimals = choose_decimals(host.memory_limit_bytes / giga_unit().bytes)
        sizes = (host.memory_used_bytes, host.memory_limit_bytes)
        text = " of ".join(format_giga(size, decimals).strip() for size in sizes)
        swap = f"swap {format_giga(host.swap_used_bytes).strip()}  " if host.swap_used_bytes > _MIN_SWAP_BYTES else ""
        swap = swap if len(swap) + len(text) <= cells else ""
        return (("".rjust(cells - len(swap) - len(text)), "text"), (swap, "warn"), (text, "value"))

    (_, _, name_width), (_, _, bar_width) = above.columns[:2]
    columns: list[Column[Host]] = [
        Column("", name_width, 9, draw_name),
        Column("", bar_width, 9, draw_bar),
        Column("", 0, 9, draw_used, grows=True),
    ]
    return place_columns(columns, width)


def _build_rank_columns(ranks: Sequence[Rank], limit: int, largest: int, glyphs: Glyphs) -> list[Column[Rank]]:
    decimals = choose_decimals(largest / giga_unit().bytes)
    longest = max([4, *(len(rank_name(rank.rank)) for rank in ranks)])

    def draw_bar(rank: Rank, cells: int) -> Row:
        own = [
            ("memory-allocated", float(rank.rss_bytes - rank.shared_bytes)),
            ("memory-reserved", float(rank.shared_bytes)),
        ]
        marks = [float(rank.rss_peak_bytes)] if rank.rss_peak_bytes else []
        return draw_stacked_bar(own if rank.alive else [], limit, cells, glyphs, marks=marks)

    def make_amount_column(
        heading: str | Row, cells: int, importance: int, size: Callable[[Rank], int | None], style: str = "value"
    ) -> Column[Rank]:
        """Return a column for memory of a process, with a dash for ranks that have exited."""

        def draw_amount(rank: Rank, cells: int) -> Row:
            text = format_giga(size(rank) if rank.alive else None, decimals)
            return ((text.rjust(cells), style if rank.alive else "muted"),)

        return Column(heading, cells, importance, draw_amount)

    return [
        Column("", longest, 9, lambda rank, _: ((rank_name(rank.rank).rjust(longest), "label"),), left=True),
        Column("", 8, 9, draw_bar, grows=True),
        make_amount_column(_draw_swatch("memory-allocated", "RSS", glyphs), 5, 9, lambda rank: rank.rss_bytes),
        Column(_draw_peak_heading(glyphs), 5, 4, lambda rank, _: ((format_giga(rank.rss_peak_bytes, decimals), "muted"),)),
        make_amount_column(_draw_swatch("memory-reserved", "shared", glyphs), 7, 5, lambda rank: rank.shared_bytes),
        make_amount_column("pinned", 6, 2, lambda rank: rank.pinned_bytes, "muted"),
    ]

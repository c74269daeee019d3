"""Where memory is: a bar for each GPU, or for each rank on the host where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from zerotop.analysis.formatting import format_count
from zerotop.analysis.live_view import Gpu, Host, LiveView, Rank
from zerotop.ui.charts.bars import draw_stacked_bar
from zerotop.ui.drawing import labels
from zerotop.ui.drawing.formatting import choose_decimals, format_giga, format_range
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import Column, draw_rule, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.drawing.units import giga_unit
from zerotop.ui.memory.memory_history import MIN_HEIGHT, draw_history

_MIN_SWAP_BYTES = (1 << 30) // 20  # bytes from which on swap is worth a word


def draw_memory(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Title and one row for each GPU, then the host; without GPUs the host and one row for each rank."""
    if view.gpus:
        return draw_gpu_memory(view, width, height, glyphs, focused=focused)
    return draw_host_memory(view, width, height, glyphs, focused=focused)


def panel_title(text: str, focused: bool) -> Row:
    """The title's spans at the left of a rule."""
    return ((text, "title-focused" if focused else "title"),)


def draw_gpu_memory(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Allocated, reserved, other and free for each GPU, with the highest so far as thin lines."""
    columns = _build_gpu_columns(view.gpus, width, glyphs)
    placed = place_columns(columns, width)
    rows = [
        draw_rule(
            panel_title(f"{'GPU memory' if width >= 46 else 'Memory'} {giga_unit().name}", focused), width, glyphs, placed
        )
    ]
    room = height - 1
    hosts = list(view.hosts) if room >= len(view.gpus) + len(view.hosts) else []
    shown, hidden = choose_shown(view.gpus, room - len(hosts), _score_gpus(view.gpus))
    rows.extend(placed.draw_row(gpu, width, glyphs) for gpu in shown)
    if hidden:
        used = format_range((gpu.used_bytes / giga_unit().bytes for gpu in hidden), 1)
        text = f"{glyphs.ellipsis} {len(hidden)} more, {used} {giga_unit().name} used"
        rows.append(fit_row(((text, "muted"),), width, glyphs))
    host_columns = place_columns(_build_host_columns(view.hosts, placed.columns[0][2], placed.columns[1][2], glyphs), width)
    rows.extend(host_columns.draw_row(host, width, glyphs) for host in hosts)
    fullest = _find_fullest(view.gpus)
    name = gpu_name(fullest, len({gpu.host for gpu in view.gpus}) > 1, False, glyphs)
    return _add_history(rows, view, name, fullest, width, height, glyphs)


def _find_fullest(gpus: Sequence[Gpu]) -> Gpu:
    """The first of those whose peak is about the highest."""
    highest = max(gpu.reserved_peak_bytes or 0 for gpu in gpus)
    return next(gpu for gpu in gpus if (gpu.reserved_peak_bytes or 0) >= highest * 0.98)


def _add_history(
    rows: list[Row], view: LiveView, name: str, gpu: Gpu | None, width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """The rows and, where there is room for it under them, the chart of the last while."""
    room = height - len(rows)
    if room >= MIN_HEIGHT and width >= 24:
        rows += draw_history(view, name, gpu, width, room, glyphs)
    return fit_height(rows, width, height, glyphs)


def draw_host_memory(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """The node's memory, then each rank's resident and shared part of it on the same scale."""
    limit = max((host.memory_limit_bytes for host in view.hosts), default=0)
    largest = max((rank.rss_peak_bytes for rank in view.ranks), default=0)
    placed = place_columns(_build_rank_columns(view.ranks, limit or largest, largest, glyphs), width)
    rows = [
        draw_rule(
            panel_title(f"{'Host memory' if width >= 46 else 'Memory'} {giga_unit().name}", focused), width, glyphs, placed
        )
    ]
    host_columns = place_columns(_build_host_columns(view.hosts, placed.columns[0][2], placed.columns[1][2], glyphs), width)
    hosts = view.hosts[: max(1, height - 2)] if height > 2 else ()
    rows.extend(host_columns.draw_row(host, width, glyphs) for host in hosts)
    shown, hidden = choose_shown(view.ranks, height - len(rows), _score_ranks(view.ranks))
    rows.extend(placed.draw_row(rank, width, glyphs) for rank in shown)
    if hidden:
        largest_hidden = format_giga(max(rank.rss_bytes for rank in hidden)).strip()
        text = (
            f"{glyphs.ellipsis} {format_count(len(hidden), 'more rank')}, at most {largest_hidden} {giga_unit().name} each"
        )
        rows.append(fit_row(((text, "muted"),), width, glyphs))
    if not view.ranks:
        return fit_height(rows, width, height, glyphs)
    return _add_history(rows, view, "all ranks", None, width, height, glyphs)


def choose_shown(items: Sequence[object], room: int, scores: Sequence[int]) -> tuple[list, list]:  # type: ignore[type-arg]
    """(shown, hidden): all where they fit; else one row is left for "more", and the telling ones come first.

    ``tellings`` says for each item how much it stands out, 0 for not at all; equals stay in order.
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
    """``GPU 3``, ``3`` where narrow, ``node2:3`` where there is more than one host."""
    if with_host:
        return f"{fit_text(sanitize(gpu.host, glyphs), 12, glyphs, at_words=False)}:{gpu.index}"
    return str(gpu.index) if short else f"GPU {gpu.index}"


def _build_gpu_columns(gpus: Sequence[Gpu], width: int, glyphs: Glyphs) -> list[Column[Gpu]]:
    several = len({gpu.host for gpu in gpus}) > 1
    short = width < 46
    names = {id(gpu): gpu_name(gpu, several, short, glyphs) for gpu in gpus}
    decimals = choose_decimals(max(gpu.total_bytes for gpu in gpus) / giga_unit().bytes / 10)

    def draw_amount(size: int | None, style: str = "value") -> Row:
        return ((format_giga(size, decimals), style),)

    def draw_bar(gpu: Gpu, cells: int) -> Row:
        allocated, reserved = gpu.allocated_bytes or 0, gpu.reserved_bytes or 0
        parts = [
            ("memory-allocated", float(allocated)),
            ("memory-reserved", float(reserved - allocated)),
            ("memory-other", float(gpu.other_bytes)),
        ]
        marks = [float(peak) for peak in (gpu.allocated_peak_bytes, gpu.reserved_peak_bytes) if peak]
        return draw_stacked_bar(parts, gpu.total_bytes, cells, glyphs, marks=marks)

    def draw_swatch(style: str, text: str) -> Row:
        return ((glyphs.find_sample(style), style), (text, "heading"))

    longest = max(len(name) for name in names.values())
    return [
        Column((), longest, 9, lambda gpu, _: ((names[id(gpu)].rjust(longest), "label"),), left=True),
        Column((), max(8, width * 2 // 7), 9, draw_bar, grows=True),
        Column(
            draw_swatch("memory-allocated", "alloc"),
            6,
            8,
            lambda gpu, _: ((" ", "text"), *draw_amount(gpu.allocated_bytes)),
        ),
        Column(
            ((glyphs.peak, "peak"), ("peak", "heading")),
            5,
            3,
            lambda gpu, _: draw_amount(gpu.allocated_peak_bytes, "muted"),
        ),
        Column(
            draw_swatch("memory-reserved", "rsrvd"),
            6,
            7,
            lambda gpu, _: ((" ", "text"), *draw_amount(gpu.reserved_bytes)),
        ),
        Column(
            ((glyphs.peak, "peak"), ("peak", "heading")),
            5,
            2,
            lambda gpu, _: draw_amount(gpu.reserved_peak_bytes, "muted"),
        ),
        Column((("job", "heading"),), 5, 1, lambda gpu, _: draw_amount(gpu.process_bytes, "muted")),
        Column(draw_swatch("memory-other", "used"), 5, 9, lambda gpu, _: draw_amount(gpu.used_bytes)),
        Column((("total", "heading"),), 5, 5, lambda gpu, _: draw_amount(gpu.total_bytes, "muted")),
    ]


def shorten_name(name: str, names: Sequence[str], width: int, glyphs: Glyphs) -> str:
    """A name in ``width`` cells: its beginning, or its end where others among ``names`` begin like it."""
    short = fit_text(name, width, glyphs, at_words=False)
    if sum(fit_text(other, width, glyphs, at_words=False) == short for other in names) < 2:
        return short
    room = width - len(glyphs.ellipsis)
    return glyphs.ellipsis + name[-room:] if room > 0 and len(name) > width else short


def _build_host_columns(hosts: Sequence[Host], name_width: int, bar_width: int, glyphs: Glyphs) -> list[Column[Host]]:
    names = [sanitize(host.name, glyphs) for host in hosts]

    def draw_name(host: Host, cells: int) -> Row:
        text = shorten_name(sanitize(host.name, glyphs), names, cells, glyphs) if len(names) > 1 else "host"
        return ((fit_text(text, cells, glyphs, at_words=False).rjust(cells), "label"),)

    def draw_bar(host: Host, cells: int) -> Row:
        return draw_stacked_bar([("memory-other", float(host.memory_used_bytes))], host.memory_limit_bytes, cells, glyphs)

    def draw_used(host: Host, cells: int) -> Row:
        largest = host.memory_limit_bytes / giga_unit().bytes
        decimals = choose_decimals(largest)
        swap = f"swap {format_giga(host.swap_used_bytes).strip()}  " if host.swap_used_bytes > _MIN_SWAP_BYTES else ""
        amounts = (format_giga(size, decimals).strip() for size in (host.memory_used_bytes, host.memory_limit_bytes))
        text = " of ".join(amounts)
        swap = swap if len(swap) + len(text) <= cells else ""
        return (("".rjust(cells - len(swap) - len(text)), "text"), (swap, "warn"), (text, "value"))

    return [
        Column((), name_width, 9, draw_name),
        Column((), bar_width, 9, draw_bar),
        Column((), 0, 9, draw_used, grows=True),
    ]


def _build_rank_columns(ranks: Sequence[Rank], scale: int, largest: int, glyphs: Glyphs) -> list[Column[Rank]]:
    decimals = choose_decimals(largest / giga_unit().bytes)
    longest = max([4, *(len(labels.rank_name(rank.rank)) for rank in ranks)])

    def draw_bar(rank: Rank, cells: int) -> Row:
        held = [
            ("memory-allocated", float(rank.rss_bytes - rank.shared_bytes)),
            ("memory-reserved", float(rank.shared_bytes)),
        ]
        parts = held if rank.alive else []
        return draw_stacked_bar(
            parts, scale, cells, glyphs, marks=[float(rank.rss_peak_bytes)] if rank.rss_peak_bytes else []
        )

    def draw_amount(rank: Rank, size: int | None, style: str = "value") -> Row:
        """What a process holds, if there is one."""
        return ((format_giga(size if rank.alive else None, decimals), style if rank.alive else "muted"),)

    def draw_swatch(style: str, text: str) -> Row:
        return ((glyphs.find_sample(style), style), (text, "heading"))

    return [
        Column((), longest, 9, lambda rank, _: ((labels.rank_name(rank.rank).rjust(longest), "label"),), left=True),
        Column((), 8, 9, draw_bar, grows=True),
        Column(
            draw_swatch("memory-allocated", "RSS"),
            5,
            9,
            lambda rank, _: draw_amount(rank, rank.rss_bytes),
        ),
        Column(
            ((glyphs.peak, "peak"), ("peak", "heading")),
            5,
            4,
            lambda rank, _: ((format_giga(rank.rss_peak_bytes, decimals), "muted"),),
        ),
        Column(
            draw_swatch("memory-reserved", "shared"),
            7,
            5,
            lambda rank, _: (("  ", "text"), *draw_amount(rank, rank.shared_bytes)),
        ),
        Column(
            (("pinned", "heading"),),
            6,
            2,
            lambda rank, _: ((" ", "text"), *draw_amount(rank, rank.pinned_bytes, "muted")),
        ),
    ]

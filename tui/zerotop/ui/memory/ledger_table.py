"""A ledger as a table: what there is now and at the peak, what was expected, and by how much that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.analysis.memory.memory_table import MemoryLine
from zerotop.analysis.memory.memory_view import MemoryView
from zerotop.analysis.memory.phase_peaks import BEFORE
from zerotop.analysis.memory.tensor_inventory import CATEGORIES
from zerotop.ui.drawing.formatting import MISSING, format_rough_time
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import Column, PlacedColumns, draw_rule, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize, wrap_text
from zerotop.ui.memory.ledger_style import PART_STYLES, SizeUnit, choose_unit
from zerotop.ui.memory.row_selection import EXTRA_KEYS, choose_lines

# A difference of less than this share of the device's or the process's memory is nobody's concern.
_MIN_DIFFERENCE = 0.02
# The rule of thumb is for these: neither for making the engine nor for evaluation.
_STEP_PHASES = (
    "forward",
    "backward",
    "step",
    "optimizer",
    "cpu_optimizer",
    "grads_to_cpu",
    "params_to_gpu",
    "allgather",
    "reduce",
)


def draw_gpu_ledger(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """The chosen GPU's. Rows that there is no room for are left out, the least telling first."""
    if view.gpu is None:
        return _draw_empty("Ledger", _NO_GPU_TEXT, width, height, glyphs, focused=focused)
    unit = choose_unit(view.gpu.total_bytes)
    lines = [*view.lines, *_build_estimate_lines(view)]
    several = len({gpu.host for gpu in view.gpus}) > 1
    name = f"GPU {view.gpu.index}" + (f" of {sanitize(view.gpu.host, glyphs)}" if several else "")
    whose = f", {format_gpu_ranks(view.gpu.ranks)}" if view.gpu.ranks else ""
    placed = place_columns(_build_gpu_columns(unit, lines, glyphs), width)
    title = ((f"{name}{whose}, {unit.name}", "title-focused" if focused else "title"),)
    below = [
        *_draw_owner(view, unit, width, glyphs),
        *_draw_exit_note(view, width, glyphs),
        *_draw_notes(view, width, glyphs),
    ]
    return _draw_table(title, placed, lines, below, width, height, glyphs)


def draw_host_ledger(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """The chosen rank's host memory."""
    if view.host is None:
        return _draw_empty("Host memory", _NO_RANK_TEXT, width, height, glyphs, focused=focused)
    unit = choose_unit(view.host.resident_bytes)
    placed = place_columns(_build_host_columns(unit, view.host_lines, glyphs), width)
    title = ((f"Host memory of rank {view.host.rank}, {unit.name}", "title-focused" if focused else "title"),)
    below = _draw_exit_note(view, width, glyphs)
    if view.node_memory is not None:
        of = choose_unit(view.node_memory.limit_bytes)
        used, limit = (
            of.format_bytes(view.node_memory.used_bytes).strip(),
            of.format_bytes(view.node_memory.limit_bytes).strip(),
        )
        text = f"{sanitize(view.host.host, glyphs)}: {used} of {limit} {of.name} in use by anyone"
        below.append(((fit_text(text, width, glyphs), "text"),))
    if view.host.swap_bytes:
        below.append(((f"{unit.format_bytes(view.host.swap_bytes).strip()} {unit.name} more are swapped out", "warn"),))
    pinned = view.host.pinned
    if pinned is not None and pinned.held_bytes:
        told = (unit.format_bytes(size).strip() for size in (pinned.held_bytes, pinned.tensors_bytes))
        below.append((("PyTorch's pinned allocator holds {} for tensors of {}".format(*told), "muted"),))
    below += [((line, "muted"),) for note in view.host.notes for line in wrap_text(note, width, 2, glyphs)]
    return _draw_table(title, placed, view.host_lines, below, width, height, glyphs)


def count_ledger_rows(view: MemoryView, *, host: bool) -> int:
    """How many rows a ledger makes use of."""
    gone = view.moment_ns != view.cursor_ns
    if host:
        return 5 + len(view.host_lines) + gone
    noted = view.gpu is not None and bool(view.gpu.notes or any(row.note for row in view.gpu.rows))
    owner = 0 if view.peaks is None else 2 + (view.peaks.peak_before_entry is not None)
    return 1 + len(view.lines) + len(_build_estimate_lines(view)) + owner + gone + 2 * noted


_NO_GPU_TEXT = (
    "No GPU was seen: there is no NVIDIA driver on this machine, or the job uses none. h shows host memory instead.",
)
_NO_RANK_TEXT = (
    "No rank has made its DeepSpeed engine yet: whose memory is whose is known from then on.",
    "A rank that never does is not seen from inside: python -E, -I and -S keep the probe out.",
)


def _draw_empty(
    title: str, sentences: Sequence[str], width: int, height: int, glyphs: Glyphs, *, focused: bool
) -> list[Row]:
    rows = [draw_rule(((title, "title-focused" if focused else "title"),), width, glyphs)]
    rows += [((line, "muted"),) for sentence in sentences for line in wrap_text(sentence, width, 4, glyphs)]
    return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)


def format_gpu_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``."""
    shown = ", ".join(map(str, ranks[:4])) + (" and more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


# --- what there is beside the rows ---------------------------------------------------------------------------------------


def _build_estimate_lines(view: MemoryView) -> list[MemoryLine]:
    """DeepSpeed's own estimate and the rule of thumb, as lines after the device."""
    found = []
    states = sum(line.now_bytes for line in view.lines if line.key in CATEGORIES[:4])
    estimates = [each.gpu_bytes for each in view.own_estimates]
    if estimates and view.gpu is not None and view.gpu.ranks:
        said = min(estimates) * len(view.gpu.ranks)
        found.append(MemoryLine("estimate", "DeepSpeed's estimate", states, None, said))
    peaks = (
        [peak.allocated_bytes for peak in view.peaks.phases if peak.phase in _STEP_PHASES] if view.peaks is not None else []
    )
    if view.rule is not None and peaks:
        peak = max(peaks)
        found.append(MemoryLine("rule", "rule of thumb", peak, peak, view.rule.peak_bytes))
    return found


def _draw_owner(view: MemoryView, unit: SizeUnit, width: int, glyphs: Glyphs) -> list[Row]:
    if view.peaks is None:
        return []
    peak, before = view.peaks.owning_peak, view.peaks.peak_before_entry
    size = f"{unit.format_bytes(peak.allocated_bytes).strip()} {unit.name}"
    micro_step = f", micro-step {peak.micro_step}" if view.micro_steps > 1 else ""
    where = f" in step {peak.step}{micro_step}" if peak.is_in_step else ", before the first step"
    if before is not None:
        where += f"; {unit.format_bytes(before.allocated_bytes).strip()} {BEFORE}"
    name = peak.phase.replace("_", " ")
    owner = f"{name} own the peak" if name.endswith("s") else f"{name} owns the peak"
    said = wrap_text(f"{owner}: {size}{where}", width, 2, glyphs)
    first: Row = ((said[0][: len(owner)], "accent"), (said[0][len(owner) :], "text"))
    return [first, *(((line, "text"),) for line in said[1:])]


def _draw_exit_note(view: MemoryView, width: int, glyphs: Glyphs) -> list[Row]:
    """That it is no more so at the cursor."""
    if view.moment_ns == view.cursor_ns:
        return []
    seconds = (view.cursor_ns - view.moment_ns) / 1e9
    ago = f", {format_rough_time(seconds)} ago" if seconds >= 1 else ""
    failed = view.failure is not None and view.moment_ns == view.failure.unix_ns
    text = f"The ranks have gone: this is when {'it failed' if failed else 'the first left'}{ago}."
    return [((line, "warn"),) for line in wrap_text(text, width, 2, glyphs)]


def _draw_notes(view: MemoryView, width: int, glyphs: Glyphs) -> list[Row]:
    if view.gpu is None:
        return []
    notes = dict.fromkeys([*(row.note for row in view.gpu.rows if row.note), *view.gpu.notes])
    return [((line, "muted"),) for note in notes for line in wrap_text(note, width, 3, glyphs)]


# --- columns -------------------------------------------------------------------------------------------------------------


def _build_gpu_columns(unit: SizeUnit, lines: Sequence[MemoryLine], glyphs: Glyphs) -> list[Column[MemoryLine]]:
    device = max(line.now_bytes for line in lines)

    def draw_now(line: MemoryLine, _: int) -> Row:
        return _draw_figure(unit.format_bytes(line.now_bytes), line, lines) if line.key != "rule" else ()

    def draw_peak(line: MemoryLine, _: int) -> Row:
        return _draw_figure(unit.format_bytes(line.peak_bytes), line, lines) if line.peak_bytes is not None else ()

    return [
        _build_name_column(lines, glyphs),
        Column((("now", "heading"),), unit.width, 9, draw_now),
        Column((("at peak", "heading"),), unit.width, 7, draw_peak),
        *_build_expected_columns(unit, device, glyphs),
        _build_basis_column(lines, glyphs),
    ]


def _build_host_columns(unit: SizeUnit, lines: Sequence[MemoryLine], glyphs: Glyphs) -> list[Column[MemoryLine]]:
    total = max(line.now_bytes for line in lines)

    def draw_pinned(line: MemoryLine, _: int) -> Row:
        return _draw_figure(unit.format_bytes(line.pinned_bytes), line, lines) if line.pinned_bytes else ()

    def draw_per_parameter(line: MemoryLine, _: int) -> Row:
        known = line.per_parameter and not line.absence_reason
        return ((f"{line.per_parameter:.2f}".rjust(8), "muted"),) if known else ()

    return [
        _build_name_column(lines, glyphs),
        Column(
            (("now", "heading"),),
            unit.width,
            9,
            lambda line, _: _draw_figure(unit.format_bytes(line.now_bytes), line, lines),
        ),
        Column((("pinned", "heading"),), unit.width, 7, draw_pinned),
        *_build_expected_columns(unit, total, glyphs),
        Column((("B/param", "heading"),), 8, 4, draw_per_parameter),
        _build_basis_column(lines, glyphs),
    ]


def _build_name_column(lines: Sequence[MemoryLine], glyphs: Glyphs) -> Column[MemoryLine]:
    longest = max(len(line.label) for line in lines) + 2

    def draw_name(line: MemoryLine, width: int) -> Row:
        style = PART_STYLES.get(line.key)
        if line.is_sum or style is None:
            lead = "" if line.is_sum or line.key in EXTRA_KEYS else "  "
            return ((fit_text(f"{lead}{line.label}", width, glyphs), "sum" if line.is_sum else "label"),)
        return ((glyphs.find_sample(style), style), (" ", "text"), (fit_text(line.label, width - 2, glyphs), "text"))

    return Column((), min(longest, 36), 9, draw_name, left=True)


def _build_expected_columns(unit: SizeUnit, whole: int, glyphs: Glyphs) -> list[Column[MemoryLine]]:
    def draw_expected(line: MemoryLine, _: int) -> Row:
        return ((unit.format_bytes(line.expected_bytes), "muted"),) if line.expected_bytes is not None else ()

    def draw_difference(line: MemoryLine, width: int) -> Row:
        size = line.difference_bytes
        if size is None:
            return ()
        if line.absence_reason:
            return ((line.absence_reason.rjust(width), "muted"),)
        much = abs(size) > _MIN_DIFFERENCE * whole and line.key not in EXTRA_KEYS
        return ((unit.format_signed(size).rjust(width), "warn" if much else "text"),)

    return [
        Column((("expected", "heading"),), 8, 6, lambda line, width: _align_right(draw_expected(line, width), width)),
        Column(((glyphs.to_plain("difference"), "heading"),), 10, 5, draw_difference),
    ]


def _align_right(row: Row, width: int) -> Row:
    missing = width - sum(len(text) for text, _ in row)
    return ((" " * missing, "text"), *row) if row else ()


def _build_basis_column(lines: Sequence[MemoryLine], glyphs: Glyphs) -> Column[MemoryLine]:
    """What rows rest on, where there is much room."""
    longest = max([8, *(len(line.basis) for line in lines)])
    return Column(
        (("  rests on", "heading"),),
        longest + 2,
        1,
        lambda line, width: ((f"  {fit_text(line.basis, width - 2, glyphs)}", "muted"),),
        left=True,
    )


def _draw_figure(text: str, line: MemoryLine, lines: Sequence[MemoryLine]) -> Row:
    if line.is_sum:
        return ((text, "sum"),)
    blank = len(text) - len(text.lstrip())
    style = (
        "last-addend" if _is_last_addend(line, lines) else "muted" if text.strip() in ("0.00", "0.0", MISSING) else "value"
    )
    if style == "last-addend":
        # The line under the addends is as long for all of them.
        return ((text[: max(0, blank - 1)], "text"), (text[max(0, blank - 1) :], style))
    return ((text, style),)


def _is_last_addend(line: MemoryLine, lines: Sequence[MemoryLine]) -> bool:
    place = next((number for number, one in enumerate(lines) if one is line), len(lines))
    return place + 1 < len(lines) and lines[place + 1].is_sum


# --- rows ----------------------------------------------------------------------------------------------------------------


def _draw_table(
    title: Row,
    placed: PlacedColumns[MemoryLine],
    lines: Sequence[MemoryLine],
    below: Sequence[Row],
    width: int,
    height: int,
    glyphs: Glyphs,
) -> list[Row]:
    rows = [draw_rule(title, width, glyphs, placed)]
    shown = choose_lines(lines, height - 1)
    # Sentences that are known now are not to be missed for rows that are hardly anything.
    if below and len(shown) + 1 + len(below[:1]) > height:
        shown = choose_lines(lines, height - 1 - len(below[:1]))
    rows += [placed.draw_row(line, width, glyphs) for line in shown]
    if below and height - len(rows) > len(below):
        rows.append(())
    return fit_height([fit_row(row, width, glyphs) for row in (*rows, *below)], width, height, glyphs)

"""A ledger as a table: memory now and at the peak, the expected amount, and the difference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zerotop.analysis.memory.ledger_rows import GROWN
from zerotop.analysis.memory.memory_table import MemoryLine
from zerotop.analysis.memory.phase_peaks import BEFORE, MIXED
from zerotop.analysis.memory.tensor_inventory import MODEL_STATES
from zerotop.analysis.views.memory_view import MemoryView
from zerotop.ui.drawing.formatting import MISSING, SizeUnit, choose_size_unit, format_rough_time
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import Column, PlacedColumns, draw_rule, panel_title, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize, wrap_text
from zerotop.ui.drawing.units import get_units
from zerotop.ui.memory.ledger_style import PART_STYLES
from zerotop.ui.memory.row_selection import EXTRA_KEYS, choose_lines

_MIN_NAME_WIDTH = 24  # cells, so that figures stay in place while names of rows change from phase to phase
_MIN_BASIS_WIDTH = 24  # cells of the last column, which is cut where there is no more room
_MIN_DIFFERENCE = 0.02  # share of the device's or the process's memory from which on a difference is highlighted
_MUCH_KEPT = 0.25  # of a peak, in tensors that outlive their step
_NOTE_ROWS = 3  # of a sentence below the table, which is cut to those that are left


def draw_gpu_ledger(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw the ledger of the chosen GPU; the least important rows are left out if not all fit."""
    if view.gpu is None:
        return _draw_empty("Ledger", _NO_GPU_TEXT, width, height, glyphs, focused=focused)
    unit = choose_size_unit(view.gpu.total_bytes)
    lines = [*view.lines, *_build_estimate_lines(view)]
    has_hosts = len({gpu.host for gpu in view.gpus}) > 1
    name = f"GPU {view.gpu.index}" + (f" of {sanitize(view.gpu.host, glyphs)}" if has_hosts else "")
    ranks = f", {format_gpu_ranks(view.gpu.ranks)}" if view.gpu.ranks else ""
    placed = place_columns(_build_gpu_columns(_name_moment(view), unit, lines, glyphs), width)
    title = panel_title(f"{name}{ranks}, {unit.name}", focused)
    below = [*_draw_peak(view, unit, width, glyphs), *_draw_exit_note(view, width, glyphs)]
    notes = list(dict.fromkeys([*(row.note for row in view.gpu.rows if row.note), *view.gpu.notes]))
    return _draw_table(title, placed, lines, [*below, *notes], width, height, glyphs)


def draw_host_ledger(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw the ledger of the chosen rank's host memory."""
    if view.host is None:
        return _draw_empty("Host memory", _NO_RANK_TEXT, width, height, glyphs, focused=focused)
    unit = choose_size_unit(view.host.resident_bytes)
    placed = place_columns(_build_host_columns(_name_moment(view), unit, view.host_lines, glyphs), width)
    title = panel_title(f"Host memory of rank {view.host.rank}, {unit.name}", focused)
    below = _draw_exit_note(view, width, glyphs)
    if view.node_memory is not None:
        node_unit = choose_size_unit(view.node_memory.limit_bytes)
        sizes = (view.node_memory.used_bytes, view.node_memory.limit_bytes)
        used = " of ".join(node_unit.format_bytes(size).strip() for size in sizes)
        text = f"{sanitize(view.host.host, glyphs)}: {used} {node_unit.name} in use by all processes"
        below.append(((fit_text(text, width, glyphs), "text"),))
    if view.host.swap_bytes:
        below.append(((f"{unit.format_bytes(view.host.swap_bytes).strip()} {unit.name} more in swap", "warn"),))
    notes, pinned = [*view.host.notes], view.host.pinned
    if pinned is not None and pinned.held_bytes:
        notes.insert(0, pinned.describe(unit.format_bytes, unit.name))
    return _draw_table(title, placed, view.host_lines, [*below, *notes], width, height, glyphs)


def count_ledger_rows(view: MemoryView, *, host: bool) -> int:
    """Return how many rows a ledger uses."""
    has_exit_note = view.moment_ns != view.cursor_ns
    if host:
        return 5 + len(view.host_lines) + has_exit_note
    has_notes = view.gpu is not None and bool(view.gpu.notes or any(row.note for row in view.gpu.rows))
    peak_rows = 0 if view.peaks is None else 2 + (view.peaks.peak_before_entry is not None)
    return 1 + len(view.lines) + len(_build_estimate_lines(view)) + peak_rows + has_exit_note + 2 * has_notes


_NO_GPU_TEXT = ("No GPU found: this machine has no NVIDIA driver, or the job uses no GPU. H shows host memory instead.",)
_NO_RANK_TEXT = (
    "No host memory of a rank was sampled up to this time.",
    "If a rank never reports, the probe is missing there: python -E, -I and -S keep it out.",
)


def _draw_empty(
    title: str, sentences: Sequence[str], width: int, height: int, glyphs: Glyphs, *, focused: bool
) -> list[Row]:
    rows = [draw_rule(panel_title(title, focused), width, glyphs)]
    rows += [((line, "muted"),) for sentence in sentences for line in wrap_text(sentence, width, 4, glyphs)]
    return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)


def format_gpu_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 1``."""
    shown = ", ".join(map(str, ranks[:4])) + (" and more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _build_estimate_lines(view: MemoryView) -> list[MemoryLine]:
    """Return DeepSpeed's own estimate and the rule of thumb, as lines after the device."""
    lines = []
    states = sum(line.now_bytes for line in view.lines if line.key in MODEL_STATES)
    estimates = [estimate.gpu_bytes for estimate in view.own_estimates]
    if estimates and view.gpu is not None and view.gpu.ranks:
        expected = min(estimates) * len(view.gpu.ranks)
        lines.append(MemoryLine("estimate", "DeepSpeed's estimate", states, None, expected))
    peak = view.peaks.step_peak if view.peaks is not None else None
    size = peak.allocated_bytes if peak is not None else 0
    # It cannot tell of tensors that outlive their step.
    is_kept = any(
        line.row is not None and (line.row.is_kept or line.key == GROWN) and line.now_bytes > _MUCH_KEPT * size
        for line in view.lines
    )
    # Several phases of other steps may have had another batch, as longer sequences.
    owner = view.peaks.owning_peak if view.peaks is not None else None
    is_of_others = (
        owner is not None and peak is not None and owner.phase == MIXED and not owner.step <= peak.step <= owner.last_step
    )
    if view.rule is not None and view.peaks is not None and peak is not None and not is_kept and not is_of_others:
        # The other figures of that column may be of another peak, as of an evaluation.
        moment = f", {peak.phase.replace('_', ' ')}" if peak is not view.peaks.owning_peak else ""
        lines.append(MemoryLine("rule", f"rule of thumb{moment}", size, size, view.rule.peak_bytes))
    return lines


def _draw_peak(view: MemoryView, unit: SizeUnit, width: int, glyphs: Glyphs) -> list[Row]:
    if view.peaks is None:
        return []
    peak, before = view.peaks.owning_peak, view.peaks.peak_before_entry
    size = f"{unit.format_bytes(peak.allocated_bytes).strip()} {unit.name}"
    steps = peak.describe_steps(with_micro_step=view.micro_steps > 1)
    moment = f" in {steps}" if peak.is_in_step else ", before the first step"
    if before is not None:
        moment += f"; {unit.format_bytes(before.allocated_bytes).strip()} {BEFORE}"
    # The last allocations of a step that fails are in no peak, only in the memory at its end.
    is_shared = view.gpu is not None and len(view.gpu.ranks) > 1
    is_passed = view.gpu is not None and not is_shared and view.gpu.allocated_bytes > peak.allocated_bytes
    whose = f" of rank {view.rank}" if is_shared else ""
    which = "" if not is_passed else " of finished steps" if peak.has_ended else " before the last allocations"
    phase = f"Peak{whose}{which}: {peak.phase.replace('_', ' ')}"
    first, *others = wrap_text(f"{phase}, {size}{moment}", width, 2, glyphs)
    return [((first[: len(phase)], "accent"), (first[len(phase) :], "text")), *(((line, "text"),) for line in others)]


def _name_moment(view: MemoryView) -> str:
    """Return the heading of the figures: ``now``, or the earlier moment that they are of."""
    if view.moment_ns == view.cursor_ns:
        return "now"
    is_failure = view.failure is not None and view.moment_ns == view.failure.unix_ns
    return "failure" if is_failure else f"step {view.step}" if view.step is not None else "at exit"


def _draw_exit_note(view: MemoryView, width: int, glyphs: Glyphs) -> list[Row]:
    """Say that the ledger is older than the cursor because ranks have exited since."""
    if view.moment_ns == view.cursor_ns:
        return []
    seconds = (view.cursor_ns - view.moment_ns) / 1e9
    ago = f", {format_rough_time(seconds)} ago" if seconds >= 1 else ""
    text = f"State {view.moment_text}{ago}."
    return [((line, "warn"),) for line in wrap_text(text, width, 2, glyphs)]


def _build_gpu_columns(when: str, unit: SizeUnit, lines: Sequence[MemoryLine], glyphs: Glyphs) -> list[Column[MemoryLine]]:
    device = max(line.now_bytes for line in lines)

    def draw_now(line: MemoryLine, width: int) -> Row:
        return _draw_figure(unit.format_bytes(line.now_bytes).rjust(width), line, lines) if line.key != "rule" else ()

    def draw_peak(line: MemoryLine, _: int) -> Row:
        return _draw_figure(unit.format_bytes(line.peak_bytes), line, lines) if line.peak_bytes is not None else ()

    return [
        _build_name_column(lines, glyphs),
        Column(when, max(unit.width, len(when)), 9, draw_now),
        Column("at peak", unit.width, 7, draw_peak),
        *_build_expected_columns(unit, device),
        _build_basis_column(lines, glyphs),
    ]


def _build_host_columns(when: str, unit: SizeUnit, lines: Sequence[MemoryLine], glyphs: Glyphs) -> list[Column[MemoryLine]]:
    total = max(line.now_bytes for line in lines)

    def draw_now(line: MemoryLine, width: int) -> Row:
        return _draw_figure(unit.format_bytes(line.now_bytes).rjust(width), line, lines)

    def draw_pinned(line: MemoryLine, _: int) -> Row:
        return _draw_figure(unit.format_bytes(line.pinned_bytes), line, lines) if line.pinned_bytes else ()

    def draw_per_parameter(line: MemoryLine, _: int) -> Row:
        is_known = line.per_parameter and not line.absence_reason
        return ((f"{line.per_parameter:.2f}".rjust(8), "muted"),) if is_known else ()

    return [
        _build_name_column(lines, glyphs),
        Column(when, max(unit.width, len(when)), 9, draw_now),
        Column("pinned", unit.width, 7, draw_pinned),
        *_build_expected_columns(unit, total),
        Column("B/param", 8, 4, draw_per_parameter),
        _build_basis_column(lines, glyphs),
    ]


def _build_name_column(lines: Sequence[MemoryLine], glyphs: Glyphs) -> Column[MemoryLine]:
    names = {id(line): line.describe(get_units().sizes[:3]) for line in lines}
    longest = max(_MIN_NAME_WIDTH, *map(len, names.values())) + 2

    def draw_name(line: MemoryLine, width: int) -> Row:
        style, name = PART_STYLES.get(line.key), names.get(id(line), line.label)
        if line.is_sum or style is None:
            lead = "" if line.is_sum or line.key in EXTRA_KEYS else "  "
            return ((fit_text(f"{lead}{name}", width, glyphs), "sum" if line.is_sum else "label"),)
        return ((glyphs.find_sample(style), style), (" ", "text"), (fit_text(name, width - 2, glyphs), "text"))

    return Column("", min(longest, 36), 9, draw_name, left=True)


def _build_expected_columns(unit: SizeUnit, whole: int) -> list[Column[MemoryLine]]:
    def draw_expected(line: MemoryLine, width: int) -> Row:
        if line.expected_bytes is None:
            return ()
        return ((unit.format_bytes(line.expected_bytes).rjust(width), "muted"),)

    def draw_difference(line: MemoryLine, width: int) -> Row:
        size = line.difference_bytes
        if size is None:
            return ()
        if line.absence_reason:
            return ((line.absence_reason.rjust(width), "muted"),)
        is_large = abs(size) > _MIN_DIFFERENCE * whole and line.key not in EXTRA_KEYS
        return ((unit.format_signed(size).rjust(width), "warn" if is_large else "text"),)

    return [Column("expected", 8, 6, draw_expected), Column("difference", 10, 5, draw_difference)]


def _build_basis_column(lines: Sequence[MemoryLine], glyphs: Glyphs) -> Column[MemoryLine]:
    def draw_basis(line: MemoryLine, width: int) -> Row:
        return ((f"  {fit_text(line.basis, width - 2, glyphs)}", "muted"),)

    width = max([8, *(len(line.basis) for line in lines)])
    return Column("  based on", min(width, _MIN_BASIS_WIDTH) + 2, 1, draw_basis, grows=True, left=True)


def _draw_figure(text: str, line: MemoryLine, lines: Sequence[MemoryLine]) -> Row:
    if line.is_sum:
        return ((text, "sum"),)
    if _is_last_addend(line, lines):
        # The underline begins one cell before the number.
        begin = max(0, len(text) - len(text.lstrip()) - 1)
        return ((text[:begin], "text"), (text[begin:], "last-addend"))
    return ((text, "muted" if text.strip() in ("0.00", "0.0", MISSING) else "value"),)


def _is_last_addend(line: MemoryLine, lines: Sequence[MemoryLine]) -> bool:
    return any(other is line and following.is_sum for other, following in pairwise(lines))


def _draw_table(
    title: Row,
    placed: PlacedColumns[MemoryLine],
    lines: Sequence[MemoryLine],
    below: Sequence[Row | str],
    width: int,
    height: int,
    glyphs: Glyphs,
) -> list[Row]:
    """Draw the table, and below it rows and sentences, of which the last one is cut to the rows that are left."""
    rows = [draw_rule(title, width, glyphs, placed)]
    shown = choose_lines(lines, height - 1)
    # The first sentence below is more important than tiny rows.
    if below and len(shown) + 1 + len(below[:1]) > height:
        shown = choose_lines(lines, height - 1 - len(below[:1]))
    rows += [placed.draw_row(line, width, glyphs) for line in shown]
    said: list[Row] = []
    for each in below:
        room = min(_NOTE_ROWS, height - len(rows) - len(said))
        if isinstance(each, str):
            said += [((line, "muted"),) for line in wrap_text(each, width, room, glyphs)] if room > 0 else []
        else:
            said.append(each)
    if said and height - len(rows) > len(said):
        rows.append(())
    return fit_height([fit_row(row, width, glyphs) for row in (*rows, *said)], width, height, glyphs)

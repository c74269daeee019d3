"""A ledger as a table: what there is now and at the peak, what was expected, and by how much that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.analysis.memory.memory_table import Line
from zerotop.analysis.memory.memory_view import MemoryView
from zerotop.analysis.memory.phase_peaks import BEFORE
from zerotop.analysis.memory.tensor_inventory import CATEGORIES
from zerotop.ui.drawing.formatting import MISSING, about
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, filled, to_height
from zerotop.ui.drawing.table import Column, Placed, place, rule
from zerotop.ui.drawing.text import fit, literal, wrap
from zerotop.ui.memory.ledger_style import STYLES, Unit, unit_for
from zerotop.ui.memory.row_selection import BESIDE, that_fit

# A difference of less than this share of the device's or the process's memory is nobody's concern.
_MUCH = 0.02
# The rule of thumb is for these: neither for making the engine nor for evaluation.
_STEP = ("forward", "backward", "step", "optimizer", "cpu_optimizer", "grads_to_cpu", "params_to_gpu", "allgather", "reduce")


def draw_gpu_ledger(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """The chosen GPU's. Rows that there is no room for are left out, the least telling first."""
    if view.gpu is None:
        return _empty("Ledger", _WITHOUT_GPU, width, height, glyphs, focused=focused)
    unit = unit_for(view.gpu.total_bytes)
    lines = [*view.lines, *_beside(view)]
    several = len({gpu.host for gpu in view.gpus}) > 1
    name = f"GPU {view.gpu.index}" + (f" of {literal(view.gpu.host, glyphs)}" if several else "")
    whose = f", {ranks_text(view.gpu.ranks)}" if view.gpu.ranks else ""
    placed = place(_gpu_columns(unit, lines, glyphs), width)
    title = ((f"{name}{whose}, {unit.name}", "title-focused" if focused else "title"),)
    below = [*_owner(view, unit, width, glyphs), *_gone(view, width, glyphs), *_notes(view, width, glyphs)]
    return _table(title, placed, lines, below, width, height, glyphs)


def draw_host_ledger(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """The chosen rank's host memory."""
    if view.host is None:
        return _empty("Host memory", _WITHOUT_RANK, width, height, glyphs, focused=focused)
    unit = unit_for(view.host.resident_bytes)
    placed = place(_host_columns(unit, view.host_lines, glyphs), width)
    title = ((f"Host memory of rank {view.host.rank}, {unit.name}", "title-focused" if focused else "title"),)
    below = _gone(view, width, glyphs)
    if view.node is not None:
        of = unit_for(view.node.limit_bytes)
        used, limit = of.text(view.node.used_bytes).strip(), of.text(view.node.limit_bytes).strip()
        text = f"{literal(view.host.host, glyphs)}: {used} of {limit} {of.name} in use by anyone"
        below.append(((fit(text, width, glyphs), "text"),))
    if view.host.swap_bytes:
        below.append(((f"{unit.text(view.host.swap_bytes).strip()} {unit.name} more are swapped out", "warn"),))
    pinned = view.host.pinned
    if pinned is not None and pinned.held_bytes:
        told = (unit.text(size).strip() for size in (pinned.held_bytes, pinned.tensors_bytes))
        below.append((("PyTorch's pinned allocator holds {} for tensors of {}".format(*told), "muted"),))
    below += [((line, "muted"),) for note in view.host.notes for line in wrap(note, width, 2, glyphs)]
    return _table(title, placed, view.host_lines, below, width, height, glyphs)


def table_rows(view: MemoryView, *, host: bool) -> int:
    """How many rows a ledger makes use of."""
    gone = view.moment_ns != view.cursor_ns
    if host:
        return 5 + len(view.host_lines) + gone
    noted = view.gpu is not None and bool(view.gpu.notes or any(row.note for row in view.gpu.rows))
    owner = 0 if view.peaks is None else 2 + (view.peaks.before is not None)
    return 1 + len(view.lines) + len(_beside(view)) + owner + gone + 2 * noted


_WITHOUT_GPU = (
    "No GPU was seen: there is no NVIDIA driver on this machine, or the job uses none. h shows host memory instead.",
)
_WITHOUT_RANK = (
    "No rank has made its DeepSpeed engine yet: whose memory is whose is known from then on.",
    "A rank that never does is not seen from inside: python -E, -I and -S keep the probe out.",
)


def _empty(title: str, sentences: Sequence[str], width: int, height: int, glyphs: Glyphs, *, focused: bool) -> list[Row]:
    rows = [rule(((title, "title-focused" if focused else "title"),), width, glyphs)]
    rows += [((line, "muted"),) for sentence in sentences for line in wrap(sentence, width, 4, glyphs)]
    return to_height([filled(row, width, glyphs) for row in rows], width, height, glyphs)


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``."""
    shown = ", ".join(map(str, ranks[:4])) + (" and more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


# --- what there is beside the rows ---------------------------------------------------------------------------------------


def _beside(view: MemoryView) -> list[Line]:
    """DeepSpeed's own estimate and the rule of thumb, as lines after the device."""
    found = []
    states = sum(line.now_bytes for line in view.lines if line.key in CATEGORIES[:4])
    estimates = [each.gpu_bytes for each in view.own_estimates]
    if estimates and view.gpu is not None and view.gpu.ranks:
        said = min(estimates) * len(view.gpu.ranks)
        found.append(Line("estimate", "DeepSpeed's estimate", states, None, said))
    peaks = [peak.allocated_bytes for peak in view.peaks.phases if peak.phase in _STEP] if view.peaks is not None else []
    if view.rule is not None and peaks:
        peak = max(peaks)
        found.append(Line("rule", "rule of thumb", peak, peak, view.rule.bytes))
    return found


def _owner(view: MemoryView, unit: Unit, width: int, glyphs: Glyphs) -> list[Row]:
    if view.peaks is None:
        return []
    peak, before = view.peaks.owner, view.peaks.before
    size = f"{unit.text(peak.allocated_bytes).strip()} {unit.name}"
    micro_step = f", micro-step {peak.micro_step}" if view.micro_steps > 1 else ""
    where = f" in step {peak.step}{micro_step}" if peak.in_a_step else ", before the first step"
    if before is not None:
        where += f"; {unit.text(before.allocated_bytes).strip()} {BEFORE}"
    name = peak.phase.replace("_", " ")
    owner = f"{name} own the peak" if name.endswith("s") else f"{name} owns the peak"
    said = wrap(f"{owner}: {size}{where}", width, 2, glyphs)
    first: Row = ((said[0][: len(owner)], "accent"), (said[0][len(owner) :], "text"))
    return [first, *(((line, "text"),) for line in said[1:])]


def _gone(view: MemoryView, width: int, glyphs: Glyphs) -> list[Row]:
    """That it is no more so at the cursor."""
    if view.moment_ns == view.cursor_ns:
        return []
    seconds = (view.cursor_ns - view.moment_ns) / 1e9
    ago = f", {about(seconds)} ago" if seconds >= 1 else ""
    failed = view.failure is not None and view.moment_ns == view.failure.unix_ns
    text = f"The ranks have gone: this is when {'it failed' if failed else 'the first left'}{ago}."
    return [((line, "warn"),) for line in wrap(text, width, 2, glyphs)]


def _notes(view: MemoryView, width: int, glyphs: Glyphs) -> list[Row]:
    if view.gpu is None:
        return []
    notes = dict.fromkeys([*(row.note for row in view.gpu.rows if row.note), *view.gpu.notes])
    return [((line, "muted"),) for note in notes for line in wrap(note, width, 3, glyphs)]


# --- columns -------------------------------------------------------------------------------------------------------------


def _gpu_columns(unit: Unit, lines: Sequence[Line], glyphs: Glyphs) -> list[Column[Line]]:
    device = max(line.now_bytes for line in lines)

    def now(line: Line, _: int) -> Row:
        return _figure(unit.text(line.now_bytes), line, lines) if line.key != "rule" else ()

    def peak(line: Line, _: int) -> Row:
        return _figure(unit.text(line.peak_bytes), line, lines) if line.peak_bytes is not None else ()

    return [
        _names(lines, glyphs),
        Column((("now", "heading"),), unit.width, 9, now),
        Column((("at peak", "heading"),), unit.width, 7, peak),
        *_expectations(unit, device, glyphs),
        _bases(lines, glyphs),
    ]


def _host_columns(unit: Unit, lines: Sequence[Line], glyphs: Glyphs) -> list[Column[Line]]:
    total = max(line.now_bytes for line in lines)

    def pinned(line: Line, _: int) -> Row:
        return _figure(unit.text(line.pinned_bytes), line, lines) if line.pinned_bytes else ()

    def each(line: Line, _: int) -> Row:
        known = line.per_parameter and not line.away
        return ((f"{line.per_parameter:.2f}".rjust(8), "muted"),) if known else ()

    return [
        _names(lines, glyphs),
        Column((("now", "heading"),), unit.width, 9, lambda line, _: _figure(unit.text(line.now_bytes), line, lines)),
        Column((("pinned", "heading"),), unit.width, 7, pinned),
        *_expectations(unit, total, glyphs),
        Column((("B/param", "heading"),), 8, 4, each),
        _bases(lines, glyphs),
    ]


def _names(lines: Sequence[Line], glyphs: Glyphs) -> Column[Line]:
    longest = max(len(line.label) for line in lines) + 2

    def cell(line: Line, width: int) -> Row:
        style = STYLES.get(line.key)
        if line.is_sum or style is None:
            lead = "" if line.is_sum or line.key in BESIDE else "  "
            return ((fit(f"{lead}{line.label}", width, glyphs), "sum" if line.is_sum else "label"),)
        return ((glyphs.sample(style), style), (" ", "text"), (fit(line.label, width - 2, glyphs), "text"))

    return Column((), min(longest, 36), 9, cell, left=True)


def _expectations(unit: Unit, whole: int, glyphs: Glyphs) -> list[Column[Line]]:
    def expected(line: Line, _: int) -> Row:
        return ((unit.text(line.expected_bytes), "muted"),) if line.expected_bytes is not None else ()

    def difference(line: Line, width: int) -> Row:
        size = line.difference_bytes
        if size is None:
            return ()
        if line.away:
            return ((line.away.rjust(width), "muted"),)
        much = abs(size) > _MUCH * whole and line.key not in BESIDE
        return ((unit.signed(size).rjust(width), "warn" if much else "text"),)

    return [
        Column((("expected", "heading"),), 8, 6, lambda line, width: _right(expected(line, width), width)),
        Column(((glyphs.plain("difference"), "heading"),), 10, 5, difference),
    ]


def _right(row: Row, width: int) -> Row:
    missing = width - sum(len(text) for text, _ in row)
    return ((" " * missing, "text"), *row) if row else ()


def _bases(lines: Sequence[Line], glyphs: Glyphs) -> Column[Line]:
    """What rows rest on, where there is much room."""
    longest = max([8, *(len(line.basis) for line in lines)])
    return Column(
        (("  rests on", "heading"),),
        longest + 2,
        1,
        lambda line, width: ((f"  {fit(line.basis, width - 2, glyphs)}", "muted"),),
        left=True,
    )


def _figure(text: str, line: Line, lines: Sequence[Line]) -> Row:
    if line.is_sum:
        return ((text, "sum"),)
    blank = len(text) - len(text.lstrip())
    style = "last-addend" if _before_sum(line, lines) else "muted" if text.strip() in ("0.00", "0.0", MISSING) else "value"
    if style == "last-addend":
        # The line under the addends is as long for all of them.
        return ((text[: max(0, blank - 1)], "text"), (text[max(0, blank - 1) :], style))
    return ((text, style),)


def _before_sum(line: Line, lines: Sequence[Line]) -> bool:
    place = next((number for number, one in enumerate(lines) if one is line), len(lines))
    return place + 1 < len(lines) and lines[place + 1].is_sum


# --- rows ----------------------------------------------------------------------------------------------------------------


def _table(
    title: Row, placed: Placed[Line], lines: Sequence[Line], below: Sequence[Row], width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    rows = [rule(title, width, glyphs, placed)]
    shown = that_fit(lines, height - 1)
    # Sentences that are known now are not to be missed for rows that are hardly anything.
    if below and len(shown) + 1 + len(below[:1]) > height:
        shown = that_fit(lines, height - 1 - len(below[:1]))
    rows += [placed.row(line, width, glyphs) for line in shown]
    if below and height - len(rows) > len(below):
        rows.append(())
    return to_height([filled(row, width, glyphs) for row in (*rows, *below)], width, height, glyphs)

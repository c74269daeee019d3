"""The places of panels, as a pure function of the terminal's size and of the amount of data."""

from __future__ import annotations

from dataclasses import dataclass, replace

TWO_COLUMNS_FROM = 76
GAP = 2
MAX_STRIP_ROWS = 5  # rows of one rank or GPU: its figures and the strip under them
_LEAST_ABOVE_SUMMARY = 6  # rows of the panels above a summary
CHART_ROWS = 7  # rows that the memory chart should have


@dataclass(frozen=True)
class Box:
    """A panel's place in cells."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True)
class ScreenOutline:
    """The layout all screens share: the upper and lower rows, and the room between them for the screen's own panels."""

    boxes: dict[str, Box]
    room: Box


def layout_outline(width: int, height: int, notices: int, *, past: bool, failed: bool = False) -> ScreenOutline:
    """Lay out header and notices at the top, and transport, tabs and keys at the bottom, as far as there is room.

    Args:
        width: cells of the terminal.
        height: rows of the terminal.
        notices: rows that the notices need.
        past: the cursor is in the past, so the transport row is needed.
        failed: the notices describe an error, which gets more room.
    """
    boxes: dict[str, Box] = {}
    top = 0
    sentences = min(notices, max(0, height // (3 if failed else 6)))
    for name, rows in (("header", 2 if height >= 12 else 1), ("notices", sentences)):
        if rows and top + rows <= height:
            boxes[name] = Box(0, top, width, rows)
            top += rows
    bottom = height
    for name in _choose_bottom_rows(height, past):
        if bottom - 1 > top:
            bottom -= 1
            boxes[name] = Box(0, bottom, width, 1)
    margin = 1 if width >= 96 else 0  # around the panels of a wide terminal
    return ScreenOutline(boxes, Box(margin, top, width - 2 * margin, bottom - top))


def _choose_bottom_rows(height: int, past: bool) -> list[str]:
    """Return the bottom rows, the lowest first. In a very low terminal the transport takes the tabs' place."""
    rows = ["keys"] if height >= 8 else []
    if height >= 20:
        return [*rows, "tabs", "transport"] if past or height >= 30 else [*rows, "tabs"]
    if height >= 10:
        rows.append("transport" if past else "tabs")
    return rows


@dataclass(frozen=True)
class PanelCounts:
    """The counts that the live screen's layout depends on."""

    gpus: int
    ranks: int
    hosts: int


def layout_live(room: Box, shape: PanelCounts) -> dict[str, Box]:
    """Return the places of the live screen's panels, as far as there is room. They do not overlap."""
    if room.width >= TWO_COLUMNS_FROM and room.height >= 7:
        inner = _layout_two_columns(shape, room.width, room.y, room.height)
    else:
        inner = _layout_one_column(shape, room.width, room.y, room.height)
    return {name: replace(box, x=box.x + room.x) for name, box in inner.items()}


def replace_with_summary(boxes: dict[str, Box], width: int, rows: int) -> dict[str, Box]:
    """Return the places with a summary of up to ``rows`` rows instead of the figures of ranks and GPUs."""
    if "cpu" not in boxes:
        return boxes
    kept = {name: box for name, box in boxes.items() if name not in ("cpu", "gpu")}
    cpu, output = boxes["cpu"], boxes.get("output")
    if "iteration" in kept and kept["iteration"].x > cpu.x:  # beside it
        kept["iteration"] = replace(kept["iteration"], height=cpu.y - kept["iteration"].y)
    height = cpu.height
    if output is not None:
        height = min(rows, cpu.height + max(0, output.height - 3))
        kept["output"] = replace(output, y=output.y + height - cpu.height, height=output.height + cpu.height - height)
    above = [name for name in ("memory", "iteration") if name in kept and kept[name].y + kept[name].height == cpu.y]
    lifted = (
        min([max(0, rows - height), *(max(0, kept[name].height - _LEAST_ABOVE_SUMMARY) for name in above)]) if above else 0
    )
    kept |= {name: replace(kept[name], height=kept[name].height - lifted) for name in above}
    kept["summary"] = Box(cpu.x, cpu.y - lifted, width, height + lifted)
    return kept


def _layout_two_columns(shape: PanelCounts, width: int, top: int, middle: int) -> dict[str, Box]:
    """Place memory and CPU at the left, iterations and GPUs at the right, output below."""
    left = (width - GAP) // 2
    right_x, right = left + GAP, width - left - GAP
    upper, lower = _split_heights(shape, middle)
    output = middle - upper - lower
    boxes = {
        "memory": Box(0, top, left, upper),
        "cpu": Box(0, top + upper, left, lower),
        "iteration": Box(right_x, top, right, upper),
        "output": Box(0, top + upper + lower, width, output),
    }
    if shape.gpus:
        boxes["gpu"] = Box(right_x, top + upper, right, lower)
    else:
        boxes["iteration"] = Box(right_x, top, right, upper + lower)
    return boxes


def _split_heights(shape: PanelCounts, middle: int) -> tuple[int, int]:
    """Return the (upper, lower) rows of the two columns; the output gets the rest."""
    if not shape.gpus:
        return _split_without_gpus(shape, middle)
    upper = 1 + shape.gpus + (shape.hosts if middle >= 24 else 0)
    lower = 1 + max(shape.ranks, shape.gpus)
    room = middle - _min_output_rows(middle)
    if upper + lower > room:
        upper = min(upper, max(6, room - lower, room // 2))
        lower = min(lower, room - upper)
    # The chart gets some of the free rows, and so do the strips if there is enough for all.
    past = upper + CHART_ROWS - 2 if upper + CHART_ROWS - 2 <= middle // 2 else upper
    upper = max(upper, min(room - lower, max(9, past, middle * 2 // 5)))
    return upper, max(lower, min(room - upper, _count_strip_rows(max(shape.ranks, shape.gpus), middle // 4)))


def _count_strip_rows(strips: int, room: int) -> int:
    """Return the rows of a panel with this many strips, each of several rows if there is room for all."""
    return 1 + strips * max(1, min(MAX_STRIP_ROWS, (room - 1) // max(1, strips)))


def _split_without_gpus(shape: PanelCounts, middle: int) -> tuple[int, int]:
    """Return the rows of the two panels beside the chart, which share its height."""
    memory, cpu = 1 + shape.hosts + shape.ranks, 1 + max(1, shape.ranks)
    both = min(middle - _min_output_rows(middle), max(memory + cpu, 9, middle * 11 // 20))
    if memory + cpu <= both:
        cpu = max(cpu, _count_strip_rows(shape.ranks, both - memory - CHART_ROWS))
        return both - cpu, cpu
    memory = min(memory, both // 2 if cpu > both - memory else memory)
    return memory, both - memory


def _min_output_rows(middle: int) -> int:
    return 1 if middle < 22 else max(3, middle // 5)


def _layout_one_column(shape: PanelCounts, width: int, top: int, middle: int) -> dict[str, Box]:
    """Place panels one below another, without the least important ones if room is short."""
    wants = {
        "memory": 1 + (shape.gpus or shape.ranks + shape.hosts),
        "iteration": 8,
        "cpu": 1 + max(1, shape.ranks),
        "output": max(3, middle // 5),
    }
    least = {"memory": 3, "iteration": 5, "cpu": 3, "output": 1}
    for name in ("output", "cpu", "iteration"):
        if sum(least[name] for name in wants) > middle:
            del wants[name]
    heights = {name: min(wants[name], least[name]) for name in wants}
    for name in ("memory", "iteration", "cpu", "output"):
        if name in heights:
            heights[name] += max(0, min(wants[name] - heights[name], middle - sum(heights.values())))
    heights = {name: min(rows, middle) for name, rows in heights.items()}
    last = list(heights)[-1]
    heights[last] += middle - sum(heights.values())
    boxes, y = {}, top
    for name, rows in heights.items():
        boxes[name] = Box(0, y, width, rows)
        y += rows
    return boxes

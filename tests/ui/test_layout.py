"""Where panels go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerotop.ui.drawing.layout import Box, PanelCounts, layout_live, layout_outline

PANELS = ("memory", "iteration", "cpu", "gpu", "output")


@given(
    st.integers(1, 320),
    st.integers(1, 100),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
    st.builds(PanelCounts, gpus=st.integers(0, 70), ranks=st.integers(0, 70), hosts=st.integers(0, 9)),
)
def test_panels_are_in_the_terminal_and_apart(
    width: int, height: int, notices: int, past: bool, failed: bool, shape: PanelCounts
) -> None:
    common = layout_outline(width, height, notices, past=past, failed=failed)
    taken: set[tuple[int, int]] = set()
    own = {name: box for name, box in layout_live(common.room, shape).items() if box.width > 0 and box.height > 0}
    for name, box in (common.boxes | own).items():
        assert 0 <= box.x <= box.x + box.width <= width, name
        assert 0 <= box.y <= box.y + box.height <= height, name
        cells = {(x, y) for x in range(box.x, box.x + box.width) for y in range(box.y, box.y + box.height)}
        assert not cells & taken, name
        taken |= cells
    assert "memory" in own or height < 6


def layout_panels(width: int, height: int, shape: PanelCounts, notices: int = 0) -> dict[str, Box]:
    """All places in a terminal that shows a running job."""
    common = layout_outline(width, height, notices, past=False)
    return common.boxes | layout_live(common.room, shape)


def test_8_gpus_and_8_ranks_in_80_by_24() -> None:
    boxes = layout_panels(80, 24, PanelCounts(gpus=8, ranks=8, hosts=1))
    assert boxes["memory"] == Box(0, 2, 39, 9)
    assert boxes["iteration"] == Box(41, 2, 39, 9)
    assert boxes["cpu"] == Box(0, 11, 39, 9)
    assert boxes["gpu"] == Box(41, 11, 39, 9)
    assert boxes["output"] == Box(0, 20, 80, 2)
    assert (boxes["tabs"].y, boxes["keys"].y) == (22, 23)


def test_the_past_gets_its_transport_row_and_a_very_low_terminal_no_tabs_then() -> None:
    assert {"transport", "tabs"} <= layout_outline(80, 24, 0, past=True).boxes.keys()
    assert "transport" not in layout_outline(80, 24, 0, past=False).boxes
    low = layout_outline(80, 16, 0, past=True).boxes
    assert "transport" in low
    assert "tabs" not in low
    high = layout_outline(80, 30, 0, past=False).boxes
    assert (high["transport"].y, high["tabs"].y) == (27, 28)


def test_40_columns_stack_panels() -> None:
    boxes = layout_panels(40, 30, PanelCounts(gpus=0, ranks=2, hosts=1), notices=1)
    assert [name for name in boxes if boxes[name].x == 0 and name in PANELS] == [
        "memory",
        "iteration",
        "cpu",
        "output",
    ]
    assert all(boxes[name].width == 40 for name in boxes)


def test_many_ranks_leave_room_for_output() -> None:
    boxes = layout_panels(120, 40, PanelCounts(gpus=64, ranks=64, hosts=8), notices=1)
    assert boxes["output"].height >= 5
    assert boxes["cpu"].height >= 10
    assert boxes["memory"].height >= 10

"""Where panels go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerotop.ui.layout import Box, Shape, arrange

PANELS = ("", "memory", "iteration", "cpu", "gpu", "output")


@given(
    st.builds(
        Shape,
        width=st.integers(1, 320),
        height=st.integers(1, 100),
        gpus=st.integers(0, 70),
        ranks=st.integers(0, 70),
        hosts=st.integers(0, 9),
        notices=st.integers(0, 6),
        past=st.booleans(),
        zoomed=st.sampled_from(PANELS),
    )
)
def test_panels_lie_in_the_terminal_and_apart(shape: Shape) -> None:
    boxes = arrange(shape)
    taken: set[tuple[int, int]] = set()
    for name, box in boxes.items():
        assert 0 <= box.x <= box.x + box.width <= shape.width, name
        assert 0 <= box.y <= box.y + box.height <= shape.height, name
        cells = {(x, y) for x in range(box.x, box.x + box.width) for y in range(box.y, box.y + box.height)}
        assert not cells & taken, name
        taken |= cells
    if not shape.zoomed:
        assert "memory" in boxes or shape.height < 4


def test_8_gpus_and_8_ranks_in_80_by_24() -> None:
    boxes = arrange(Shape(80, 24, gpus=8, ranks=8, hosts=1, notices=0, past=False))
    assert boxes["memory"] == Box(0, 2, 39, 9)
    assert boxes["iteration"] == Box(41, 2, 39, 9)
    assert boxes["cpu"] == Box(0, 11, 39, 9)
    assert boxes["gpu"] == Box(41, 11, 39, 9)
    assert boxes["output"] == Box(0, 20, 80, 2)
    assert (boxes["status"].y, boxes["keys"].y) == (22, 23)


def test_in_a_low_terminal_the_past_takes_the_status_row() -> None:
    shape = Shape(80, 24, gpus=0, ranks=2, hosts=1, notices=0, past=True)
    assert "transport" in arrange(shape)
    assert "status" not in arrange(shape)
    high = arrange(Shape(80, 30, gpus=0, ranks=2, hosts=1, notices=0, past=False))
    assert high["transport"].y == 27
    assert high["status"].y == 28


def test_40_columns_stack_panels() -> None:
    boxes = arrange(Shape(40, 30, gpus=0, ranks=2, hosts=1, notices=1, past=False))
    assert [name for name in boxes if boxes[name].x == 0 and name in PANELS] == [
        "memory",
        "iteration",
        "cpu",
        "output",
    ]
    assert all(boxes[name].width == 40 for name in boxes)


def test_many_ranks_leave_room_for_output() -> None:
    boxes = arrange(Shape(120, 40, gpus=64, ranks=64, hosts=8, notices=1, past=False))
    assert boxes["output"].height >= 5
    assert boxes["cpu"].height >= 10
    assert boxes["memory"].height >= 10


def test_zoom_takes_the_middle() -> None:
    boxes = arrange(Shape(120, 40, gpus=8, ranks=8, hosts=1, notices=0, past=False, zoomed="cpu"))
    assert boxes["cpu"] == Box(1, 2, 118, 35)
    assert "memory" not in boxes

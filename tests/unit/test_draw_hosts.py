"""How the names of nodes are shortened."""

from __future__ import annotations

import pytest

from zerotop.ui.drawing.glyphs import ASCII, BLOCKS
from zerotop.ui.live.memory import shorten_name

NODES = ["gpu_node_1", "gpu_node_2", "storage"]


@pytest.mark.parametrize(
    ("name", "width", "shown"),
    [
        ("gpu_node_1", 10, "gpu_node_1"),
        ("gpu_node_1", 6, "…ode_1"),
        ("gpu_node_2", 6, "…ode_2"),
        ("storage", 6, "stora…"),
        ("gpu_node_2", 2, "…2"),
    ],
)
def test_names_with_the_same_beginning_show_their_ends(name: str, width: int, shown: str) -> None:
    assert shorten_name(name, NODES, width, BLOCKS) == shown


def test_short_names_in_ascii_and_without_room() -> None:
    assert len(shorten_name("gpu_node_1", NODES, 6, ASCII)) == 6
    assert len(shorten_name("gpu_node_1", NODES, 1, ASCII)) <= 1
    assert shorten_name("gpu_node_1", NODES, 0, BLOCKS) == ""

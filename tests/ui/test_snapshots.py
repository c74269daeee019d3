"""Whole screens as pictures: fixed sizes, a clock that stands still, a pinned Textual.

``pytest tests/ui/test_snapshots.py --snapshot-update`` takes them anew; look at them before you commit them.
"""

from __future__ import annotations

from typing import Any

import pytest

from fake_source import cpu_story, killed_story, many_story, offload_story
from watching import Watch
from zerotop.ui.drawing.glyphs import ASCII


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_offload(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(Watch(offload_story(), 75.0).app, terminal_size=size)


def test_two_ranks_without_gpus(snap_compare: Any) -> None:
    assert snap_compare(Watch(cpu_story(), 12.0).app, terminal_size=(100, 30))


def test_post_mortem(snap_compare: Any) -> None:
    assert snap_compare(Watch(killed_story(), 60.0).app, terminal_size=(80, 24))


def test_64_ranks(snap_compare: Any) -> None:
    assert snap_compare(Watch(many_story(), 75.0).app, terminal_size=(120, 40))


def test_40_columns(snap_compare: Any) -> None:
    assert snap_compare(Watch(offload_story(), 75.0).app, terminal_size=(40, 24))


def test_without_utf8(snap_compare: Any) -> None:
    assert snap_compare(Watch(offload_story(), 75.0, glyphs=ASCII).app, terminal_size=(80, 24))


def test_looking_back_in_the_light_theme(snap_compare: Any) -> None:
    assert snap_compare(Watch(offload_story(), 75.0).app, terminal_size=(120, 40), press=["t", "shift+left"])


def test_leaving(snap_compare: Any) -> None:
    assert snap_compare(Watch(offload_story(), 75.0).app, terminal_size=(80, 24), press=["q"])

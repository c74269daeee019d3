"""The strip of host memory in the post-mortem of a job."""

from __future__ import annotations

import pytest

from zerotop.analysis.failures.end import build_host_figures
from zerotop.recording.moments.host_memory import HostMemory
from zerotop.ui.base.post_mortem import draw_memory_strip
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, Glyphs
from zerotop.ui.drawing.rows import row_text


@pytest.mark.parametrize("glyphs", [ASCII, BLOCKS], ids=["ascii", "blocks"])
def test_use_beyond_the_limit_and_below_zero_is_drawn_at_the_ends(glyphs: Glyphs) -> None:
    used = (-(2**62), 0, 2**30, 2**62)  # as in a damaged recording
    samples = tuple(HostMemory(second * 10**9, value, 2**30) for second, value in enumerate(used))
    low, top = glyphs.levels[1], glyphs.levels[-1]
    assert low + low + top + top in row_text(draw_memory_strip(samples, 80, glyphs))


def test_figures_of_host_memory_have_their_moments() -> None:
    samples = tuple(HostMemory(second * 10**9, used << 30, 8 << 30) for second, used in enumerate((1, 6, 2)))
    (figure,) = build_host_figures(samples)
    assert (figure.label, figure.bytes) == ("host peak in last 2 s", 6 << 30)
    strip = row_text(draw_memory_strip(samples, 80, BLOCKS))
    assert strip.startswith("host memory, last 2 s")
    assert strip.endswith(" 2.00 of 8.00 GiB at the end")

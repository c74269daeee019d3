"""The title above the lines that allocated the largest blocks."""

from __future__ import annotations

import pytest

from zerotop.analysis.memory.block_lines import Look
from zerotop.analysis.memory.phase_peaks import PhasePeak
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.memory.allocation_lines import draw_look


@pytest.mark.parametrize(("last_step", "text"), [(25, "the highest: step 25"), (81, "the highest: steps 25 to 81")])
def test_a_higher_peak_is_named_by_all_steps_of_its_reading(last_step: int, text: str) -> None:
    look = Look("peak", 4, 0, 1, 1, 1 << 30, 0, ())
    peak = PhasePeak("backward", 2 << 30, 2 << 30, True, 25, last_step, False, True, 0, 1, 0)
    title = draw_look(look, peak, "", (100, 5), BLOCKS)[0]
    assert text in "".join(part[0] for part in title)

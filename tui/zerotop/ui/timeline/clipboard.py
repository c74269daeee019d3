"""The timeline's numbers for the clipboard: tab-separated columns under a heading, in SI units."""

from __future__ import annotations

from zerotop.analysis.text_tables import format_tsv
from zerotop.analysis.timeline.phase_ribbon import choose_phase_codes
from zerotop.ui.timeline.picture import Picture
from zerotop_probe.recording.tables import METRICS, PHASES


def format_window(picture: Picture) -> str:
    """Return a row for each column of the window or the selected range: begin, longest phase, means and highest values.

    Times are seconds since the recording began; values that were not recorded are empty.
    """
    window, values = picture.timeline.window, picture.timeline.values
    names = [METRICS[name].heading for name in values]
    ranks = [f"rank {rank} phase" for rank in picture.ranks[:1]]
    codes = [choose_phase_codes(picture.timeline.phases[rank]).tolist() for rank in picture.ranks[:1]]
    rows: list[tuple[object, ...]] = [
        ("time_s", *ranks, *(f"{name} {kind}" for name in names for kind in ("mean", "highest")))
    ]
    for place in range(window.columns):
        begin = (window.first + place) * window.column_ns
        if picture.selected_range is None or (
            begin + window.column_ns > picture.selected_range[0] and begin < picture.selected_range[1]
        ):
            numbers = (float(row[place]) for lane in values.values() for row in (lane.mean, lane.highest))
            phases = (PHASES[code[place]] if code[place] >= 0 else "" for code in codes)
            rows.append((f"{begin / 1e9:.9g}", *phases, *numbers))
    return format_tsv(rows)

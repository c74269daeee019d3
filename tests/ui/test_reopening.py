"""A screen that stays open lets go of detail that was deleted meanwhile, and shows the same place again."""

from __future__ import annotations

from pathlib import Path

import pytest

import recordings
from segmented_recordings import fold_at, unpack_segmented
from waiting import wait_until
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.ui.app import app as app_module
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop_probe.outside.folding import step_history


def count_held(folder: Path) -> int:
    """Return how many deleted files of a folder this process still has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line and line.endswith("(deleted)") for line in maps)


async def test_deleted_detail_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "MUCH_HELD_BYTES", 0)
    monkeypatch.setattr(app_module, "LEFT_S", 3600.0)
    # No step is notable, so that as much as possible is deleted.
    monkeypatch.setattr(step_history, "_FIRST_STEPS", 1)
    monkeypatch.setattr(step_history, "is_unlike_before", lambda record, before: False)
    folder = unpack_segmented(recordings.find_packed_file("gpu-offload-4"), tmp_path / "recording", full_detail_s=5)
    source = RecordingSource(Recording.open(folder))
    offset_ns, end_ns = source.recording.sources["spans"][0].offset_ns, source.end_ns
    app = ZerotopApp(source, None, title="held", glyphs=BLOCKS)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        app.action_set_rank(0)
        await wait_until(pilot, lambda: len(app.viewer.source.findings_at(None)) > 0)
        findings = app.viewer.source.findings_at(None)
        fold_at(folder, end_ns - offset_ns + 30 * 10**9)
        await wait_until(pilot, lambda: app.viewer.source.recording.held_bytes > 0)
        assert count_held(folder) > 0
        app.run_tick()
        await pilot.pause()
        assert app.viewer.source is source  # a key was pressed: somebody may look at it
        monkeypatch.setattr(app_module, "LEFT_S", -1.0)
        await wait_until(pilot, lambda: count_held(folder) == 0)
        await wait_until(pilot, lambda: app.is_watching and app.screen is app.shown_screen)
        assert app.viewer.source.findings_at(None)[: len(findings)] == findings
        frame = app.viewer.make_frame()
        assert (app.shown_name, frame.rank, frame.is_rank_chosen) == ("timeline", 0, True)
        assert app.viewer.source.recording.held_bytes == 0
        await pilot.press("1")
        assert app.shown_name == "live"

"""``u`` and ``U``: every number on every screen is in the units that were chosen, and nothing else changes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from textual.geometry import Region
from textual.pilot import Pilot

from recordings import find_packed_file, open_recording
from screens import read_rows
from waiting import wait_until
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.reports.recording_index import Overviews
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.job.recording_library import UserLibrary
from zerotop.recording import catalog
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.app.settings import UserSettings
from zerotop.ui.app.start_app import StartApp
from zerotop.ui.base.clipboard import collect_copy_text
from zerotop.ui.base.frame_widget import RowWidget
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.base.tabs import TABS
from zerotop.ui.compare.screen import CompareScreen
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, Glyphs
from zerotop.ui.start.screen import StartScreen

_BINARY, _DECIMAL = re.compile(r"\b[KMGT]iB\b"), re.compile(r"\b[kMGT]B\b(?!/s)")
_NOT_OURS = ("keys", "output")  # the key says what it switches to; the job's own words stay as they are
_ERROR = "CUDA out of memory"  # so do PyTorch's, which are told after ours


def make_app(name: str, settings: UserSettings | None = None, glyphs: Glyphs = BLOCKS) -> ZerotopApp:
    return ZerotopApp(RecordingSource(open_recording(name)), title=name, settings=settings, glyphs=glyphs)


def read_panels(app: ZerotopApp) -> dict[str, str]:
    """Panel by panel what is on the screen, but for how often it is drawn."""
    panels = [panel for panel in app.screen.query("RowWidget").results(RowWidget) if panel.display and panel.id != "tabs"]
    return {panel.id or "": panel.plain_text() for panel in panels}


def find_panels_with_sizes(app: ZerotopApp) -> tuple[set[str], set[str]]:
    """The panels that tell sizes in binary units, and those that do in decimal ones."""
    texts = {name: text.partition(_ERROR)[0] for name, text in read_panels(app).items() if name not in _NOT_OURS}
    binary, decimal = ({name for name, text in texts.items() if kind.search(text)} for kind in (_BINARY, _DECIMAL))
    return binary, decimal


def read_regions(app: ZerotopApp) -> dict[str, Region]:
    return {panel.id or "": panel.region for panel in app.screen.query("RowWidget")}


async def open_screen(app: ZerotopApp, pilot: Pilot[Leaving], screen: str) -> None:
    app.action_switch(screen)
    await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


@pytest.fixture(scope="module")
def finding_count() -> int:
    """How many findings there are in the story: they come one after the other while it is shown."""
    recording = open_recording("story")
    return len(detect_findings(recording, recording.last_written_ns))


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_on_every_screen_sizes_follow_and_nothing_moves(size: tuple[int, int], finding_count: int) -> None:
    app = make_app("story")
    followed = set()
    async with app.run_test(size=size) as pilot:
        await wait_until(pilot, lambda: len(app.viewer.source.findings_at(None)) == finding_count)
        for tab in TABS:
            await open_screen(app, pilot, tab.name)
            usual, places = read_panels(app), read_regions(app)
            binary, decimal = find_panels_with_sizes(app)
            assert not decimal
            await pilot.press("u")
            await pilot.pause()
            assert find_panels_with_sizes(app) == (set(), binary)
            assert read_regions(app) == places
            followed |= binary
            await pilot.press("u")
            await pilot.pause()
            assert read_panels(app) == usual
    assert followed >= {"memory", "ledger", "bars", "lanes", "rank-table"}


@pytest.mark.parametrize("name", ["cpu-clean", "gpu-microscope", "z2-oom", "z2-offload"])
async def test_no_size_is_left_in_the_other_unit(name: str) -> None:
    app = make_app(name)
    async with app.run_test(size=(200, 50)) as pilot:
        await pilot.press("u")
        for tab in TABS:
            await open_screen(app, pilot, tab.name)
            assert find_panels_with_sizes(app)[0] == set(), (tab.name, read_panels(app))


async def test_the_post_mortem_uses_the_chosen_units() -> None:
    app = make_app("z2-oom")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("end")
        await pilot.pause()
        notices = read_panels(app)["notices"]
        assert "GiB" in notices
        await pilot.press("u")
        await pilot.pause()
        ours = read_panels(app)["notices"].partition(_ERROR)[0]
        assert "GB" in ours
        assert "iB" not in ours


async def test_it_is_still_so_on_another_screen_and_in_another_run(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    app = make_app("story", UserSettings(path))
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(app, pilot, "live")
        assert "s/it" in read_panels(app)["header"]
        await open_screen(app, pilot, "memory")
        await pilot.press("u", "U")
        await open_screen(app, pilot, "live")
        assert "GPU memory GB" in read_panels(app)["memory"]
        assert re.search(r"0\.\d{3} it/s", read_panels(app)["header"])
    app = make_app("story", UserSettings(path))
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(app, pilot, "live")
        assert "GPU memory GB" in read_panels(app)["memory"]
        assert "it/s" in read_panels(app)["header"]
    app = make_app("story", UserSettings())
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(app, pilot, "live")
        assert "GPU memory GiB" in read_panels(app)["memory"]


async def test_without_utf8_all_of_it_is_ascii() -> None:
    app = make_app("story", glyphs=ASCII)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await pilot.press("U", "u")
        await pilot.pause()
        text = "\n".join(read_rows(app))
        assert "Sizes in GB" in text
        assert text.isascii()


async def test_the_list_and_a_comparison_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = catalog.find_default_folder()
    folder.mkdir(parents=True)
    for name in ("story", "z2-oom"):
        shutil.copy(find_packed_file(name), folder)
    app = StartApp(UserLibrary(Overviews(folder, None, lambda path: False), job_finder=list), glyphs=BLOCKS)

    def read_sheet() -> str:
        return read_panels(app)["sheet"].rpartition("\n")[0]

    async with app.run_test(size=(200, 50)) as pilot:
        await wait_until(
            pilot, lambda: isinstance(app.screen, StartScreen) and "Qwen2" in read_sheet() and "Llama" in read_sheet()
        )
        assert all(word in read_sheet() for word in ("peak GiB", "s/it", "KiB")), read_sheet()
        await pilot.press("u", "U")
        assert all(word in read_sheet() for word in ("peak GB", "it/s", "kB"))
        assert not _BINARY.search(read_sheet())
        await pilot.press("space", "down", "space", "c")
        await wait_until(pilot, lambda: isinstance(app.screen, CompareScreen))
        await pilot.pause()
        copied = collect_copy_text(app.screen)
        assert _DECIMAL.search(copied)
        assert not _BINARY.search(copied)
        await pilot.press("u")
        assert not _DECIMAL.search(collect_copy_text(app.screen))
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, StartScreen) and "peak GiB" in read_sheet())

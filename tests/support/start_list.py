"""For tests of the list of recordings: a folder with three of them, and the program that lists it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot

import recordings
from screens import read_rows
from waiting import wait_until
from zerotop.analysis.reports.recording_index import Overviews
from zerotop.commands.job.recording_library import UserLibrary
from zerotop.recording import catalog
from zerotop.ui.app.settings import UserSettings
from zerotop.ui.app.start_app import StartApp
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.drawing.glyphs import BLOCKS, Glyphs
from zerotop.ui.start.screen import StartScreen
from zerotop_probe.outside.attaching.jobs import FoundJob


def filled_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the default folder with three recordings; the current folder is another, empty one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = catalog.find_default_folder()
    folder.mkdir(parents=True)
    shutil.copy(recordings.find_packed_file("cpu-clean"), folder)
    shutil.copy(recordings.find_packed_file("z2-oom"), folder)
    recordings.unpack_to_folder("story", folder)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return folder


class Start:
    """The program that lists the default folder."""

    def __init__(
        self,
        glyphs: Glyphs = BLOCKS,
        settings: UserSettings | None = None,
        job_finder: Callable[[], Sequence[FoundJob]] = list,
    ) -> None:
        place = catalog.find_default_folder()
        self.desk = UserLibrary(Overviews(place, None, lambda path: False), job_finder=job_finder)
        self.app = StartApp(self.desk, glyphs=glyphs, settings=settings)

    @property
    def list(self) -> StartScreen:
        screen = self.app.screen
        assert isinstance(screen, StartScreen)
        return screen

    def names(self) -> Sequence[str]:
        return [getattr(row, "name", "") for row in self.list.model.rows]

    def text(self) -> str:
        return "\n".join(read_rows(self.app))

    def notices(self) -> Sequence[str]:
        return [notice.message for notice in self.app._notifications]


def is_shown(start: Start, id: str | None) -> bool:
    return start.app.screen.id == id


async def wait_for_overviews(start: Start, pilot: Pilot[Leaving]) -> None:
    """Wait until the list has recordings and the overview of each is read."""

    def are_read() -> bool:
        recordings = start.desk.recordings
        return len(recordings) > 0 and all(recording.overview is not None for recording in recordings)

    await wait_until(pilot, are_read)


async def wait_for_list(start: Start, pilot: Pilot[Leaving]) -> None:
    await wait_for_overviews(start, pilot)
    await wait_until(pilot, lambda: "exit 0" in start.text() and "reading" not in start.text())

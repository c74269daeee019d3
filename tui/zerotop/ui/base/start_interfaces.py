"""The interfaces of the start screen: recordings, running jobs, and actions on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from textual.message import Message

from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.reports.measures import Comparison
from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.sweeps import Sweep
from zerotop.ui.base.interfaces import Controller


class RefusedError(Exception):
    """An action is not possible; the text is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job on this node that is not being recorded."""

    pid: int
    launcher: str
    ranks: int
    gpus: tuple[str, ...]
    age_s: float
    zero_stage: int | None
    script: str


@dataclass(frozen=True, slots=True)
class OpenedRecording:
    """A recording to watch."""

    source: RecordingSource
    controller: Controller | None  # None if the job has ended
    title: str
    play_from_ns: int | None = None  # None follows the end


class RecordingOpened(Message):
    """A recording was opened in a list, and is to be shown."""

    def __init__(self, opened: OpenedRecording, beside: Path | None = None) -> None:
        """``beside``: another recording, whose iterations are drawn behind this one's."""
        super().__init__()
        self.opened = opened
        self.beside = beside


LibraryItem = ListedRecording | RunningJob


class RecordingLibrary(Protocol):
    """The user's recordings, read in the background. Slow methods return a sentence, or raise RefusedError."""

    folder_name: str  # of the recordings
    recordings: tuple[ListedRecording, ...]  # known so far; the same object while nothing has changed
    running_jobs: tuple[RunningJob, ...]  # likewise

    def start(self) -> None:
        """List the recordings, and read changes from now on."""

    def stop(self) -> None:
        """Stop reading."""

    def open(self, item: LibraryItem) -> OpenedRecording:
        """Open a recording, or start recording a job from outside."""

    def export(self, recording: ListedRecording) -> str:
        """Write the steps as CSV to the current folder; return a sentence with the path."""

    def pack(self, recording: ListedRecording) -> str:
        """Pack the recording into one file in the current folder; return a sentence with the path."""

    def describe_obstacle(self, recording: ListedRecording) -> str:
        """Return why the recording cannot be deleted; "" if it can."""

    def delete(self, recording: ListedRecording) -> str:
        """Delete the recording permanently; return a sentence with the freed space."""

    def list_sweeps(self) -> Sequence[Sweep]:
        """Return the user's sweeps, the newest first."""

    def find_shape(self, sweep: Sweep) -> ModelShape | None:
        """Return the shape of a sweep's model; None if it is not known."""

    def open_point(self, sweep: Sweep, number: int) -> OpenedRecording | None:
        """Open the recording of a sweep's point; None if it has none."""

    def compare(self, recordings: Sequence[ListedRecording]) -> Comparison:
        """Compare recordings, which reads all of them."""

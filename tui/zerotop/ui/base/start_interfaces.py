"""What the start screen needs from the rest: what there is to open, and what can be done with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from zerotop.analysis.reports.measures import Comparison
from zerotop.analysis.reports.recording_index import Recording
from zerotop.ui.base.interfaces import Controller, Source


class RefusedError(Exception):
    """It cannot be done; the text is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job of this node that nobody records."""

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

    source: Source
    controller: Controller | None  # None where nothing runs
    title: str
    play_from_ns: int | None = None  # None goes along with the end


LibraryItem = Recording | RunningJob


class RecordingLibrary(Protocol):
    """The user's recordings. Reads them by itself, meanwhile; what may take long raises Refused or returns a sentence."""

    folder_name: str
    """Where they lie."""

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """What is known of now; the same object while nothing has changed."""

    @property
    def running_jobs(self) -> tuple[RunningJob, ...]:
        """Likewise."""

    def start(self) -> None:
        """Lists the recordings at once, and from now on reads what changes."""

    def stop(self) -> None:
        """Stops that."""

    def open(self, item: LibraryItem) -> OpenedRecording:
        """A recording; one of a job that nobody records is begun, from outside."""

    def export(self, recording: Recording) -> str:
        """Writes the steps as CSV to the current folder; says where."""

    def pack(self, recording: Recording) -> str:
        """Writes it as one small file to the current folder; says where."""

    def describe_obstacle(self, recording: Recording) -> str:
        """Why it cannot be deleted, as a sentence; "" where it can."""

    def delete(self, recording: Recording) -> str:
        """Deletes it for good; says what that freed."""

    def compare(self, recordings: Sequence[Recording]) -> Comparison:
        """Reads them whole."""

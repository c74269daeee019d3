"""Real recordings, packed: ``tests/recordings/README.md`` says how each was made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.demo import RECORDING_PATH
from zerotop.recording.packed.packing import SUFFIX, unpack_files
from zerotop.recording.reader import Recording
from zerotop.recording.storage import UnpackedFolder

FOLDER = Path(__file__).resolve().parent.parent / "recordings"


def open_without_probe(name: str, into: Path) -> Recording:
    """Open a recording without the files of its ranks, as samplers alone would have made it."""
    folder = unpack_to_folder(name, into)
    for path in folder.glob("*-rank*"):
        path.unlink()
    return Recording.open(folder)


def list_recordings() -> list[str]:
    """Return the names of all recordings; one of them is shipped with the demo."""
    return sorted(path.stem for path in (RECORDING_PATH, *FOLDER.glob(f"*{SUFFIX}")))


def find_packed_file(name: str) -> Path:
    """Return the path of a packed recording."""
    return RECORDING_PATH if name == RECORDING_PATH.stem else FOLDER / (name + SUFFIX)


def open_recording(name: str) -> Recording:
    """Open a recording, which is unpacked once for all tests."""
    return Recording.from_folder(UnpackedFolder(find_packed_file(name), dict(unpack_recording(name))))


def open_searched(recording: str | Recording) -> RecordingSource:
    """Open a recording for screens, with all its findings: on a busy machine one look does not get that far."""
    source = RecordingSource(open_recording(recording) if isinstance(recording, str) else recording)
    while source.search_findings().is_behind:
        pass
    return source


@cache
def unpack_recording(name: str) -> dict[str, bytes]:
    """Return the contents of its files, by name."""
    return unpack_files(find_packed_file(name))


def has_table(name: str, table: str) -> bool:
    """Return whether a recording has a table."""
    return any(file.startswith(f"{table}-") for file in unpack_recording(name))


def unpack_to_folder(name: str, into: Path) -> Path:
    """Unpack a recording into a new folder in ``into``; return that folder, the recording before it was packed."""
    recording = into / name
    recording.mkdir()
    for file, content in unpack_recording(name).items():
        (recording / file).write_bytes(content)
    return recording


def rewrite_events(name: str, change: Callable[[dict[str, Any]], object]) -> Recording:
    """Open a recording with each line of its event files, headers too, replaced by ``change``."""
    files = {
        file: content if not file.endswith(".jsonl") else b"".join(map(_make_line_rewriter(change), content.splitlines()))
        for file, content in unpack_recording(name).items()
    }
    return Recording.from_folder(UnpackedFolder(find_packed_file(name), files))


def _make_line_rewriter(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    return lambda line: json.dumps(change(json.loads(line))).encode() + b"\n"


class Label(NamedTuple):
    """A finding that must be, and the step in which it begins, more or less."""

    name: str
    step: int | None
    within: int = 0  # steps more or less

    def fits_finding(self, found: tuple[str, int | None]) -> bool:
        """Return whether that is the labelled finding."""
        name, step = found
        same = step == self.step if step is None or self.step is None else abs(step - self.step) <= self.within
        return name == self.name and same


def read_labels(kind: str = "findings") -> dict[str, list[Label]]:
    """Return the findings that each recording must have, and no others; they are set by hand, with reasons.

    ``outside``: without the files of the ranks. ``missed``: staged faults that are known to have no finding.
    """
    entries = json.loads((FOLDER / "labels.json").read_text())
    return {name: [Label(*label) for label in entry.get(kind, ())] for name, entry in entries.items()}


def compare_findings(
    expected: Iterable[Label], found: Iterable[tuple[str, int | None]]
) -> tuple[list[str], list[str], list[str]]:
    """Return the kinds of right, wrong and missed findings."""
    right, wrong, missed = [], list(found), []
    for label in expected:
        fitting = next((one for one in wrong if label.fits_finding(one)), None)
        if fitting is None:
            missed.append(label.name)
        else:
            wrong.remove(fitting)
            right.append(label.name)
    return right, [name for name, _ in wrong], missed

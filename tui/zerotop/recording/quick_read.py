"""Read only the part of a recording that a summary line needs: no output, no CPU samples, the spans of one rank."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from zerotop.recording.packed.packing import unpack_files
from zerotop.recording.reader import Recording, RecordingError
from zerotop.recording.storage import Directory, UnpackedFolder
from zerotop_probe.recording.directory import SESSION_FILE

# The events of this many ranks are enough for a summary.
_MAX_RANKS = 64
_RANK_PATTERN = re.compile(r"-rank(\d+)-")


class Stamp(NamedTuple):
    """A value that changes with the recording."""

    bytes: int  # on disk
    files: int
    changed_ns: int  # unix time of the last change of a file


def read_stamp(path: Path) -> Stamp:
    """Read the stamp of a recording folder or a packed recording. Raise OSError if it is not accessible."""
    if not path.is_dir():
        status = path.stat()
        return Stamp(status.st_size, 1, status.st_mtime_ns)
    size = files = changed_ns = 0
    with os.scandir(path) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            size, files, changed_ns = size + status.st_size, files + 1, max(changed_ns, status.st_mtime_ns)
    return Stamp(size, files, changed_ns)


def open_glimpse(path: Path) -> Recording:
    """Open a recording without most of its files. Raise RecordingError like :meth:`Recording.open`.

    It contains the events, the spans of the lowest rank, folded steps, the probe's cost and losses in every rank, host
    memory (whose samples show when the recording was last written), and the allocator samples of all ranks or else their
    process memory.
    """
    try:
        if path.is_dir():
            return Recording.from_folder(_GlimpseDirectory(path))
        if not path.is_file():
            raise RecordingError(f"There is no recording at {path}.")
        return Recording.from_folder(UnpackedFolder(path, unpack_files(path, choose_files)))
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}.") from None


def choose_files(names: set[str]) -> set[str]:
    """Return the names of the files that :func:`open_glimpse` needs."""
    spans = {name for name in names if name.startswith("spans-")}
    lowest = min(map(_parse_rank, spans), default=0)
    memory = {name for name in names if name.startswith("allocator-")} or {n for n in names if n.startswith("processes-")}
    events = {name for name in names if name.startswith("events-") and _parse_rank(name) < _MAX_RANKS}
    others = {name for name in names if name.startswith(("probe-", "hosts-", "folded-"))}
    return {SESSION_FILE} & names | {name for name in spans if _parse_rank(name) == lowest} | memory | others | events


def _parse_rank(name: str) -> int:
    match = _RANK_PATTERN.search(name)
    return int(match[1]) if match else -1


class _GlimpseDirectory(Directory):
    """A recording folder that lists only those files."""

    def list_files(self) -> list[str]:
        return sorted(choose_files(set(super().list_files())))

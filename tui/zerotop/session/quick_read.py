"""As much of a recording as a line about it needs: no output, no samples of processors, the spans of one rank."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from zerotop.session.packing import unpack_files
from zerotop.session.reader import Session, SessionError
from zerotop.session.storage import Directory, UnpackedFolder
from zerotop_probe.recording.directory import SESSION_FILE

# A job of more ranks than this says the same in the events of these.
_MAX_RANKS = 64
_RANK_PATTERN = re.compile(r"-rank(\d+)-")


class Stamp(NamedTuple):
    """What changes whenever a recording does."""

    bytes: int  # on disk
    files: int
    changed_ns: int  # unix time of the last change of any file


def read_stamp(path: Path) -> Stamp:
    """Of a session directory or a packed recording. Raises OSError where it cannot be looked at."""
    if not path.is_dir():
        status = path.stat()
        return Stamp(status.st_size, 1, status.st_mtime_ns)
    size = files = changed_ns = 0
    with os.scandir(path) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            size, files, changed_ns = size + status.st_size, files + 1, max(changed_ns, status.st_mtime_ns)
    return Stamp(size, files, changed_ns)


def open_glimpse(path: Path) -> Session:
    """Opens a recording without most of its files. Raises SessionError as :meth:`Session.open` does.

    It has the events, the spans of the lowest rank, what every rank's probe lost, the nodes' own memory, by whose samples
    one knows when it was written last, and of all ranks what the allocator held, or else their memory on the host.
    """
    try:
        if path.is_dir():
            return Session.from_folder(_GlimpseDirectory(path))
        if not path.is_file():
            raise SessionError(f"There is no session at {path}.")
        return Session.from_folder(UnpackedFolder(path, unpack_files(path, choose_files)))
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {error.strerror}.") from None


def choose_files(names: set[str]) -> set[str]:
    """Of the names of a recording's files those that a glimpse needs."""
    spans = {name for name in names if name.startswith("spans-")}
    lowest = min(map(_parse_rank, spans), default=0)
    memory = {name for name in names if name.startswith("allocator-")} or {n for n in names if n.startswith("processes-")}
    events = {name for name in names if name.startswith("events-") and _parse_rank(name) < _MAX_RANKS}
    others = {name for name in names if name.startswith(("probe-", "hosts-"))}
    return {SESSION_FILE} & names | {name for name in spans if _parse_rank(name) == lowest} | memory | others | events


def _parse_rank(name: str) -> int:
    found = _RANK_PATTERN.search(name)
    return int(found[1]) if found else -1


class _GlimpseDirectory(Directory):
    """A session directory in which only those files are seen."""

    def list_files(self) -> list[str]:
        return sorted(choose_files(set(super().list_files())))

"""Reading a recording, whole or still growing.

Tables are memory-mapped, so that opening costs nothing however long the job ran. A torn last record waits for its rest, a
missing file is a table without rows, an unknown newer field is ignored. Nothing read is ever unpickled or evaluated.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.tables import FORMAT_MAJOR, TABLES

# A header line longer than this is not one of ours.
_LONGEST_HEADER = 1 << 20
# Silence after which a recording whose end nobody saw counts as ended. The sampler writes ten times a second.
_LIVE_NS = 5_000_000_000


class SessionError(Exception):
    """A recording cannot be read; the text is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Event:
    """One rare fact (see ``zerotop_probe.recording.events``) and who wrote it."""

    unix_ns: int
    name: str
    facts: dict[str, Any]
    role: str
    rank: int
    host: str
    pid: int


@dataclass
class Clocks:
    """What turns CLOCK_MONOTONIC into unix time. Writers of one boot share one clock, whatever the wall clock did since."""

    offsets: dict[str, int] = field(default_factory=dict)

    def offset_ns(self, header: dict[str, Any]) -> int:
        """What to add to a monotonic time of the file with this header."""
        pair = header["clock"]
        offset = int(pair["unix_ns"]) - int(pair["monotonic_ns"])
        boot = header.get("writer", header).get("boot") or ""
        return self.offsets.setdefault(boot, offset) if boot else offset


def read_header(line: bytes, name: str) -> dict[str, Any]:
    """A file's first line. Raises SessionError when it is of a newer format, ValueError when it is no header."""
    header = json.loads(line)
    if not isinstance(header, dict) or "clock" not in header:
        raise ValueError(f"{name} has no header")
    check_format(header, name)
    return header


def check_format(header: dict[str, Any], name: str) -> None:
    """Raises SessionError for a recording that a newer zerotop made."""
    version = header.get("zerotop")
    if not isinstance(version, list) or not version or not isinstance(version[0], int):
        raise ValueError(f"{name} does not say its format")
    if version[0] > FORMAT_MAJOR:
        raise SessionError(
            f"{name} has recording format {version[0]}, this zerotop reads up to {FORMAT_MAJOR}: use a newer zerotop."
        )


class Source:
    """One table of one writer: whole records, memory-mapped, growing with :meth:`refresh`."""

    def __init__(self, path: Path, header: dict[str, Any], data_offset: int, offset_ns: int) -> None:
        writer = header["writer"]
        self.path = path
        self.table = str(header["table"])
        self.role = str(writer["role"])
        self.rank = int(writer["rank"])
        self.host = str(writer["host"])
        self.pid = int(writer["pid"])
        self.offset_ns = offset_ns
        self._data_offset = data_offset
        self._dtype = np.dtype([(str(name), str(code)) for name, code in header["dtype"]])
        needed = {item.name for item in TABLES[self.table].fields if item.name != "pad"}
        if not needed <= set(self._dtype.names or ()):
            raise ValueError(f"{path.name} lacks columns")
        if self._dtype.hasobject:
            raise ValueError(f"{path.name} has columns that are no plain values")
        self.array: NDArray[Any] = np.empty(0, self._dtype)
        self._known = TABLES[self.table].known
        self.refresh()

    def refresh(self) -> bool:
        """Maps what has been added since. True when there was a whole record more."""
        try:
            size = self.path.stat().st_size - self._data_offset
        except OSError:
            return False  # the folder is gone; what is mapped stays readable
        count = max(0, size) // self._dtype.itemsize
        if count <= len(self.array):
            return False
        try:
            mapped = np.memmap(self.path, self._dtype, "r", self._data_offset, (count,))
        except (OSError, ValueError):
            return False
        self.array = mapped.view(np.ndarray)
        return True

    def count_known(self, cursor_ns: int) -> int:
        """How many records could have been read at a moment in unix time: a prefix of :attr:`array`."""
        return bisect_right(self.array[self._known], cursor_ns - self.offset_ns)

    def last_tick(self, cursor_ns: int, oldest_ns: int = 0) -> NDArray[Any]:
        """The records of the last sampler tick up to the cursor (they share one time); none if older than ``oldest_ns``."""
        end = self.count_known(cursor_ns)
        if not end:
            return self.array[:0]
        times = self.array[self._known]
        time_ns = times[end - 1]
        begin = end - 1
        while begin and times[begin - 1] == time_ns:
            begin -= 1
        return self.array[begin:end] if time_ns + self.offset_ns >= oldest_ns else self.array[:0]

    @property
    def bounds_ns(self) -> tuple[int, int] | None:
        """Unix times of the first and the last record."""
        if not len(self.array):
            return None
        times = self.array[self._known]
        return int(times[0]) + self.offset_ns, int(times[-1]) + self.offset_ns


class _EventFile:
    """Tails one JSON-lines file. A line that is no event is counted and passed over."""

    def __init__(self, path: Path, clocks: Clocks) -> None:
        self.path = path
        self.damaged = 0
        self._clocks = clocks
        self._position = 0
        self._header: dict[str, Any] | None = None
        self._offset_ns = 0

    def read(self) -> list[Event]:
        """The events of the whole lines added since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        found = [self._event(line) for line in whole.split(b"\n") if line.strip()]
        return [event for event in found if event is not None]

    def _event(self, line: bytes) -> Event | None:
        try:
            if self._header is None:
                self._header = read_header(line, self.path.name)
                self._offset_ns = self._clocks.offset_ns(self._header)
                return None
            facts = json.loads(line)
            writer = self._header["writer"]
            time_ns, name = int(facts.pop("time_ns")) + self._offset_ns, str(facts.pop("event"))
            return Event(time_ns, name, facts, writer["role"], writer["rank"], writer["host"], writer["pid"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            self.damaged += 1
            return None


class Session:
    """A recording: its tables by name, its events in order of time, its output."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info
        self.name = str(info.get("name") or path.name)
        self.sources: dict[str, list[Source]] = {name: [] for name in TABLES}
        self.events: list[Event] = []
        self.damaged_files = 0
        self._clocks = Clocks()
        self._clocks.offset_ns(info)
        self._event_files: list[_EventFile] = []
        self._known_files: set[str] = set()
        self.refresh()

    @classmethod
    def open(cls, path: Path) -> Session:
        """Opens a session directory.

        Raises SessionError, with a sentence, when there is none, it is no session, or it is of a newer format.
        """
        if not path.is_dir():
            raise SessionError(f"There is no session at {path}.")
        try:
            info = json.loads((path / SESSION_FILE).read_bytes())
            check_format(info, SESSION_FILE)
            Clocks().offset_ns(info)
        except FileNotFoundError:
            raise SessionError(f"{path} holds no recording: it has no {SESSION_FILE}.") from None
        except OSError as error:
            raise SessionError(f"{path} cannot be read: {error.strerror}.") from None
        except (ValueError, AttributeError, KeyError, TypeError, OverflowError, RecursionError):
            raise SessionError(f"{path / SESSION_FILE} is damaged: the recording cannot be read.") from None
        return cls(path, info)

    def refresh(self) -> bool:
        """Reads what was written since the last call. True when there was anything."""
        new = self._find_files()
        for sources in self.sources.values():
            for source in sources:
                new |= source.refresh()
        fresh = [event for file in self._event_files for event in file.read()]
        if fresh:
            self.events = sorted([*self.events, *fresh], key=lambda event: event.unix_ns)
        return new or bool(fresh)

    def _find_files(self) -> bool:
        try:
            names = sorted(set(os.listdir(self.path)) - self._known_files)
        except OSError:
            return False
        new = False
        for name in names:
            path = self.path / name
            if name.startswith("events-") and name.endswith(".jsonl"):
                self._event_files.append(_EventFile(path, self._clocks))
                self._known_files.add(name)
            elif name.endswith(".rec"):
                new |= self._add_source(path)
        return new

    def _add_source(self, path: Path) -> bool:
        """Opens a table's file; one whose header is not yet whole is looked at again, a damaged one is passed over."""
        try:
            with open(path, "rb") as file:
                line = file.readline(_LONGEST_HEADER)
            if not line.endswith(b"\n"):
                return False
            self._known_files.add(path.name)
            header = read_header(line, path.name)
            if header["table"] in self.sources:
                source = Source(path, header, len(line), self._clocks.offset_ns(header))
                self.sources[source.table].append(source)
                return True
        except SessionError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            self.damaged_files += 1
        return False

    def last_event(self, name: str, cursor_ns: int | None = None) -> Event | None:
        """The latest event of a name up to the cursor."""
        for event in reversed(self.events):
            if event.name == name and (cursor_ns is None or event.unix_ns <= cursor_ns):
                return event
        return None

    @property
    def begin_ns(self) -> int:
        """When the session was made, in unix nanoseconds."""
        return int(self.info["clock"]["unix_ns"])

    @property
    def end_ns(self) -> int:
        """The latest moment that anything was recorded of; now while the recording is live."""
        return time.time_ns() if self.live else self.last_written_ns

    @property
    def last_written_ns(self) -> int:
        """The time of the last record or event."""
        bounds = [source.bounds_ns for sources in self.sources.values() for source in sources]
        times = [bound[1] for bound in bounds if bound] + [event.unix_ns for event in self.events[-1:]]
        return max([self.begin_ns, *times])

    @property
    def live(self) -> bool:
        """Whether somebody still writes it: its end was not recorded and it is not silent."""
        ended, started = self.last_event("job_ended"), self.last_event("job_started")
        if ended is not None and (started is None or ended.unix_ns >= started.unix_ns):
            return False
        return time.time_ns() - self.last_written_ns < _LIVE_NS

    @property
    def records(self) -> int:
        """Records and events read so far."""
        return sum(len(s.array) for sources in self.sources.values() for s in sources) + len(self.events)

    def output_tail(self, cursor_ns: int, size: int = 32768) -> bytes:
        """The last bytes of the job's output up to the cursor, of all nodes one after another."""
        pieces = []
        for source in self.sources["output"]:
            known = source.count_known(cursor_ns)
            if known:
                last = source.array[known - 1]
                end = int(last["offset"]) + int(last["length"])
                log = source.path.with_name(source.path.stem + ".log")
                try:
                    with open(log, "rb") as file:
                        file.seek(max(0, end - size))
                        pieces.append(file.read(min(size, end)))
                except OSError:
                    continue
        return b"".join(pieces)

"""Reading a recording, whole or still growing.

Tables are memory-mapped, so that opening costs nothing however long the job ran; a packed recording is unpacked in memory.
A torn last record waits for its rest, a missing file is a table without rows, an unknown newer field is ignored. Nothing
read is ever unpickled or evaluated.
"""

from __future__ import annotations

import contextlib
import json
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from zerotop.session.files import Event, EventFile, Source
from zerotop.session.headers import DAMAGE_ERRORS, Clocks, SessionError, check_format, read_header
from zerotop.session.packing import unpack_files
from zerotop.session.storage import Directory, Folder, UnpackedFolder, read_first_line
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.tables import TABLES

__all__ = ["Event", "Session", "SessionError", "Source"]

# Silence after which a recording whose end nobody saw counts as ended. The sampler writes ten times a second.
_SILENCE_NS = 5_000_000_000
_BEGINNINGS, _ENDS = (events.JOB_STARTED, events.ATTACHED), (events.JOB_ENDED, events.DETACHED)

_CONTROL_EVENTS = "events-control-"


class Session:
    """A recording: its tables by name, its events in order of time, its output."""

    def __init__(self, path: Path, info: dict[str, Any], folder: Folder | None = None) -> None:
        self.path = path
        self._folder: Folder = folder or Directory(path)
        self.info = info
        self.name = str(info.get("name") or path.name)
        self.sources: dict[str, list[Source]] = {name: [] for name in TABLES}
        self._sources_by_host: dict[tuple[str, str], list[Source]] = {}
        self._sources_by_process: dict[tuple[str, str, int], list[Source]] = {}
        self.events: list[Event] = []
        self._events_by_name: dict[str, list[Event]] = {}
        self._events_by_writer: dict[tuple[str, str, int, int], list[Event]] = {}
        self.damaged_files = 0
        self._clocks = Clocks()
        self._clocks.find_offset(info)
        self._event_files: list[EventFile] = []
        self._known_files: set[str] = set()
        self.last_written_ns = self.begin_ns
        """The time of the last record or event."""
        self.refresh()

    @classmethod
    def open(cls, path: Path) -> Session:
        """Opens a session directory or a packed recording.

        Raises SessionError, with a sentence, when there is none, it is no session, or it is of a newer format.
        """
        if path.is_dir():
            return cls(path, _load_info(Directory(path)))
        if not path.is_file():
            raise SessionError(f"There is no session at {path}.")
        return cls.from_folder(UnpackedFolder(path, unpack_files(path)))

    @classmethod
    def from_folder(cls, folder: Folder) -> Session:
        """The session whose files lie in ``folder``. Raises SessionError as :meth:`open` does."""
        return cls(folder.path, _load_info(folder), folder)

    def refresh(self) -> bool:
        """Read what was written since the last call. True when there was anything."""
        new = self._find_files()
        # Events first: who reads that a process is gone then has its last records too.
        fresh: list[Event] = []
        for file in self._event_files:
            fresh += file.read_new()
        if fresh:
            self.events = sorted([*self.events, *fresh], key=_get_event_time)
            self._index_events(fresh)
            self.last_written_ns = max(self.last_written_ns, self.events[-1].unix_ns)
        for source in chain.from_iterable(self.sources.values()):
            if source.refresh():
                new = True
                self._update_last_written(source)
        return new or bool(fresh)

    def _update_last_written(self, source: Source) -> None:
        self.last_written_ns = max(self.last_written_ns, source.last_ns or 0)

    def _index_events(self, fresh: Sequence[Event]) -> None:
        """Takes events in by name and writer. With many ranks there are tens of thousands, of which few are asked for."""
        touched: dict[int, list[Event]] = {}
        for event in fresh:
            named = self._events_by_name.setdefault(event.name, [])
            by_writer = self._events_by_writer.setdefault((event.name, event.host, event.pid, event.rank), [])
            for events_of_it in (named, by_writer):
                events_of_it.append(event)
                touched[id(events_of_it)] = events_of_it
        for events_of_it in touched.values():
            events_of_it.sort(key=_get_event_time)

    def events_named(self, name: str, cursor_ns: int | None = None) -> Sequence[Event]:
        """The events of a name up to a moment in unix time, in order; None is the end."""
        named = self._events_by_name.get(name, [])
        return named[:] if cursor_ns is None else named[: bisect_right(named, cursor_ns, key=_get_event_time)]

    def process_events(self, name: str, host: str, pid: int, rank: int, cursor_ns: int) -> Sequence[Event]:
        """Those of them that a process of a rank wrote."""
        named = self._events_by_writer.get((name, host, pid, rank), [])
        return named[: bisect_right(named, cursor_ns, key=_get_event_time)]

    def host_sources(self, table: str, host: str) -> Sequence[Source]:
        """The tables of a name that writers on a node wrote."""
        return self._sources_by_host.get((table, host), ())

    def process_sources(self, table: str, host: str, pid: int) -> Sequence[Source]:
        """The tables of a name that a process wrote: several where its number was another's, or its probe put in again."""
        return self._sources_by_process.get((table, host, pid), ())

    def find_source(self, table: str, host: str, pid: int, at_ns: int | None = None) -> Source | None:
        """The one of those that it wrote at a moment (unix time; None: now), or first; None where there are none."""
        written = self.process_sources(table, host, pid)
        if len(written) < 2:
            return written[0] if written else None
        begun = [source for source in written if at_ns is None or source.created_ns <= at_ns]
        return max(begun, key=_get_created_ns) if begun else min(written, key=_get_created_ns)

    def release_memory(self) -> None:
        """Gives the memory of what was read back to the system, see :meth:`Source.release`: for who has read much."""
        for sources in self.sources.values():
            for source in sources:
                source.release_memory()

    @property
    def damaged_lines(self) -> int:
        """Lines of events that could not be read and were passed over, or held facts that make no sense."""
        return sum(file.damaged_lines for file in self._event_files)

    def _find_files(self) -> bool:
        try:
            names = [name for name in self._folder.list_files() if name not in self._known_files]
        except OSError:
            return False
        new = False
        for name in sorted(names, key=_file_order):
            if name.startswith("events-") and name.endswith(".jsonl"):
                if name.startswith(_CONTROL_EVENTS):
                    self._adopt_clock(name)
                self._event_files.append(EventFile(self._folder, name, self._clocks))
                self._known_files.add(name)
            elif name.endswith(".rec"):
                new |= self._add_source(name)
        return new

    def _adopt_clock(self, name: str) -> None:
        """Takes a node's times by this file if its writer knew how its clock stands to that of the others."""
        with contextlib.suppress(OSError, SessionError, *DAMAGE_ERRORS):
            header = read_header(read_first_line(self._folder, name), name)
            if header.get("aligned"):
                self._clocks.find_offset(header)

    def _add_source(self, name: str) -> bool:
        """Opens a table's file; one whose header is not yet whole is looked at again, a damaged one is passed over."""
        try:
            line = read_first_line(self._folder, name)
            if not line.endswith(b"\n"):
                return False
            self._known_files.add(name)
            header = read_header(line, name)
            if header["table"] in self.sources:
                source = Source(self._folder, name, header, len(line), self._clocks.find_offset(header))
                self.sources[source.table].append(source)
                self._update_last_written(source)
                self._sources_by_host.setdefault((source.table, source.host), []).append(source)
                self._sources_by_process.setdefault((source.table, source.host, source.pid), []).append(source)
                return True
        except (OSError, *DAMAGE_ERRORS):
            self.damaged_files += 1
        return False

    @property
    def begin_ns(self) -> int:
        """When the session was made, in unix nanoseconds."""
        return int(self.info["clock"]["unix_ns"])

    @property
    def end_ns(self) -> int:
        """The latest moment that anything was recorded of; now while the recording is live."""
        return time.time_ns() if self.is_live else self.last_written_ns

    @property
    def is_over(self) -> bool:
        """Whether its end was recorded: that of its job, or of being attached to one."""
        turns = [event for name in _BEGINNINGS + _ENDS for event in self._events_by_name.get(name, ())[-1:]]
        return bool(turns) and max(turns, key=_get_event_time).name in _ENDS

    @property
    def is_live(self) -> bool:
        """Whether somebody still writes it: its end was not recorded and it is not silent. Nobody writes a packed one."""
        return self._folder.can_grow and not self.is_over and time.time_ns() - self.last_written_ns < _SILENCE_NS

    def read_output_tail(self, cursor_ns: int, size: int = 32768) -> bytes:
        """The last bytes of the job's output up to the cursor, of all nodes one after another."""
        return b"".join(_read_tail(source, cursor_ns, size) for source in self.sources["output"])


def _read_tail(source: Source, cursor_ns: int, size: int) -> bytes:
    known = source.count_until(cursor_ns)
    if not known:
        return b""
    last = source.array[known - 1]
    end = int(last["offset"]) + int(last["length"])
    return source.read_output(max(0, end - size), end)


def _get_event_time(event: Event) -> int:
    return event.unix_ns


def _file_order(name: str) -> tuple[bool, str]:
    """Who has a node join may say how its clock stands to that of the others."""
    return not name.startswith(_CONTROL_EVENTS), name


def _get_created_ns(source: Source) -> int:
    return source.created_ns


def _load_info(folder: Folder) -> dict[str, Any]:
    """The session file. Raises SessionError."""
    path = folder.path
    try:
        info: dict[str, Any] = json.loads(folder.read_bytes(SESSION_FILE))
        check_format(info, SESSION_FILE)
        Clocks().find_offset(info)
    except FileNotFoundError:
        raise SessionError(f"{path} holds no recording: it has no {SESSION_FILE}.") from None
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {error.strerror}.") from None
    except DAMAGE_ERRORS:
        raise SessionError(f"{path / SESSION_FILE} is damaged: the recording cannot be read.") from None
    return info

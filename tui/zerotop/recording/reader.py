"""Read a recording, complete or still growing.

Tables are memory-mapped, so that opening takes no longer for a long job; a packed recording is unpacked in memory. A torn
last record waits for its rest, a missing file is a table without rows, and newer fields are ignored. Nothing is ever
unpickled or evaluated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from zerotop.recording.events.event_files import E, EventBudget, EventFile
from zerotop.recording.events.event_index import EventIndex, get_event_time
from zerotop.recording.headers import DAMAGE_ERRORS, Clocks, RecordingError, parse_writer, read_header
from zerotop.recording.memory_map import keep_freed_memory
from zerotop.recording.moments.at import At, Moments
from zerotop.recording.packed.packing import SUFFIX, unpack_files
from zerotop.recording.recording_info import load_info
from zerotop.recording.storage import Directory, Folder, UnpackedFolder, read_first_line
from zerotop.recording.table_files import Source, refresh_together
from zerotop_probe.recording import events, segments
from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.event_base import Event
from zerotop_probe.recording.segments import parse_name
from zerotop_probe.recording.tables import PROBE, TABLES

__all__ = ["Event", "Recording", "RecordingError", "Source"]

SILENCE_NS = 5_000_000_000
"""A recording without an end counts as ended after this silence. The sampler writes ten times a second."""

_BEGINNINGS: tuple[type[Event], ...] = (events.JobStarted, events.Attached)
_ENDS: tuple[type[Event], ...] = (events.JobEnded, events.Detached)

# A sampler folds and removes files every other minute.
_MAX_TRIES = 5

# A job may go on for long without its samplers.
_LATEST_EVENT_NS = 30 * 86_400 * 10**9
_CONTROL_EVENTS = "events-control-"
_MANY_SOURCES, _RARE_REFRESHES = 1_000, 4
# Tables of one kind by one process, which begins a new one each time that the probe is injected into it again.
_MOST_OF_PROCESS = 200


class Recording:
    """A recording: its tables by name, its events by time, its output."""

    def __init__(self, path: Path, info: dict[str, Any], folder: Folder | None = None) -> None:
        self.path = path
        self._folder: Folder = folder or Directory(path)
        self.info = info
        self.name = path.resolve().name.removesuffix(SUFFIX)  # the one that it was packed or renamed to
        self.sources: dict[str, list[Source]] = {name: [] for name in TABLES}
        self._sources_by_stem: dict[str, Source] = {}
        self._sources_by_host: dict[tuple[str, str], list[Source]] = {}
        self._sources_by_process: dict[tuple[str, str, int], list[Source]] = {}
        self._events = EventIndex()
        self.damaged_files = 0
        self._misses_files = False
        self._event_budget = EventBudget()
        self._impossible_events = 0
        self.held_bytes = 0
        """Size on disk of files that were removed since they were opened; it is freed when the recording is closed."""
        self._clocks = Clocks()
        self._clocks.find_offset(info)
        self._event_files: list[EventFile] = []
        self._known_files: set[str] = set()
        self._begun_files: set[str] = set()  # without a whole header so far
        self._moments = Moments()
        self.kept: dict[Any, Any] = {}
        """What has been computed of the whole recording."""
        self.last_written_ns = self.begin_ns
        """Unix time of the last record or event."""
        self._is_opened = False
        self._refreshes = 0
        keep_freed_memory()
        self.refresh()
        self._is_opened = True

    @classmethod
    def open(cls, path: Path) -> Recording:
        """Open a recording folder or a packed recording.

        Raise RecordingError, with a sentence, if it is missing, no recording, or of a newer format.
        """
        if path.is_dir():
            for _ in range(_MAX_TRIES):
                recording = cls(path, load_info(Directory(path)))
                if not recording.is_incomplete:
                    break
            return recording
        if not path.is_file():
            raise RecordingError(f"There is no recording at {path}.")
        return cls.from_folder(UnpackedFolder(path, unpack_files(path)))

    @classmethod
    def from_folder(cls, folder: Folder) -> Recording:
        """Open the recording with the files in ``folder``. Raise RecordingError like :meth:`open`."""
        return cls(folder.path, load_info(folder), folder)

    @property
    def is_incomplete(self) -> bool:
        """Whether files were folded and removed while it was opened: their replacements may not have been read."""
        return self._misses_files or any(source.is_incomplete for source in chain.from_iterable(self.sources.values()))

    def refresh(self) -> bool:
        """Read the records written since the last call. Return whether there were any.

        Raise RecordingError if a file has lost records that were read before, because results from them cannot be undone.
        """
        new = self._find_files()
        # Events first: a reader that knows that a process is gone then also has its last records.
        fresh: list[Event] = []
        for file in self._event_files:
            try:
                fresh += file.read_new()
            except RecordingError as error:
                self._refuse_newer(error)
        sources = [*chain.from_iterable(self.sources.values())]
        grown = refresh_together(self._choose_due(sources))
        for source in sources:
            if source.is_cut:
                raise RecordingError(f"{source.path} was cut short while it was read: open the recording again.")
        for source in grown:
            self._update_last_written(source)
        self._add_new_events(fresh)
        new |= bool(grown)
        new |= self._admit_records(sources) or bool(fresh)
        if new:
            self._moments.forget()
        return new

    def _choose_due(self, sources: Sequence[Source]) -> Sequence[Source]:
        """Return the tables to read now: of very many, each with the probe's own cost only in one of some refreshes."""
        self._refreshes += 1
        if not self._is_opened or len(sources) < _MANY_SOURCES:
            return sources
        turn = self._refreshes % _RARE_REFRESHES
        return [
            source for number, source in enumerate(sources) if source.table != PROBE.name or number % _RARE_REFRESHES == turn
        ]

    def at(self, cursor_ns: int | None = None) -> At:
        """Return the recording at a moment in unix time, or at its end: the same object until more is read."""
        return self._moments.find(self, self.last_written_ns if cursor_ns is None else cursor_ns)

    def _admit_records(self, sources: Sequence[Source]) -> bool:
        """Use waiting records if the recording is known to go on: others are as late, or two tables go on after a pause."""
        waiting, admitted = [source for source in sources if source.waiting_records], False
        resumed = sorted(source.resumed_ns for source in waiting if source.resumed_ns is not None)
        if resumed and len(resumed) >= min(2, len(sources)):
            self.last_written_ns = max(self.last_written_ns, resumed[0])
        while found := [source for source in waiting if source.admit_until(self.last_written_ns)]:
            admitted = True
            for source in found:
                self._update_last_written(source)
        return admitted

    def _add_new_events(self, fresh: list[Event]) -> None:
        """Add events, except those that are much later than all records, whose time is impossible."""
        if any(source.last_ns for source in chain.from_iterable(self.sources.values())):
            latest_ns = self.last_written_ns + _LATEST_EVENT_NS
            possible = [event for event in fresh if event.unix_ns <= latest_ns]
            self._impossible_events += len(fresh) - len(possible)
            fresh = possible
        if fresh:
            self._events.add(fresh)
            self.last_written_ns = max(self.last_written_ns, *(event.unix_ns for event in fresh))

    def _update_last_written(self, source: Source) -> None:
        self.last_written_ns = max(self.last_written_ns, source.last_ns or 0)

    def events_of(self, kind: type[E], cursor_ns: int | None = None) -> Sequence[E]:
        """Return the events of a kind up to the cursor (unix time; None: all), by time."""
        return self._events.find_all(kind, cursor_ns)

    def process_events(self, kind: type[E], host: str, pid: int, rank: int, cursor_ns: int) -> Sequence[E]:
        """Return the events of a kind that a rank's process wrote up to the cursor, by time."""
        return self._events.find_written(kind, host, pid, rank, cursor_ns)

    def host_sources(self, table: str, host: str) -> Sequence[Source]:
        """Return the tables of a name that were written on a node."""
        return self._sources_by_host.get((table, host), ())

    def process_sources(self, table: str, host: str, pid: int) -> Sequence[Source]:
        """Return the tables of a name that a process wrote: several if its pid was reused or its probe injected again."""
        return self._sources_by_process.get((table, host, pid), ())

    def find_sibling(self, table: str, source: Source) -> Source | None:
        """Return the table that belongs to the same writer and its same start of recording as ``source``."""
        return self._sources_by_stem.get(table + source.writer_name)

    def find_source(self, table: str, host: str, pid: int, at_ns: int | None = None) -> Source | None:
        """Return the table that the process was writing at a unix time (None: now), else its first, or None without any."""
        sources = self.process_sources(table, host, pid)
        if len(sources) < 2:
            return sources[0] if sources else None
        earlier = [source for source in sources if at_ns is None or source.created_ns <= at_ns]
        return max(earlier, key=_get_created_ns) if earlier else min(sources, key=_get_created_ns)

    def release_memory(self) -> None:
        """Release the memory of all records that were read, see :meth:`Source.release_memory`."""
        for sources in self.sources.values():
            for source in sources:
                source.release_memory()

    def close(self) -> None:
        """Let go of files that were removed, see :attr:`held_bytes`. Nothing can be read from this recording any more."""
        self._folder.release_files()
        self._moments.forget()  # they refer to this recording
        self.kept.clear()

    @property
    def damaged_records(self) -> int:
        """Number of skipped records among those read so far."""
        return sum(source.damaged_records for source in chain.from_iterable(self.sources.values()))

    @property
    def replaced_files(self) -> int:
        """Number of tables whose file was replaced by a shorter one after it was opened."""
        return sum(source.is_replaced for source in chain.from_iterable(self.sources.values()))

    @property
    def cut_files(self) -> int:
        """Number of files that lack records at their end, as far as that shows.

        Further files of their tables follow; or the recording is over, and they have no whole header.
        """
        return len(self._folder.cut_files) + (len(self._begun_files) if self.is_over else 0)

    @property
    def damaged_lines(self) -> int:
        """Number of event lines that were skipped or had invalid facts."""
        return self._impossible_events + sum(file.damaged_lines for file in self._event_files)

    def _find_files(self) -> bool:
        try:
            listed = self._folder.list_files()
        except OSError:
            return False
        names = [name for name in listed if name not in self._known_files]
        if SESSION_FILE in names:  # else the whole recording was deleted
            self.held_bytes = (len(self._known_files) + len(names) - len(listed)) * segments.SEGMENT_BYTES
        new = False
        for name in sorted(names, key=_file_order):
            if name.startswith("events-") and name.endswith(".jsonl"):
                if name.startswith(_CONTROL_EVENTS):
                    self._adopt_clock(name)
                self._add_events(name)
            elif name.endswith(".rec"):
                new |= self._add_table_file(name)
        return new

    def _add_table_file(self, name: str) -> bool:
        """Open a table's file, or add it to the table that it continues."""
        stem = (parse_name(name) or (name, 0))[0]
        source = self._sources_by_stem.get(stem)
        if source is None:
            return self._add_source(name, stem)
        try:
            if self._folder.file_size(name) < source.header_bytes:
                return False
        except OSError:
            return False
        source.add_segment(name)
        self._known_files.add(name)
        return True

    def _add_events(self, name: str) -> None:
        self._known_files.add(name)
        try:
            self._folder.file_size(name)
        except OSError:
            self.damaged_files += 1
        else:
            self._event_files.append(EventFile(self._folder, name, self._clocks, self._event_budget))

    def _adopt_clock(self, name: str) -> None:
        """Use this file's clock for its node if the writer has aligned it to the clocks of other nodes."""
        with contextlib.suppress(OSError, RecordingError, *DAMAGE_ERRORS):
            header = read_header(read_first_line(self._folder, name), name)
            if header.get("aligned"):
                self._clocks.find_offset(header)
                self._clocks.note_error(header)

    @property
    def clock_errors_ns(self) -> dict[str, int]:
        """How wrong the aligned clocks of nodes may be, by host; without those that nobody aligned or measured."""
        return self._clocks.errors_ns

    def _add_source(self, name: str, stem: str) -> bool:
        """Open a table's file. One with an incomplete header is tried again later; a damaged one is skipped and counted."""
        try:
            line = read_first_line(self._folder, name)
            if not line.endswith(b"\n"):
                self._begun_files.add(name)
                return False
            self._known_files.add(name)
            self._begun_files.discard(name)
            header = read_header(line, name)
            if header["table"] in self.sources:
                writer = parse_writer(header)
                if len(self.process_sources(str(header["table"]), writer.host, writer.pid)) >= _MOST_OF_PROCESS:
                    raise ValueError("too many files of one process")
                source = Source(self._folder, name, header, len(line), self._clocks.find_offset(header))
                self.sources[source.table].append(source)
                self._sources_by_stem[stem] = source
                self._sources_by_host.setdefault((source.table, source.host), []).append(source)
                self._sources_by_process.setdefault((source.table, source.host, source.pid), []).append(source)
                return True
        except FileNotFoundError:
            self._misses_files = True
        except RecordingError as error:
            self._refuse_newer(error)
        except (OSError, *DAMAGE_ERRORS):
            self._known_files.add(name)
            self.damaged_files += 1
        return False

    def _refuse_newer(self, error: RecordingError) -> None:
        """Refuse a recording with a file of a newer format; one that appears later only counts as damaged."""
        if not self._is_opened:
            raise error
        self.damaged_files += 1

    @property
    def events(self) -> list[Event]:
        """All events by time."""
        return self._events.ordered

    @property
    def begin_ns(self) -> int:
        """Unix time in nanoseconds at which the recording was created."""
        return int(self.info["clock"]["unix_ns"])

    @property
    def end_ns(self) -> int:
        """Unix time of the last record or event; now while the recording is live."""
        return time.time_ns() if self.is_live else self.last_written_ns

    @property
    def is_over(self) -> bool:
        """Whether the end of the job, or of the attachment to it, was recorded."""
        last: dict[str, Event] = {}  # by node: one that ended is not the end of a job that others began, too
        for event in sorted(chain(*map(self._events.find_all, _BEGINNINGS + _ENDS)), key=get_event_time):
            last[event.writer.host] = event
        return bool(last) and all(isinstance(event, _ENDS) for event in last.values())

    @property
    def is_live(self) -> bool:
        """Whether it is still being written: not packed, without a recorded end, and not silent."""
        return self._folder.can_grow and not self.is_over and time.time_ns() - self.last_written_ns < SILENCE_NS


def _file_order(name: str) -> tuple[bool, str]:
    """Sort control files first: they may align the clock of a node to those of the others."""
    return not name.startswith(_CONTROL_EVENTS), name


def _get_created_ns(source: Source) -> int:
    return source.created_ns

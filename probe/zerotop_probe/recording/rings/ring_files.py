"""The files of a rank whose node has a sampler: records go into a ring in shared memory, and the sampler writes them.

Nothing here waits: a record takes one copy into memory. If the ring is full the record is lost and counted. If there is no
sampler any more, the rank writes the ring's records to the recording itself, at the end of a step.
"""

from __future__ import annotations

import itertools
import os
import struct
import time
from typing import Any, Union

from zerotop_probe.recording import writer
from zerotop_probe.recording.event_base import Event
from zerotop_probe.recording.interruptions import is_interruption
from zerotop_probe.recording.rings import shared_memory
from zerotop_probe.recording.rings.drained_file import EVENTS_KIND, TABLE_KIND
from zerotop_probe.recording.rings.ring_drainer import EVENT_PART, EVENT_PART_BYTES, SLOTS_AT_ONCE, drain_ring
from zerotop_probe.recording.rings.shared_memory import (
    PAYLOAD_BYTES,
    PHASE,
    PHASE_PLACES,
    PHASES_AT,
    SLOT,
    SLOTS_AT,
    VOID,
    Ring,
    pack_declaration,
)
from zerotop_probe.recording.tables import Table
from zerotop_probe.recording.writer import Identity, format_event, make_header

# Slots that only events may use, so that a ring that runs full can still say so.
_EVENT_SHARE = 16
# Slots that stay free, as several threads may see the last free one at once.
_SPARE_SLOTS = 64
# The sampler looks ten times a second. After this time without, it may be gone.
_PATIENCE_NS = 1_000_000_000

_TAG = struct.Struct("<Q")


class RingFiles:
    """The ring of this process and its writers."""

    def __init__(self, recording: str, identity: Identity, folder: str) -> None:
        """Create the ring. Raise OSError if that is not possible."""
        self._recording = recording
        self._pid = os.getpid()
        header = make_header("events", identity)
        declaration = pack_declaration(kind=EVENTS_KIND, session=os.path.abspath(recording), header=header)
        self.ring = Ring.create(folder, f"{identity.file_stem}-{time.monotonic_ns()}", declaration)
        self.ring.note_pass(time.monotonic_ns(), 0)
        self._identity = identity
        self._tables: list[RingTable] = []
        # A counter that needs no lock, because a signal handler of the job may write too.
        self.take_slot = itertools.count().__next__
        # The last slot taken, and the first ones that tables and events may not take.
        self.position = 0
        self.table_end = self.event_end = -1
        self.longest_event = min(self.ring.slots, SLOTS_AT_ONCE) // 2  # in slots
        # The phases in the ring's header as numbers of 64 bits: to store four costs half as much as to pack a record.
        self.phases = memoryview(self.ring.memory)[PHASES_AT : PHASES_AT + PHASE_PLACES * PHASE.size].cast("q")
        self._is_open = True
        self.extend()
        self.events = RingEvents(self)

    def open_table(self, table: Table, **extra: Any) -> RingTable:
        """Return a writer of records of a table; ``extra`` goes into the header of its file."""
        declaration = pack_declaration(
            kind=TABLE_KIND, header=make_header(table.name, self._identity, dtype=table.dtype, **extra)
        )
        self.ring.add_declarations(declaration)
        self._tables.append(RingTable(self, table, len(self._tables) + 1))  # the events are declared first
        return self._tables[-1]

    @property
    def lost_records(self) -> int:
        """Number of records and events without room."""
        return self.events.lost + sum(table.lost for table in self._tables)

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """The ring's bytes, its number of slots, the bytes of each, and the position of the first one."""
        return len(self.ring.memory), self.ring.slots, SLOT.size, SLOTS_AT

    def extend(self) -> bool:
        """Learn how much of the ring is free now; return whether a record of a table fits."""
        if not self._is_open:
            return False
        end = self.ring.read_drained()[0] + self.ring.slots - _SPARE_SLOTS
        self.table_end, self.event_end = end - self.ring.slots // _EVENT_SHARE, end
        return self.position < self.table_end

    def explain_loss(self) -> str:
        """Return why the ring is full."""
        error = self.ring.read_pass()[1] if self._is_open else 0
        return os.strerror(error) if error else "the sampler of this node does not keep up"

    def poll(self, time_ns: int) -> None:
        """Write the records to the recording if nobody else does; called at the ends of steps."""
        if self._is_open and time_ns - self.ring.read_pass()[0] > _PATIENCE_NS:
            self._drain_here(is_final=False)

    def _drain_here(self, *, is_final: bool) -> bool:
        """Write the records if no sampler has claimed the ring; return whether all are written."""
        if not self.ring.try_claim():
            return False
        try:
            return drain_ring(self.ring, self._recording, is_final=is_final)
        finally:
            self.ring.release_claim()

    def finish(self) -> None:
        """Write the remaining records if there is no sampler; called before the process ends."""
        if self._is_open and self._drain_here(is_final=True):
            self.ring.remove()

    def close(self) -> None:
        """Leave the ring to the sampler; later records count as lost. In a forked child the ring stays its parent's."""
        if self._is_open:
            if os.getpid() == self._pid:
                self.finish()
            self._is_open = False
            self.table_end = self.event_end = -1
            self.phases.release()
            self.ring.close()


class RingTable:
    """A writer of one table. Never raises; ``lost`` counts records without room, ``last_error`` is the reason."""

    __slots__ = ("_files", "_memory", "_pack_into", "_slots", "_take_slot", "index", "last_error", "lost")

    def __init__(self, files: RingFiles, table: Table, index: int) -> None:
        self.lost = 0
        self.last_error = ""
        self._files = files
        self.index = index
        self._memory = files.ring.memory
        self._slots = files.ring.slots
        self._take_slot = files.take_slot
        padding = PAYLOAD_BYTES - table.record_struct.size
        self._pack_into = struct.Struct(f"{table.record_struct.format}{padding}xQ").pack_into

    def write(self, *values: Any) -> None:
        """Append one record: a value for every field, in the table's order."""
        files = self._files
        if files.position >= files.table_end and not files.extend():
            self.lost += 1
            self.last_error = files.explain_loss()
            return
        slot = -1
        try:
            files.position = slot = self._take_slot()
            offset = SLOTS_AT + slot % self._slots * SLOT.size
            self._pack_into(self._memory, offset, *values, (slot + 1) << 8 | self.index)
        except BaseException as error:
            if is_interruption(error):
                if slot < 0:  # whoever drains the ring skips the one that was taken
                    files.position = slot = self._take_slot()
                offset = SLOTS_AT + slot % self._slots * SLOT.size
                self._pack_into(self._memory, offset, *values, (slot + 1) << 8 | self.index)
                raise
            self.lost += 1
            self.last_error = type(error).__name__
            _void_slot(files.ring, slot)

    def close(self) -> None:
        """Do nothing: the ring is closed as a whole."""


class RingEvents:
    """A writer of events. Never raises; ``lost`` counts events for which there was no room."""

    def __init__(self, files: RingFiles) -> None:
        self.lost = 0
        self._files = files
        self._numbers = itertools.count()

    def write(self, time_ns: int, event: type[Event] | str, **facts: Any) -> None:
        """Append an event of :mod:`~zerotop_probe.recording.events` that happened at ``time_ns`` (CLOCK_MONOTONIC)."""
        try:
            line = format_event(time_ns, event, facts)
            parts = [line[begin : begin + EVENT_PART_BYTES] for begin in range(0, len(line), EVENT_PART_BYTES)]
            self._write_parts(parts)
        except Exception as error:
            if is_interruption(error):
                raise
            self.lost += 1

    def _write_parts(self, parts: list[bytes]) -> None:
        files, number = self._files, next(self._numbers)
        files.extend()
        if files.position + len(parts) >= files.event_end or len(parts) > files.longest_event:
            self.lost += 1
            return
        for left, part in zip(range(len(parts) - 1, -1, -1), parts):
            files.position = slot = files.take_slot()
            payload = EVENT_PART.pack(number, left, len(part), part)
            SLOT.pack_into(files.ring.memory, SLOTS_AT + slot % files.ring.slots * SLOT.size, payload, (slot + 1) << 8)


def _void_slot(ring: Ring, slot: int) -> None:
    """Mark a slot that was taken and has no record, or the draining process would wait for it."""
    try:
        _TAG.pack_into(ring.memory, SLOTS_AT + slot % ring.slots * SLOT.size + PAYLOAD_BYTES, (slot + 1) << 8 | VOID)
    except ValueError:  # the ring is closed
        return


class DiskFiles:
    """The files of a rank without a sampler on its node: every record is written at once."""

    def __init__(self, recording: str, identity: Identity) -> None:
        self._recording = recording
        self._identity = identity
        self._writers: list[writer.RecordWriter] = []
        self.events = writer.EventWriter(recording, identity)
        writer.reserve_events(self.events.fileno())

    def open_table(self, table: Table, **extra: Any) -> writer.RecordWriter:
        """Return a writer of records of a table; ``extra`` goes into the header of its file."""
        self._writers.append(writer.RecordWriter(self._recording, table, self._identity, **extra))
        return self._writers[-1]

    @property
    def lost_records(self) -> int:
        """Number of records and events that could not be written."""
        return self.events.lost + sum(table.lost for table in self._writers)

    def poll(self, time_ns: int) -> None:
        """Do nothing: all records are written."""

    def finish(self) -> None:
        """Do nothing: all records are written."""

    def close(self) -> None:
        """Close all files; later records count as lost."""
        self.events.close()
        for table in self._writers:
            table.close()


TableWriter = Union[RingTable, writer.RecordWriter]
RankFiles = Union[RingFiles, DiskFiles]


def open_rank_files(recording: str, identity: Identity) -> RankFiles:
    """Return the files of this rank: in memory shared with a sampler of this node if one offers it, else on disk."""
    try:
        folder = shared_memory.find_folder(recording)
        if folder is not None and shared_memory.is_private(folder):
            return RingFiles(recording, identity, folder)
    except (OSError, ValueError) as error:
        if is_interruption(error):
            raise
    return DiskFiles(recording, identity)

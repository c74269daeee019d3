"""Write the records of a ring to the files of its recording.

A pass appends records to the files first and then notes in the ring how far it came. After a crash between the two, the next
process finds more bytes in a file than the ring says, and skips that many of the same records: none is lost or doubled.
"""

from __future__ import annotations

import errno
import json
import platform
import struct
import time
from collections.abc import Callable

from zerotop_probe.recording.rings.drained_file import DrainedFile
from zerotop_probe.recording.rings.shared_memory import PAYLOAD_BYTES, SLOT, VOID, Ring
from zerotop_probe.recording.tables import BEGINS, SPANS

_TIME_BYTES = 8
_UNPACK_SPAN = SPANS.record_struct.unpack
_PACK_BEGIN = BEGINS.record_struct.pack
# The number of the first declaration.
_EVENT = 0

# A part of an event's line: number of the event, parts left after this one, length, bytes.
_PART_HEAD = struct.Struct("<IHH")
EVENT_PART_BYTES = PAYLOAD_BYTES - _PART_HEAD.size
EVENT_PART = struct.Struct(f"<IHH{EVENT_PART_BYTES}s")

_TAG = struct.Struct(f"<{PAYLOAD_BYTES}xQ")

# Slots that one look takes; an event must fit into half of it.
SLOTS_AT_ONCE = 8192
# How far to look for records after a slot that has none.
_LOOK_AHEAD = 16
_FEWEST_SLOTS = 64
# A slot that was taken is filled at once. If records follow and it is still empty after this time, it was abandoned, as by
# an exception of a signal handler.
_ABANDONED_NS = 1_000_000_000
# Other processors than x86 may show a tag before the record in front of it, for less than this time.
_SETTLE_S = 0.0 if platform.machine() in ("x86_64", "AMD64", "i686") else 0.001


# Called with the name of a table, and new records of it.
OnRecords = Callable[[str, list[bytes]], None]


def derive_begins(begins: list[bytes], spans: list[bytes], phases: list[bytes], newest_ns: int) -> list[bytes]:
    """Return the missing records of BEGINS, of phases that began after ``newest_ns``, the last begin in the recording.

    In a short step a rank only notes the begin of a phase in its ring's header, and writes the records of all spans when the
    step ends. There is still a begin for each span: those of phases in progress come from the header, the others from the
    spans.

    ``begins`` and ``spans`` are new records of the two tables, ``phases`` those of the ring's header, which must have been
    read before. Phases within others either have a record of their begin or need none.
    """
    known = {get_time(record) for record in begins}
    missing = {get_time(record): record for record in phases}
    for span in spans:
        begin_ns, _, _, step, micro_step, _, _, phase, _, depth, engine, _ = _UNPACK_SPAN(span)
        if not depth:
            missing[begin_ns] = _PACK_BEGIN(begin_ns, step, micro_step, phase, depth, engine, 0)
    return [record for time_ns, record in missing.items() if time_ns > newest_ns and time_ns not in known]


def get_time(record: bytes) -> int:
    return int.from_bytes(record[:_TIME_BYTES], "little", signed=True)


class RingDrainer:
    """The files of one ring. Only the process that has claimed the ring may drain it."""

    def __init__(self, ring: Ring, recording: str, on_records: OnRecords | None = None) -> None:
        """``on_records`` receives the written records."""
        self.ring = ring
        self._recording = recording
        self._on_records = on_records
        self._drained, self._begins_ns = ring.read_drained()
        self._progress = ring.read_progress()
        self._files: list[DrainedFile] = []
        self._blocked_at = -1  # the slot that keeps the records after it back
        self._blocked_ns = 0

    def drain(self, time_ns: int, *, is_final: bool = False) -> int:
        """Write the new records and return their number.

        ``is_final``: the ring's writer is gone. Raise OSError; the records then stay in the ring for the next time.
        """
        total = 0
        while True:
            self._add_files()
            count = self._drain_some(time_ns, is_final)
            total += count
            if count < SLOTS_AT_ONCE // 2:
                return total

    def _add_files(self) -> None:
        lines = self.ring.read_declarations().splitlines()
        for line in lines[len(self._files) :]:
            self._files.append(DrainedFile(self._recording, json.loads(line), self._progress[len(self._files)]))
        if sum(file.open() for file in self._files):
            self.ring.write_progress(self._drained, self._begins_ns, [file.progress for file in self._files])

    def _drain_some(self, time_ns: int, is_final: bool) -> int:
        phases = self.ring.read_phases()
        found = self._find_records(time_ns, is_final)
        payloads = self._sort_records(found)
        begins_ns = self._complete_begins(payloads, phases)
        if not any(payloads) and not found:
            return 0
        fresh = []
        for file, own in zip(self._files, payloads):
            if own:
                data = b"".join(own)
                file.append(data)
                fresh.append((file, len(data)))
        # Only once all of them are written: after an error the same records come again.
        for file, length in fresh:
            file.note_written(length)
        if self._on_records is not None:
            for file, own in zip(self._files, payloads):
                self._on_records(file.table, own)
        self._drained += len(found)
        self._begins_ns = begins_ns
        self.ring.write_progress(self._drained, begins_ns, [file.progress for file in self._files])
        return len(found)

    def _complete_begins(self, payloads: list[list[bytes]], phases: list[bytes]) -> int:
        """Add the begins of phases that have no record of theirs; return the time of the last begin."""
        numbers = {file.table: number for number, file in enumerate(self._files)}
        if BEGINS.name not in numbers or SPANS.name not in numbers:
            return self._begins_ns
        begins = payloads[numbers[BEGINS.name]]
        begins += derive_begins(begins, payloads[numbers[SPANS.name]], phases, self._begins_ns)
        begins.sort(key=get_time)
        return max(self._begins_ns, get_time(begins[-1])) if begins else self._begins_ns

    def _sort_records(self, found: list[tuple[bytes, int]]) -> list[list[bytes]]:
        """Return the records of each file."""
        payloads: list[list[bytes]] = [[] for _ in self._files]
        sizes = [file.record_bytes for file in self._files]
        parts: dict[int, list[bytes]] = {}  # of each incomplete event
        for payload, kind in found:
            if kind == _EVENT:
                number, left, length, data = EVENT_PART.unpack(payload)
                parts.setdefault(number, []).append(data[:length])
                if not left:
                    payloads[_EVENT] += parts.pop(number)
            elif kind != VOID:
                payloads[kind].append(payload[: sizes[kind]])
        return payloads

    def _find_records(self, time_ns: int, is_final: bool) -> list[tuple[bytes, int]]:
        """Return (payload, kind) of each of the next slots, VOID for an abandoned one, up to an event in progress."""
        slots, begin = self._read_slots(), self._drained
        found: list[tuple[bytes, int]] = []
        open_events: dict[int, int] = {}  # the first slot of each incomplete event, by its number
        files = len(self._files)
        for index, (payload, tag) in enumerate(slots):
            kind = tag & 0xFF
            if tag >> 8 != begin + index + 1:
                following = slots[index + 1 : index + _LOOK_AHEAD]
                if not self._is_abandoned(begin + index, following, time_ns, is_final):
                    break
                kind = VOID
            elif kind == _EVENT:
                number, left = _PART_HEAD.unpack_from(payload)[:2]
                open_events.setdefault(number, index)
                if not left:
                    del open_events[number]
            elif kind >= files and kind != VOID:
                break  # it was declared after the last look
            found.append((payload, kind))
        if open_events and not is_final:
            first = min(open_events.values())
            if not self._is_overdue(begin + first, time_ns):
                del found[first:]
        return found

    def _read_slots(self) -> list[tuple[bytes, int]]:
        """Return (payload, tag) of the next slots, whether they are filled or not."""
        ring = self.ring
        first = self._drained % ring.slots
        # Most passes find few records: copy about as many slots as are filled.
        count, most = _FEWEST_SLOTS, min(SLOTS_AT_ONCE, ring.slots)
        while count < most and ring.read_tag((first + count - 1) % ring.slots) >> 8 == self._drained + count:
            count = min(2 * count, most)
        if _SETTLE_S and ring.read_tag(first) >> 8 == self._drained + 1:
            time.sleep(_SETTLE_S)
        # The tags first: a copy that is interrupted within a slot may have its tag without the record in front of it.
        count = min(count, ring.slots)
        tags = _TAG.iter_unpack(ring.read_slots(first, count))
        return [(payload, tag) for (tag,), (payload, _) in zip(tags, SLOT.iter_unpack(ring.read_slots(first, count)))]

    def _is_abandoned(self, slot: int, following: list[tuple[bytes, int]], time_ns: int, is_final: bool) -> bool:
        """Whether an empty slot will never be filled although records follow it."""
        if not any(tag >> 8 == slot + 2 + index for index, (_, tag) in enumerate(following)):
            return False
        return is_final or self._is_overdue(slot, time_ns)

    def _is_overdue(self, slot: int, time_ns: int) -> bool:
        """Whether this slot has blocked the ones after it for too long."""
        if self._blocked_at != slot:
            self._blocked_at, self._blocked_ns = slot, time_ns
        return time_ns - self._blocked_ns > _ABANDONED_NS

    def close(self) -> None:
        """Close the files, not the ring."""
        for file in self._files:
            file.close()


def drain_ring(ring: Ring, recording: str, *, is_final: bool) -> bool:
    """Write all records of a ring that the caller has claimed, and return True.

    After an error, which is noted in the ring, they stay there for the next time.
    """
    drainer = RingDrainer(ring, recording)
    try:
        drainer.drain(time.monotonic_ns(), is_final=is_final)
        ring.note_pass(time.monotonic_ns(), 0)
        return True
    except OSError as error:
        ring.note_pass(ring.read_pass()[0], error.errno or errno.EIO)
        return False
    finally:
        drainer.close()

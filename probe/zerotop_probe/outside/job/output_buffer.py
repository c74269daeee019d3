"""Recording the job's output: the bytes in ``output-<writer>.log``, their times in its index table."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Sequence

from zerotop_probe.outside.job.stream import Stream
from zerotop_probe.recording.plain_files import open_plain_file
from zerotop_probe.recording.tables import OUTPUT, STREAMS
from zerotop_probe.recording.writer import Identity, RecordWriter, create_file

# Bytes in our memory at a time.
_CHUNK_BYTES = 1 << 18
# Chunks copied in one poll, so that a job that prints without pause does not block the loop.
_CHUNKS_PER_POLL = 64


class OutputRecorder:
    """Copies streams to disk. Bytes that cannot be written are counted in ``lost_bytes``; the job never notices."""

    def __init__(
        self, session: str, identity: Identity, streams: Sequence[Stream], *, on_error: Callable[[str], None]
    ) -> None:
        """``on_error`` is called with the reason when output is lost for the first time."""
        self.lost_bytes = 0
        self._streams = streams
        self._on_error = on_error
        self._index_writer = RecordWriter(session, OUTPUT, identity)
        self._offset = 0
        self._log_descriptor: int | None = None
        try:
            self._log_descriptor = create_file(session, f"output-{identity.file_stem}", ".log")
        except OSError as error:
            self._count_lost(0, error)

    @property
    def lost_records(self) -> int:
        """Index records that could not be written."""
        return self._index_writer.lost

    def poll(self, time_ns: int) -> bool:
        """Copy the output since the last poll, dated ``time_ns``; return whether there is more."""
        more = [self._copy_stream(stream, time_ns) for stream in self._streams]
        return any(more)

    def _copy_stream(self, stream: Stream, time_ns: int) -> bool:
        size = stream.read_size()
        for _ in range(_CHUNKS_PER_POLL):
            if stream.recorded_bytes >= size:
                return False
            data = stream.read(stream.recorded_bytes, min(_CHUNK_BYTES, size - stream.recorded_bytes))
            if not data:
                return False
            stream.recorded_bytes += len(data)
            self._record_output(stream, data, time_ns)
            stream.release_memory()
        return stream.recorded_bytes < size

    def _record_output(self, stream: Stream, data: bytes, time_ns: int) -> None:
        written = self._append_log(data)
        if written:
            self._index_writer.write(time_ns, self._offset, written, STREAMS.index(stream.name), 0)
            self._offset += written

    def _append_log(self, data: bytes) -> int:
        if self._log_descriptor is None:
            self.lost_bytes += len(data)
            return 0
        written = 0
        try:
            while written < len(data):
                written += os.write(self._log_descriptor, data[written:])
        except OSError as error:
            self._count_lost(len(data) - written, error)
        return written

    def _count_lost(self, count: int, error: OSError) -> None:
        first = not self.lost_bytes
        self.lost_bytes += count
        if first:
            self._on_error(f"the job's output is not recorded: {error.strerror or error}")

    def close(self) -> None:
        """Close the files."""
        self._index_writer.close()
        if self._log_descriptor is not None:
            os.close(self._log_descriptor)
            self._log_descriptor = None


def count_recorded_bytes(session: str, host: str, stream: str) -> int:
    """Return how many bytes of a stream this host's samplers have recorded, where a restarted one continues."""
    code = STREAMS.index(stream)
    lengths = [field.name for field in OUTPUT.fields].index("length")
    streams = [field.name for field in OUTPUT.fields].index("stream")
    total = 0
    for path in glob.glob(os.path.join(glob.escape(session), f"{OUTPUT.name}-node-{host}-*.rec")):
        try:
            with open(open_plain_file(path), "rb") as file:
                json.loads(file.readline())
                records = file.read()
        except (OSError, ValueError):  # its first line could not be written, as on a full disk
            continue
        whole = OUTPUT.record_struct.iter_unpack(records[: len(records) - len(records) % OUTPUT.record_struct.size])
        total += sum(record[lengths] for record in whole if record[streams] == code)
    return total

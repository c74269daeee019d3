"""The files that ranks write their output to: launchers redirect it (``torchrun --redirects``), or the user's shell does.

The job's recorded output lacks what goes there. When a rank has ended, the end of its files is recorded.
"""

from __future__ import annotations

import glob
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording import clock, redact, tables
from zerotop_probe.recording.directory import OUTPUT_SETTING, read_recording_info
from zerotop_probe.recording.tables import STREAMS
from zerotop_probe.recording.writer import Identity, RecordWriter, create_named_file

TAIL_BYTES = 1 << 14
# Of the job's recorded output, which has the text of a file already if the launcher passes it on (``torchrun --tee``).
_SEARCHED_BYTES = 1 << 18
_COMPARED_LINES = 3


class OutputFile(NamedTuple):
    """A regular file that a process has open as its output. ``stream`` is an index into STREAMS, 0 for both."""

    path: str
    device: int
    inode: int
    stream: int

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the file, whatever its path."""
        return self.device, self.inode

    def read_from(self, begin: int) -> tuple[int, bytes]:
        """Return the file's size and its bytes from ``begin`` on, at most the last TAIL_BYTES; 0 if it is gone."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return 0, b""
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != self.key:  # another one of that name, or in another container
                return 0, b""
            first = max(begin, status.st_size - TAIL_BYTES)
            data = os.pread(descriptor, max(0, status.st_size - first), first)
            return status.st_size, data if first == begin else data[data.find(b"\n") + 1 :]
        except OSError:
            return 0, b""
        finally:
            os.close(descriptor)


class RankFiles:
    """Follows the output files of ranks."""

    def __init__(
        self,
        recording: str,
        note: Callable[[ProcessHandle, int, str | None, str | None], None],
        recorded: Collection[tuple[int, int]] = (),
    ) -> None:
        """``note`` gets a rank's process, its number, and its files of stdout and stderr when they are known.

        It is called again when the rank has ended, with None for files without any output. Files in ``recorded`` (device
        and inode) are left out.
        """
        self._recording = recording
        self._note = note
        self._recorded = recorded
        info = read_recording_info(recording)
        self._redacts = bool(info.get("redact_output"))
        self._records = info.get(OUTPUT_SETTING) is not False
        self._files: dict[ProcessHandle, tuple[OutputFile, ...]] = {}
        self._ranks: dict[ProcessHandle, int] = {}
        self._logs: dict[tuple[int, int], _FileLog] = {}

    def follow(self, process: ProcessHandle, rank: int) -> None:
        """Look where a living rank writes to: its script may change that."""
        files = tuple(file for file in find_output_files(process.pid) if file.key not in self._recorded)
        if files and files != self._files.get(process):
            self._files[process], self._ranks[process] = files, rank
            self._note(process, rank, *_list_paths(files))

    def record_end(self, process: ProcessHandle) -> None:
        """Record the end of an ended rank's files."""
        files, written = self._files.get(process, ()), []
        for file in files:
            log = self._logs.get(file.key)
            if log is None:
                log = self._logs[file.key] = self._create_log(file, process)
            log.read_more()
            if log.size:
                written.append(file)
        if files:
            self._note(process, self._ranks[process], *_list_paths(written))

    def close(self) -> None:
        """Record what others, such as a launcher, have written to the files of ended ranks since."""
        for log in self._logs.values():
            log.read_more()
            log.close()

    def _create_log(self, file: OutputFile, process: ProcessHandle) -> _FileLog:
        owners = [one for one, files in self._files.items() if any(other.key == file.key for other in files)]
        ranks = sorted({self._ranks[one] for one in owners})
        rank = ranks[0] if len(ranks) == 1 else -1
        identity = Identity("rank" if rank >= 0 else "node", rank, clock.read_hostname(), *process, clock.read_boot_id())
        return _FileLog(self._recording, identity, file, ranks, redacts=self._redacts, records=self._records)


class _FileLog:
    """The recorded part of one file, a table of its own."""

    def __init__(
        self, recording: str, identity: Identity, file: OutputFile, ranks: Sequence[int], *, redacts: bool, records: bool
    ) -> None:
        self.size = 0  # of the file when it was read last
        self._recording, self._identity, self._file, self._ranks = recording, identity, file, ranks
        self._redacts, self._records = redacts, records
        self._log: int | None = None
        self._table: RecordWriter | None = None
        self._offset = 0

    def read_more(self) -> None:
        """Record what was written to the file since the last call."""
        size, data = self._file.read_from(self.size)
        if size <= self.size:
            return
        is_first, self.size = not self.size, size
        if not self._records:
            return
        if self._redacts:
            data = _redact(data)
        if is_first:
            who = f"rank {self._ranks[0]}" if len(self._ranks) == 1 else f"ranks {', '.join(map(str, self._ranks))}"
            name = STREAMS[self._file.stream]
            if _is_recorded(self._recording, data):
                self._append(f"[{name} of {who} is also in {self._file.path}]\n".encode())
                return
            self._append(f"[the end of the {name} of {who}, from {self._file.path}:]\n".encode())
        self._append(data if data.endswith(b"\n") else data + b"\n")

    def _append(self, data: bytes) -> None:
        with suppress(OSError):
            if self._log is None:
                self._log, _ = create_named_file(self._recording, f"output-{self._identity.file_stem}", ".log")
                self._table = RecordWriter(self._recording, tables.OUTPUT, self._identity)
            written = os.write(self._log, data)
            if self._table is not None:
                self._table.write(time.monotonic_ns(), self._offset, written, self._file.stream, 0)
            self._offset += written

    def close(self) -> None:
        """Close the files of the recording."""
        if self._log is not None and self._table is not None:
            os.close(self._log)
            self._table.close()
            self._log = None


def find_output_files(pid: int) -> tuple[OutputFile, ...]:
    """Return the regular files that stdout and stderr of a process are; none that cannot be seen."""
    found: dict[tuple[int, int], OutputFile] = {}
    for number in (1, 2):
        with suppress(OSError):
            link = f"/proc/{pid}/fd/{number}"
            status, path = os.stat(link), os.readlink(link)
            key = status.st_dev, status.st_ino
            if stat.S_ISREG(status.st_mode) and not path.endswith(" (deleted)"):
                found[key] = OutputFile(path, *key, 0 if key in found else number)
    return tuple(found.values())


def _list_paths(files: Iterable[OutputFile]) -> tuple[str | None, str | None]:
    """Return the paths of stdout and stderr."""
    by_stream = {file.stream: redact.redact_text(file.path) for file in files}
    return by_stream.get(1, by_stream.get(0)), by_stream.get(2, by_stream.get(0))


def _redact(data: bytes) -> bytes:
    redactor = redact.StreamRedactor()
    return redactor.feed(data) + redactor.flush()


def _is_recorded(recording: str, data: bytes) -> bool:
    """Return whether the last lines of a file are in the job's recorded output: launchers can pass them on, too."""
    lines = [line.strip() for line in data.splitlines() if line.strip()][-_COMPARED_LINES:]
    for path in glob.iglob(os.path.join(glob.escape(recording), "output-node-*.log")):
        with suppress(OSError), open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _SEARCHED_BYTES))
            recorded = log.read()
            if lines and all(line in recorded for line in lines):
                return True
    return False

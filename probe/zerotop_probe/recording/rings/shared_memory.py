"""Memory that a rank shares with its node's sampler: a ring of records, so that the training never waits for a file system.

The sampler of a recording offers a folder in /dev/shm; a rank that finds it creates a ring there, and the sampler writes the
ring's records to the recording. Ranks on other nodes or in other containers find no such folder and write to the recording
themselves.

A ring is a file of preallocated pages: a header, the declarations of the rank's files (JSON lines) and slots. A slot holds
one record and its tag, stored last: its sequence number plus one, and the number of its declaration in the lowest byte. The
rank has a record lock on the file for as long as it lives; whoever drains the ring has an flock on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import stat
import struct
from typing import Any, NamedTuple

from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.tables import BEGINS, FOLDED, TABLES

MEMORY_ROOT = "/dev/shm"
RING_SUFFIX = ".ring"
_NEW_SUFFIX = ".new"

# In each folder: the path of its recording. The sampler that drains the folder's rings has an flock on it.
OWNER_FILE = "session"

_PAGE = 4096
DECLARATIONS_AT = _PAGE
SLOTS_AT = 16 * _PAGE
# Room for the longest record of a table that a rank writes: folded ones are written by the folder.
_LONGEST = max(table.record_struct.size for table in TABLES.values() if table is not FOLDED)
SLOT = struct.Struct(f"<{-(-_LONGEST // 8) * 8}sQ")
PAYLOAD_BYTES = SLOT.size - 8

# Half a minute of the most records that a rank makes; less on a machine with little shared memory, as in a container with
# Docker's 64 MB, of which data loaders and NCCL need most.
_RING_BYTES, _LEAST_BYTES = 8 << 20, 256 << 10
_SHARE = 64

MAGIC = b"ztring\x00\x03"
VOID = 255  # the tag's declaration of a slot without a record
_MAX_DECLARATIONS = 16

# The phases that have begun in the step in progress, each a record of BEGINS and its time again, which is stored last.
PHASES_AT, PHASE_PLACES = 3072, 16
PHASE = struct.Struct(BEGINS.record_struct.format + "q")
_PLACE = struct.Struct(f"<{BEGINS.record_struct.size}s8s")

_HEAD = struct.Struct("<8sQ")  # magic, number of slots
_WORD = struct.Struct("<Q")
_DECLARED_AT, _DRAINED_AT_NS, _ERRNO, _GENERATION = 16, 24, 32, 40  # offsets of words
_PROGRESS_AT, _PROGRESS_BYTES = 1024, 1024
_HOW_FAR = struct.Struct("<Qq")
_FILE = struct.Struct("<IIQQ")


class FileProgress(NamedTuple):
    """The progress of writing one declared file; all sizes are without headers."""

    number: int = 0  # one more than the number in the file's name; 0: not created yet
    segment: int = 0
    segment_begin: int = 0  # bytes of all segments before
    bytes: int = 0  # bytes of the whole table


def find_folder(recording: str) -> str | None:
    """Return the path of the folder for rings of a recording, which need not exist; None if the recording has no file.

    Its name follows from the content of the recording's file, which other users cannot read.
    """
    try:
        with open(os.path.join(recording, SESSION_FILE), "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()[:32]
    except OSError:
        return None
    return os.path.join(MEMORY_ROOT, f"zerotop-{os.geteuid()}-{digest}")


def is_private(folder: str) -> bool:
    """Whether this is a directory of this user that others can neither read nor write."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def choose_size(folder: str) -> int:
    """Return the bytes of a new ring; 0 if there is too little shared memory."""
    free = os.statvfs(folder)
    size = min(_RING_BYTES, free.f_bavail * free.f_frsize // _SHARE) // _PAGE * _PAGE
    return size if size >= _LEAST_BYTES else 0


class Ring:
    """A mapped ring, for the rank that fills it or for whoever drains it."""

    def __init__(self, descriptor: int, path: str) -> None:
        """Map an initialised ring and own its descriptor. Raise ValueError or OSError if it is no ring."""
        self.descriptor = descriptor
        self.path = path
        size = os.fstat(descriptor).st_size
        self.memory = mmap.mmap(descriptor, size)
        magic, self.slots = _HEAD.unpack_from(self.memory)
        if magic != MAGIC or not 0 < self.slots <= (size - SLOTS_AT) // SLOT.size:
            raise ValueError("it is no ring of this version")

    @classmethod
    def create(cls, folder: str, name: str, declarations: bytes) -> Ring:
        """Create a ring whose writer is this process. Raise OSError if there is not enough memory."""
        size = choose_size(folder)
        path = os.path.join(folder, name + RING_SUFFIX)
        descriptor = os.open(path + _NEW_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # All of it is reserved now: a page that cannot be had later would end the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            os.pwrite(descriptor, _HEAD.pack(MAGIC, (size - SLOTS_AT) // SLOT.size), 0)
            ring = cls(descriptor, path)
            ring.add_declarations(declarations)
            os.rename(path + _NEW_SUFFIX, path)
        except (OSError, ValueError):
            os.close(descriptor)
            os.unlink(path + _NEW_SUFFIX)
            raise
        return ring

    @classmethod
    def open(cls, path: str) -> Ring:
        """Open a ring of this user. Raise OSError or ValueError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise PermissionError("it belongs to another user")
            return cls(descriptor, path)
        except (OSError, ValueError):
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Unmap the ring and release its locks."""
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
        with contextlib.suppress(BufferError):
            self.memory.close()

    def remove(self) -> None:
        """Delete the file; the mapping stays."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _read_word(self, offset: int) -> int:
        return int(_WORD.unpack_from(self.memory, offset)[0])

    def _write_word(self, offset: int, value: int) -> None:
        _WORD.pack_into(self.memory, offset, value)

    # --- locks ----------------------------------------------------------------------------------------------

    def try_claim(self) -> bool:
        """Claim the ring in order to drain it; return False while another process has claimed it."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def release_claim(self) -> None:
        """Let others drain this ring."""
        with contextlib.suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def has_writer(self) -> bool:
        """Whether the process that fills the ring still runs. Not to be called by that process."""
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError:
            return True
        with contextlib.suppress(OSError):
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1)
        return False

    # --- declarations ---------------------------------------------------------------------------------------

    def add_declarations(self, lines: bytes) -> None:
        """Add lines that describe files. Raise OSError if there is no room."""
        used = self._read_word(_DECLARED_AT)
        begin, end = DECLARATIONS_AT + used, DECLARATIONS_AT + used + len(lines)
        if end > SLOTS_AT or self.read_declarations().count(b"\n") + lines.count(b"\n") > _MAX_DECLARATIONS:
            raise OSError("there is no room for another file")
        self.memory[begin:end] = lines
        self._write_word(_DECLARED_AT, used + len(lines))

    def read_declarations(self) -> bytes:
        """Return the lines so far."""
        end = min(DECLARATIONS_AT + self._read_word(_DECLARED_AT), SLOTS_AT)
        return self.memory[DECLARATIONS_AT:end]

    # --- slots ----------------------------------------------------------------------------------------------

    def read_tag(self, index: int) -> int:
        """Return the tag of one slot."""
        return self._read_word(SLOTS_AT + index * SLOT.size + PAYLOAD_BYTES)

    def read_slots(self, first: int, count: int) -> bytes:
        """Return the bytes of consecutive slots; the first slot follows the last."""
        end = first + count
        begin_at, end_at = (SLOTS_AT + index * SLOT.size for index in (first, min(end, self.slots)))
        return self.memory[begin_at:end_at] + self.memory[SLOTS_AT : SLOTS_AT + max(0, end - self.slots) * SLOT.size]

    def read_phases(self) -> list[bytes]:
        """Return a record of BEGINS for each of the last phases that have begun, in any order; some are written already."""
        places = _PLACE.iter_unpack(self.memory[PHASES_AT : PHASES_AT + PHASE_PLACES * PHASE.size])
        return [record for record, time_bytes in places if record.startswith(time_bytes) and any(time_bytes)]

    # --- progress of draining -------------------------------------------------------------------------------

    def read_drained(self) -> tuple[int, int]:
        """Return the number of slots whose records are written, in all laps, and the time of the last written begin."""
        while True:
            generation = self._read_word(_GENERATION)
            drained, begun_ns = _HOW_FAR.unpack_from(self.memory, _PROGRESS_AT + generation % 2 * _PROGRESS_BYTES)
            if self._read_word(_GENERATION) == generation:
                return drained, begun_ns

    def read_progress(self) -> list[FileProgress]:
        """Return the progress of every declared file, in the order of the declarations."""
        begin = _PROGRESS_AT + self._read_word(_GENERATION) % 2 * _PROGRESS_BYTES + _HOW_FAR.size
        return [
            FileProgress(*_FILE.unpack_from(self.memory, begin + index * _FILE.size)) for index in range(_MAX_DECLARATIONS)
        ]

    def write_progress(self, drained: int, begun_ns: int, files: list[FileProgress]) -> None:
        """Replace the progress as a whole: after a crash at any moment it is the old or the new one."""
        generation = self._read_word(_GENERATION) + 1
        begin = _PROGRESS_AT + generation % 2 * _PROGRESS_BYTES
        _HOW_FAR.pack_into(self.memory, begin, drained, begun_ns)
        for index, file in enumerate(files):
            _FILE.pack_into(self.memory, begin + _HOW_FAR.size + index * _FILE.size, *file)
        self._write_word(_GENERATION, generation)

    def note_pass(self, time_ns: int, error: int) -> None:
        """Note a look at the ring, and the errno that prevented writing its records, 0 if there was none."""
        self._write_word(_ERRNO, error)
        self._write_word(_DRAINED_AT_NS, time_ns)

    def read_pass(self) -> tuple[int, int]:
        """Return the time of the last look, CLOCK_MONOTONIC, and its errno; zeros before the first."""
        return self._read_word(_DRAINED_AT_NS), self._read_word(_ERRNO)


def list_rings(folder: str) -> list[str]:
    """Return the paths of a folder's rings; none if it is not this user's own."""
    if not is_private(folder):
        return []
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(RING_SUFFIX)]
    except OSError:
        return []


def offer_folder(recording: str) -> str | None:
    """Create the folder for rings of a recording, or use one that a killed sampler has left; None if there is none."""
    folder = find_folder(recording)
    if folder is None:
        return None
    with contextlib.suppress(OSError):
        os.mkdir(folder, 0o700)
    return folder if is_private(folder) else None


def remove_folder(folder: str) -> None:
    """Remove a folder unless rings are left in it. A rank that is creating one now writes to the recording instead."""
    if list_rings(folder):
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name == OWNER_FILE or name.endswith(_NEW_SUFFIX):
                os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def pack_declaration(**facts: Any) -> bytes:
    """Return the line of a declaration."""
    return json.dumps(facts, default=str).encode() + b"\n"

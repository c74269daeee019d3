"""Python tracebacks in a job's output: the exception that ended a rank, and the line of the script that raised it."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zerotop.recording.output.tail import PrintedLine

_HEAD = "Traceback (most recent call last):"
# Prefixes of lines: PyTorch's own, torchrun's with --tee, and those of srun --label.
_RANK = re.compile(r"\[rank(\d+)\]:|^\s*(\d+): ")
_LOCAL_RANK = re.compile(r"\[default(\d+)\]:")
# Ray names a worker's process: before each of its lines, and where it raises a worker's exception again in the driver.
_RAY_WORKER = re.compile(r"\(\S.* pid=(\d+)(?:, ip=[^)]*)?\)")
_RAY_CALL = re.compile(r"ray\.exceptions\.RayTaskError\S*: ray::.*?\(pid=(\d+)")
# Python goes on after such an exception, which nobody could catch.
_IGNORED = "Exception ignored "
_INTERRUPTED = re.compile(r"(?:.*: ?)?KeyboardInterrupt:? *")
# Nor does one that ends a thread end its process.
THREAD_MARK = "Exception in thread "
_FRAME = re.compile(r'\s+File "(.+)", line (\d+), in (.+)$')
_ERROR = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::\s(.*)|:?)$")
# Lines of other processes that may come between those of an unmarked traceback.
_MOST_LINES = 400
# What torchrun and accelerate raise themselves when a rank has failed.
_LAUNCHERS_OWN = ("ChildFailedError", "SignalException", "CalledProcessError")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|/zerotop_probe/|^<")
# The script of `python -` and of `python -c`.
_UNNAMED = ("<stdin>", "<string>")
_SPAWN = "/multiprocessing/spawn.py"
_LONGEST_PLACE = 40
_LONGEST_TEXT = 240
# Failures of communication: another rank ended, and this one waited for it.
_LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_PEER = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|remote process exited|Timed out waiting \d+ms for (?:recv|send)"
    r"|Socket Timeout|NCCL communicator was aborted"
)
_TIMED_OUT = re.compile(r"[Tt]imed out|Timeout|collective operation timeout")


class TracebackFrame(NamedTuple):
    """One line of a traceback."""

    path: str
    line: int
    function: str

    @property
    def is_own(self) -> bool:
        """Whether the file is the user's: neither installed with pip nor part of Python."""
        return _INSTALLED.search(self.path) is None


@dataclass(frozen=True, slots=True)
class Traceback:
    """One exception as Python printed it."""

    time_ns: int  # unix time of its last line
    error: str  # type of the exception, without its module
    message: str  # its first line; "" without one
    frames: tuple[TracebackFrame, ...]  # the outermost first
    rank: int | None  # None where its lines do not say
    local_rank: int | None
    pid: int | None = None  # likewise
    thread: str = ""  # the one that it ended, as threading names it, beside the first; "" for that

    @property
    def is_marked(self) -> bool:
        """Whether its lines say which process it is of."""
        return any(one is not None for one in (self.rank, self.local_rank, self.pid))

    @property
    def is_lost_peer(self) -> bool:
        """Whether the rank failed because another one had failed before, and it could not communicate."""
        return self.error in _LOST_PEER_TYPES or _LOST_PEER.search(self.message) is not None

    @property
    def has_timed_out(self) -> bool:
        """Whether the rank has waited in vain for another one, which may have done the same."""
        return _TIMED_OUT.search(self.message) is not None

    @property
    def text(self) -> str:
        """The exception in one line, as printed."""
        return f"{self.error}: {self.message}" if self.message else self.error

    def _is_unnamed(self, frame: TracebackFrame) -> bool:
        """Whether a frame is of a script without a file, in which the traceback begins; new processes begin in one, too."""
        begin, *others = self.frames
        is_begin = frame.path == begin.path and begin.path in _UNNAMED
        return is_begin and not any(other.path.endswith(_SPAWN) for other in others[:1])

    @property
    def place(self) -> str:
        """The innermost line of the user's own code, as ``train.py:71 in save``; "" without frames."""
        own = [frame for frame in self.frames if frame.is_own or self._is_unnamed(frame)] or list(self.frames)
        if not own:
            return ""
        path, folder = own[-1].path, os.path.dirname(own[0].path)
        shown = os.path.relpath(path, folder) if folder and path.startswith(f"{folder}/") else os.path.basename(path)
        function = own[-1].function
        return f"{shown}:{own[-1].line}" + ("" if function == "<module>" else f" in {function}")

    def describe(self) -> dict[str, str | None]:
        """Return the values of templates: ``error``, ``place``, ``line`` and the sentence ``text``, not too long."""
        line, text = self.place.partition(" in ")[0], self.text.rstrip()
        place = self.place if len(self.place) <= _LONGEST_PLACE else line
        text = text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."
        ending = "" if text.endswith((".", "!", "?")) else "."
        return {"error": self.error, "place": place or None, "line": line or None, "text": f"{text}{ending}"}


@dataclass
class _Reading:
    """A traceback whose end has not been read."""

    first: int  # number of its first line
    pid: int | None  # of its process, where its lines name it
    thread: str
    frames: list[TracebackFrame] = field(default_factory=list)


def parse_tracebacks(lines: Sequence[PrintedLine]) -> Iterator[Traceback]:
    """Yield the tracebacks in one stream of output, by their ends.

    Lines of several ranks may be mixed, as long as their prefixes differ. In a chain of exceptions each one is yielded. The
    exception of a data loader's worker replaces the one that passed it on.
    """
    readings: dict[str, _Reading] = {}
    for number, (time_ns, text) in enumerate(lines):
        at = text.find(_HEAD)
        if at >= 0:
            if number and _IGNORED in lines[number - 1].text:
                continue
            # What stands before it without a newline, as a bar of progress, is no prefix.
            is_bare = "" not in readings and any(_FRAME.match(line.text) for line in lines[number + 1 : number + 2])
            head = "" if is_bare else text[:at].removesuffix("Original ")
            _, mark, thread = lines[number - 1].text.partition(THREAD_MARK) if number else ("", "", "")
            readings[head] = _Reading(number, _read_pid(_RAY_WORKER.search(head)), thread.removesuffix(":") if mark else "")
            continue
        prefix = max((one for one in readings if text.startswith(one)), key=len, default=None)
        if prefix is None:
            continue
        reading, rest = readings[prefix], text[len(prefix) :]
        if (frame := _FRAME.match(rest)) is not None:
            reading.frames.append(TracebackFrame(frame[1], int(frame[2]), frame[3]))
        elif (call := _RAY_CALL.match(rest)) is not None:  # the worker's frames follow
            reading.pid, reading.frames = _read_pid(call), []
        elif rest[:1].strip() and (error := _ERROR.match(rest)) is not None and reading.frames:
            del readings[prefix]
            if (kind := error[1].rpartition(".")[2]) not in _LAUNCHERS_OWN:
                rank, local = _RANK.search(prefix), _LOCAL_RANK.search(prefix)
                yield Traceback(
                    time_ns,
                    kind,
                    error[2] or "",
                    tuple(reading.frames),
                    int(rank[1] or rank[2]) if rank is not None else None,
                    int(local[1]) if local is not None else None,
                    reading.pid,
                    reading.thread,
                )
        elif number - reading.first > _MOST_LINES:
            del readings[prefix]


def find_interrupts(lines: Iterable[PrintedLine]) -> Iterator[int]:
    """Yield the unix times at which Python printed a KeyboardInterrupt, those that it ignored at its exit included."""
    return (time_ns for time_ns, text in lines if _INTERRUPTED.fullmatch(text) is not None)


def _read_pid(match: re.Match[str] | None) -> int | None:
    return int(match[1]) if match is not None else None

"""Why a rank ended too early: in each case what a headline and sentences say, and the advice.

Shortages that end a DataLoader's worker or a rank, by the messages of PyTorch and Python: shared memory, files, space.
"""

from __future__ import annotations

import os.path
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from zerotop.analysis.code_line import read_line
from zerotop.analysis.failures.rank_ends import RankEnd, read_printed_ends
from zerotop.analysis.failures.tracebacks import Traceback
from zerotop.recording.moments.at import At
from zerotop_probe.recording.events import LoaderStarted, Node


class Short(Enum):
    """What was short."""

    SHARED_MEMORY = "shared memory"
    OPEN_FILES = "open files"
    SENT_TENSORS = "open files of tensors that were sent"
    SPACE = "space"  # on a file system
    WORKER = "worker"  # a signal killed it: the reason is elsewhere
    CRASHED_WORKER = "crashed worker"  # a signal of its own doing
    EXITED_WORKER = "exited worker"  # it ended itself


@dataclass(frozen=True, slots=True)
class WorkerShortage:
    """One shortage, as an exception reports it."""

    kind: Short
    is_worker: bool  # a DataLoader's worker met it, not the rank itself
    folder: str = ""  # of the file that found no space, if it is known
    worker_pid: int | None = None
    signal: str = ""  # in the words of PyTorch, such as "Killed"
    exit_code: int | None = None  # of a worker that ended itself


_OPEN_FILES = re.compile(r"(?P<sent>received \d+ items of ancdata)|Too many open files")
# Frames of sending a tensor to another process, or receiving it.
_SENDING = ("torch/multiprocessing/reductions.py", "multiprocessing/reduction.py", "multiprocessing/resource_sharer.py")
# PyTorch's files on /dev/shm have names such as /torch_18111_1653167000_0.
_FULL_SHM = re.compile(
    r"shared memory ?\(shm\)|out of shared memory|/torch_\d+_\d+(?:_\d+)?>.*(?:No space left|Cannot allocate memory)"
    r"|unable to (?:write to|resize) file </torch_\d+"
)
_SPACE = re.compile(r"No space left on device(?:: '(?P<path>[^']+)')?")
_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d+)[^)]*\) (?:is killed by signal: (?P<signal>[A-Z][\w ]*)"
    r"|exited(?: unexpectedly with exit code (?P<code>\d+))?)"
)
# Signals that compiled code ends its process with, as PyTorch names them.
_CRASH_WORDS = ("Segmentation fault", "Aborted", "Illegal instruction", "Floating point exception", "Bus error")
_WORKER_FILE = "torch/utils/data/_utils/worker.py"


def find_shortage(traceback: Traceback) -> WorkerShortage | None:
    """Return the shortage that an exception reports; None if it reports none."""
    worker = _WORKER.search(traceback.message)
    is_worker = worker is not None or any(frame.path.endswith(_WORKER_FILE) for frame in traceback.frames)
    pid = int(worker["pid"]) if worker is not None else None
    signal = (worker["signal"] or "").strip() if worker is not None else ""
    if (match := _OPEN_FILES.search(traceback.message)) is not None:
        is_sent = bool(match["sent"]) or any(frame.path.endswith(_SENDING) for frame in traceback.frames)
        return WorkerShortage(Short.SENT_TENSORS if is_sent else Short.OPEN_FILES, is_worker)
    if _FULL_SHM.search(traceback.message):
        return WorkerShortage(Short.SHARED_MEMORY, is_worker, "/dev/shm", pid, signal)
    if (match := _SPACE.search(traceback.message)) is not None:
        folder = os.path.dirname(match["path"] or "")
        is_shared = folder.startswith("/dev/shm")
        return WorkerShortage(Short.SHARED_MEMORY if is_shared else Short.SPACE, is_worker, folder)
    if signal:
        return WorkerShortage(Short.CRASHED_WORKER if signal in _CRASH_WORDS else Short.WORKER, True, "", pid, signal)
    code = worker["code"] if worker is not None else None
    return WorkerShortage(Short.EXITED_WORKER, True, "", pid, exit_code=int(code)) if code else None


class EndCause(NamedTuple):
    """Why a rank ended. The texts are templates of ``Text`` with the evidence and values of an ``End``."""

    headline: str
    details: str
    advice: str
    fix: str
    confidence: float = 0.95
    is_error: bool = False  # the rank ended by itself
    is_shortage: bool = False  # an exception named what was short, other than memory
    is_of_memory: bool = False  # host memory was short: the values have what saves it

    @property
    def texts(self) -> dict[str, Any]:
        """The fields of a kind of finding."""
        return {name: value for name, value in self._asdict().items() if not name.startswith("is_")}


_VANISHED = EndCause(
    confidence=0.9,
    headline="{dead} died unexpectedly[ after {steps:count step}]{early}",
    details="Process {pid}.[ {together}][ {others:Ranks} failed because of that.]",
    advice="Look at its last output and at the kernel's log. Saving more often limits how much work is lost.",
    fix="dmesg -T | grep -i kill",
)
_SIGNALLED = _VANISHED._replace(
    confidence=0.95,
    headline="{ended} was killed by signal {number} ({signal})[ after {steps:count step}]{early}",
    details=(
        "[Process {pid}[, as {launcher} printed].][ {together}][ {others:Ranks} failed because of that.]"
        "[ Launchers and schedulers stop all ranks at once: this signal was sent to {alone} only.]"
    ),
)
_STOPPED = _SIGNALLED._replace(
    advice="Usually a scheduler's time limit or a manual kill. {saving_limits} how much is lost.", fix=""
)
_INTERRUPTED = _STOPPED._replace(advice="Usually Ctrl-C in its terminal. {saving_limits} how much is lost.")
_HUNG_UP = _STOPPED._replace(advice="Usually its terminal or connection was closed: start it in tmux, or with nohup.")
_OUT_OF_MEMORY = "The kernel killed a process of its control group for lack of memory just then."
_KILLED = _SIGNALLED._replace(
    details=f"{_OUT_OF_MEMORY} {_SIGNALLED.details}",
    advice="{saving_memory}",
    fix="{saving_memory_fix}",
    is_of_memory=True,
)
_KILLED_BY_SCHEDULER = _KILLED._replace(
    details=f"{{scheduler}} printed that the job used more memory than it was given. {_SIGNALLED.details}"
)
_VANISHED_KILLED = _KILLED._replace(headline=_VANISHED.headline, details=f"{_OUT_OF_MEMORY} {_VANISHED.details}")
_SENT = _SIGNALLED._replace(
    details=(
        "The kernel killed no process of its control group for lack of memory: a process sent the signal.["
        " Its host memory had grown by {grown_bytes:bytes} to {host_held_bytes:bytes} since its last step.] "
        f"{_SIGNALLED.details}"
    ),
    advice="Find out what ends processes on the node: a memory watchdog, a limit of the scheduler, or a script. The kernel's"
    " audit log names the sender of the next one.",
    fix="auditctl -a always,exit -F arch=b64 -S kill -F a1={number}",
)
_TO_SEVERAL = _STOPPED._replace(
    headline="{signalled:Ranks} were killed by signal {number} ({signal}) at once[ after {steps:count step}]{early}",
    details=(
        "[{launcher} did not print that it ended any of them: the signal came from elsewhere.]"
        "[ {others:Ranks} failed because of that.]"
    ),
    advice="Usually a scheduler, which signals all ranks, or a manual kill. {saving_limits} how much is lost.",
)
_TO_ONE = _SIGNALLED._replace(
    advice="Usually a manual kill, or a script on the node. The kernel's audit log names the sender of the next one.",
    fix=_SENT.fix,
)
CRASHED = _SIGNALLED._replace(
    advice="Compiled code crashed: let Python print which line called it. Saving more often limits how much work is lost.",
    fix="PYTHONFAULTHANDLER=1",
)
OTHER_SIZE = _SIGNALLED._replace(
    headline="{ended} got {received:,} bytes in a collective where it expected {expected:,}",
    details=f"The ranks passed tensors of different sizes to one collective, and gloo aborts. {_SIGNALLED.details}",
    advice="All ranks must pass tensors of one shape. With this variable PyTorch compares them, and prints both shapes.",
    fix="TORCH_DISTRIBUTED_DEBUG=DETAIL",
)
_BUS_ERROR = _SIGNALLED._replace(
    advice="Usually /dev/shm is full: start the container with a larger --shm-size, or set {worker_count} to 0.",
    fix="docker run --shm-size=16g",
)
_RAISED = EndCause(
    is_error=True,
    headline="Rank {rank} ended with {error}[ at {place}]",
    details="{text}[ {others:Ranks} failed because of that.][ {launcher} printed exit code {code}.]",
    advice="Its output has the traceback.",
    fix="[{line}]",
)
LEFT_ALONE = _RAISED._replace(
    headline="Rank {early_rank} ended without an error after {early_steps:count step}: rank {rank} lost it and failed",
    details="Rank {rank} ended with {error}[ at {place}].[ {others:Ranks} failed because of that.]",
    advice=(
        "See why rank {early_rank} leaves the loop before the others: sys.exit(), a data loader with fewer batches, or a"
        " condition that differs between ranks."
    ),
    fix="drop_last=True",
)
_BLOCKING = "The traceback names where the error was noticed. With this variable it names the line that launched the kernel."
DEVICE_ASSERT = _RAISED._replace(
    headline="Rank {rank} ended: a kernel on its GPU found that {assertion} does not hold",
    details=(
        "[{meaning} ]{kernel_place} checks `{assertion}`. {text}[ {others:Ranks} failed because of that.]"
        "[ {launcher} printed exit code {code}.]"
    ),
    advice=_BLOCKING,
    fix="CUDA_LAUNCH_BLOCKING=1",
)
NO_CLASS = DEVICE_ASSERT._replace(headline="Rank {rank} ended: a target of the loss is none of the classes")
OUT_OF_RANGE = DEVICE_ASSERT._replace(headline="Rank {rank} ended: an index is outside its tensor, or its embedding")
# A kernel's check, as CUDA prints it for each thread.
_ASSERTION = re.compile(
    r"(?P<kernel_place>[\w.]+\.cuh?:\d+): .*: block: \[[\d,]+\], thread: \[[\d,]+\] Assertion `(?P<assertion>.+)` failed"
)
_INDEX = re.compile(r"index out of bounds|[iI]ndex.* < |< .*[sS]ize|ScatterGather|Indexing")


def find_assertion(lines: Iterable[str]) -> tuple[EndCause, dict[str, Any]] | None:
    """Return the cause for a check that failed in a kernel of PyTorch, by what CUDA has printed, and its values."""
    found = next(filter(None, map(_ASSERTION.search, lines)), None)
    if found is None:
        return None
    place, assertion = found["kernel_place"], found["assertion"]
    if "n_classes" in assertion:
        meaning = "Each target has to be at least 0 and less than the number of classes, or ignore_index."
        return NO_CLASS, {**found.groupdict(), "meaning": meaning}
    cause = OUT_OF_RANGE if _INDEX.search(f"{place} {assertion}") else DEVICE_ASSERT
    return cause, {**found.groupdict(), "meaning": None}


_UNEQUAL = _RAISED._replace(
    headline="Rank {rank} ended: the samples of a batch differ in shape[, in {worker}]",
    advice="Let the dataset return samples of one shape, resized or padded; or pass a collate_fn that pads them.",
    fix="collate_fn=",
)
_COLLATE_FILE = "torch/utils/data/_utils/collate.py"
# The latter comes in a worker, where the batch is put into shared memory of the size of its samples.
_UNEQUAL_SHAPES = re.compile(r"stack expects each tensor to be equal size|resize storage that is not resizable")


def find_unequal_samples(traceback: Traceback) -> tuple[EndCause, dict[str, Any]] | None:
    """Return the cause for samples that make no batch, and its values; None if the exception tells of something else."""
    is_collating = any(frame.path.endswith(_COLLATE_FILE) for frame in traceback.frames)
    if not is_collating or _UNEQUAL_SHAPES.search(traceback.message) is None:
        return None
    is_worker = any(frame.path.endswith(_WORKER_FILE) for frame in traceback.frames)
    return _UNEQUAL, {"worker": "a DataLoader worker" if is_worker else None}


_UNEXPLAINED = _VANISHED._replace(
    details=(
        f"{_VANISHED.details} The kernel killed no process of its control group for lack of memory. A signal, a crash in"
        " compiled code and os._exit() end a process without a word."
    ),
)
EXITED = _VANISHED._replace(
    is_error=True,
    headline="{ended} ended with exit code {code}[ after {steps:count step}]{early}",
    details=(
        "Process {pid}[, as {launcher} printed], without a traceback.[ {manner}][ {together}]"
        "[ {others:Ranks} failed because of that.]"
        "[ By custom, programs that end themselves after {meant} exit with this code.]"
    ),
    advice="Its last output may say why it ended.",
    fix="",
)
EXIT_CALLED = EXITED._replace(
    headline="{ended} ended by os._exit({exit_status})[ at {exit_place}][ after {steps:count step}]{early}",
    details=(
        "Process {pid} called it itself[, at {exit_line}].[ {also:Ranks} did so, too.][ {together}]"
        "[ {others:Ranks} failed because of that.]"
    ),
    advice="Look at what leads to that call: it ends the process without a traceback.",
    fix="[{exit_location}]",
)
"""A line of the job's own called os._exit."""
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_BY_SIGNAL: dict[int, EndCause] = dict.fromkeys(_CRASHES, CRASHED)
# The signals that people and schedulers end jobs with, which leave no trace in the kernel's log, by name.
STOPS = {"SIGTERM": _STOPPED, "SIGINT": _INTERRUPTED, "SIGHUP": _HUNG_UP}
_BY_SIGNAL |= {signal.SIGBUS: _BUS_ERROR, **{signal.Signals[name]: cause for name, cause in STOPS.items()}}


def choose_cause(end: RankEnd, kills: int | None, scheduler: str | None, *, is_alone: bool = False) -> EndCause:
    """Return the cause by how the rank ended.

    ``kills``: processes that the kernel killed for lack of memory then, None if unknown; ``scheduler``: that reported one;
    ``is_alone``: the other ranks did not get its signal.
    """
    number = end.signal_number
    if number is None:
        if end.traceback is not None:
            return _RAISED
        return EXITED if end.exit_code else _VANISHED_KILLED if kills else _VANISHED if kills is None else _UNEXPLAINED
    if number == signal.SIGKILL and scheduler is not None:
        return _KILLED_BY_SCHEDULER
    if end.with_signal and not kills:
        return _TO_SEVERAL
    if number == signal.SIGKILL and kills == 0:
        return _SENT
    if kills:
        return _KILLED
    if number == signal.SIGTERM and is_alone:
        return _TO_ONE
    return _BY_SIGNAL.get(number, _SIGNALLED)


# --- shortages -----------------------------------------------------------------------------------------------------------

_SHARED_MEMORY = EndCause(
    is_error=True,
    is_shortage=True,
    headline="/dev/shm[ of {shared_bytes:bytes}] is full: {who} found no space",
    details="{text} Batches go from DataLoader workers to their rank through /dev/shm.",
    advice="Give the container more: --shm-size, or --ipc=host. Fewer workers and a smaller prefetch_factor need less.",
    fix="docker run --shm-size=16g",
)
SHORTAGES = {
    Short.SHARED_MEMORY: _SHARED_MEMORY,
    Short.OPEN_FILES: _SHARED_MEMORY._replace(
        headline="Too many open files: {who} failed",
        details="{text}[ A file, socket or pipe was opened at {place}.]",
        advice="Close what is opened and no longer needed, or raise the limit of open files.",
        fix="ulimit -n 65536",
    ),
    Short.SENT_TENSORS: _SHARED_MEMORY._replace(
        headline="Too many open files: {who} failed",
        details="{text} Each tensor that one process sends to another needs an open file.",
        advice='Raise the limit of open files, or call torch.multiprocessing.set_sharing_strategy("file_system").',
        fix="ulimit -n 65536",
    ),
    Short.SPACE: _SHARED_MEMORY._replace(
        headline="No space left[ on {folder}]: {who} failed",
        details="{text}",
        advice="Free space there, or write to another file system; TMPDIR moves temporary files.",
        fix="df -h[ {folder}]",
    ),
    Short.WORKER: _SHARED_MEMORY._replace(
        headline="{who}[ (PID {worker_pid})] was killed: {worker_signal}",
        details="{text}",
        advice="Look at the kernel's log: if host memory was short, use fewer workers or a smaller prefetch_factor.",
        fix="dmesg -T | grep -i kill",
    ),
    Short.CRASHED_WORKER: _SHARED_MEMORY._replace(
        headline="{who}[ (PID {worker_pid})] crashed: {worker_signal}",
        details="{text}[ It read the dataset {dataset}[, whose {reader} begins at {reader_place}].]",
        advice=(
            "Look at what its dataset and collate_fn call in C code, such as compiled libraries and ctypes. With this"
            " argument of the DataLoader, and faulthandler imported, the worker prints which line called it."
        ),
        fix="worker_init_fn=lambda _: faulthandler.enable()",
    ),
    Short.EXITED_WORKER: _SHARED_MEMORY._replace(
        headline="{who}[ (PID {worker_pid})] ended itself with exit code {worker_code}",
        details="{text}",
        advice=(
            "Look for sys.exit() and os._exit() in its dataset and collate_fn. Without workers these run in the rank, where"
            " such a call is recorded with its line."
        ),
        fix="num_workers=0",
    ),
}
_OF_WORKER = (Short.WORKER, Short.CRASHED_WORKER, Short.EXITED_WORKER)


def choose_shortage(
    at: At, host: str, rank: int | None, traceback: Traceback | None
) -> tuple[EndCause, dict[str, Any]] | None:
    """Return the cause for a shortage that an exception reports, and its values; None if it reports none."""
    shortage = _find_first_shortage(at, traceback) if traceback is not None else None
    if shortage is None:
        return None
    of_rank = f" of rank {rank}" if rank is not None else ""
    worker, process = f"a DataLoader worker{of_rank}", f"rank {rank}" if rank is not None else "the job"
    who = worker if shortage.is_worker else process
    loader = _find_loader(at, host, shortage.worker_pid)
    reader = read_line(loader) if loader is not None else None
    sizes = [event.shared_memory_bytes for event in at.events_of(Node) if event.writer.host == host]
    return SHORTAGES[shortage.kind], {
        "who": who[0].upper() + who[1:] if shortage.kind in _OF_WORKER else who,
        "folder": shortage.folder or None,
        "worker_pid": shortage.worker_pid,
        "worker_signal": shortage.signal,
        "worker_code": shortage.exit_code,
        "dataset": loader.dataset if loader is not None else None,
        "reader": reader.function.rpartition(".")[2] if reader is not None else None,
        "reader_place": reader.location if reader is not None else None,
        "shared_bytes": next(filter(None, reversed(sizes)), None) if shortage.kind is Short.SHARED_MEMORY else None,
    }


def _find_first_shortage(at: At, traceback: Traceback) -> WorkerShortage | None:
    """Return the shortage that an exception reports, or for a worker of which it says no more than that, one before it."""
    shortage, worker = find_shortage(traceback), _WORKER.search(traceback.message)
    if shortage is not None or worker is None:
        return shortage
    earlier = [one for one in read_printed_ends(at).tracebacks if one.time_ns <= traceback.time_ns]
    known = filter(None, map(find_shortage, reversed(earlier)))
    return next((one for one in known if one.worker_pid == int(worker["pid"])), None)


def _find_loader(at: At, host: str, pid: int | None) -> LoaderStarted | None:
    """Return the last start of a worker with this PID; None if it was not seen, or its dataset has no text to show."""
    found = (one for one in reversed(at.events_of(LoaderStarted)) if one.writer.host == host and pid in one.workers)
    return next((one for one in found if one.dataset.isprintable()), None)

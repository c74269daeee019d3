"""Read the figures that NCCL's Inspector writes about collectives: how long each took on the GPU, and its bus bandwidth.

The Inspector is a profiler plugin of NCCL that whoever starts the job switches on (``zerotop run --nccl-inspector``, or the
variables of its documentation). Each process then appends lines of JSON about collectives to a file of its own. Up to
version 4.2 every line names its communicator; from 4.3 on a line before those of a communicator does. Some are left out:
small ones, those beyond 1,024 in an interval, and in version 4.0 all but the last of an interval.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording import events

_PLUGIN, _ENABLE, _FOLDER = "NCCL_PROFILER_PLUGIN", "NCCL_INSPECTOR_ENABLE", "NCCL_INSPECTOR_DUMP_DIR"
_INTERVAL = "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"
# Below the recording's folder. What was read of the files there is given back to the file system.
_OWN_FOLDER = "nccl-inspector"
_INTERVAL_US = 1_000_000
_PERIOD_S = 5.0
# Figures that differ by less than this share from the last are written once a minute.
_NEWS, _LONGEST_S = 0.1, 60.0
# Of a file, in a period; older lines are skipped.
_MOST_BYTES = 4 << 20
_MOST_FIGURES = 32
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

Key = tuple[str, str]  # communicator and collective


def enable_inspector(plugin: str, recording: str, environment: MutableMapping[str, str]) -> None:
    """Set the variables with which NCCL loads the plugin. Those of the Inspector that are set already stay."""
    environment[_PLUGIN] = plugin
    folder = os.path.join(recording, _OWN_FOLDER)
    with suppress(OSError):  # without it NCCL's figures are missing, and nothing else
        os.makedirs(folder, 0o700)
    for name, value in ((_ENABLE, "1"), (_INTERVAL, str(_INTERVAL_US)), (_FOLDER, folder)):
        environment.setdefault(name, value)


def find_dump(process: ProcessHandle) -> str | None:
    """Return the file that the Inspector writes in a process; None if it is not switched on."""
    environment = procfs.read_environment(process.pid)
    if not environment.get(_PLUGIN) or environment.get(_ENABLE, "0") in ("", "0"):
        return None
    folder = environment.get(_FOLDER) or f"nccl-inspector-{environment.get('SLURM_JOBID') or 'unknown-jobid'}"
    with suppress(OSError):
        return os.path.join(os.readlink(f"/proc/{process.pid}/cwd"), folder, f"{socket.gethostname()}-pid{process.pid}.log")
    return None


class InspectorFile:
    """The growing file of a process, and the sums of the lines that were read since the last figures."""

    def __init__(self, path: str, *, is_ours: bool) -> None:
        self._path = path
        self._is_ours = is_ours
        self._position = 0
        self._header: Mapping[str, Any] = {}
        self._sums: dict[Key, dict[str, Any]] = {}
        self._numbers: dict[Key, int] = {}

    def read(self) -> None:
        """Read what is new. Raises OSError, also if there is no file yet."""
        with open(self._path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size - self._position > _MOST_BYTES:
                self._position = size - _MOST_BYTES
            file.seek(self._position)
            data = file.read(_MOST_BYTES)
        end = data.rfind(b"\n") + 1
        for line in data[:end].splitlines():
            self._add_line(line)
        self._position += end
        if self._is_ours and end:
            _free_blocks(self._path, self._position)

    def _add_line(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            header = record.get("header")
            self._header = header if isinstance(header, dict) else self._header
            call = record.get("coll_perf")
            if call is None:
                return
            seconds, size, speed = (
                float(call[name]) for name in ("coll_exec_time_us", "coll_msg_size_bytes", "coll_busbw_gbs")
            )
            key = str(self._header["id"]), str(call["coll"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # torn, or of a version that is not known
        if not all(math.isfinite(value) and value >= 0 for value in (seconds, size, speed)):
            return
        if key not in self._sums and len(self._sums) < _MOST_FIGURES:
            names = {"communicator": key[0], "collective": key[1]}
            ranks = {name: self._header.get(name) for name in ("n_ranks", "nnodes")}
            self._sums[key] = {**names, **ranks, "count": 0, "missed": 0, "seconds": 0.0, "bytes": 0.0, "bus_gbs": 0.0}
        if (sums := self._sums.get(key)) is not None:
            sums["count"] += 1
            sums["seconds"] += seconds / 1e6
            sums["bytes"] += size
            sums["bus_gbs"] = max(sums["bus_gbs"], speed)
            sums["missed"] += self._count_missed(key, call.get("coll_sn"))

    def _count_missed(self, key: Key, number: object) -> int:
        """Return how many collectives are missing before one: NCCL numbers those of a kind in a communicator."""
        last = self._numbers.get(key)
        if not isinstance(number, int):
            return 0
        self._numbers[key] = number
        return max(0, number - last - 1) if last is not None else 0

    def take_figures(self) -> dict[Key, dict[str, Any]]:
        """Return the sums by communicator and collective, and begin anew."""
        sums, self._sums = self._sums, {}
        return sums


def _free_blocks(path: str, size: int) -> None:
    """Give back the blocks of a file's begin, where the file system can. Its writer appends as before."""
    with suppress(OSError, AttributeError), open(path, "r+b") as file:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        fallocate(file.fileno(), _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_longlong(0), ctypes.c_longlong(size))


class InspectorReader(threading.Thread):
    """Records the figures of this node's ranks, if any rank has the Inspector. Files may hang: it has its own thread."""

    def __init__(
        self, recording: str, list_processes: Callable[[], Iterable[ProcessHandle]], write: Callable[..., object]
    ) -> None:
        """``write`` takes the time, the class of an event, and its fields."""
        super().__init__(name="nccl inspector", daemon=True)
        self._own_folder = os.path.join(recording, _OWN_FOLDER)
        self._list_processes = list_processes
        self._write = write
        self._files: dict[ProcessHandle, InspectorFile] = {}
        self._read_s: dict[ProcessHandle, float] = {}
        self._told: dict[ProcessHandle, tuple[float, dict[Key, tuple[float, float]]]] = {}
        self._is_closing = threading.Event()

    def run(self) -> None:
        while not self._is_closing.wait(_PERIOD_S):
            self.read_figures(time.monotonic())

    def read_figures(self, now_s: float) -> None:
        """Record the figures of each rank that has some: if they are new, or a minute after the last."""
        for process in self._list_processes():
            file = self._files.get(process)
            if file is None:
                if (path := find_dump(process)) is None:
                    continue
                file = InspectorFile(path, is_ours=os.path.dirname(path) == self._own_folder)
                self._files[process], self._read_s[process] = file, now_s
            with suppress(OSError):
                file.read()
            figures, seconds = file.take_figures(), now_s - self._read_s[process]
            self._read_s[process] = now_s
            if figures and seconds > 0 and self._is_news(process, now_s, figures, seconds):
                self._write(
                    time.monotonic_ns(),
                    events.NcclFigures,
                    pid=process.pid,
                    start=process.start,
                    seconds=round(seconds, 3),
                    figures=list(figures.values()),
                )

    def _is_news(self, process: ProcessHandle, now_s: float, figures: dict[Key, dict[str, Any]], seconds: float) -> bool:
        values = {key: (sums["seconds"] / seconds, sums["bus_gbs"]) for key, sums in figures.items()}
        told_s, told = self._told.get(process, (-math.inf, {}))
        is_alike = told.keys() == values.keys() and all(
            abs(new - old) <= _NEWS * old for key in values for new, old in zip(values[key], told[key], strict=True)
        )
        if is_alike and now_s - told_s < _LONGEST_S:
            return False
        self._told[process] = now_s, values
        return True

    def finish(self) -> None:
        """Stop; does not wait."""
        self._is_closing.set()

"""Watches the GPUs of a node for hardware faults: threads wait for NVML's events, another one reads counters and links."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from zerotop_probe.outside.sampling.faults.call_guard import CallGuard, GuardedThread, StandstillTimer
from zerotop_probe.outside.sampling.faults.health import GpuHealth, ReportLimit
from zerotop_probe.outside.sampling.faults.nvml_faults import EventSet, FaultReader, NvmlEvent, Readings
from zerotop_probe.outside.sampling.faults.operational_events import OperationalEvents
from zerotop_probe.outside.sampling.nvml import GpuDevice, GpuLost
from zerotop_probe.recording import events

# Half ticks of 50 ms between readings.
_PERIOD = 20
# How long one wait for an event lasts, which costs as good as nothing. A wait that takes this much longer shows that the
# driver hangs.
_WAIT_S = 5.0
_WAIT_PATIENCE_S = 5.0
_NO_ANSWER = "NVML does not answer"
# Between events that come again and again.
_STORM_PAUSE_S = 0.05


class FaultWatch:
    """Records the hardware faults of a node's GPUs."""

    def __init__(self, write: Callable[..., object], on_error: Callable[[str, BaseException], None]) -> None:
        """``write`` takes the time, the class of an event, and its fields."""
        self._write = write
        self._on_error = on_error
        self._health: GuardedThread | None = None
        self._waiting: list[_EventThread] = []
        self._numbers: dict[GpuDevice, list[int]] = {}

    def open(self, devices: Sequence[GpuDevice]) -> None:
        """Begin to watch. A GPU that is divided by MIG is watched as a whole."""
        numbers = self._numbers
        for device in devices:
            numbers.setdefault(device.whole, []).append(device.gpu.index)
        if not numbers:
            return
        self._waiting = [
            _EventThread(kind, source, numbers, self._write, self._on_error) for kind, source in _SOURCES.items()
        ]
        sampler = HealthSampler(numbers, self._write, self._explain_hidden)
        self._health = GuardedThread("gpu faults", sampler, on_error=self._on_error, on_silent=self.note_silent)
        for waiting in self._waiting:
            waiting.start_waiting()
        self._health.start_sampling()

    def _explain_hidden(self, device: GpuDevice) -> dict[str, str]:
        """Return NVML's reasons why a GPU's events are not visible, by kind."""
        found = {waiting.kind: waiting.explain_hidden(device) for waiting in self._waiting}
        return {kind: why for kind, why in found.items() if why is not None}

    def note_silent(self, device: GpuDevice | None, seconds: float, is_back: bool) -> None:
        """Record that a call on a GPU does not return, or has returned."""
        gpu = device.gpu.index if device is not None else None
        gpus = self._numbers.get(device, [device.gpu.index]) if device is not None else None
        self._write(time.monotonic_ns(), events.GpuSilent, gpu=gpu, gpus=gpus, seconds=round(seconds, 1), back=is_back)

    def request_sample(self, time_ns: int, half_tick: int) -> None:
        """Request readings if they are due, and notice calls that do not return."""
        if self._health is None:
            return
        if half_tick % _PERIOD == 0:
            self._health.request_sample(time_ns, half_tick)
        for waiting in self._waiting:
            if (seconds := waiting.take_silence()) is not None:
                self.note_silent(None, seconds, False)
        self._health.check_calls()

    def finish_sampling(self, timeout_s: float) -> None:
        """Stop, without waiting for a driver that hangs, or for the end of a wait for events."""
        for waiting in self._waiting:
            waiting.finish_waiting()
        if self._health is not None:
            self._health.finish_sampling(timeout_s)


class HealthSampler:
    """Reads counters and links of GPUs, and records those that became worse."""

    def __init__(
        self,
        numbers: dict[GpuDevice, list[int]],
        write: Callable[..., object],
        explain_hidden: Callable[[GpuDevice], dict[str, str]],
    ) -> None:
        self.guard = CallGuard()
        self._numbers = numbers
        self._write = write
        self._explain_hidden = explain_hidden
        self._readers = {device: FaultReader(device) for device in numbers}
        self._health = {device: GpuHealth() for device in numbers}
        self._told: dict[GpuDevice, set[str]] = {device: set() for device in numbers}

    def prepare_sampling(self) -> None:
        """Read which counts are old, and which states are bad at the begin."""
        self._read_all(time.monotonic_ns())

    def leave_out(self, device: GpuDevice) -> None:
        """Read a GPU no longer."""
        self._readers = {one: reader for one, reader in self._readers.items() if one is not device}

    def take_back(self, device: GpuDevice) -> None:
        """Read it again."""
        self._readers = self._readers | {device: FaultReader(device)}

    def take_sample(self, time_ns: int, tick: int) -> None:
        """Read all GPUs that still respond; record once what cannot be seen of each."""
        for device in self._read_all(time_ns):
            self._tell_hidden(device, self._readers[device].explain_hidden() if device in self._readers else {})

    def _read_all(self, time_ns: int) -> list[GpuDevice]:
        readings = {device: found for device, reader in self._readers.items() if (found := self._read(device, reader))}
        for device, usual in self._find_usual_links(readings):
            self._health[device].most_links = max(self._health[device].most_links, usual)
        for device, found in readings.items():
            for fault in self._health[device].compare(found, time_ns):
                self._write(time_ns, events.GpuFault, **_name_gpus(device, self._numbers), **fault._asdict())
        return list(readings)

    def _read(self, device: GpuDevice, reader: FaultReader) -> Readings | None:
        try:
            return self.guard.call_driver(device, reader.read)
        except GpuLost:
            self.leave_out(device)
            self._write(time.monotonic_ns(), events.GpuFault, kind="lost", **_name_gpus(device, self._numbers))
            return None

    @staticmethod
    def _find_usual_links(readings: dict[GpuDevice, Readings]) -> Iterator[tuple[GpuDevice, int]]:
        """Yield the number of active links that most GPUs of the same kind have, for those that have some."""
        for device, found in readings.items():
            peers = Counter(
                other.links for one, other in readings.items() if one.gpu.name == device.gpu.name and other.links
            )
            (usual, count), *_ = [*peers.most_common(1), (0, 0)]
            if found.links and usual and count > len(readings) / 2:
                yield device, usual

    def _tell_hidden(self, device: GpuDevice, hidden: dict[str, str]) -> None:
        """Record once what cannot be seen of a GPU."""
        told = self._told[device]
        if hidden := {kind: why for kind, why in (self._explain_hidden(device) | hidden).items() if kind not in told}:
            told.update(hidden)
            self._write(time.monotonic_ns(), events.GpuFaultsHidden, gpu=device.gpu.index, hidden=hidden)

    def close(self) -> None:
        """Do nothing: the events are written."""


class _EventSource(Protocol):
    """NVML's events of some GPUs; ``hidden`` has its reasons for those that show none."""

    hidden: dict[GpuDevice, str]

    @property
    def is_open(self) -> bool: ...
    def wait(self, timeout_s: float) -> NvmlEvent | None: ...
    def close(self) -> None: ...


# The sources of events, by what is hidden without them. Each has a thread: one that hangs does not keep another one waiting.
_SOURCES: dict[str, Callable[[Iterable[GpuDevice]], _EventSource]] = {"xid": EventSet, "operational": OperationalEvents}


class _EventThread(threading.Thread):
    """Waits for the events of GPUs from one source."""

    def __init__(
        self,
        kind: str,
        open_source: Callable[[Iterable[GpuDevice]], _EventSource],
        numbers: dict[GpuDevice, list[int]],
        write: Callable[..., object],
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(name=f"gpu events: {kind}", daemon=True)
        self.kind = kind
        self._open_source = open_source
        self._numbers = numbers
        self._write = write
        self._on_error = on_error
        self._hidden: dict[GpuDevice, str] | None = None
        self._wait = object()  # the current one
        self._timer = StandstillTimer()
        self._is_silent = False
        self._closing = threading.Event()
        self._limits: dict[object, ReportLimit] = {}

    def start_waiting(self) -> None:
        """Start the thread. Under a limit of processes (ulimit -u) that may fail, which is reported."""
        try:
            self.start()
        except RuntimeError as error:
            self._on_error(self.name, error)

    def explain_hidden(self, device: GpuDevice) -> str | None:
        """Return NVML's reason why the events of a GPU are not visible; None if they are."""
        return _NO_ANSWER if self._hidden is None else self._hidden.get(device)

    def take_silence(self) -> float | None:
        """Return once how long a call has lasted that does not return."""
        seconds = self._timer.measure(self._wait)
        if not self.is_alive() or self._is_silent or seconds < _WAIT_S + _WAIT_PATIENCE_S:
            return None
        self._is_silent = True
        return seconds

    def finish_waiting(self) -> None:
        """Let the thread end after its current wait."""
        self._closing.set()

    def run(self) -> None:
        """Record events until the end."""
        try:
            waiting = self._open_source(self._numbers)
            self._hidden = waiting.hidden
            while waiting.is_open and not self._closing.is_set():
                self._wait = object()
                if (found := waiting.wait(_WAIT_S)) is not None:
                    self._record(found)
                self._hidden = waiting.hidden
            waiting.close()
        except Exception as error:
            self._on_error(self.name, error)

    def _record(self, found: NvmlEvent) -> None:
        report = found.report or {}
        what = found.device, found.kind, found.value, report.get("module"), report.get("code")
        limit = self._limits.setdefault(what, ReportLimit(found.time_ns))
        if not limit.is_due(found.time_ns):
            self._closing.wait(_STORM_PAUSE_S)
            return
        limit.note_report(found.time_ns)
        facts = {"value": found.value, "report": found.report} | _name_gpus(found.device, self._numbers)
        self._write(found.time_ns, events.GpuFault, kind=found.kind, **facts)


def _name_gpus(device: GpuDevice, numbers: dict[GpuDevice, list[int]]) -> dict[str, Any]:
    return {"gpu": device.gpu.index, "gpus": numbers[device]}

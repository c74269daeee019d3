"""Sampling the GPUs of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from zerotop_probe.outside.sampling import pcie
from zerotop_probe.outside.sampling.faults.call_guard import CallGuard
from zerotop_probe.outside.sampling.nvml import GpuDevice, GpuDiscovery, GpuLost, discover_gpus
from zerotop_probe.recording.tables import GPU_PROCESSES, GPUS
from zerotop_probe.recording.writer import Identity, RecordWriter

# In half ticks of 50 ms. Processes on the GPUs are queried when the memory in use has changed, which is rare in training, at
# least this many half ticks after the previous query, and after the maximum in any case.
_HALF_TICKS_PER_ROW = 2
_MIN_PROCESS_PERIOD, _MAX_PROCESS_PERIOD = 4, 20

Answer = TypeVar("Answer")


class GpuSampler:
    """Writes GPUS at every tick and GPU_PROCESSES when memory in use has changed; called twice a tick."""

    def __init__(
        self,
        recording: str,
        identity: Identity,
        *,
        on_seen: Callable[[GpuDiscovery], None],
        on_open: Callable[[Sequence[GpuDevice]], None] = lambda _: None,
        on_lost: Callable[[str], None],
        on_neighbour: Callable[[int], None],
    ) -> None:
        """Prepare to sample.

        Args:
            on_seen: receives the discovered GPUs once.
            on_open: receives them to query them in other ways.
            on_lost: receives a sentence for each GPU that is lost.
            on_neighbour: receives the pid of each process that shares a GPU with others, once.

        """
        self._recording = recording
        self._identity = identity
        self._on_seen = on_seen
        self._on_open = on_open
        self._on_lost = on_lost
        self._on_neighbour = on_neighbour
        self._neighbours: set[int] = set()
        self._devices: list[GpuDevice] = []
        self.guard = CallGuard()
        self._writers: tuple[RecordWriter, RecordWriter] | None = None
        self._processes_tick = -_MAX_PROCESS_PERIOD

    @property
    def lost_records(self) -> int:
        """Records that could not be written."""
        return sum(writer.lost for writer in self._writers or ())

    def prepare_sampling(self) -> None:
        """Open NVML, which may take seconds on a machine with many GPUs."""
        discovery, self._devices = discover_gpus()
        if self._devices:
            self._writers = (
                RecordWriter(self._recording, GPUS, self._identity),
                RecordWriter(self._recording, GPU_PROCESSES, self._identity),
            )
        self._on_seen(discovery)
        self._on_open(self._devices)
        self._set_pace()

    def _set_pace(self) -> None:
        """Choose how often the byte counters are read, from the cost of a read on this machine."""
        costs_s = [
            cost_s for device in list(self._devices) if (cost_s := self._query_device(device, device.measure_read_cost))
        ]
        for device in self._devices:
            device.pace = pcie.choose_pace(len(self._devices), max(costs_s, default=0.0))

    def leave_out(self, device: GpuDevice) -> None:
        """Sample a GPU no longer."""
        self._devices = [one for one in self._devices if one is not device]

    def take_back(self, device: GpuDevice) -> None:
        """Sample it again."""
        self._devices = sorted([*self._devices, device], key=lambda one: one.gpu.index)

    def is_due(self, half_tick: int) -> bool:
        """Whether a sample is due: rows are written at every second half tick, counters may be read at others."""
        return half_tick % _HALF_TICKS_PER_ROW == 0 or any(device.is_due(half_tick) for device in list(self._devices))

    def take_sample(self, time_ns: int, tick: int) -> None:
        """Record all GPUs that still respond; ``tick`` counts half ticks."""
        if self._writers is None:
            return
        rows, processes = self._writers
        for device in list(self._devices):
            if tick % _HALF_TICKS_PER_ROW:
                self._query_device(device, partial(device.update_counters, tick))
            elif row := self._query_device(device, partial(device.read_row, time_ns, tick)):
                rows.write(*row)
        if tick % _HALF_TICKS_PER_ROW == 0:
            self._sample_processes(processes, time_ns, tick)

    def _sample_processes(self, writer: RecordWriter, time_ns: int, tick: int) -> None:
        """Query all GPUs in one tick, since readers take the rows of the last tick as complete."""
        is_overdue = tick - self._processes_tick >= _MAX_PROCESS_PERIOD
        changed = any(device.has_memory_changed for device in self._devices)
        if not is_overdue and not (changed and tick - self._processes_tick >= _MIN_PROCESS_PERIOD):
            return
        self._processes_tick = tick
        for device in list(self._devices):
            refresh = is_overdue or device.has_memory_changed
            for row in self._query_device(device, partial(device.read_process_rows, time_ns, refresh=refresh)) or ():
                writer.write(*row)
            for pid in device.sharing_pids - self._neighbours:
                self._neighbours.add(pid)
                self._on_neighbour(pid)

    def _query_device(self, device: GpuDevice, query: Callable[[], Answer]) -> Answer | None:
        """Return the result of a query. A lost GPU is reported once and omitted from then on."""
        try:
            return self.guard.call_driver(device, query)
        except GpuLost as error:
            self.leave_out(device)
            self._on_lost(f"GPU {device.gpu.index} ({device.gpu.name}) does not respond any more: {error}")
            return None

    def close(self) -> None:
        """Close the files. NVML stays open until the process ends, which is soon: another thread may be in a call."""
        for writer in self._writers or ():
            writer.close()

"""Sampling the GPUs of a node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pynvml

from zerotop_probe.outside.sampling import pcie
from zerotop_probe.outside.sampling.nvml import Device, Lost, Seen, look
from zerotop_probe.recording.tables import GPU_PROCESSES, GPUS
from zerotop_probe.recording.writer import Identity, RecordWriter

# In half ticks of 50 ms. The processes on the GPUs are asked for when the memory in use has changed, as it seldom does in
# training, but no more often than the second, and after the third in any case.
_PER_ROW = 2
_PROCESSES_AT_MOST, _PROCESSES_AT_LEAST = 4, 20

Answer = TypeVar("Answer")


class GpuSampler:
    """Writes GPUS at every tick, and GPU_PROCESSES when memory in use has changed; called twice a tick."""

    def __init__(
        self,
        session: str,
        identity: Identity,
        *,
        on_seen: Callable[[Seen], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """``on_seen`` is told once what there is; ``on_lost`` a sentence for each GPU that is lost."""
        self._session = session
        self._identity = identity
        self._on_seen = on_seen
        self._on_lost = on_lost
        self._devices: list[Device] = []
        self._writers: tuple[RecordWriter, RecordWriter] | None = None
        self._processes_at = -_PROCESSES_AT_LEAST

    @property
    def lost_records(self) -> int:
        """Records that could not be written."""
        return sum(writer.lost for writer in self._writers or ())

    def prepare(self) -> None:
        """Opens NVML, which takes up to seconds on a machine with many GPUs."""
        seen, self._devices = look()
        if self._devices:
            self._writers = (
                RecordWriter(self._session, GPUS, self._identity),
                RecordWriter(self._session, GPU_PROCESSES, self._identity),
            )
            self._set_pace()
        self._on_seen(seen)

    def _set_pace(self) -> None:
        """How often the byte counters are looked at: by how much that costs here."""
        looks = [look_s for device in list(self._devices) if (look_s := self._try(device, device.measure_look))]
        for device in self._devices:
            device.pace = pcie.pace(len(self._devices), max(looks, default=0.0))

    def wants(self, half_tick: int) -> bool:
        """Whether there is something to do then; there is a row at every second one."""
        return half_tick % _PER_ROW == 0 or any(device.is_due(half_tick) for device in list(self._devices))

    def sample(self, time_ns: int, tick: int) -> None:
        """Records all GPUs that still answer; ``tick`` counts half ticks."""
        if self._writers is None:
            return
        rows, processes = self._writers
        for device in list(self._devices):
            if tick % _PER_ROW:
                self._try(device, partial(device.count_between, tick))
            elif row := self._try(device, partial(device.row, time_ns, tick)):
                rows.write(*row)
        if tick % _PER_ROW == 0:
            self._sample_processes(processes, time_ns, tick)

    def _sample_processes(self, writer: RecordWriter, time_ns: int, tick: int) -> None:
        """All GPUs in one tick, since a reader takes the last tick for the whole truth."""
        every = tick - self._processes_at >= _PROCESSES_AT_LEAST
        changed = any(device.memory_changed for device in self._devices)
        if not every and not (changed and tick - self._processes_at >= _PROCESSES_AT_MOST):
            return
        self._processes_at = tick
        for device in list(self._devices):
            again = every or device.memory_changed
            for row in self._try(device, partial(device.process_rows, time_ns, again=again)) or ():
                writer.write(*row)

    def _try(self, device: Device, query: Callable[[], Answer]) -> Answer | None:
        """The answer of a GPU; one that is lost is said once and left out from then on."""
        try:
            return query()
        except Lost as error:
            self._devices.remove(device)
            self._on_lost(f"GPU {device.gpu.index} ({device.gpu.name}) does not answer any more: {error}")
            return None

    def close(self) -> None:
        """Closes the files and NVML."""
        for writer in self._writers or ():
            writer.close()
        if self._devices:
            pynvml.nvmlShutdown()

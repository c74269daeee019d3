"""Sampling GPUs through NVML. No driver, no library, MIG, a GPU that is lost meanwhile: all are normal."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pynvml

from zerotop_probe.recording.tables import GPU_PROCESSES, GPUS, UNKNOWN
from zerotop_probe.recording.writer import Identity, RecordWriter

# In half ticks of 50 ms: how often there is a row, the processes, and what changes slowly.
_PER_ROW = 2
_PER_PROCESSES = 4
_PER_SLOW = 10

# Field values, all read by one call: instant power (mW) and the PCIe byte counters. pynvml has names for them
# from version 12.5 on only; nvmlDeviceGetPcieThroughput blocks for 20 ms and is never used.
_POWER_INSTANT, _PCIE_TX, _PCIE_RX = 186, 197, 198
_FIELDS = (_POWER_INSTANT, _PCIE_TX, _PCIE_RX)
# The byte counters have 32 bits: at the 55 GB/s of a PCIe 5 link they wrap every 78 ms (seen on an H200: read
# every 93 ms they said 16 GB/s of 60). Reading one takes 160 us of processor time, so it is read at every
# half tick only while bytes flow, more than this many a second.
_COUNTER_MODULUS = 1 << 32
_FLOWING_BYTES_PER_S = 1e9
_VALUE_OF_TYPE = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}

_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND)
# What a GPU or driver will never answer. Anything else, a time-out say, may be answered at the next tick.
_NEVER = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
)


@dataclass(frozen=True)
class Gpu:
    """What identifies a GPU of this node."""

    index: int
    uuid: str
    name: str
    total_bytes: int


class Seen(NamedTuple):
    """What NVML shows on this machine; ``notice`` says in a sentence why that is less than all."""

    driver: str | None
    gpus: tuple[Gpu, ...]
    notice: str | None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class Lost(Exception):
    """The GPU does not answer any more."""


class Counter:
    """A byte counter of a PCIe direction that does not wrap; ``total`` is -1 until it was read."""

    def __init__(self) -> None:
        self.total = UNKNOWN
        self.flows = False
        self._raw = 0
        self._time_ns = 0

    def advance(self, raw: int, now_ns: int) -> None:
        """Takes the driver's counter, read at ``now_ns``."""
        if self.total == UNKNOWN:
            self.total = raw
        else:
            more = (raw - self._raw) % _COUNTER_MODULUS
            self.total += more
            self.flows = more * 1e9 > _FLOWING_BYTES_PER_S * (now_ns - self._time_ns)
        self._raw, self._time_ns = raw, now_ns


class Device:
    """One GPU. A query that it does not support is made once and never again."""

    def __init__(self, index: int) -> None:
        """Raises NVMLError if the driver does not give it to us."""
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._off: set[str] = set()
        self._links = {_PCIE_TX: Counter(), _PCIE_RX: Counter()}
        self._slow: tuple[float, float, int] = (math.nan, math.nan, UNKNOWN)
        total = self._ask("memory", pynvml.nvmlDeviceGetMemoryInfo)
        uuid = _text(pynvml.nvmlDeviceGetUUID(self._handle))
        name = _text(pynvml.nvmlDeviceGetName(self._handle))
        self.gpu = Gpu(index, uuid, name, int(total.total) if total is not None else UNKNOWN)
        mode = self._ask("mig", pynvml.nvmlDeviceGetMigMode)
        self.mig = mode is not None and bool(mode[0])

    def _ask(self, name: str, query: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None. Raises Lost."""
        if name in self._off:
            return None
        try:
            return query(self._handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in _LOST:
                raise Lost(str(error)) from error
            if error.value in _NEVER:
                self._off.add(name)
        return None

    def row(self, time_ns: int, half_tick: int) -> tuple[object, ...]:
        """The next row of GPUS. Raises Lost."""
        memory = self._ask("memory", pynvml.nvmlDeviceGetMemoryInfo)
        use = self._ask("utilization", pynvml.nvmlDeviceGetUtilizationRates)
        fields = self._fields(_FIELDS)
        if half_tick % _PER_SLOW == 0:
            self._slow = self._read_slow()
        temperature, clock, reasons = self._slow
        return (
            time_ns,
            UNKNOWN if memory is None else memory.used,
            UNKNOWN if memory is None else memory.total,
            self._links[_PCIE_TX].total,
            self._links[_PCIE_RX].total,
            reasons,
            math.nan if use is None else use.gpu,
            math.nan if use is None else use.memory,
            self._power(fields.get(_POWER_INSTANT)),
            temperature,
            clock,
            self.gpu.index,
        )

    def count_between(self) -> None:
        """Half a tick after a row: keeps the counters that run fast from wrapping unseen. Raises Lost."""
        flowing = [field for field, link in self._links.items() if link.flows]
        if flowing:
            self._fields(flowing)

    def _fields(self, numbers: Sequence[int]) -> dict[int, float]:
        """The field values that could be had, by their numbers; byte counters are brought forward."""
        wanted = [number for number in numbers if f"field {number}" not in self._off]
        values = self._ask("fields", pynvml.nvmlDeviceGetFieldValues, wanted) if wanted else None
        result = {}
        now_ns = time.monotonic_ns()
        for value in values or ():
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                result[value.fieldId] = getattr(value.value, _VALUE_OF_TYPE.get(value.valueType, "ullVal"))
            elif value.nvmlReturn in _NEVER:
                self._off.add(f"field {value.fieldId}")
        for number, link in self._links.items():
            if number in result:
                link.advance(int(result[number]), now_ns)
        return result

    def _power(self, instant_mw: float | None) -> float:
        if instant_mw is None:
            instant_mw = self._ask("power", pynvml.nvmlDeviceGetPowerUsage)
        return math.nan if instant_mw is None else instant_mw / 1000

    def _read_slow(self) -> tuple[float, float, int]:
        temperature = self._ask("temperature", pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
        clock = self._ask("clock", pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
        # Throttle reasons were renamed clock event reasons; the old name is what drivers old and new have.
        reasons = self._ask("reasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return (
            math.nan if temperature is None else temperature,
            math.nan if clock is None else clock,
            UNKNOWN if reasons is None else ctypes.c_int64(reasons).value,
        )

    def process_rows(self, time_ns: int) -> list[tuple[object, ...]]:
        """Rows of GPU_PROCESSES: who holds memory on this GPU. Raises Lost."""
        processes = self._ask("processes", pynvml.nvmlDeviceGetComputeRunningProcesses) or ()
        rows: list[tuple[object, ...]] = []
        for process in processes:
            used = UNKNOWN if process.usedGpuMemory is None else process.usedGpuMemory
            rows.append((time_ns, used, process.pid, self.gpu.index))
        return rows


class GpuSampler:
    """Writes GPUS at every tick and GPU_PROCESSES at every second; called twice a tick."""

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
        self._on_seen(seen)

    def sample(self, time_ns: int, tick: int) -> None:
        """Records all GPUs that still answer; ``tick`` counts half ticks."""
        if self._writers is None:
            return
        for device in list(self._devices):
            try:
                self._sample_one(device, *self._writers, time_ns, tick)
            except Lost as error:
                self._devices.remove(device)
                self._on_lost(f"GPU {device.gpu.index} ({device.gpu.name}) does not answer any more: {error}")

    def _sample_one(
        self, device: Device, rows: RecordWriter, processes: RecordWriter, time_ns: int, half_tick: int
    ) -> None:
        if half_tick % _PER_ROW:
            device.count_between()
            return
        rows.write(*device.row(time_ns, half_tick))
        if half_tick % _PER_PROCESSES == 0:
            for row in device.process_rows(time_ns):
                processes.write(*row)

    def close(self) -> None:
        """Closes the files and NVML."""
        for writer in self._writers or ():
            writer.close()
        if self._devices:
            pynvml.nvmlShutdown()


def look() -> tuple[Seen, list[Device]]:
    """Opens NVML and all GPUs that it shows."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    except (pynvml.NVMLError, OSError) as error:
        return Seen(None, (), _why_no_driver(error)), []
    devices, refused = [], []
    for index in range(count):
        try:
            devices.append(Device(index))
        except (pynvml.NVMLError, Lost) as error:
            refused.append(f"GPU {index} cannot be watched: {error}.")
    if not count:
        refused.append(f"The NVIDIA driver {driver} shows no GPU.")
    if any(device.mig for device in devices):
        names = ", ".join(str(device.gpu.index) for device in devices if device.mig)
        refused.append(f"MIG is on for GPU {names}: memory is the whole GPU's, utilization is not known.")
    return Seen(driver, tuple(device.gpu for device in devices), " ".join(refused) or None), devices


def _why_no_driver(error: Exception) -> str:
    value = getattr(error, "value", None)
    if value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "There is no NVIDIA driver on this machine: host memory and processors are what is shown."
    if value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "The NVIDIA driver is installed but not loaded: host memory and processors are what is shown."
    if value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "The NVIDIA library and the loaded driver differ in version: restart the machine."
    if value == pynvml.NVML_ERROR_NO_PERMISSION:
        return "This user may not use the NVIDIA driver: host memory and processors are what is shown."
    return f"The NVIDIA driver does not answer ({error}): host memory and processors are what is shown."

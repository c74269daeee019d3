"""Sampling GPUs through NVML. No driver, no library, MIG, a GPU that is lost meanwhile: all are normal."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pynvml

from zerotop_probe.recording.tables import GPU_PROCESSES, GPUS, UNKNOWN
from zerotop_probe.recording.writer import Identity, RecordWriter

# What changes slowly, or costs 40 us and more a GPU, is read at every fifth or second tick.
_TICKS_PER_SLOW = 5
_TICKS_PER_PROCESSES = 2

# Field values, all read by one call: instant power (mW) and the PCIe byte counters. pynvml has names for them
# from version 12.5 on only; nvmlDeviceGetPcieThroughput blocks for 20 ms and is never used.
_POWER_INSTANT, _PCIE_TX, _PCIE_RX = 186, 197, 198
_FIELDS = (_POWER_INSTANT, _PCIE_TX, _PCIE_RX)
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


class Device:
    """One GPU. A query that it does not support is made once and never again."""

    def __init__(self, index: int) -> None:
        """Raises NVMLError if the driver does not give it to us."""
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._off: set[str] = set()
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

    def row(self, time_ns: int, tick: int) -> tuple[object, ...]:
        """The next row of GPUS. Raises Lost."""
        memory = self._ask("memory", pynvml.nvmlDeviceGetMemoryInfo)
        use = self._ask("utilization", pynvml.nvmlDeviceGetUtilizationRates)
        fields = self._fields()
        if tick % _TICKS_PER_SLOW == 0:
            self._slow = self._read_slow()
        temperature, clock, reasons = self._slow
        return (
            time_ns,
            UNKNOWN if memory is None else memory.used,
            UNKNOWN if memory is None else memory.total,
            _counter(fields.get(_PCIE_TX)),
            _counter(fields.get(_PCIE_RX)),
            reasons,
            math.nan if use is None else use.gpu,
            math.nan if use is None else use.memory,
            self._power(fields.get(_POWER_INSTANT)),
            temperature,
            clock,
            self.gpu.index,
        )

    def _fields(self) -> dict[int, float]:
        """The field values that could be had, by their numbers."""
        wanted = [field for field in _FIELDS if f"field {field}" not in self._off]
        values = self._ask("fields", pynvml.nvmlDeviceGetFieldValues, wanted) if wanted else None
        result = {}
        for value in values or ():
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                result[value.fieldId] = getattr(value.value, _VALUE_OF_TYPE.get(value.valueType, "ullVal"))
            elif value.nvmlReturn in _NEVER:
                self._off.add(f"field {value.fieldId}")
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


def _counter(value: float | None) -> int:
    return UNKNOWN if value is None else int(value)


class GpuSampler:
    """Writes GPUS at every tick and GPU_PROCESSES at every second."""

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
        """Records all GPUs that still answer."""
        if self._writers is None:
            return
        for device in list(self._devices):
            try:
                self._writers[0].write(*device.row(time_ns, tick))
                for row in device.process_rows(time_ns) if tick % _TICKS_PER_PROCESSES == 0 else ():
                    self._writers[1].write(*row)
            except Lost as error:
                self._devices.remove(device)
                self._on_lost(f"GPU {device.gpu.index} ({device.gpu.name}) does not answer any more: {error}")

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

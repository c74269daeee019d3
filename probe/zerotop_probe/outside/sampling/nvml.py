"""GPUs as NVML shows them. No driver, no library, MIG, a GPU that is lost meanwhile: all are normal."""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pynvml

from zerotop_probe.outside.sampling import pcie
from zerotop_probe.outside.sampling.pcie import LinkCounter
from zerotop_probe.recording.tables import UNKNOWN

# Half ticks of 50 ms from reading to reading of what changes slowly.
_SLOW_PERIOD = 10

# Field values: instant power (mW) and the PCIe byte counters. pynvml has names for them from version 12.5 on only;
# nvmlDeviceGetPcieThroughput blocks for 20 ms and is never used.
_POWER_INSTANT, _PCIE_TX, _PCIE_RX = 186, 197, 198
_MEASURED_READS = 3
_VALUE_OF_TYPE = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}

_LOST_ERRORS = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND)
# What a GPU or driver will never answer. Anything else, a time-out say, may be answered at the next tick.
_PERMANENT_ERRORS = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
)


@dataclass(frozen=True)
class Gpu:
    """What identifies a GPU of this node, or an instance of one that MIG has divided."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    mig_of: str | None = None
    """Of an instance the UUID of the whole."""


class GpuDiscovery(NamedTuple):
    """What NVML shows on this machine; ``notice`` says in a sentence why that is less than all."""

    driver: str | None
    gpus: tuple[Gpu, ...]
    notice: str | None


def _decode_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class GpuLost(Exception):
    """The GPU does not answer any more."""


class GpuDevice:
    """One GPU, or an instance of one. A query that it does not support is made once and never again."""

    def __init__(self, index: int, handle: Any, whole: GpuDevice | None = None) -> None:
        """``whole``: what it is an instance of. Raises NVMLError if the driver does not give it to us."""
        self._handle = handle
        # An instance has no temperature and no clock but its GPU's.
        self._chip = whole._handle if whole is not None else handle
        self.gpu = Gpu(index, "", "GPU", UNKNOWN)
        self._unsupported: set[str] = set()
        self._links = {_PCIE_TX: LinkCounter(), _PCIE_RX: LinkCounter()}
        self.pace = pcie.FASTEST_PACE
        self._used_bytes = UNKNOWN
        self._listed_used_bytes = UNKNOWN
        self._processes: list[tuple[int, int]] = []
        self._slow_values: tuple[float, float, int] = (math.nan, math.nan, UNKNOWN)
        total = self._query_driver("memory", pynvml.nvmlDeviceGetMemoryInfo)
        uuid = _decode_text(pynvml.nvmlDeviceGetUUID(self._handle))
        name = _decode_text(pynvml.nvmlDeviceGetName(self._handle))
        size = int(total.total) if total is not None else UNKNOWN
        self.gpu = Gpu(index, uuid, name, size, whole.gpu.uuid if whole is not None else None)
        mode = self._query_driver("mig", pynvml.nvmlDeviceGetMigMode) if whole is None else None
        self.is_mig = mode is not None and bool(mode[0])

    def find_instances(self, first: int) -> list[GpuDevice]:
        """Those into which MIG has divided it, numbered from ``first`` on. Raises Lost."""
        found: list[GpuDevice] = []
        for place in range(self._query_driver("instances", pynvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            # A place may be empty.
            handle = self._query_driver(f"instance {place}", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, place)
            if handle is not None:
                found.append(GpuDevice(first + len(found), handle, self))
        return found

    def _query_driver(self, name: str, query: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None. Raises Lost."""
        if name in self._unsupported:
            return None
        try:
            return query(self._handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in _LOST_ERRORS:
                raise GpuLost(str(error)) from error
            if error.value in _PERMANENT_ERRORS:
                self._unsupported.add(name)
        return None

    def read_row(self, time_ns: int, half_tick: int) -> tuple[object, ...]:
        """The next row of GPUS. Raises Lost."""
        memory = self._query_driver("memory", pynvml.nvmlDeviceGetMemoryInfo)
        use = self._query_driver("utilization", pynvml.nvmlDeviceGetUtilizationRates)
        fields = self._read_fields([_POWER_INSTANT, *self._find_due_fields(half_tick)], half_tick)
        if half_tick % _SLOW_PERIOD == 0:
            self._slow_values = self._read_slow()
        temperature, clock, reasons = self._slow_values
        self._used_bytes = UNKNOWN if memory is None else memory.used
        return (
            time_ns,
            self._used_bytes,
            UNKNOWN if memory is None else memory.total,
            self._links[_PCIE_TX].total,
            self._links[_PCIE_RX].total,
            reasons,
            math.nan if use is None else use.gpu,
            math.nan if use is None else use.memory,
            self._read_power(fields.get(_POWER_INSTANT)),
            temperature,
            clock,
            self.gpu.index,
        )

    def _find_due_fields(self, half_tick: int) -> list[int]:
        if "fields" in self._unsupported:
            return []
        links = self._links.items()
        return [field for field, link in links if link.is_due(half_tick) and f"field {field}" not in self._unsupported]

    def is_due(self, half_tick: int) -> bool:
        """Whether a byte counter must be looked at."""
        return bool(self._find_due_fields(half_tick))

    def update_counters(self, half_tick: int) -> None:
        """Half a tick after a row: looks at the counters that must be looked at more often. Raises Lost."""
        if due := self._find_due_fields(half_tick):
            self._read_fields(due, half_tick)

    def measure_read_cost(self) -> float:
        """Seconds of processor time that a look at the counters takes here, both directions. Raises Lost."""
        costs = []
        for _ in range(_MEASURED_READS):
            before = time.thread_time_ns()
            self._read_fields(list(self._links), 0)
            costs.append(time.thread_time_ns() - before)
        return statistics.median(costs) / 1e9

    def _read_fields(self, numbers: Sequence[int], half_tick: int) -> dict[int, float]:
        """The field values that could be had, by their numbers; byte counters are brought forward."""
        wanted = [number for number in numbers if f"field {number}" not in self._unsupported]
        values = self._query_driver("fields", pynvml.nvmlDeviceGetFieldValues, wanted) if wanted else None
        result = {}
        now_ns = time.monotonic_ns()
        for value in values or ():
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                result[value.fieldId] = getattr(value.value, _VALUE_OF_TYPE.get(value.valueType, "ullVal"))
            elif value.nvmlReturn in _PERMANENT_ERRORS:
                self._unsupported.add(f"field {value.fieldId}")
        for number, link in self._links.items():
            if number in result:
                link.add_reading(int(result[number]), now_ns, half_tick, self.pace)
        return result

    def _read_power(self, instant_mw: float | None) -> float:
        if instant_mw is None:
            instant_mw = self._query_driver("power", pynvml.nvmlDeviceGetPowerUsage)
        return math.nan if instant_mw is None else instant_mw / 1000

    def _read_slow(self) -> tuple[float, float, int]:
        kind, domain, chip = pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_CLOCK_SM, self._chip
        temperature = self._query_driver("temperature", lambda _: pynvml.nvmlDeviceGetTemperature(chip, kind))
        clock = self._query_driver("clock", lambda _: pynvml.nvmlDeviceGetClockInfo(chip, domain))
        # Throttle reasons were renamed clock event reasons; the old name is what drivers old and new have.
        reasons = self._query_driver("reasons", lambda _: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(chip))
        return (
            math.nan if temperature is None else temperature,
            math.nan if clock is None else clock,
            UNKNOWN if reasons is None else ctypes.c_int64(reasons).value,
        )

    @property
    def has_memory_changed(self) -> bool:
        """Whether the memory in use is not what it was when the processes were last asked for."""
        return self._used_bytes != self._listed_used_bytes

    def read_process_rows(self, time_ns: int, *, again: bool) -> list[tuple[object, ...]]:
        """Rows of GPU_PROCESSES: who holds memory on this GPU, asked ``again`` or as it was. Raises Lost."""
        if again:
            self._listed_used_bytes = self._used_bytes
            processes = self._query_driver("processes", pynvml.nvmlDeviceGetComputeRunningProcesses) or ()
            self._processes = [
                (UNKNOWN if process.usedGpuMemory is None else process.usedGpuMemory, process.pid) for process in processes
            ]
        return [(time_ns, used, pid, self.gpu.index) for used, pid in self._processes]


def discover_gpus() -> tuple[GpuDiscovery, list[GpuDevice]]:
    """Opens NVML and all GPUs that it shows."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        driver = _decode_text(pynvml.nvmlSystemGetDriverVersion())
    except (pynvml.NVMLError, OSError) as error:
        return GpuDiscovery(None, (), _explain_no_driver(error)), []
    devices, said = _open_devices(count)
    if not count:
        said.append(f"The NVIDIA driver {driver} shows no GPU.")
    return GpuDiscovery(driver, tuple(device.gpu for device in devices), " ".join(said) or None), devices


def _open_devices(count: int) -> tuple[list[GpuDevice], list[str]]:
    """All GPUs that can be watched, of a divided one its instances; and sentences about what is not so."""
    devices: list[GpuDevice] = []
    said: list[str] = []
    number = count
    for index in range(count):
        try:
            device = GpuDevice(index, pynvml.nvmlDeviceGetHandleByIndex(index))
            parts = device.find_instances(number) if device.is_mig else []
        except (pynvml.NVMLError, GpuLost) as error:
            said.append(f"GPU {index} cannot be watched: {error}.")
            continue
        if device.is_mig:
            said.append(_describe_instances(index, [part.gpu.index for part in parts]))
        devices += parts or [device]
        number += len(parts)
    return sorted(devices, key=lambda device: device.gpu.index), said


def _describe_instances(index: int, parts: list[int]) -> str:
    if not parts:
        return f"MIG is on for GPU {index}, and there is no instance of it to be seen: memory is the whole GPU's."
    names = f"its instance is GPU {parts[0]}" if len(parts) == 1 else f"its instances are GPUs {parts[0]} to {parts[-1]}"
    return f"MIG is on for GPU {index}: {names} here, and how busy and how hungry for power each is is not known."


def _explain_no_driver(error: Exception) -> str:
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

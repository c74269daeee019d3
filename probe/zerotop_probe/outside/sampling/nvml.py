"""Reading GPUs through NVML. A missing driver or library, MIG and GPUs that get lost are expected.

The samplers know a GPU only as a :class:`GpuDevice`, and the library only through this module and ``faults.nvml_faults``.
"""

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
from zerotop_probe.outside.sampling.host_sampler import read_meminfo
from zerotop_probe.outside.sampling.pcie import LinkCounter
from zerotop_probe.recording.tables import GPUS, UNKNOWN

# Half ticks of 50 ms between readings of slowly changing values.
_SLOW_PERIOD = 10

# Field values: instant power (mW) and the PCIe byte counters. pynvml has names for them from version 12.5 on only;
# nvmlDeviceGetPcieThroughput blocks for 20 ms and is never used.
_POWER_INSTANT, _PCIE_TX, _PCIE_RX = 186, 197, 198
_MEASURED_READS = 3
# Time over which the driver is asked how much processes computed, and between such queries.
_USE_WINDOW_NS = 1_000_000_000
_VALUE_OF_TYPE = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}

_LOST_ERRORS = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND)
# A query that fails with one of these will always fail. After others, such as a timeout, the next tick may succeed.
PERMANENT_ERRORS = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
)


_NOT_SUPPORTED = str(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))


# The number of a field value, or that and the number of a link.
Field = int | tuple[int, int]


@dataclass(frozen=True)
class GpuIdentity:
    """The identity of a GPU of this node, or of a MIG instance."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    mig_of: str | None = None
    """For a MIG instance, the UUID of its GPU."""
    unified: bool = False
    """It has no memory of its own but shares the host's: NVML has no figure, and /proc/meminfo takes its place."""


class GpuDiscovery(NamedTuple):
    """The GPUs that NVML shows; ``notice`` is a sentence that says why some or all are missing."""

    driver: str | None
    gpus: tuple[GpuIdentity, ...]
    notice: str | None


def _decode_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class GpuLost(Exception):
    """The GPU does not respond any more."""


class GpuDevice:
    """One GPU or MIG instance. A query that it does not support is made only once."""

    def __init__(self, index: int, handle: Any, whole: GpuDevice | None = None) -> None:
        """``whole``: the GPU of a MIG instance. Raises NVMLError if the driver denies access."""
        self.handle = handle
        # An instance has the temperature, the clock and the faults of its GPU.
        self.whole = whole if whole is not None else self
        self._chip = self.whole.handle
        self.gpu = GpuIdentity(index, "", "GPU", UNKNOWN)
        self._unsupported: dict[str, str] = {}
        self._links = {_PCIE_TX: LinkCounter(), _PCIE_RX: LinkCounter()}
        self.pace = pcie.FASTEST_PACE
        self._used_bytes = UNKNOWN
        self._listed_used_bytes = UNKNOWN
        self._processes: list[tuple[int, int, float]] = []
        self._process_use: dict[int, float] | None = None
        self._use_read_ns = -_USE_WINDOW_NS
        self._slow_values: tuple[float, float, int] = (math.nan, math.nan, UNKNOWN)
        total = self.query_driver("memory", pynvml.nvmlDeviceGetMemoryInfo)
        uuid = _decode_text(pynvml.nvmlDeviceGetUUID(self.handle))
        name = _decode_text(pynvml.nvmlDeviceGetName(self.handle))
        mode = self.query_driver("mig", pynvml.nvmlDeviceGetMigMode) if whole is None else None
        self.is_mig = mode is not None and bool(mode[0])
        is_unified = whole is None and not self.is_mig and self.explain_missing("memory") == _NOT_SUPPORTED
        size = int(total.total) if total is not None else read_meminfo().get(b"MemTotal", UNKNOWN) if is_unified else UNKNOWN
        self.gpu = GpuIdentity(index, uuid, name, size, whole.gpu.uuid if whole is not None else None, is_unified)

    def find_instances(self, first: int) -> list[GpuDevice]:
        """Return its MIG instances, numbered from ``first``. Raises GpuLost."""
        instances: list[GpuDevice] = []
        for slot in range(self.query_driver("instances", pynvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            # A slot may be empty.
            handle = self.query_driver(f"instance {slot}", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, slot)
            if handle is not None:
                instances.append(GpuDevice(first + len(instances), handle, self))
        return instances

    def explain_missing(self, name: str) -> str | None:
        """Return NVML's reason why a query is not supported; None if it is, or has not been made."""
        return self._unsupported.get(name)

    def query_driver(self, name: str, query: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a query, or None. Raises GpuLost."""
        if name in self._unsupported:
            return None
        try:
            return query(self.handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in _LOST_ERRORS:
                raise GpuLost(str(error)) from error
            if error.value in PERMANENT_ERRORS:
                self._unsupported[name] = str(error)
        return None

    def read_row(self, time_ns: int, half_tick: int) -> tuple[object, ...]:
        """Return the next row of GPUS. Raises GpuLost."""
        self._used_bytes, total_bytes = self._read_memory()
        use = self.query_driver("utilization", pynvml.nvmlDeviceGetUtilizationRates)
        fields = self._read_fields([_POWER_INSTANT, *self._find_due_fields(half_tick)], half_tick)
        if half_tick % _SLOW_PERIOD == 0:
            self._slow_values = self._read_slow()
        temperature, clock, reasons = self._slow_values
        row = {
            "time_ns": time_ns,
            "gpu": self.gpu.index,
            "used_bytes": self._used_bytes,
            "total_bytes": total_bytes,
            "pcie_tx_bytes": self._links[_PCIE_TX].total,
            "pcie_rx_bytes": self._links[_PCIE_RX].total,
            "throttle_reasons": reasons,
            "utilization_percent": math.nan if use is None else use.gpu,
            "memory_utilization_percent": math.nan if use is None else use.memory,
            "power_w": self._read_power(fields.get(_POWER_INSTANT)),
            "temperature_c": temperature,
            "sm_clock_mhz": clock,
        }
        return tuple(row[field.name] for field in GPUS.fields)

    def _read_memory(self) -> tuple[int, int]:
        """Return the memory in use, and all of it."""
        if self.gpu.unified:
            host = read_meminfo()
            total, available = (host.get(name, UNKNOWN) for name in (b"MemTotal", b"MemAvailable"))
            return (total - available if UNKNOWN not in (total, available) else UNKNOWN), total
        memory = self.query_driver("memory", pynvml.nvmlDeviceGetMemoryInfo)
        return (UNKNOWN, UNKNOWN) if memory is None else (memory.used, memory.total)

    def _find_due_fields(self, half_tick: int) -> list[int]:
        if "fields" in self._unsupported:
            return []
        links = self._links.items()
        return [field for field, link in links if link.is_due(half_tick) and f"field {field}" not in self._unsupported]

    def is_due(self, half_tick: int) -> bool:
        """Whether a byte counter must be read."""
        return bool(self._find_due_fields(half_tick))

    def update_counters(self, half_tick: int) -> None:
        """Read the byte counters that are due between two rows. Raises GpuLost."""
        if due := self._find_due_fields(half_tick):
            self._read_fields(due, half_tick)

    def measure_read_cost(self) -> float:
        """Return the CPU seconds that reading the byte counters of both directions takes. Raises GpuLost."""
        costs = []
        for _ in range(_MEASURED_READS):
            before = time.thread_time_ns()
            self._read_fields(list(self._links), 0)
            costs.append(time.thread_time_ns() - before)
        return statistics.median(costs) / 1e9

    def read_fields(self, numbers: Sequence[Field], query: str = "fields") -> dict[Field, float]:
        """Return the field values that could be read, of numbers, or of pairs with a link. Raises GpuLost.

        ``query``: fields that are asked for together; if NVML refuses all of them, others are still asked for.
        """
        with_link = any(isinstance(number, tuple) for number in numbers)
        supported = [number for number in numbers if f"field {number}" not in self._unsupported]
        values = self.query_driver(query, pynvml.nvmlDeviceGetFieldValues, supported) if supported else None
        result: dict[Field, float] = {}
        for value in values or ():
            field = (value.fieldId, value.scopeId) if with_link else value.fieldId
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                result[field] = getattr(value.value, _VALUE_OF_TYPE.get(value.valueType, "ullVal"))
            elif value.nvmlReturn in PERMANENT_ERRORS:
                self._unsupported[f"field {field}"] = str(pynvml.NVMLError(value.nvmlReturn))
        return result

    def _read_fields(self, numbers: Sequence[int], half_tick: int) -> dict[Field, float]:
        """Read field values and update the byte counters."""
        result = self.read_fields(numbers)
        now_ns = time.monotonic_ns()
        for number, link in self._links.items():
            if number in result:
                link.add_reading(int(result[number]), now_ns, half_tick, self.pace)
        return result

    def _read_power(self, instant_mw: float | None) -> float:
        if instant_mw is None:
            instant_mw = self.query_driver("power", pynvml.nvmlDeviceGetPowerUsage)
        return math.nan if instant_mw is None else instant_mw / 1000

    def _read_slow(self) -> tuple[float, float, int]:
        kind, domain, chip = pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_CLOCK_SM, self._chip
        temperature = self.query_driver("temperature", lambda _: pynvml.nvmlDeviceGetTemperature(chip, kind))
        clock = self.query_driver("clock", lambda _: pynvml.nvmlDeviceGetClockInfo(chip, domain))
        # Throttle reasons were renamed clock event reasons; all drivers have the old name.
        reasons = self.query_driver("reasons", lambda _: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(chip))
        return (
            math.nan if temperature is None else temperature,
            math.nan if clock is None else clock,
            UNKNOWN if reasons is None else ctypes.c_int64(reasons).value,
        )

    @property
    def has_memory_changed(self) -> bool:
        """Whether the memory in use has changed since the processes were last queried."""
        return self._used_bytes != self._listed_used_bytes

    def read_process_rows(self, time_ns: int, *, refresh: bool) -> list[tuple[object, ...]]:
        """Return rows of GPU_PROCESSES: the processes that hold memory on this GPU; the last result unless ``refresh``.

        Raises GpuLost.
        """
        if refresh:
            self._listed_used_bytes = self._used_bytes
            processes = self.query_driver("processes", list_processes) or ()
            # That a single process uses the GPU is known from the row of the GPU: the query takes over a millisecond.
            use = self._read_process_use(time_ns) if len(processes) > 1 else None
            self._processes = [
                (
                    UNKNOWN if process.usedGpuMemory is None else process.usedGpuMemory,
                    process.pid,
                    math.nan if use is None else use.get(process.pid, 0.0),
                )
                for process in processes
            ]
        return [(time_ns, used, pid, self.gpu.index, percent, 0) for used, pid, percent in self._processes]

    @property
    def sharing_pids(self) -> set[int]:
        """The processes on this GPU at the last query, if there were several."""
        return {pid for _, pid, _ in self._processes} if len(self._processes) > 1 else set()

    def _read_process_use(self, time_ns: int) -> dict[int, float] | None:
        """Return the share (percent) of the last second in which kernels of each process ran; None if that is unknown."""
        if time_ns - self._use_read_ns < _USE_WINDOW_NS:
            return self._process_use
        self._use_read_ns = time_ns
        since_us = (time.time_ns() - _USE_WINDOW_NS) // 1000
        samples = self.query_driver("process use", pynvml.nvmlDeviceGetProcessUtilization, since_us) or ()
        shares: dict[int, list[int]] = {}
        for sample in samples:
            shares.setdefault(sample.pid, []).append(sample.smUtil)
        # Processes that ran no kernel have no sample. Without any sample the GPU was idle, or the driver hides them.
        self._process_use = {pid: statistics.mean(each) for pid, each in shares.items()} or None
        return self._process_use


def list_processes(handle: Any) -> list[Any]:
    """Return pynvml's entries for the processes that compute on a GPU. Raises NVMLError."""
    try:
        return list(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except pynvml.NVMLLibraryMismatchError:  # a driver before R510; not one of NVML's errors
        return list(pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle))


def discover_gpus() -> tuple[GpuDiscovery, list[GpuDevice]]:
    """Open NVML and all GPUs that it shows."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        driver = _decode_text(pynvml.nvmlSystemGetDriverVersion())
    except (pynvml.NVMLError, OSError) as error:
        return GpuDiscovery(None, (), _explain_no_driver(error)), []
    devices, notices = _open_devices(count)
    if not count:
        notices.append(f"The NVIDIA driver {driver} shows no GPU.")
    return GpuDiscovery(driver, tuple(device.gpu for device in devices), " ".join(notices) or None), devices


def _open_devices(count: int) -> tuple[list[GpuDevice], list[str]]:
    """Return all GPUs that can be sampled, or their MIG instances, and notices about the others."""
    devices: list[GpuDevice] = []
    notices: list[str] = []
    number = count
    for index in range(count):
        try:
            device = GpuDevice(index, pynvml.nvmlDeviceGetHandleByIndex(index))
            parts = device.find_instances(number) if device.is_mig else []
        except (pynvml.NVMLError, GpuLost) as error:
            notices.append(f"GPU {index} cannot be sampled: {error}.")
            continue
        if device.is_mig:
            notices.append(_describe_instances(index, [part.gpu.index for part in parts]))
        devices += parts or [device]
        number += len(parts)
    return sorted(devices, key=lambda device: device.gpu.index), notices


def _describe_instances(index: int, parts: list[int]) -> str:
    if not parts:
        return f"MIG is enabled on GPU {index}, but no instance is visible: its memory is that of the whole GPU."
    names = f"its instance is GPU {parts[0]}" if len(parts) == 1 else f"its instances are GPUs {parts[0]} to {parts[-1]}"
    return f"MIG is enabled on GPU {index}: {names} here. Utilization and power of each instance are unknown."


def _explain_no_driver(error: Exception) -> str:
    value = getattr(error, "value", None)
    if value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "No NVIDIA driver on this machine: showing CPU and host memory only."
    if value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "The NVIDIA driver is installed but not loaded: showing CPU and host memory only."
    if value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "The NVIDIA library and the loaded driver have different versions: restart the machine."
    if value == pynvml.NVML_ERROR_NO_PERMISSION:
        return "This user may not access the NVIDIA driver: showing CPU and host memory only."
    return f"The NVIDIA driver does not respond ({error}): showing CPU and host memory only."

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
from zerotop_probe.outside.sampling.pcie import Counter
from zerotop_probe.recording.tables import UNKNOWN

# Half ticks of 50 ms from reading to reading of what changes slowly.
_PER_SLOW = 10

# Field values: instant power (mW) and the PCIe byte counters. pynvml has names for them from version 12.5 on only;
# nvmlDeviceGetPcieThroughput blocks for 20 ms and is never used.
_POWER_INSTANT, _PCIE_TX, _PCIE_RX = 186, 197, 198
_LOOKS_TO_MEASURE = 3
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
    """What identifies a GPU of this node, or an instance of one that MIG has divided."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    mig_of: str | None = None
    """Of an instance the UUID of the whole."""


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
    """One GPU, or an instance of one. A query that it does not support is made once and never again."""

    def __init__(self, index: int, handle: Any, whole: Device | None = None) -> None:
        """``whole``: what it is an instance of. Raises NVMLError if the driver does not give it to us."""
        self._handle = handle
        # An instance has no temperature and no clock but its GPU's.
        self._chip = whole._handle if whole is not None else handle
        self.gpu = Gpu(index, "", "GPU", UNKNOWN)
        self._off: set[str] = set()
        self._links = {_PCIE_TX: Counter(), _PCIE_RX: Counter()}
        self.pace = pcie.FASTEST
        self._used = UNKNOWN
        self._used_before = UNKNOWN
        self._processes: list[tuple[int, int]] = []
        self._slow: tuple[float, float, int] = (math.nan, math.nan, UNKNOWN)
        total = self._ask("memory", pynvml.nvmlDeviceGetMemoryInfo)
        uuid = _text(pynvml.nvmlDeviceGetUUID(self._handle))
        name = _text(pynvml.nvmlDeviceGetName(self._handle))
        size = int(total.total) if total is not None else UNKNOWN
        self.gpu = Gpu(index, uuid, name, size, whole.gpu.uuid if whole is not None else None)
        mode = self._ask("mig", pynvml.nvmlDeviceGetMigMode) if whole is None else None
        self.mig = mode is not None and bool(mode[0])

    def instances(self, first: int) -> list[Device]:
        """Those into which MIG has divided it, numbered from ``first`` on. Raises Lost."""
        found: list[Device] = []
        for place in range(self._ask("instances", pynvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            # A place may be empty.
            handle = self._ask(f"instance {place}", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, place)
            if handle is not None:
                found.append(Device(first + len(found), handle, self))
        return found

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
        fields = self._fields([_POWER_INSTANT, *self._due(half_tick)], half_tick)
        if half_tick % _PER_SLOW == 0:
            self._slow = self._read_slow()
        temperature, clock, reasons = self._slow
        self._used = UNKNOWN if memory is None else memory.used
        return (
            time_ns,
            self._used,
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

    def _due(self, half_tick: int) -> list[int]:
        if "fields" in self._off:
            return []
        links = self._links.items()
        return [field for field, link in links if link.is_due(half_tick) and f"field {field}" not in self._off]

    def is_due(self, half_tick: int) -> bool:
        """Whether a byte counter must be looked at."""
        return bool(self._due(half_tick))

    def count_between(self, half_tick: int) -> None:
        """Half a tick after a row: looks at the counters that must be looked at more often. Raises Lost."""
        if due := self._due(half_tick):
            self._fields(due, half_tick)

    def measure_look(self) -> float:
        """Seconds of processor time that a look at the counters takes here, both directions. Raises Lost."""
        costs = []
        for _ in range(_LOOKS_TO_MEASURE):
            before = time.thread_time_ns()
            self._fields(list(self._links), 0)
            costs.append(time.thread_time_ns() - before)
        return statistics.median(costs) / 1e9

    def _fields(self, numbers: Sequence[int], half_tick: int) -> dict[int, float]:
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
                link.look(int(result[number]), now_ns, half_tick, self.pace)
        return result

    def _power(self, instant_mw: float | None) -> float:
        if instant_mw is None:
            instant_mw = self._ask("power", pynvml.nvmlDeviceGetPowerUsage)
        return math.nan if instant_mw is None else instant_mw / 1000

    def _read_slow(self) -> tuple[float, float, int]:
        kind, domain, chip = pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_CLOCK_SM, self._chip
        temperature = self._ask("temperature", lambda _: pynvml.nvmlDeviceGetTemperature(chip, kind))
        clock = self._ask("clock", lambda _: pynvml.nvmlDeviceGetClockInfo(chip, domain))
        # Throttle reasons were renamed clock event reasons; the old name is what drivers old and new have.
        reasons = self._ask("reasons", lambda _: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(chip))
        return (
            math.nan if temperature is None else temperature,
            math.nan if clock is None else clock,
            UNKNOWN if reasons is None else ctypes.c_int64(reasons).value,
        )

    @property
    def memory_changed(self) -> bool:
        """Whether the memory in use is not what it was when the processes were last asked for."""
        return self._used != self._used_before

    def process_rows(self, time_ns: int, *, again: bool) -> list[tuple[object, ...]]:
        """Rows of GPU_PROCESSES: who holds memory on this GPU, asked ``again`` or as it was. Raises Lost."""
        if again:
            self._used_before = self._used
            processes = self._ask("processes", pynvml.nvmlDeviceGetComputeRunningProcesses) or ()
            self._processes = [
                (UNKNOWN if process.usedGpuMemory is None else process.usedGpuMemory, process.pid) for process in processes
            ]
        return [(time_ns, used, pid, self.gpu.index) for used, pid in self._processes]


def look() -> tuple[Seen, list[Device]]:
    """Opens NVML and all GPUs that it shows."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    except (pynvml.NVMLError, OSError) as error:
        return Seen(None, (), _why_no_driver(error)), []
    devices, said = _opened(count)
    if not count:
        said.append(f"The NVIDIA driver {driver} shows no GPU.")
    return Seen(driver, tuple(device.gpu for device in devices), " ".join(said) or None), devices


def _opened(count: int) -> tuple[list[Device], list[str]]:
    """All GPUs that can be watched, of a divided one its instances; and sentences about what is not so."""
    devices: list[Device] = []
    said: list[str] = []
    number = count
    for index in range(count):
        try:
            device = Device(index, pynvml.nvmlDeviceGetHandleByIndex(index))
            parts = device.instances(number) if device.mig else []
        except (pynvml.NVMLError, Lost) as error:
            said.append(f"GPU {index} cannot be watched: {error}.")
            continue
        if device.mig:
            said.append(_of_divided(index, [part.gpu.index for part in parts]))
        devices += parts or [device]
        number += len(parts)
    return sorted(devices, key=lambda device: device.gpu.index), said


def _of_divided(index: int, parts: list[int]) -> str:
    if not parts:
        return f"MIG is on for GPU {index}, and there is no instance of it to be seen: memory is the whole GPU's."
    names = f"its instance is GPU {parts[0]}" if len(parts) == 1 else f"its instances are GPUs {parts[0]} to {parts[-1]}"
    return f"MIG is on for GPU {index}: {names} here, and how busy and how hungry for power each is is not known."


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

"""What NVML shows of a GPU's hardware: memory errors, its links, and events such as Xids. Nothing here needs root.

Whether a driver, a card or a container has a value is found by asking for it, never by a version.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pynvml

from zerotop_probe.outside.sampling.nvml import GpuDevice

# Field values, by number; pynvml's older versions have no names for some.
_COUNTERS = {3: "ecc_corrected", 4: "ecc_uncorrected", 142: "rows_corrected", 143: "rows_uncorrected", 94: "pcie_replays"}
_STATES = {144: "rows_pending", 145: "rows_failed", 31: "pages_pending", 230: "recovery"}
# Sums over all links on GPUs before Hopper; counters of each link from then on.
_LINK_SUMS = {38: "nvlink_crc", 45: "nvlink_crc", 52: "nvlink_replays", 59: "nvlink_recoveries"}
_LINK_COUNTERS = {163: "nvlink_crc", 161: "nvlink_replays", 162: "nvlink_recoveries"}
# No GPU has more links (Blackwell has 18).
_MOST_LINKS = 36
# From this utilization (percent) on, in two readings in a row, a link runs at its full rate: it slows down at idle.
_LOADED_PERCENT = 50
# Counters of links are read once in so many readings, which is a minute: on Hopper those of 18 links take 43 ms.
_LINK_PERIOD = 60

XID = 0x8
_EVENTS = {
    0x400: "dram_retired",
    0x800: "dram_failed",
    0x1000: "poison",
    0x2000: "poison_fatal",
    0x4000: "unavailable",
    0x8000: "recovery",
}
_WANTED = XID | sum(_EVENTS)
# After a wait that did not wait, in seconds: a GPU that is lost makes each one end at once.
_PAUSE_S = 1.0
_SHORTEST_WAIT_S = 0.05


class Readings(NamedTuple):
    """The values of one GPU at a time, by kind. Those that it does not have are missing."""

    counters: dict[str, int]
    states: dict[str, int]
    links: int | None  # active ones
    lanes: tuple[int, int] | None  # of PCIe now, and at most
    generation: tuple[int, int] | None  # likewise; None while little computes


class FaultReader:
    """Reads the faults of one whole GPU. Its methods raise GpuLost."""

    def __init__(self, device: GpuDevice) -> None:
        self.device = device
        self._was_loaded = False
        self._count = 0

    def read(self) -> Readings:
        """Return its values now."""
        device = self.device
        fields = device.read_fields([*_COUNTERS, *_STATES], "fault fields")
        states = {name: int(fields[number]) for number, name in _STATES.items() if number in fields}
        counters = {name: int(fields[number]) for number, name in _COUNTERS.items() if number in fields}
        links = self._list_links()
        errors = self._read_link_errors(len(links)) if self._count % _LINK_PERIOD == 0 else {}
        self._count += 1
        lanes = self._read_pair(
            "pcie_width", pynvml.nvmlDeviceGetCurrPcieLinkWidth, "pcie width limit", pynvml.nvmlDeviceGetMaxPcieLinkWidth
        )
        return Readings(counters | errors, states, sum(links) if links else None, lanes, self._read_generation())

    def _read_link_errors(self, links: int) -> dict[str, int]:
        """Return the error counters of all NVLinks together."""
        if not links:
            return {}
        sums = _add_up(_LINK_SUMS, self.device.read_fields([*_LINK_SUMS], "link fields"))
        numbers = [(number, link) for number in _LINK_COUNTERS for link in range(links)]
        names = {pair: _LINK_COUNTERS[pair[0]] for pair in numbers}
        return sums or _add_up(names, self.device.read_fields(numbers, "link fields"))

    def _list_links(self) -> list[int]:
        """Return whether each NVLink is active; nothing for a GPU without any."""
        links: list[int] = []
        while len(links) < _MOST_LINKS:
            name = "nvlinks" if not links else f"nvlink {len(links)}"
            state = self.device.query_driver(name, pynvml.nvmlDeviceGetNvLinkState, len(links))
            if state is None:
                break
            links.append(int(state))
        return links

    def _read_generation(self) -> tuple[int, int] | None:
        use = self.device.query_driver("utilization", pynvml.nvmlDeviceGetUtilizationRates)
        was_loaded, self._was_loaded = self._was_loaded, use is not None and use.gpu >= _LOADED_PERCENT
        if not (was_loaded and self._was_loaded):
            return None
        return self._read_pair(
            "pcie_generation",
            pynvml.nvmlDeviceGetCurrPcieLinkGeneration,
            "pcie generation limit",
            pynvml.nvmlDeviceGetMaxPcieLinkGeneration,
        )

    def _read_pair(self, name: str, query: Any, limit_name: str, query_limit: Any) -> tuple[int, int] | None:
        value, limit = self.device.query_driver(name, query), self.device.query_driver(limit_name, query_limit)
        return (int(value), int(limit)) if value and limit else None

    def explain_hidden(self) -> dict[str, str]:
        """Return NVML's reasons for values that it has not shown, by kind; without links, which many GPUs do not have."""
        names = {name: f"field {number}" for number, name in _COUNTERS.items() if not name.startswith("rows")}
        reasons = {
            name: self.device.explain_missing(query) for name, query in (names | {"pcie_width": "pcie_width"}).items()
        }
        whole = self.device.explain_missing("fault fields")
        return {
            name: reason
            for name, found in reasons.items()
            if (reason := found or (whole if name in names else None)) is not None
        }


def _add_up(names: Mapping[Any, str], fields: Mapping[Any, float]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for key, name in names.items():
        if key in fields:
            sums[name] = sums.get(name, 0) + int(fields[key])
    return sums


class NvmlEvent(NamedTuple):
    """An event of a whole GPU."""

    device: GpuDevice
    kind: str
    value: int | None
    time_ns: int
    report: dict[str, Any] | None = None


class EventSet:
    """The events of some GPUs. Every call may block where the driver hangs; :meth:`wait` at most for its time otherwise."""

    def __init__(self, devices: Iterable[GpuDevice]) -> None:
        """Register the GPUs. ``hidden`` has NVML's reason for each that reports no Xids."""
        self.hidden: dict[GpuDevice, str] = {}
        self._devices: dict[int | None, GpuDevice] = {}
        self._set: Any = None
        try:
            self._set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            self.hidden = dict.fromkeys(devices, str(error))
            return
        for device in devices:
            try:
                wanted = pynvml.nvmlDeviceGetSupportedEventTypes(device.handle) & _WANTED
                pynvml.nvmlDeviceRegisterEvents(device.handle, wanted, self._set)
                self._devices[_find_address(device.handle)] = device
                if not wanted & XID:
                    self.hidden[device] = "Not Supported"
            except pynvml.NVMLError as error:
                self.hidden[device] = str(error)

    @property
    def is_open(self) -> bool:
        """Whether any GPU reports events."""
        return bool(self._devices)

    def wait(self, timeout_s: float) -> NvmlEvent | None:
        """Return the next event; None if there is none in time."""
        began_s = time.monotonic()
        try:
            data = pynvml.nvmlEventSetWait_v2(self._set, int(1000 * timeout_s))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:  # an old driver
                self.hidden = dict.fromkeys(self._devices.values(), str(error))
                self._devices.clear()
            else:
                pause_after_wait(began_s)
            return None
        # A handle is compared, not asked: a GPU that is lost answers nothing.
        device = self._devices.get(_find_address(data.device))
        kind = "xid" if data.eventType == XID else _EVENTS.get(data.eventType)
        if device is None or kind is None:
            return None
        return NvmlEvent(device, kind, int(data.eventData) if kind in ("xid", "recovery") else None, time.monotonic_ns())

    def close(self) -> None:
        """Free it."""
        if self._set is not None:
            pynvml.nvmlEventSetFree(self._set)


def pause_after_wait(began_s: float) -> None:
    """Sleep if a wait that began at a time has ended at once without an event."""
    if time.monotonic() - began_s < _SHORTEST_WAIT_S:
        time.sleep(_PAUSE_S)


def _find_address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value

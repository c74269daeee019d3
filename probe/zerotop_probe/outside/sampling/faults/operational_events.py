"""GPU Operational Events: structured reports of NVIDIA's driver, a preview from R615 on. Nothing here needs root.

Whether a driver has them is found by asking for them, never by a version. Its released headers let ``nvmlEventSetWait_v3``
take a structure that holds the timeout; bindings of an earlier preview pass the timeout as a third argument under the same
name. It is called with both, and with more room than either writes to: neither form can write elsewhere or wait longer. An
answer of another form than the released one is recognised, and ends the reading.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from typing import Any

import pynvml

from zerotop_probe.outside.sampling.faults.nvml_faults import NvmlEvent, pause_after_wait
from zerotop_probe.outside.sampling.nvml import PERMANENT_ERRORS, GpuDevice

_OTHER_FORM = "another form of nvmlEventSetWait_v3"
_ABSENT = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
# Warnings and errors: notices and telemetry are no faults.
_LOWEST_LEVEL = 40
_DATA_TYPES = _BITS, _STRUCTURED = 0, 1
# No event is said to have more.
_MOST_CONTEXTS = 16
_LEGACY_XID = 1
_ATTRIBUTES = ("uncontained", "latent", "propagated", "component_reset", "threshold_exceeded", "primary", "overflow")
_GROUP_ATTRIBUTES = ("recovered", "previous", "simulated")

_TEXT = {"uuid": 96, "sourceModule": 16}
_WORDS = ("eventType", "eventData", "groupCursor", "instanceId", "timestampUsec", "traceId")
_NUMBERS = (
    *("gpuInstanceId", "computeInstanceId", "severity", "categoryId", "moduleEventCode", "scope", "originator"),
    *("moduleInstance", "chipletId", "logLevel", "attributes", "groupCperSize", "groupAttributes"),
)
# Room behind each structure, for a later version that is longer.
_ROOM = ("room", ctypes.c_char * 4096)


class _Wait(ctypes.Structure):
    """``nvmlEventSetWait_v3_t``."""

    _fields_ = (
        ("timeoutMs", ctypes.c_uint),
        ("dataType", ctypes.c_uint),
        *((name, ctypes.c_char * size) for name, size in _TEXT.items()),
        *((name, ctypes.c_ulonglong) for name in _WORDS),
        *((name, ctypes.c_uint) for name in _NUMBERS),
        ("groupSize", ctypes.c_ubyte),
        ("groupIndex", ctypes.c_ubyte),
        _ROOM,
    )


class _Config(ctypes.Structure):
    """``nvmlGpuOperationalEventConfig_v1_t``."""

    _fields_ = (("uuid", ctypes.c_char * 96), ("minLogLevel", ctypes.c_uint), ("minSeverity", ctypes.c_uint), _ROOM)


class _Count(ctypes.Structure):
    """``nvmlEventSetGetContextCount_v1_t``."""

    _fields_ = (("count", ctypes.c_uint), _ROOM)


class _Context(ctypes.Structure):
    """The beginning of ``nvmlEventSetGetContextInfo_v1_t`` and of what a legacy Xid is returned in."""

    _fields_ = (("index", ctypes.c_uint), ("answer", ctypes.c_uint), _ROOM)


class OperationalEvents:
    """The operational events of some GPUs; every call may block where the driver hangs, as those of ``EventSet``."""

    def __init__(self, devices: Iterable[GpuDevice]) -> None:
        """Subscribe to the GPUs. ``hidden`` has NVML's reason for each whose driver has such events but shows none."""
        self.hidden: dict[GpuDevice, str] = {}
        self._devices: dict[str, GpuDevice] = {}
        self._set: Any = None
        for device in devices:
            try:
                self._subscribe(device)
            except pynvml.NVMLError as error:
                if error.value == _ABSENT:  # most drivers: nothing is hidden
                    return
                self.hidden[device] = str(error)

    def _subscribe(self, device: GpuDevice) -> None:
        for name in ("nvmlEventSetWait_v3", "nvmlEventSetRegisterGpuOperationalEvents_v1"):
            _find_function(name)
        if self._set is None:
            self._set = pynvml.nvmlEventSetCreate()
        config = _Config(uuid=device.gpu.uuid.encode(), minLogLevel=_LOWEST_LEVEL)
        _call("nvmlEventSetRegisterGpuOperationalEvents_v1", self._set, config)
        self._devices[device.gpu.uuid.lower()] = device

    @property
    def is_open(self) -> bool:
        """Whether any GPU reports events."""
        return bool(self._devices)

    def wait(self, timeout_s: float) -> NvmlEvent | None:
        """Return the next event; None if there is none in time."""
        timeout_ms = int(1000 * timeout_s)
        data, began_s = _Wait(timeoutMs=timeout_ms), time.monotonic()
        try:
            _call("nvmlEventSetWait_v3", self._set, data, ctypes.c_uint(timeout_ms))
        except pynvml.NVMLError as error:
            if error.value in PERMANENT_ERRORS:
                self._give_up(str(error))
            else:
                pause_after_wait(began_s)
            return None
        uuid = data.uuid.decode(errors="replace")
        if data.dataType not in _DATA_TYPES or not (uuid == "" or uuid.startswith("GPU-")):
            self._give_up(_OTHER_FORM)
            return None
        device = self._devices.get(uuid.lower())
        if data.dataType == _BITS or device is None:
            return None
        return NvmlEvent(device, "operational", self._read_xid(), time.monotonic_ns(), _describe(data))

    def _give_up(self, why: str) -> None:
        self.hidden |= dict.fromkeys(self._devices.values(), why)
        self._devices.clear()

    def _read_xid(self) -> int | None:
        """Return the Xid by which the latest event is known, too."""
        try:
            _call("nvmlEventSetGetContextCount_v1", self._set, count := _Count())
            for index in range(min(count.count, _MOST_CONTEXTS)):
                _call("nvmlEventSetGetContextInfo_v1", self._set, kind := _Context(index=index))
                if kind.answer == _LEGACY_XID:
                    _call("nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1", self._set, xid := _Context(index=index))
                    return int(xid.answer)
        except pynvml.NVMLError:
            pass
        return None

    def close(self) -> None:
        """Free it."""
        if self._set is not None:
            pynvml.nvmlEventSetFree(self._set)


def _find_function(name: str) -> Any:
    """Return a function that pynvml's older versions do not know. Raises NVMLError."""
    return pynvml._nvmlGetFunctionPointer(name)


def _call(name: str, events: Any, structure: ctypes.Structure, *more: Any) -> None:
    code = _find_function(name)(events, ctypes.byref(structure), *more)
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)


def _describe(data: _Wait) -> dict[str, Any]:
    """Return the fields of ``OperationalEvent``."""
    bits = ((_ATTRIBUTES, data.attributes), (_GROUP_ATTRIBUTES, data.groupAttributes))
    return {
        "module": data.sourceModule.decode(errors="replace").strip(),
        "code": data.moduleEventCode,
        "category": data.categoryId,
        "severity": data.severity,
        "group": data.groupCursor or None,
        "traits": [name for names, mask in bits for place, name in enumerate(names) if mask >> place & 1],
    }

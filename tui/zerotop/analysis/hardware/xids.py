"""The Xids of NVIDIA's driver: what each means for a training job, and what to do. ``docs/hardware.md`` is made from it.

After NVIDIA's document "Xid Errors" (docs.nvidia.com/deploy/xid-errors), in our words. Those that a training job does not
meet, such as display errors, are left out.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Origin(Enum):
    """Where a fault comes from, by NVIDIA's document."""

    CODE = "mostly the job's own code"
    HARDWARE = "hardware"
    DRIVER = "driver or hardware"
    EITHER = "code, driver or hardware"
    CLEANUP = "follows another fault or the end of a process"
    NOTE = "a note of the driver"


class Xid(NamedTuple):
    """One Xid. ``name`` follows "Xid 79, " in a headline."""

    number: int
    name: str
    origin: Origin
    meaning: str
    action: str


_DEBUG = "Find the kernel: run again with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer."
_LEAVE = "Restart from the last checkpoint on another node, and have this one drained and its GPU checked."
_RESET = "Restart from the last checkpoint on other GPUs; this one needs a reset before it is used again."
_AGAIN = "Restart from the last checkpoint. If it comes again on this GPU, use another node and tell its operator."
_WATCH = "Nothing now. Tell the operator of the node if more of them come."
_LINK = "The fault may be at either end of the link. " + _RESET
_UPDATE = "Restart from the last checkpoint after a reset of the GPU; if it comes again, have driver and GPU checked."

_ALL = (
    Xid(8, "a kernel timed out", Origin.EITHER, "The GPU stopped working on what it was given.", _AGAIN),
    Xid(11, "broken commands", Origin.EITHER, "The commands that reached the GPU were invalid or damaged.", _AGAIN),
    Xid(
        13,
        "exception in a kernel",
        Origin.CODE,
        "A kernel read or wrote outside of an array, or ran an invalid instruction. Rarely the hardware.",
        f"{_DEBUG} If the same code fails on this GPU alone, suspect the GPU.",
    ),
    Xid(
        31,
        "illegal memory address",
        Origin.CODE,
        "A kernel or a copy used an address that is not mapped. Rarely the driver or the hardware.",
        f"{_DEBUG} If the same code fails on this GPU alone, suspect the GPU.",
    ),
    Xid(
        32,
        "damaged command stream",
        Origin.DRIVER,
        "The commands that reached the GPU over PCIe were damaged: mostly a bad link, not the job's code.",
        _AGAIN,
    ),
    Xid(38, "driver firmware error", Origin.DRIVER, "The firmware of the driver failed.", _UPDATE),
    Xid(
        43,
        "a process was stopped",
        Origin.CODE,
        "The driver ended the work of a process after a fault of its own. The GPU is healthy.",
        _DEBUG,
    ),
    Xid(
        45,
        "cleanup after a process",
        Origin.CLEANUP,
        "The driver removed the work of a process that failed or was killed. It says nothing about why.",
        "Look for the first fault: an earlier Xid, an exception, or who ended the process.",
    ),
    Xid(
        48,
        "uncorrectable memory error",
        Origin.HARDWARE,
        "The GPU found two wrong bits in its memory, which it cannot repair.",
        _RESET,
    ),
    Xid(54, "power cable missing", Origin.HARDWARE, "The board has no auxiliary power.", _LEAVE),
    Xid(
        61,
        "microcontroller warning",
        Origin.DRIVER,
        "A microcontroller of the GPU reported a breakpoint or warning.",
        _UPDATE,
    ),
    Xid(62, "microcontroller halted", Origin.DRIVER, "A microcontroller of the GPU halted.", _UPDATE),
    Xid(
        63,
        "memory will be replaced",
        Origin.HARDWARE,
        "The GPU noted a bad page or row of its memory, and uses a spare one after its next reset.",
        "The job may go on. The operator of the node should reset the GPU once it is idle.",
    ),
    Xid(
        64,
        "bad memory not replaced",
        Origin.HARDWARE,
        "The GPU could not note a bad page or row of its memory, or has no spare one.",
        _LEAVE,
    ),
    Xid(65, "video decoder exception", Origin.EITHER, "The video processor failed.", _AGAIN),
    Xid(68, "video decoder exception", Origin.CODE, "NVDEC was given data or commands that it cannot process.", _AGAIN),
    Xid(
        69,
        "invalid engine command",
        Origin.CODE,
        "A process gave an engine of the GPU a command that it does not know.",
        _DEBUG,
    ),
    Xid(
        74,
        "NVLink error",
        Origin.HARDWARE,
        "An NVLink to another GPU or to a switch failed, perhaps because the GPU at its other end did.",
        _LINK,
    ),
    Xid(
        79,
        "fallen off the bus",
        Origin.HARDWARE,
        "The driver cannot reach the GPU over PCIe any more: power, heat, the slot, or the GPU itself.",
        _LEAVE,
    ),
    Xid(
        92,
        "many corrected errors",
        Origin.HARDWARE,
        "The GPU corrects memory errors at a high rate. Results are right so far.",
        "Save a checkpoint; the operator of the node should check the GPU.",
    ),
    Xid(
        94,
        "contained memory error",
        Origin.HARDWARE,
        "An error that cannot be corrected reached one process only, which the driver ends.",
        "Restart from the last checkpoint. The GPU can go on, and should be reset once it is idle.",
    ),
    Xid(
        95,
        "uncontained memory error",
        Origin.HARDWARE,
        "An error that cannot be corrected may have reached other processes on the GPU, too.",
        _RESET,
    ),
    Xid(109, "context switch timed out", Origin.EITHER, "The GPU did not switch between processes in time.", _AGAIN),
    Xid(119, "GSP does not answer", Origin.DRIVER, "The GPU's system processor did not answer the driver in time.", _UPDATE),
    Xid(120, "GSP error", Origin.DRIVER, "The GPU's system processor failed.", _UPDATE),
    Xid(
        121,
        "chip link error corrected",
        Origin.HARDWARE,
        "The link between a Grace CPU and its GPU corrected an error.",
        _WATCH,
    ),
    Xid(
        137,
        "illegal NVLink access",
        Origin.EITHER,
        "An access to another GPU's memory was refused there: mostly code that uses a peer's memory after it was freed.",
        _AGAIN,
    ),
    Xid(
        140,
        "unrecovered memory error",
        Origin.HARDWARE,
        "The driver saw memory errors that it could not recover from.",
        _RESET,
    ),
    Xid(143, "GPU not initialized", Origin.DRIVER, "The GPU did not start.", _LEAVE),
    *(
        Xid(number, "NVLink error", Origin.HARDWARE, f"An NVLink failed (unit {unit}), at either end.", _LINK)
        for number, unit in enumerate(("SAW", "RLW", "TLW", "TREX", "NVLPW", "NETIR", "MSE"), 144)
    ),
    Xid(
        154,
        "recovery action changed",
        Origin.NOTE,
        "The driver says what would bring the GPU back, such as a reset. The Xid before it says why.",
        "See the action with nvidia-smi -q, and the Xid before this one.",
    ),
)

XIDS = {xid.number: xid for xid in _ALL}
"""All Xids, by number."""

_DOCUMENT = "https://docs.nvidia.com/deploy/xid-errors"


def describe_xid(number: int) -> Xid:
    """Return an Xid; of one that is not listed only what is certain."""
    action = f"See {_DOCUMENT}."
    return XIDS.get(number) or Xid(number, "see NVIDIA's list", Origin.EITHER, "It is not in zerotop's table.", action)


def format_table() -> str:
    """Return the table for ``docs/hardware.md``."""
    rows = [f"| {one.number} | {one.name} | {one.origin.value} | {one.meaning} | {one.action} |" for one in XIDS.values()]
    return "\n".join(("| Xid | name | cause | meaning | what to do |", "| ---: | --- | --- | --- | --- |", *rows)) + "\n"

"""Parser for out-of-memory errors in a job's output: by PyTorch 1.x to 2.13, NCCL, cuBLAS and the host.

PyTorch's message has had three forms (c10/cuda/CUDACachingAllocator.cpp): with all figures in brackets up to 2.0; in
sentences from 2.1 on, which writes "capacty" for capacity; and with the memory of this process from 2.2 on. In 2.3.0 it
breaks off after "GPU". With backend:cudaMallocAsync it is a list, in some versions only its first words
(c10/cuda/CUDAMallocAsyncAllocator.cpp).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

CUDA, DRIVER, NCCL, CUBLAS, HOST, KILLED = "cuda", "cuda_driver", "nccl", "cublas", "host", "killed"
"""PyTorch's allocator; another caller of the driver; NCCL; cuBLAS or cuDNN; host memory refused; killed by the kernel."""

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_SIZE = r"(\d+(?:\.\d+)?)\s+(bytes|[KMGTP]iB)"
_LONGEST = 2000

# The most informative kinds first: of several in an output the first one here counts.
_BEGINNINGS = (
    (CUDA, re.compile(r"(?:CUDA|HIP) out of memory\.\s+Tried to allocate")),
    (CUDA, re.compile(r"(?:OutOfMemoryError: |^)Allocation on device\b", re.MULTILINE)),
    (NCCL, re.compile(r"Failed to CUDA (?:host )?(?:calloc|alloc|malloc)(?: async)?")),
    (NCCL, re.compile(r"NCCL WARN Cuda failure (?:\d+ )?'out of memory'")),
    (CUBLAS, re.compile(r"(?:CUBLAS|CUDNN|HIPBLAS)_STATUS_ALLOC_FAILED")),
    (HOST, re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate")),
    (HOST, re.compile(r"MemoryError: Unable to allocate")),
    (DRIVER, re.compile(r"(?:CUDA|HIP) (?:error|driver error): out of memory|CUDA_ERROR_OUT_OF_MEMORY")),
    (KILLED, re.compile(r"return code = -9\b|exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\) received")),
)
_RANK = re.compile(r"\[rank(\d+)\]:")

_FIELDS = {
    "requested_bytes": rf"(?:Tried to allocate|Requested\s*:)\s+{_SIZE}",
    "total_bytes": rf"(?:total\s+capac(?:i)?ty\s+of\s+{_SIZE}|{_SIZE}\s+total\s+capacity|Device limit\s*:\s+{_SIZE})",
    "free_bytes": rf"(?:of\s+which\s+{_SIZE}\s+is\s+free|{_SIZE}\s+free;|Free \(according to CUDA\)\s*:\s+{_SIZE})",
    "allowed_bytes": rf"{_SIZE}\s+allowed;",
    "process_bytes": rf"this\s+process\s+has\s+{_SIZE}\s+memory\s+in\s+use",
    "allocated_bytes": (
        rf"(?:allocated\s+memory\s+{_SIZE}\s+is\s+allocated|{_SIZE}\s+already\s+allocated|Currently allocated\s*:\s+{_SIZE})"
    ),
    "private_bytes": rf"with\s+{_SIZE}\s+allocated\s+in\s+private\s+pools",
    "unallocated_bytes": rf"{_SIZE}\s+is\s+reserved\s+by\s+PyTorch\s+but\s+unallocated",
    "reserved_bytes": rf"{_SIZE}\s+reserved\s+in\s+total",
}
_COMPILED = {name: re.compile(pattern) for name, pattern in _FIELDS.items()}
_OTHERS = re.compile(rf"Process\s+(\d+)\s+has\s+{_SIZE}\s+memory\s+in\s+use")
_DEVICE = re.compile(r"(?:GPU|on device)\s+(\d+)")
# The beginning of a line that continues PyTorch's message, where it was wrapped.
_CONTINUATION = re.compile(
    r"\s*(?:GPU \d|Including|Process \d|Of the|memory|(?:un)?allocated|reserved|PyTorch|is|by|but|\d|Currently allocated"
    r"|Requested +:|Device limit|Free \(according|:)"
)
_BYTES = re.compile(r"(\d+)\s+bytes")
_NUMPY = re.compile(rf"Unable to allocate\s+{_SIZE}")


@dataclass(frozen=True, slots=True)
class ErrorText:
    """One error; None where its text lacks a figure. Sizes are rounded as in the text, mostly to two decimals of GiB."""

    kind: str
    text: str  # the error as printed, on one line
    offset: int  # of its beginning in the output
    rank: int | None = None
    device: int | None = None  # the process's own ordinal
    requested_bytes: int | None = None
    total_bytes: int | None = None
    allowed_bytes: int | None = None  # where the process is limited to a fraction of the device
    free_bytes: int | None = None
    process_bytes: int | None = None  # of the device, by this process
    allocated_bytes: int | None = None  # by PyTorch
    private_bytes: int | None = None  # the part in private pools, as of CUDA graphs
    reserved_bytes: int | None = None
    others: tuple[tuple[int, int], ...] = ()  # (process id, bytes) of other processes

    @property
    def unallocated_bytes(self) -> int | None:
        """Reserved by PyTorch but not allocated."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes


def parse_output(output: str) -> ErrorText | None:
    """Return the last error of the most informative kind; None without any."""
    for kind, beginning in _BEGINNINGS:
        matches = list(beginning.finditer(output))
        if matches:
            return _parse_error(kind, output, matches[-1])
    return None


def _parse_error(kind: str, output: str, beginning: re.Match[str]) -> ErrorText:
    line_begin = max(output.rfind("\n", 0, beginning.start()) + 1, beginning.start() - _LONGEST)
    end = _find_error_end(output, beginning.end(), wrapped=kind == CUDA)
    message = output[beginning.start() : end]
    rank = _RANK.search(output[line_begin : beginning.start()])
    figures = _parse_cuda(message) if kind == CUDA else _parse_other(message)
    text = " ".join(output[line_begin:end].split())
    return ErrorText(kind, text, beginning.start(), int(rank[1]) if rank else None, **figures)


def _find_error_end(output: str, begin: int, *, wrapped: bool) -> int:
    """Return the end of the error's line, or of the last line that it was wrapped into."""
    end = _find_line_end(output, begin)
    while wrapped and end < min(len(output), begin + _LONGEST) and _CONTINUATION.match(output, end + 1):
        end = _find_line_end(output, end + 1)
    return min(end, begin + _LONGEST)


def _find_line_end(output: str, begin: int) -> int:
    end = output.find("\n", begin)
    return end if end >= 0 else len(output)


def _parse_cuda(message: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, pattern in _COMPILED.items():
        match = pattern.search(message)
        if match:
            figures[name] = _parse_size(*(part for part in match.groups() if part is not None))
    unallocated = figures.pop("unallocated_bytes", None)
    if unallocated is not None and "allocated_bytes" in figures:
        figures["reserved_bytes"] = figures["allocated_bytes"] + unallocated
    others = [(int(pid), _parse_size(number, unit)) for pid, number, unit in _OTHERS.findall(message)]
    # Without a sentence about this process, the only one that is named is this one, by its pid outside the container.
    own = max(others, key=lambda process: process[1], default=None)
    if "process_bytes" not in figures and own is not None and own[1] >= figures.get("allocated_bytes", 0):
        figures["process_bytes"] = own[1]
        others.remove(own)
    device = _DEVICE.search(message)
    return figures | {"device": int(device[1]) if device else None, "others": tuple(others)}


def _parse_other(message: str) -> dict[str, Any]:
    count, numpy = _BYTES.search(message), _NUMPY.search(message)
    return {"requested_bytes": int(count[1]) if count else _parse_size(numpy[1], numpy[2]) if numpy else None}


def _parse_size(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])

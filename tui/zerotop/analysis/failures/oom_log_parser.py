"""What a job's output says of memory that could not be had: the sentences of PyTorch 1.x to 2.13, NCCL, cuBLAS and the host.

PyTorch's own sentence has had three forms (c10/cuda/CUDACachingAllocator.cpp): with all figures in brackets up to 2.0; in
sentences from 2.1 on, which writes "capacty" for capacity; and with what this process uses from 2.2 on. In 2.3.0 it breaks
off after "GPU". With backend:cudaMallocAsync it is a list, and in some versions no more than its first words
(c10/cuda/CUDAMallocAsyncAllocator.cpp).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CUDA, DRIVER, NCCL, CUBLAS, HOST, KILLED = "cuda", "cuda_driver", "nccl", "cublas", "host", "killed"
"""PyTorch's allocator; the driver, asked by somebody else; NCCL; cuBLAS or cuDNN; host memory refused; the kernel killed."""

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_SIZE = r"(\d+(?:\.\d+)?)\s+(bytes|[KMGTP]iB)"
_LONGEST = 2000

# In order of how much they tell: where an output has several kinds, the first of these that it has.
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
# How a line begins that goes on with PyTorch's sentence, where somebody has broken it.
_CONTINUATION = re.compile(
    r"\s*(?:GPU \d|Including|Process \d|Of the|memory|(?:un)?allocated|reserved|PyTorch|is|by|but|\d|Currently allocated"
    r"|Requested +:|Device limit|Free \(according|:)"
)
_BYTES = re.compile(r"(\d+)\s+bytes")
_NUMPY = re.compile(rf"Unable to allocate\s+{_SIZE}")


@dataclass(frozen=True, slots=True)
class ErrorText:
    """What one error says; None where it does not. Sizes that it gives in GiB with two decimals are as exact as that."""

    kind: str
    text: str  # the error as printed, on one line
    offset: int  # where in the output it begins
    rank: int | None = None
    device: int | None = None  # the process's own ordinal
    requested_bytes: int | None = None
    total_bytes: int | None = None
    allowed_bytes: int | None = None  # where the process was given a fraction of the device
    free_bytes: int | None = None
    process_bytes: int | None = None  # of the device, by this process
    allocated_bytes: int | None = None  # by PyTorch
    private_bytes: int | None = None  # of that in private pools, as of CUDA graphs
    reserved_bytes: int | None = None
    others: tuple[tuple[int, int], ...] = ()  # (process id, bytes) of processes that it names

    @property
    def unallocated_bytes(self) -> int | None:
        """Reserved by PyTorch but not allocated."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes


def parse_output(output: str) -> ErrorText | None:
    """The last error of the kind that tells most; None where there is none."""
    for kind, begins in _BEGINNINGS:
        found = list(begins.finditer(output))
        if found:
            return _parse_error(kind, output, found[-1])
    return None


def _parse_error(kind: str, output: str, begin: re.Match[str]) -> ErrorText:
    line = output.rfind("\n", 0, begin.start()) + 1
    place = max(line, begin.start() - _LONGEST)
    end = _find_error_end(output, begin.end(), wrapped=kind == CUDA)
    said = output[begin.start() : end]
    rank = _RANK.search(output[place : begin.start()])
    facts = ErrorText(kind, " ".join(output[place:end].split()), begin.start(), int(rank[1]) if rank else None)
    return _parse_cuda(facts, said) if kind == CUDA else _parse_other(facts, said)


def _find_error_end(output: str, begin: int, *, wrapped: bool) -> int:
    """Where the error ends: with its line, or with the last of the lines that it was broken into."""
    end = _find_line_end(output, begin)
    while wrapped and end < min(len(output), begin + _LONGEST) and _CONTINUATION.match(output, end + 1):
        end = _find_line_end(output, end + 1)
    return min(end, begin + _LONGEST)


def _find_line_end(output: str, begin: int) -> int:
    end = output.find("\n", begin)
    return end if end >= 0 else len(output)


def _parse_cuda(facts: ErrorText, sentence: str) -> ErrorText:
    found: dict[str, int] = {}
    for name, pattern in _COMPILED.items():
        match = pattern.search(sentence)
        if match:
            found[name] = _parse_size(*(part for part in match.groups() if part is not None))
    unallocated = found.pop("unallocated_bytes", None)
    if unallocated is not None and "allocated_bytes" in found:
        found["reserved_bytes"] = found["allocated_bytes"] + unallocated
    device = _DEVICE.search(sentence)
    others = tuple((int(pid), _parse_size(number, unit)) for pid, number, unit in _OTHERS.findall(sentence))
    # Without a sentence about this process the only one that is named is this one, by its number outside of the container.
    own = max(range(len(others)), key=lambda place: others[place][1], default=None)
    if "process_bytes" not in found and own is not None and others[own][1] >= found.get("allocated_bytes", 0):
        found["process_bytes"] = others[own][1]
        others = (*others[:own], *others[own + 1 :])
    return ErrorText(
        facts.kind, facts.text, facts.offset, facts.rank, int(device[1]) if device else None, others=others, **found
    )


def _parse_other(facts: ErrorText, sentence: str) -> ErrorText:
    count, numpy = _BYTES.search(sentence), _NUMPY.search(sentence)
    requested = int(count[1]) if count else _parse_size(numpy[1], numpy[2]) if numpy else None
    return ErrorText(facts.kind, facts.text, facts.offset, facts.rank, requested_bytes=requested)


def _parse_size(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])

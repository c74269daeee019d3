"""How PyTorch's CUDA allocator is configured: which variable counts in which version, and what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Up to 2.8 there is only the first. 2.9 calls it deprecated for the last, but takes expandable_segments from the first alone
# (github.com/pytorch/pytorch/issues/183387). From 2.10 on the first that is set counts, in this order
# (c10/cuda/CUDAAllocatorConfig.h).
CUDA_VARIABLE, HIP_VARIABLE, ANY_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"

# A comma within brackets belongs to a list: roundup_power2_divisions:[256:1,512:2].
_ENTRY = re.compile(r"\s*([^:,\s]+)\s*:\s*(\[[^\]]*\]|[^,]*)")


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The configuration in force."""

    variable: str  # where it is from; "" where nothing is set, and PyTorch's defaults hold
    text: str  # as it was set
    values: dict[str, str]
    caching: bool  # False where PyTorch was told not to keep what is freed
    notes: tuple[str, ...]  # sentences about what is set and does not count

    @property
    def has_expandable_segments(self) -> bool:
        """Whether segments grow in place."""
        return self.values.get("expandable_segments", "").strip().lower() == "true"

    @property
    def backend(self) -> str:
        """The allocator itself: "native" or "cudaMallocAsync"."""
        return self.values.get("backend", "native").strip()


def parse_version(torch: str) -> tuple[int, int]:
    """Major and minor of a version like ``2.11.0+cu130``; (0, 0) where it is none."""
    match = re.match(r"(\d+)\.(\d+)", torch)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def choose_variable(torch: str) -> str:
    """The variable to set in that version of PyTorch; the old name where the version is not known, as all take it."""
    return ANY_VARIABLE if parse_version(torch) >= (2, 10) else CUDA_VARIABLE


def parse_settings(environment: Mapping[str, str], torch: str) -> AllocatorSettings:
    """What counts of a rank's environment."""
    known = parse_version(torch)
    order = (
        [CUDA_VARIABLE, HIP_VARIABLE, ANY_VARIABLE] if known >= (2, 9) or known == (0, 0) else [CUDA_VARIABLE, HIP_VARIABLE]
    )
    name = next((candidate for candidate in order if candidate in environment), "")
    text = environment.get(name, "")
    values = dict(_ENTRY.findall(text))
    notes = [
        _describe_ignored(other, name, torch)
        for other in (CUDA_VARIABLE, HIP_VARIABLE, ANY_VARIABLE)
        if other in environment and other != name
    ]
    if known == (2, 9) and name == ANY_VARIABLE and values.pop("expandable_segments", None) is not None:
        notes.append(
            f"PyTorch {torch} takes expandable_segments from {CUDA_VARIABLE} only: what {ANY_VARIABLE} says of it does not count."
        )
    return AllocatorSettings(name, text, values, environment.get(NO_CACHING, "0") in ("", "0"), tuple(notes))


def _describe_ignored(other: str, name: str, torch: str) -> str:
    if name:
        return f"{other} is set too and does not count: {name} does."
    return f"{other} is set and does not count: PyTorch {torch} knows only {CUDA_VARIABLE}."

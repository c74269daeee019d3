"""How PyTorch's CUDA allocator is configured: which variable counts in which version, and what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Up to 2.8 there is only the first. 2.9 calls it deprecated for the last, but takes expandable_segments from the first alone
# (github.com/pytorch/pytorch/issues/183387). From 2.10 on the first that is set counts, in this order
# (c10/cuda/CUDAAllocatorConfig.h).
CUDA, HIP, ANY = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"

# A comma within brackets belongs to a list: roundup_power2_divisions:[256:1,512:2].
_ENTRY = re.compile(r"\s*([^:,\s]+)\s*:\s*(\[[^\]]*\]|[^,]*)")


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration in force."""

    variable: str  # where it is from; "" where nothing is set, and PyTorch's defaults hold
    text: str  # as it was set
    values: dict[str, str]
    caching: bool  # False where PyTorch was told not to keep what is freed
    notes: tuple[str, ...]  # sentences about what is set and does not count

    @property
    def expandable_segments(self) -> bool:
        """Whether segments grow in place."""
        return self.values.get("expandable_segments", "").strip().lower() == "true"

    @property
    def backend(self) -> str:
        """The allocator itself: "native" or "cudaMallocAsync"."""
        return self.values.get("backend", "native").strip()


def version(torch: str) -> tuple[int, int]:
    """Major and minor of a version like ``2.11.0+cu130``; (0, 0) where it is none."""
    match = re.match(r"(\d+)\.(\d+)", torch)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def variable(torch: str) -> str:
    """The variable to set in that version of PyTorch; the old name where the version is not known, as all take it."""
    return ANY if version(torch) >= (2, 10) else CUDA


def settings(environment: Mapping[str, str], torch: str) -> Settings:
    """What counts of a rank's environment."""
    known = version(torch)
    order = [CUDA, HIP, ANY] if known >= (2, 9) or known == (0, 0) else [CUDA, HIP]
    name = next((candidate for candidate in order if candidate in environment), "")
    text = environment.get(name, "")
    values = dict(_ENTRY.findall(text))
    notes = [_unheard(other, name, torch) for other in (CUDA, HIP, ANY) if other in environment and other != name]
    if known == (2, 9) and name == ANY and values.pop("expandable_segments", None) is not None:
        notes.append(f"PyTorch {torch} takes expandable_segments from {CUDA} only: what {ANY} says of it does not count.")
    return Settings(name, text, values, environment.get(NO_CACHING, "0") in ("", "0"), tuple(notes))


def _unheard(other: str, name: str, torch: str) -> str:
    if name:
        return f"{other} is set too and does not count: {name} does."
    return f"{other} is set and does not count: PyTorch {torch} knows only {CUDA}."

"""The configuration of PyTorch's CUDA allocator, from environment variables whose precedence differs by version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zerotop_probe.recording.events import Hello

# Up to 2.8 only the first exists. 2.9 deprecates it in favour of the last, but reads expandable_segments from the first only
# (github.com/pytorch/pytorch/issues/183387). From 2.10 on the first that is set counts, in this order
# (c10/cuda/CUDAAllocatorConfig.h).
CUDA_VARIABLE, HIP_VARIABLE, ANY_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"

# A comma within brackets belongs to a list: roundup_power2_divisions:[256:1,512:2].
_ENTRY = re.compile(r"\s*([^:,\s]+)\s*:\s*(\[[^\]]*\]|[^,]*)")


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The configuration in force."""

    variable: str  # the variable it was read from; "" where none is set, and PyTorch's defaults apply
    text: str  # as it was set
    values: dict[str, str]
    caching: bool  # False if PyTorch's caching of freed memory is switched off
    notes: tuple[str, ...]  # sentences about variables that are set and ignored

    @property
    def has_expandable_segments(self) -> bool:
        """Whether segments grow in place."""
        return self.values.get("expandable_segments", "").strip().lower() == "true"


def parse_version(torch: str) -> tuple[int, int]:
    """Return major and minor of a version like ``2.11.0+cu130``; (0, 0) for other text."""
    match = re.match(r"(\d+)\.(\d+)", torch)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def choose_variable(torch: str) -> str:
    """Return the variable to set in a version of PyTorch; for an unknown version the old name, which all read."""
    return ANY_VARIABLE if parse_version(torch) >= (2, 10) else CUDA_VARIABLE


def read_settings(hello: Hello | None) -> AllocatorSettings:
    """Return the settings of a rank; None: it has not reported."""
    return parse_settings((hello.environment or {}), hello.torch or "") if hello is not None else parse_settings({}, "")


def parse_settings(environment: Mapping[str, str], torch: str) -> AllocatorSettings:
    """Return the settings that a version of PyTorch reads from the environment."""
    version = parse_version(torch)
    variables = (CUDA_VARIABLE, HIP_VARIABLE, ANY_VARIABLE)
    read = variables if version >= (2, 9) or version == (0, 0) else variables[:2]
    name = next((variable for variable in read if variable in environment), "")
    text = environment.get(name, "")
    values = dict(_ENTRY.findall(text))
    notes = [_describe_ignored(other, name, torch) for other in variables if other in environment and other != name]
    if version == (2, 9) and name == ANY_VARIABLE and values.pop("expandable_segments", None) is not None:
        notes.append(
            f"PyTorch {torch} reads expandable_segments from {CUDA_VARIABLE} only and ignores it in {ANY_VARIABLE}."
        )
    return AllocatorSettings(name, text, values, environment.get(NO_CACHING, "0") in ("", "0"), tuple(notes))


def _describe_ignored(other: str, name: str, torch: str) -> str:
    if name:
        return f"{other} is ignored because {name} is set."
    return f"{other} is ignored: PyTorch {torch} reads only {CUDA_VARIABLE}."

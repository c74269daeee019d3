"""Identities of GPUs and processes."""

from __future__ import annotations

GpuKey = tuple[str, int]
"""Host and the sampler's index: NVML's, and after those the instances of GPUs divided by MIG."""

ProcessKey = tuple[str, int]
"""Host and pid."""

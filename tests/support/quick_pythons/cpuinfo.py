"""A replacement for py-cpuinfo in jobs of the tests, which reads the kernel's description of the processor.

DeepSpeed asks py-cpuinfo twice or three times in each rank, for the architecture, the vendor and the flags. That starts a
process each time, which measures the clock rate for more than a second.
"""

from __future__ import annotations

import platform
from pathlib import Path

_ARCHITECTURES = {"x86_64": "X86_64", "aarch64": "ARM_8"}


def get_cpu_info() -> dict[str, object]:
    """Return the fields of py-cpuinfo that DeepSpeed reads."""
    fields = dict[str, str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return {
        "arch": _ARCHITECTURES[platform.machine()],
        "vendor_id_raw": fields.get("vendor_id", ""),
        "flags": fields.get("flags", fields.get("Features", "")).split(),
    }

"""Styles of a ledger's rows, and the unit of its figures."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.memory import host_ledger as on_host
from zerotop.analysis.memory import ledger_rows as of_gpu
from zerotop.analysis.memory import tensor_inventory as of_tensors
from zerotop.ui.drawing.formatting import format_fixed
from zerotop.ui.drawing.units import get_units

# From the bottom of a bar to its top.
PART_STYLES = {
    of_tensors.PARAMETERS: "memory-parameters",
    of_tensors.GRADIENTS: "memory-gradients",
    of_tensors.MASTER_WEIGHTS: "memory-master",
    of_tensors.OPTIMIZER_STATE: "memory-optimizer",
    of_tensors.BUFFERS: "memory-buffers",
    of_gpu.CUBLAS: "memory-buffers",
    of_gpu.ACTIVATIONS: "memory-activations",
    of_gpu.UNATTRIBUTED: "memory-allocated",
    of_gpu.UNEXPLAINED: "memory-unexplained",
    of_gpu.UNALLOCATED: "memory-reserved",
    on_host.PINNED_SPARE: "memory-reserved",
    of_gpu.OUTSIDE: "memory-other",
    of_gpu.JOB: "memory-other",
    on_host.REST: "memory-other",
    of_gpu.OTHERS: "memory-others",
    of_gpu.BEFORE: "memory-others",
    of_gpu.DRIVER: "memory-others",
    of_gpu.REST: "memory-free",
    of_gpu.FREE: "memory-free",
}
NOT_JOB_KEYS = (of_gpu.OTHERS, of_gpu.BEFORE, of_gpu.DRIVER, of_gpu.REST, of_gpu.FREE)
"""Rows of a device that do not belong to the job."""


@dataclass(frozen=True)
class SizeUnit:
    """The unit of all figures of a panel, named in its title."""

    name: str
    size: int
    decimals: int
    width: int

    def format_bytes(self, count: int | None) -> str:
        """Return bytes in this unit, right-aligned; a value above zero never reads as zero."""
        if count is None:
            return format_fixed(None, self.decimals, self.width)
        least = 10**-self.decimals
        if 0 < abs(count) / self.size < least / 2:
            return f"<{least:.{self.decimals}f}".rjust(self.width)
        return format_fixed(count / self.size, self.decimals, self.width)

    def format_signed(self, count: int) -> str:
        """Return bytes in this unit with a sign, unless they read as zero."""
        text = f"{count / self.size:+.{self.decimals}f}"
        return (text if text.strip("+-0.") else f"{0:.{self.decimals}f}").rjust(self.width)


def choose_unit(largest: int) -> SizeUnit:
    """Return GiB, or MiB for small amounts; or GB and MB."""
    _, mega, giga, _ = get_units().sizes
    if largest < 2 * giga.bytes:
        return SizeUnit(*mega, 1, 7)
    return SizeUnit(*giga, 2 if largest < 1000 * giga.bytes else 1, 7)

"""One failure to get memory: the figures that reasons and advice follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zerotop.analysis.failures.evaluation_memory import EvaluationGrowth
from zerotop.analysis.formatting import format_count
from zerotop.analysis.memory.allocator_settings import AllocatorSettings
from zerotop.analysis.memory.leak_holders import LeakAdvice
from zerotop_probe.recording.events import EngineFacts

NOTABLE_SHARE = 0.05
"""The share of the whole from which on other processes, or the rounding of pinned memory, are worth a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Bytes and the last micro-batch at a failure. None where no source recorded it."""

    kind: str  # a kind of oom_log_parser: "cuda", "cuda_driver", "nccl", "cublas", "host" or "killed"
    requested_bytes: int | None = None
    limit_bytes: int | None = None  # the part of the device, or of host memory, that the process may use
    total_bytes: int | None = None  # the device's
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_split_bytes: int | None = None
    largest_free_block_bytes: int | None = None
    others_bytes: int | None = None  # of the device, by other processes
    outer_phase: str = ""  # the outermost: a forward may be an evaluation's
    rows: int | None = None  # of the last micro-batch
    sequence: int | None = None
    tokens: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether the process may use only a part of the device."""
        known = self.limit_bytes is not None and self.total_bytes is not None
        return known and self.limit_bytes <= self.total_bytes * (1 - NOTABLE_SHARE)  # type: ignore[operator]

    @property
    def unallocated_bytes(self) -> int | None:
        """Bytes that PyTorch reserves and no tensor uses."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def releasable_bytes(self) -> int:
        """Unallocated bytes in segments that are wholly free."""
        return max(0, (self.unallocated_bytes or 0) - (self.inactive_split_bytes or 0))


class LeakEvidence(NamedTuple):
    """Memory that steps have left behind, and what is known about it."""

    bytes: int
    since_step: int
    until_step: int
    holder: str  # a sentence about the variable that keeps it, or the lines that allocated it; "" where both are unknown
    setting: str  # the variable or line in the advice
    advice: LeakAdvice


class GraphEvidence(NamedTuple):
    """Forwards of the evaluation that had gradients enabled."""

    forwards: int
    line: str  # of the first, in a sentence; "" where it is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class OomCase(MemoryFigures):
    """Figures and facts of the device, the job and its configuration. Sizes are bytes; None is unknown."""

    model_states_bytes: int | None = None  # parameters, gradients, master weights and state on the device
    largest_batch: Mapping[str, int] = field(default_factory=dict)  # rows, sequence, tokens of training's largest before
    host_used_bytes: int | None = None
    pinned_spare_bytes: int = 0  # of host memory, by the rounding of pinned requests
    kill_count: int = 0  # processes, by the kernel
    has_workers: bool = True  # the rank has started workers of a data loader, or that is unknown
    has_begun: bool = False  # the rank has ended a phase other than its init
    torch: str = ""
    settings: AllocatorSettings | None = None
    engine: EngineFacts = field(default_factory=lambda: EngineFacts({}))
    leak: LeakEvidence | None = None
    growth: EvaluationGrowth | None = None  # of the evaluation in which it failed
    graphs: GraphEvidence | None = None
    changes: str = ""  # what changed in the training shortly before, as the end of a sentence

    @property
    def batch_ratio(self) -> float | None:
        """Size of the last micro-batch by training's largest before; None where sizes are not known."""
        for size, name in ((self.tokens, "tokens"), (self.rows, "rows")):
            before = self.largest_batch.get(name)
            if size and before:
                return size / before
        return None


def put_size(count: int) -> str:
    """Return a placeholder for the template of a :class:`~zerotop.analysis.formatting.Text`: ``1.50 GiB``, ``20.0 MiB``."""
    return f"{{{int(count)}:size}}"


def describe_batch(rows: int | None, sequence: int | None) -> str:
    """Return ``160 x 1024 tokens`` or ``160 rows``; "" where the rows are not known."""
    if not rows:
        return ""
    return f"{rows} x {sequence} tokens" if sequence else format_count(rows, "row")

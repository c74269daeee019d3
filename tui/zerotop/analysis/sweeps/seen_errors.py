"""How far predicted times of other runs were off, by what differs from the recorded setting.

An interval of the model alone holds what its speeds decide. Runs that were not in sight when the speeds were chosen were off
by more, also without any change: another day, another machine. So an interval is at least as wide as these errors were.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup

GPUS, STAGE, OFFLOAD, CHECKPOINTING = "GPUs", "stage", "offload", "checkpointing"
BATCH, FAR_BATCH, ACCUMULATION = "batch, length", "batch, length, beyond 4x", "accumulation"

RUNS = 0.18
"""Logarithm of the times of two runs of one setting, which 90 % of them differ by at most."""

# Logarithms of truth by prediction, of which 90 % were smaller: the most of the groups, by model and by the source of the
# runs, of the tuned pairs that `benchmarks/what_if.py --calibrate` prints. The pairs with another batch are within one run
# (0.09), so the spread between runs is added. Of GPUs the most (0.76) is left out: it is of three runs.
_SEEN = {GPUS: 0.45, STAGE: 0.40, OFFLOAD: 0.35, CHECKPOINTING: 0.24, BATCH: 0.20, FAR_BATCH: 0.24}


def list_changes(before: tuple[EngineSetup, Workload], after: tuple[EngineSetup, Workload]) -> Iterator[str]:
    """Yield what differs between two settings, the hardest to predict first."""
    (old, old_work), (new, new_work) = before, after
    if old.ranks != new.ranks:
        yield GPUS
    if old.stage != new.stage:
        yield STAGE
    offloads = [(one.offload_optimizer, one.offload_parameters, one.offloaded_share) for one in (old, new)]
    if offloads[0] != offloads[1]:
        yield OFFLOAD
    if old_work.checkpointing != new_work.checkpointing:
        yield CHECKPOINTING
    ratio = count_tokens(new_work) / count_tokens(old_work)
    if ratio != 1 or old_work.micro_batch != new_work.micro_batch:
        yield BATCH if 0.25 <= ratio <= 4 else FAR_BATCH
    if old_work.accumulation != new_work.accumulation:
        yield ACCUMULATION


def count_tokens(work: Workload) -> int:
    """Return those of a micro-batch; its rows where tokens are not counted."""
    return work.micro_batch * (work.sequence or 1)


def find_seen_error(before: tuple[EngineSetup, Workload], after: tuple[EngineSetup, Workload]) -> float:
    """Return the logarithm by which 90 % of predictions of such a change were off at most; 0 if nothing changes."""
    return max((max(RUNS, _SEEN.get(change, 0.0)) for change in list_changes(before, after)), default=0.0)

"""Values of text fields of events: the probe writes them, and readers compare with them."""

from __future__ import annotations

from collections.abc import Iterable

SLOW, SHARE, SILENT = "slow", "share", "silent"
"""Why stacks were sampled: ``why`` of the event ``stacks``."""

BETWEEN_PHASES, UNKNOWN_PHASE = "between phases", "unknown phase"
"""Where stacks were sampled, if not in a phase: ``where`` of the event ``stacks``."""

CREEP, PEAK, EVALUATION = "creep", "peak", "evaluation"
"""Why the lines of allocations were looked at: ``why`` of the event ``memory_lines``."""

ANOMALY, PROFILER = "anomaly", "profiler"
"""Modes of PyTorch that slow every step: ``mode`` of the event ``debug_mode``."""

AGAIN, FAILURE = "again", "out_of_memory"
"""Moments at which tensors were counted more than once: ``when`` of the event ``tensors``."""

UNOPTIMIZED, NO_SYNC = "unoptimized", "no_sync"
"""Settings of the training: trained parameters in no optimizer, and DDP's no_sync(); ``name`` of a ``ChangedSetting``."""

OBJECTS = "optimizer_objects"
"""The same: which optimizers there are. The line of a change is that which called for a new one."""

INPUTS = "inputs."
"""The same, before the class of a model: the sizes of its inputs without their rows, and their dtype."""

SUBNORMAL = "subnormal_state"
"""The same: whether the state of an optimizer on the CPU holds subnormal numbers."""

BYPASSED = "bypassed"
"""The value of NO_SYNC while the model is called without the DistributedDataParallel that wraps it."""

DIMENSIONS = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "layers": "num_hidden_layers",
}
"""Names of a model's dimensions, and of the attributes that configurations of transformers models share."""


def format_numbers(numbers: Iterable[int], separator: str = ",") -> str:
    """Format a set of numbers as the kernel does, as in the lists of cores of events: ``0-3,8``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in parts)

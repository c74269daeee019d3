"""Values of text fields of events: the probe writes them, and readers compare with them."""

from __future__ import annotations

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

DIMENSIONS = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "layers": "num_hidden_layers",
}
"""Names of a model's dimensions, and of the attributes that configurations of transformers models share."""

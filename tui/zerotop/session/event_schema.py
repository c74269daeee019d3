"""What the facts of an event must be, so that who reads them need not ask.

The events themselves are described in :mod:`zerotop_probe.recording.events`. Here stands of each fact that somebody reads
what kind of value it is. One that is null or absent could not be had, which is no damage unless it is marked as needed.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from zerotop.session.headers import MAX_NUMBER
from zerotop_probe.recording import events

_DIGITS = re.compile("[0-9]{1,18}")


class _Required(NamedTuple):
    """An event without this fact says nothing."""

    shape: Any


# A shape is int, float (an int too), str, bool, dict (whatever is in it), [shape] for lists of such, {str: shape} for tables
# with such values, {int: shape} where what they are of is a number, or the facts of an object, by name.
_SIZES = {str: int}
_PROCESS_FACTS = {"rank": int, "local_rank": int, "pid": int, "start": int}
_COMMAND_FACTS = {
    **_PROCESS_FACTS,
    "command": [str],
    "launcher": str,
    "age_s": float,
    "ranks": [_PROCESS_FACTS],
    "text": str,
}
_END_FACTS = {"exit_code": int, "signal": str, "seconds": float, "oom_kills": int, "text": str}
_FAILURE_FACTS = {"where": str, "error": str}
_DEVICE_FACTS = {"ordinal": int, "uuid": str, "name": str, "total_bytes": int, "visible": str}
_GPU_FACTS = {"index": _Required(int), "uuid": str, "name": _Required(str), "total_bytes": int, "mig_of": str}

FACT_SHAPES: dict[str, dict[str, Any]] = {
    events.HELLO: {
        **dict.fromkeys(("rank", "local_rank", "node_rank", "world_size"), int),
        **dict.fromkeys(("launcher", "python", "torch", "deepspeed", "transformers", "accelerate"), str),
        "arguments": [str],
        "environment": {str: str},
    },
    events.ENGINE: {
        **dict.fromkeys(("engine", "rank", "local_rank", "zero_stage", "global_steps"), int),
        **dict.fromkeys(("micro_batch", "gradient_accumulation", "train_batch", "world_size", "data_parallel"), int),
        **dict.fromkeys(("parameters", "trainable_parameters", "rank_parameters", "largest_layer_parameters"), int),
        **dict.fromkeys(("engine_class", "model", "optimizer", "inner_optimizer", "device", "dtype", "autocast"), str),
        **dict.fromkeys(("offload_optimizer", "offload_parameters", "allocator"), str),
        "activation_checkpointing": bool,
        "devices": [_DEVICE_FACTS],
        "config": dict,
    },
    events.TOTAL_STEPS: {"steps": _Required(int), "source": str},
    events.OVERFLOW: {"engine": int, "step": int, "loss_scale_before": float, "loss_scale_after": float},
    events.TENSORS: {
        **dict.fromkeys(("engine", "step", "unread", "allocated_bytes", "unclaimed_bytes"), int),
        **dict.fromkeys(("device", "host", "host_pinned", "pinned_allocator"), _SIZES),
        "when": str,
        "unclaimed_largest": [int],
    },
    events.OUT_OF_MEMORY: {
        **dict.fromkeys(("device", "step", "micro_step", "rows", "sequence", "tokens", "retries", "ooms"), int),
        **dict.fromkeys(("requested_bytes", "limit_bytes", "free_bytes", "allocated_bytes", "reserved_bytes"), int),
        **dict.fromkeys(("inactive_split_bytes", "largest_free_block_bytes"), int),
        "phase": str,
    },
    events.MICROSCOPE: {
        **dict.fromkeys(("request", "first_step", "steps", "begin_ns", "end_ns"), _Required(int)),
        "baseline": _Required(_SIZES),
        "state": str,
        "why": str,
        "snapshot": str,
    },
    events.PROBE_ERROR: _FAILURE_FACTS,
    events.LEFT: {"lost": int},
    events.GOODBYE: {"lost": int},
    events.NODE: {
        **dict.fromkeys(("host", "kernel", "cpu", "driver", "gpu_notice"), str),
        **dict.fromkeys(("cores", "memory_bytes", "sampler_pid", "sampler_start"), int),
        "gpus": [_GPU_FACTS],
        "numa": [{"node": _Required(int), "cpus": _Required(str)}],
    },
    events.JOB_STARTED: _COMMAND_FACTS,
    events.ATTACHED: _COMMAND_FACTS,
    events.JOINED: _COMMAND_FACTS,
    events.PARTED: _END_FACTS,
    events.REACHED: {"name": str, "host": str, "ranks": int, "joined": bool},
    events.NOT_REACHED: {"name": str, "why": str},
    events.NOT_ENTERED: {**_PROCESS_FACTS, "why": str},
    events.RANK_FOUND: _PROCESS_FACTS,
    events.RANK_SILENT: {**_PROCESS_FACTS, "why": str},
    events.AFFINITY: {"pid": int, "cpus": str, "threads": {int: str}},
    events.RANK_GONE: _PROCESS_FACTS,
    events.COMPILING: _PROCESS_FACTS,
    events.BUILD_LOCKED: {"path": _Required(str)},
    events.STOP_SENT: {"signal": str},
    events.JOB_ENDED: _END_FACTS,
    events.SAMPLER_ERROR: _FAILURE_FACTS,
    events.SAMPLER_ENDED: {"lost_records": int, "lost_output_bytes": int},
}


def drop_invalid_facts(name: str, facts: dict[str, Any]) -> bool:
    """Takes what facts of an event of that name cannot be as not known. Returns whether there was any.

    Raises ValueError if the event says nothing without it. Of an event that is not known nobody reads any.
    """
    shapes = FACT_SHAPES.get(name, {})
    nonsense = [fact for fact, shape in shapes.items() if not _is_allowed(facts.get(fact), shape)]
    if any(isinstance(shapes[fact], _Required) for fact in nonsense):
        raise ValueError(f"{name} makes no sense")
    facts.update(dict.fromkeys(nonsense))
    return bool(nonsense)


def _is_allowed(value: Any, shape: Any) -> bool:
    if isinstance(shape, _Required):
        return value is not None and _has_shape(value, shape.shape)
    return value is None or _has_shape(value, shape)


def _has_shape(value: Any, shape: Any) -> bool:
    if isinstance(shape, list):
        return isinstance(value, list) and all(_has_shape(each, shape[0]) for each in value)
    if isinstance(shape, dict):
        of_table = shape.keys() & {str, int}
        return isinstance(value, dict) and (_is_table(value, shape) if of_table else _is_object(value, shape))
    if shape in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= MAX_NUMBER
    return isinstance(value, shape)


def _is_object(facts: dict[str, Any], shapes: dict[str, Any]) -> bool:
    return all(_is_allowed(facts.get(name), shape) for name, shape in shapes.items())


def _is_table(table: dict[str, Any], shape: dict[type, Any]) -> bool:
    ((kind, of),) = shape.items()
    return all((kind is str or _DIGITS.fullmatch(key)) and _has_shape(value, of) for key, value in table.items())

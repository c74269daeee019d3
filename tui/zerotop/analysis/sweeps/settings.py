"""The settings that a sweep varies: their names, how values are written, and which combinations cannot work."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product

from zerotop.recording.sweeps import SKIPPED, Plan, Point, Result, Value

STAGE, OFFLOAD, ALLOCATOR, GPUS = "stage", "offload", "allocator", "gpus"
CHECKPOINTING, ACCUMULATION = "gradient_checkpointing", "gradient_accumulation"
MICRO_BATCH, SEQ_LENGTH = "micro_batch", "seq_length"

SETTINGS = (STAGE, OFFLOAD, ALLOCATOR, GPUS, CHECKPOINTING, ACCUMULATION, MICRO_BATCH, SEQ_LENGTH)
"""In the order of columns and of the points: the last one changes fastest."""

DEFAULT_ALLOCATOR = "default"

OFFLOAD_DEVICES = {
    "none": ("none", "none"),
    "optimizer": ("cpu", "none"),
    "params": ("none", "cpu"),
    "optimizer_params": ("cpu", "cpu"),
    "nvme_optimizer": ("nvme", "none"),
    "nvme_params": ("cpu", "nvme"),
    "nvme_optimizer_params": ("nvme", "nvme"),
}
"""The offload modes, as the ready DeepSpeed configs are named: devices of the optimizer and of the parameters."""

_OFFLOAD_NAMES = {
    "params": "parameters",
    "optimizer_params": "optimizer and parameters",
    "nvme_optimizer": "optimizer to NVMe",
    "nvme_params": "parameters to NVMe and optimizer to the CPU",
    "nvme_optimizer_params": "optimizer and parameters to NVMe",
}
_MOST = {
    "gpus": 1_000,
    "nodes": 1_000_000,
    "micro_batch": 10**8,
    "seq_length": 10**9,
    "accumulation": 10**6,
    "gradient_accumulation": 10**6,
    "bucket": 10**11,
}

MOST_VALUES = 100_000  # of a range, and points of a sweep


def describe_offload(mode: str) -> str:
    """Return what a mode offloads, in words."""
    return _OFFLOAD_NAMES.get(mode, mode)


def find_excess(settings: Mapping[str, int | None]) -> str:
    """Return a sentence about a number, by the name of its option, that no machine trains with; "" without one."""
    for name, value in settings.items():
        if (value or 0) > _MOST[name]:
            return f"--{name.replace('_', '-')} {value} is more than any machine trains with"
    return ""


def parse_numbers(text: str, *, least: int = 1) -> list[int]:
    """Return the whole numbers in ``1,2,4``, ``128:2048:128`` (both ends included) or a mixture, each once.

    Raises ValueError, with the reason, for anything else and for ranges that are empty or run backwards.
    """
    numbers: list[int] = []
    for part in text.split(","):
        numbers += _parse_range(part) if ":" in part else [_parse_number(part)]
    if any(number < least for number in numbers):
        raise ValueError(f"{min(numbers)} is less than {least}")
    return list(dict.fromkeys(numbers))


def _parse_range(text: str) -> range:
    parts = [_parse_number(part) for part in text.split(":")]
    if len(parts) not in (2, 3):
        raise ValueError(f"{text} is not a range: write BEGIN:END:STEP, as in 128:2048:128")
    begin, end, step = (*parts, 1)[:3]
    if step < 1:
        raise ValueError(f"the range {text} has a step of {step}; it must be 1 or more")
    if end < begin:
        raise ValueError(f"the range {text} runs backwards: write {end}:{begin}:{step}")
    if (end - begin) // step >= MOST_VALUES:
        raise ValueError(f"the range {text} has more than {MOST_VALUES:,} values")
    return range(begin, end + 1, step)


def _parse_number(text: str) -> int:
    word = text.strip()
    if not re.fullmatch(r"-?[0-9]+", word):
        raise ValueError(f"{word!r} is not a whole number" if word else "a value is missing")
    return int(word)


def format_values(values: Sequence[Value]) -> str:
    """Return values as a command line has them: evenly spaced numbers as ``128:2048:128``."""
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(numbers) == len(values) > 3:
        step = numbers[1] - numbers[0]
        if step > 0 and numbers == list(range(numbers[0], numbers[-1] + 1, step)):
            return f"{numbers[0]}:{numbers[-1]}" + (f":{step}" if step > 1 else "")
    return ", ".join(map(str, values))


def parse_words(text: str, choices: Sequence[str]) -> list[str]:
    """Return the comma-separated words, each once. Raises ValueError for a word that is not among the choices."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in choices:
            raise ValueError(f"{word!r} is not one of {', '.join(choices)}")
    return list(dict.fromkeys(words))


def parse_any(text: str) -> list[Value]:
    """Return the values of the user's own setting: numbers and ranges as numbers, other words as they are."""
    words = [word.strip() for word in text.split(",")]
    if all(re.fullmatch(r"[\d:]*", word) for word in words):
        return list(parse_numbers(text, least=0))
    if not all(words):
        raise ValueError("a value is missing")
    return list(dict.fromkeys(words))


def count_points(settings: Mapping[str, Sequence[Value]]) -> int:
    """Return the number of combinations."""
    return math.prod(len(values) for values in settings.values())


def build_points(settings: Mapping[str, Sequence[Value]], limits: Mapping[str, int]) -> tuple[Point, ...]:
    """Return all combinations; impossible ones are skipped, with the reason.

    ``limits``: the highest possible value of a setting, for example of ``gpus``; see :func:`find_obstacle`.
    """
    points = []
    for number, values in enumerate(product(*settings.values())):
        chosen = dict(zip(settings, values, strict=True))
        reason = find_obstacle(chosen, limits)
        points.append(Point(number, chosen, Result(SKIPPED, reason) if reason else None))
    return tuple(points)


def find_obstacle(settings: Mapping[str, Value], limits: Mapping[str, int]) -> str:
    """Return why a combination cannot work, as a sentence; "" if it may.

    DeepSpeed offloads the optimizer to the CPU from stage 1 on, parameters in stage 3, and uses NVMe in stage 3 only
    (https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training).
    """
    stage, offload = settings.get(STAGE), str(settings.get(OFFLOAD, "none"))
    optimizer, parameters = OFFLOAD_DEVICES[offload]
    if isinstance(stage, int):
        if stage < 3 and "nvme" in (optimizer, parameters):
            return f"Stage {stage} cannot offload to NVMe: only stage 3 can."
        if stage < 3 and parameters != "none":
            return f"Stage {stage} keeps whole parameters on each GPU: only stage 3 can offload them."
        if stage < 1 and optimizer != "none":
            return "Stage 0 does not partition the optimizer, and cannot offload it: stages 1 to 3 can."
    for name, most in limits.items():
        value = settings.get(name)
        if isinstance(value, int) and value > most:
            return _LIMIT_SENTENCES[name].format(value=value, most=most)
    return ""


_LIMIT_SENTENCES = {
    GPUS: "This machine has {most} GPUs, not {value}.",
    SEQ_LENGTH: "The model supports {most} tokens, not {value}.",
}


def describe_settings(plan: Plan, settings: Mapping[str, Value]) -> str:
    """Return the settings that vary, or all if none does: ``stage 3, seq-length 512``."""
    shown = plan.varied or list(settings)
    return ", ".join(f"{name.replace('_', '-')} {settings[name]}" for name in shown if name in settings)

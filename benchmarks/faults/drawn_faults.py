"""Faults in jobs that are drawn by chance: whether zerotop finds them, and names their cause and their line.

    python benchmarks/faults/drawn_faults.py --jobs 32 --seed 1 --folder drawn       # one to four GPUs, or a CPU
    python benchmarks/faults/drawn_faults.py --faults float threads --jobs 4
    python benchmarks/faults/drawn_faults.py --judge drawn

The jobs are those of ``clean_jobs.py``; each has a fault from a random step on. Prints a line of JSON for each job with the
truth (step, line, and the iteration time before and after by the job's own clock), then one for all.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from drawn_jobs import (
    LINES,
    SCRIPT,
    Draw,
    Outcome,
    add_options,
    describe_finding,
    describe_job,
    draw_job,
    list_warnings,
    run_all,
)

# A finding is of the fault if it begins so near it.
_EARLY_STEPS, _LATE_STEPS = 3, 10
# A smaller effect on the iterations need not be found.
_LEAST_EFFECT = 0.05


class Fault(NamedTuple):
    """Where a fault is possible, and the finding that names its cause: a kind or words in it."""

    words: str  # a regular expression for name, headline and details
    engines: tuple[str, ...] = ("plain", "ddp", "fsdp2", "deepspeed")
    needs_gpu: bool = False
    is_once: bool = False  # it does not change the pace for good
    of_memory: bool = False


_PLAIN = ("plain",)
_LOOPS = ("plain", "ddp", "fsdp2")
FAULTS = {
    "unfreeze": Fault(r"gradients|trainable|requires_grad|trained", _PLAIN),
    "float": Fault(r"fp32|float32", _PLAIN, needs_gpu=True),
    "checkpointing_off": Fault(r"checkpointing", _LOOPS),
    "logits": Fault(r"memory_creep", needs_gpu=True, of_memory=True),
    "foreach_off": Fault(r"foreach|optimizer|step phase", _LOOPS),
    "threads": Fault(r"hread.*(lock|computes|cores)"),
    "collate": Fault(r"data"),
    "rank0_eval": Fault(r"repeated_pause|drawn_loop", ("ddp", "fsdp2", "deepspeed")),
    "longer": Fault(r"tokens instead of"),
    "generate_once": Fault(r"long_pause|pause|stopped", is_once=True, engines=_PLAIN),
    "empty_cache": Fault(r"emptied|empty_cache", needs_gpu=True),
    "item": Fault(r"item", needs_gpu=True),
    "sleep": Fault(r"time\.sleep"),
    "gc": Fault(r"gc\.collect|garbage"),
    "logger": Fault(r"write_log"),
    "giant_pause": Fault(r"time\.sleep|pause", is_once=True),
}


def draw_fault(chance: random.Random, fault: str, engines: list[str], seconds: tuple[float, float]) -> Draw:
    """Draw a job with this fault."""
    possible = [one for one in engines if one in FAULTS[fault].engines] or list(FAULTS[fault].engines[:1])
    draw = draw_job(chance, engines=possible, seconds=seconds, is_busy=False, fault=fault)
    changes: dict[str, Any] = {
        "begin": round(chance.uniform(0.35, 0.6), 3),
        "amount": round(chance.uniform(0.02, 0.12), 3),
        "objects": 300_000 if fault == "gc" else 0,
    }
    changes["checkpointing"] = draw.checkpointing or fault == "checkpointing_off"
    if fault == "float":
        changes["dtype"] = "bf16"
    return replace(draw, **changes)


def judge_job(outcome: Outcome) -> dict[str, Any]:
    """Return the truth of a job, and what was found of it."""
    fault, truth = FAULTS[outcome.draw.fault], outcome.truth
    begin = truth.get("begin", -1)
    before, after = truth.get("before_ms"), truth.get("after_ms")
    effect = after / before - 1 if before and after else None
    # A job that its fault made too slow to end was changed, too.
    has_effect = fault.is_once or fault.of_memory or effect is None or effect >= _LEAST_EFFECT
    line = LINES.get(outcome.draw.fault)
    # Where the fault calls a function that computes, either line is right.
    lines = [line, LINES["compute"]] if outcome.draw.fault in ("collate", "rank0_eval") else [line]
    near = [
        one for one in outcome.findings if one.step is not None and begin - _EARLY_STEPS <= one.step <= begin + _LATE_STEPS
    ]
    texts = {id(one): f"{one.name} {one.headline} {one.details} {one.fix}" for one in near}
    named = [one for one in near if re.search(fault.words, texts[id(one)])]
    told = list_warnings(outcome.findings)
    return {
        **describe_job(outcome),
        "fault": outcome.draw.fault,
        "line": line,
        "effect": None if effect is None else round(effect, 3),
        "has_effect": has_effect,
        "is_found": bool(near),
        "is_cause_right": bool(named),
        "is_line_right": any(f"{SCRIPT.name}:{one}" in text for one in lines for text in texts.values()) if line else None,
        "findings": [describe_finding(one) for one in near],
        "other_warnings": [describe_finding(one) for one in told if one not in near],
    }


def main() -> None:
    """Print a line for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, help="only these")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    faults = options.faults or [name for name, fault in FAULTS.items() if torch.cuda.is_available() or not fault.needs_gpu]
    chance.shuffle(faults)
    names = [faults[at % len(faults)] for at in range(options.jobs)]
    drawn = [draw_fault(chance, name, options.engines, tuple(options.seconds)) for name in names]
    jobs = [(f"fault-{options.seed}-{at:03}-{name}", draw) for at, (name, draw) in enumerate(zip(names, drawn, strict=True))]
    results = []
    for outcome in run_all(jobs, options):
        results.append(judge_job(outcome))
        print(json.dumps(results[-1]), flush=True)
    counted = [one for one in results if one["has_effect"] and one["recorded_steps"]]
    names_of = ("is_found", "is_cause_right", "is_line_right")
    sums = {name: sum(bool(one[name]) for one in counted) for name in names_of}
    sums["with_line"] = sum(one["is_line_right"] is not None for one in counted)
    print(json.dumps({"jobs": len(results), "with_effect": len(counted), **sums}), flush=True)


if __name__ == "__main__":
    main()

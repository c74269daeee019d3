"""PyTorch ran out of device memory: who asked for how much, and why there was not so much.

Read from the probe's black box of the error, the micro-batches before, and the phases in progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.annotations.annotation import Annotation, Severity
from zerotop.analysis.annotations.facts import Facts, Group, Process
from zerotop.analysis.annotations.thresholds import OUTSIDE_BYTES
from zerotop.analysis.annotations.words import size
from zerotop.session.reader import Event
from zerotop_probe.recording.tables import EVAL, PHASE_CODE

_NUMBERS = (
    "requested_bytes",
    "limit_bytes",
    "free_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "largest_free_block_bytes",
    "retries",
    "rows",
    "sequence",
    "tokens",
)


# A micro-batch is larger from this ratio on.
_LARGER = 1.05


class Why(NamedTuple):
    """The cause as a clause, and what to do."""

    text: str
    advice: str
    confidence: float


def detect(facts: Facts) -> Iterator[Annotation]:
    """One finding for each step in which a rank of an attempt ran out of memory: the first that did."""
    for group in facts.groups:
        told: set[object] = set()
        errors = [(event, process) for process in group.processes for event in process.events("out_of_memory")]
        for event, process in sorted(errors, key=lambda error: error[0].unix_ns):
            step = event.facts.get("step")
            if step not in told:
                told.add(step)
                yield _annotation(group, process, event)


def _annotation(group: Group, process: Process, event: Event) -> Annotation:
    seen = {name: float(event.facts[name]) for name in _NUMBERS if _known(event.facts.get(name))}
    evaluating = _evaluating(process, event.unix_ns)
    seen |= _training(process, event.unix_ns)
    if {"allocated_bytes", "reserved_bytes"} <= set(seen):
        seen["unallocated_bytes"] = seen["reserved_bytes"] - seen["allocated_bytes"]
    if {"limit_bytes", "free_bytes", "reserved_bytes"} <= set(seen):
        seen["outside_bytes"] = max(0.0, seen["limit_bytes"] - seen["free_bytes"] - seen["reserved_bytes"])
    why = _why(seen, evaluating, process)
    step = event.facts.get("step")
    return Annotation(
        name="out_of_memory",
        begin_ns=event.unix_ns,
        end_ns=event.unix_ns,
        known_ns=event.unix_ns,
        step=step if isinstance(step, int) and step >= 0 else None,
        ranks=(process.rank,),
        severity=Severity.ERROR,
        confidence=why.confidence,
        sentence=_sentence(seen, process, event.facts, why, evaluating),
        advice=why.advice,
        evidence=seen | {"evaluating": float(evaluating)},
    )


def _known(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _evaluating(process: Process, time_ns: int) -> bool:
    """Whether an evaluation had begun and not ended."""
    sources = process.facts.session.sources["begins"]
    mine = [source for source in sources if (source.host, source.pid) == (process.source.host, process.source.pid)]
    begun = process.facts.samples(mine).within(0, time_ns)
    begun = begun.where(begun.rows["phase"] == PHASE_CODE["eval"]) if len(begun) else begun
    if not len(begun):
        return False
    ended = process.begins_ns(process.phase("eval").within(0, time_ns - 1))
    return int(begun.times[-1]) not in ended.tolist()


def _training(process: Process, time_ns: int) -> dict[str, float]:
    """The largest training micro-batch so far; nothing where there was none."""
    forwards = process.phase("forward").within(0, time_ns - 1)
    forwards = forwards.where((forwards.rows["flags"] & EVAL == 0) & (forwards.rows["rows"] > 0))
    if not len(forwards):
        return {}
    largest = forwards.rows[int(np.argmax(np.maximum(forwards.rows["tokens"], forwards.rows["rows"])))]
    names = ("rows", "sequence", "tokens")
    return {f"training_{name}": float(largest[name]) for name in names if largest[name] > 0}


def _why(seen: dict[str, float], evaluating: bool, process: Process) -> Why:
    if evaluating:
        return _in_evaluation(seen)
    if seen.get("unallocated_bytes", 0.0) >= seen.get("requested_bytes", np.inf):
        return _in_pieces(seen, process)
    if seen.get("outside_bytes", 0.0) > OUTSIDE_BYTES:
        text = f"{size(seen['outside_bytes'])} of the device were used outside this rank's PyTorch"
        return Why(text, "End other processes on this GPU (nvidia-smi lists them), or set CUDA_VISIBLE_DEVICES.", 0.8)
    ratio = _ratio(seen)
    if ratio is not None and ratio > _LARGER:
        text = f"its micro-batch of {_shape(seen, '')} is {ratio:.1f} times the largest before"
        return Why(text, "Cut sequences to a fixed length in the tokenizer (truncation=True, max_length=...).", 0.9)
    return Why("what it holds already leaves no more", _smaller(process), 0.7)


def _in_evaluation(seen: dict[str, float]) -> Why:
    ratio, shape = _ratio(seen), _shape(seen, "")
    text = "it was evaluating" + (f", with a micro-batch of {shape}" if shape else "")
    if ratio is None or ratio <= _LARGER:
        return Why(text, "Set Trainer's eval_accumulation_steps=1, or lower per_device_eval_batch_size.", 0.8)
    text += f", {ratio:.1f} times training's {_shape(seen, 'training_')}"
    to = f" to {seen['training_rows']:.0f}, as in training" if "training_rows" in seen else ""
    return Why(text, f"Lower Trainer's per_device_eval_batch_size{to}.", 0.95)


def _in_pieces(seen: dict[str, float], process: Process) -> Why:
    text = f"{size(seen['unallocated_bytes'])} of its own were unused, but in pieces too small"
    if "expandable_segments:true" in process.allocator_settings:
        return Why(text, "Pad batches to one sequence length, or call torch.cuda.empty_cache() where sizes change.", 0.8)
    return Why(text, "Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.", 0.9)


def _smaller(process: Process) -> str:
    if not process.engine.get("activation_checkpointing"):
        return "Set Trainer's gradient_checkpointing=True: activations are computed again instead of kept."
    batch = process.engine.get("micro_batch")
    if isinstance(batch, int) and batch > 1:
        return f'Halve "train_micro_batch_size_per_gpu" to {batch // 2} and double "gradient_accumulation_steps".'
    return 'Set "zero_optimization.stage" to 3, or "offload_optimizer.device" to "cpu".'


def _ratio(seen: dict[str, float]) -> float | None:
    for name in ("tokens", "rows"):
        if seen.get(name, 0) > 0 and seen.get(f"training_{name}", 0) > 0:
            return seen[name] / seen[f"training_{name}"]
    return None


def _shape(seen: dict[str, float], kind: str) -> str:
    rows, sequence = seen.get(f"{kind}rows", 0), seen.get(f"{kind}sequence", 0)
    return f"{rows:.0f} x {sequence:.0f} tokens" if rows and sequence else f"{rows:.0f} rows" if rows else ""


def _sentence(seen: dict[str, float], process: Process, facts: dict[str, Any], why: Why, evaluating: bool) -> str:
    where = f" in {facts['phase']}" if facts.get("phase") else ""
    where += f" of step {facts['step']}" if _known(facts.get("step")) and not evaluating else ""
    where += f" before step {facts['step']}" if _known(facts.get("step")) and evaluating else ""
    asked = f"asked for {size(seen['requested_bytes'])}" if "requested_bytes" in seen else "ran out of device memory"
    text = f"Rank {process.rank} {asked}{where}"
    parts = [
        f"{size(seen[name])} {words}"
        for name, words in (
            ("free_bytes", "of the device were free"),
            ("unallocated_bytes", "of its own reserve were unused"),
            ("allocated_bytes", "were in its tensors"),
        )
        if name in seen
    ]
    text += f" when {' and '.join([', '.join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)}" if parts else ""
    return f"{text}: {why.text}."

"""Grade ``zerotop estimate`` against measured runs: errors by regime, verdicts, and rows that it cannot express.

    python benchmarks/estimate_truths.py              # the tables
    python benchmarks/estimate_truths.py --regimes    # by framework and what is trained
    python benchmarks/estimate_truths.py --rows       # each row, too

``estimate_truths.jsonl`` holds measurements by others and our own, one run a line, sizes in bytes; ``source`` says where
each is from. A third of the rows, by a hash of their id, is held out: formulas and constants were chosen on the others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerotop.analysis.memory.caching_allocator import AllocatorRules
from zerotop.analysis.memory.expected.beyond_allocated import Interval, JobMemory, estimate_memory
from zerotop.analysis.memory.expected.model_shape import ModelShape, parse_shape
from zerotop.analysis.memory.expected.peak_moments import DEFAULT_BUCKET, Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup
from zerotop.analysis.sweeps.estimates import Hardware, build_setup, estimate_time
from zerotop.analysis.sweeps.regimes import Regime, build_model

_TRUTHS = Path(__file__).with_name("estimate_truths.jsonl")
_DTYPES = {
    "mixed_bf16": "mixed",
    "fp16": "mixed",
    "pure_bf16": "pure",
    "mixed_fp32_weights": "fp32_weights",
    "fp16_amp": "fp32_weights",
}
_LOSSES = {"hf": "logits", "fused_triton": "fused"}


def read_rows() -> list[dict[str, Any]]:
    """Return the measured runs."""
    return [json.loads(line) for line in _TRUTHS.read_text().splitlines()]


def is_held_out(row: dict[str, Any]) -> bool:
    """Return whether a row was not looked at for tuning."""
    return int(hashlib.sha256(row["id"].encode()).hexdigest(), 16) % 3 == 0


def express(row: dict[str, Any]) -> tuple[ModelShape, EngineSetup, Workload] | str:
    """Return a row's shape, setup and workload, or why it has none."""
    shape = parse_shape(row.get("config") or {})
    if shape is None:
        return "the architecture is not public"
    if row.get("seq_len") is None:
        return "the length is not told"
    if (row.get("tensor_parallel") or 1) > 1:
        return "tensor parallel"
    adapter = row.get("adapter") or {}
    targets = adapter.get("targets") or ["q", "v"]
    regime = Regime(
        dtype=_DTYPES.get(row["dtype"], "pure" if row["dtype"].startswith("lora") else row["dtype"]),
        lora_rank=adapter.get("r") or (8 if adapter else 0),
        lora_targets=[targets] if isinstance(targets, str) else targets,
        quantization=row.get("quantization") or "",
        framework={"fsdp1": "fsdp", "fsdp2": "fsdp", "nanotron": "deepspeed"}.get(row["framework"], row["framework"]),
        fp32_norms=bool(row.get("upcast_for_kbit")) and row["stage"] == 0,
    )
    model = build_model(shape, row.get("params") or shape.parameters or 0, regime)
    setup = build_setup(model, Hardware(row["gpus_per_node"], row.get("nodes", 1)), row["stage"], row.get("offload", "none"))
    work = Workload(
        micro_batch=row["micro_batch"],
        sequence=row["seq_len"],
        accumulation=row.get("accumulation", 1),
        checkpointing=row.get("checkpointing", "none"),
        loss=_LOSSES.get(row["loss"], row["loss"]),
        has_score_matrices=row["attention"] in ("eager", "plain transformer layer"),
        # The Trainer's AdamW is fused.
        foreach=bool(row.get("foreach", "Trainer" not in row["source"])),
        update_in_backward=row.get("optimizer") == "adamw_in_backward",
        # Sweeps have the configs of ds_configs.
        overlap_comm=row["source"].startswith("product's sweep"),
        bucket=row.get("bucket_elements") or DEFAULT_BUCKET,
    )
    return shape, setup, work


def estimate_row(row: dict[str, Any]) -> JobMemory | str:
    """Return the estimate, or why there is none."""
    parts = express(row)
    if isinstance(parts, str):
        return parts
    rules = AllocatorRules(expandable_segments="expandable_segments:True" in (row.get("allocator") or ""))
    return estimate_memory(*parts, gpu=row.get("gpu") or "", gpu_bytes=row.get("gpu_memory"), rules=rules)


def list_figures(row: dict[str, Any], memory: JobMemory) -> Iterator[tuple[str, Interval, float]]:
    """Yield the name, the estimate and the measurement of each figure that a row has."""
    for name, part in (
        ("allocated", memory.allocated),
        ("reserved", memory.reserved),
        ("NVML", memory.device),
        ("host", memory.host),
    ):
        measured = row["measured"].get(name.lower())
        if measured:
            yield name, part, measured
    seconds, parts = row["measured"].get("step_seconds"), express(row)
    if seconds and not isinstance(parts, str):
        time = estimate_time(*parts, row.get("gpu") or "", row.get("nodes") or 1)
        if time.seconds is not None:
            yield "time", Interval(*time.seconds, ""), seconds


def describe_regime(row: dict[str, Any]) -> str:
    """Return the framework and what is trained, and whether all settings are told."""
    kind = "LoRA" if row.get("adapter") else row["dtype"]
    return f"{row['framework']}, {kind}, {row['quality']}"


def grade(rows: Sequence[dict[str, Any]], title: str, *, by_regime: bool, show_rows: bool) -> None:
    """Print the errors and verdicts of some rows."""
    errors: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    verdicts: Counter[str] = Counter()
    wrong = []
    for row in rows:
        memory = estimate_row(row)
        if isinstance(memory, str):
            continue
        for name, part, measured in list_figures(row, memory):
            group = describe_regime(row) if by_regime else row["quality"]
            error = part.likely / measured - 1
            errors[name, group].append((abs(error), part.low <= measured <= part.high))
            if show_rows:
                print(f"{row['id']:28} {name:9} {part.likely / 1e9:7.2f} {measured / 1e9:7.2f} GB {error:+7.1%}")
        if row.get("gpu_memory"):
            fits, failed = memory.needed < row["gpu_memory"], bool(row["measured"].get("oom"))
            verdicts["ran out of memory" if failed else "ran"] += 1
            if fits == failed:
                verdicts['false "fits"' if fits else 'false "does not fit"'] += 1
                wrong.append(f"  {row['id']} ({row['quality']}): {'fits' if fits else 'does not fit'}")
    print(f"\n{title}: {len(rows)} rows\n\n| | | rows | median | mean | 95 % | max | in the interval |")
    print("|---|---|---|---|---|---|---|---|")
    for (name, group), values in sorted(errors.items()):
        sizes = sorted(size for size, _ in values)
        figures = (statistics.median(sizes), statistics.mean(sizes), sizes[int(0.95 * len(sizes))], sizes[-1])
        text = " | ".join(f"{100 * figure:.1f} %" for figure in figures)
        inside = sum(is_inside for _, is_inside in values) / len(values)
        print(f"| {name} | {group} | {len(sizes)} | {text} | {inside:.0%} |")
    print("\n" + ", ".join(f"{name}: {count}" for name, count in verdicts.items()))
    print(*wrong, sep="\n")


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="print each row")
    parser.add_argument("--regimes", action="store_true", help="print the errors of each regime")
    options = parser.parse_args()
    every = read_rows()
    rows = [row for row in every if row["graded"]]
    for title, held in (("Tuned", False), ("Held out", True)):
        chosen = [row for row in rows if is_held_out(row) == held]
        grade(chosen, title, by_regime=options.regimes, show_rows=options.rows)
    print("\nNot expressed")
    for row in every:
        reason = express(row)
        if isinstance(reason, str):
            print(f"  {row['id']}{'' if row['graded'] else ' (not graded)'}: {reason}")


if __name__ == "__main__":
    main()

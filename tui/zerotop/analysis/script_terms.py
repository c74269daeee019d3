"""The names of the settings of the script at hand, for advice: the Trainer's, or those of a hand-written loop."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zerotop.analysis.engine import LOOP
from zerotop.recording.moments.rank_records import TRAINER
from zerotop_probe.recording.events import EngineFacts

_EVALUATE_WITHOUT = (
    "Evaluate under torch.no_grad(), and move outputs to the host at once: then they do not accumulate on the GPU."
)
# Each term with the Trainer, and in a hand-written loop. Names that end in "fix" can be copied.
_TRAINER_TERMS = {
    "eval_batch_size": ("per_device_eval_batch_size", "the evaluation's batch_size"),
    "eval_batch_fix": ("per_device_eval_batch_size", "batch_size"),
    "or_accumulate_outputs": (", or set eval_accumulation_steps to 1", ", or move outputs to the host at once"),
    "recompute_fix": ("gradient_checkpointing=True", "model.gradient_checkpointing_enable()"),
    "fused_loss_fix": ("use_liger_kernel=True", "LigerFusedLinearCrossEntropyLoss()(head.weight, hidden, labels)"),
    "bucket_fix": ('fsdp="full_shard"', "DistributedDataParallel(model, gradient_as_bucket_view=True)"),
    "bucket_advice": (
        "FSDP divides gradients among the ranks instead; the Trainer has no setting for the buckets.",
        "Let the gradients be views of the buckets.",
    ),
    "worker_count": ("dataloader_num_workers", "the DataLoader's num_workers"),
    "worker_setting": ("dataloader_num_workers", "num_workers"),
    "fewer_workers": ("fewer dataloader_num_workers", "fewer workers of the DataLoader"),
    "fewer_workers_fix": ("dataloader_num_workers=1", "num_workers=1"),
    "grouping_fix": (
        'train_sampling_strategy="group_by_length"  # transformers 4: group_by_length=True',
        # any other sampler of this kind gives each rank all samples
        "sampler=transformers.trainer_pt_utils.DistributedLengthGroupedSampler(batch_size, dataset)",
    ),
    "saving_limits": ("Trainer's save_steps limits", "Frequent checkpoints limit"),
    "eval_outputs": ("Collect no logits on the GPU in the evaluation.", _EVALUATE_WITHOUT),
    "eval_outputs_fix": ("prediction_loss_only=True", "with torch.no_grad():"),
    "eval_tensors": (
        "Keep less of the evaluation: move logits to the host at once.",
        "Keep less of the evaluation: move outputs to the host at once, and sum up metrics batch by batch.",
    ),
    "graphs_fix": ('torch_compile_mode="reduce-overhead"', 'model = torch.compile(model, mode="reduce-overhead")'),
    "clipping_fix": ("max_grad_norm=1.0", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
    "eval_tensors_fix": ("eval_accumulation_steps=1", ".detach().cpu()"),
}
PROFILE = "p = torch.profiler.profile(); p.start()  # some steps later: p.stop(); print(p.key_averages().table())"
"""Lines for a training script that print where the time of some steps goes."""
SNAPSHOTS = (
    "import tracemalloc; tracemalloc.start(); s = tracemalloc.take_snapshot()  # some steps later: "
    'print(max(tracemalloc.take_snapshot().compare_to(s, "lineno"), key=lambda one: one.size_diff))'
)
"""Lines for a training script that print where Python allocates most of what it keeps. They see no tensors of PyTorch."""

# Each term with DeepSpeed, and without.
_DEEPSPEED_TERMS = {
    "tool": ("DeepSpeed", "PyTorch"),
    "breakdown": (
        "Have DeepSpeed time its phases, to see which part takes longer.",
        "Trace a few steps with torch.profiler, to see which part takes longer.",
    ),
    "breakdown_fix": ('"wall_clock_breakdown": true', PROFILE),
    "own_cores_fix": ("deepspeed --bind_cores_to_rank", "numactl --physcpubind=CORES"),
    "binding_too": ("; deepspeed --bind_cores_to_rank sets it too", ""),
    "lower_scale": ('set "fp16.initial_scale_power" lower', "give GradScaler a lower init_scale"),
    "rarer_growth": ('raise "fp16.loss_scale_window"', "raise GradScaler's growth_interval"),
}
# Variables, not attributes, words of strings or settings of these names.
_NAMED_PARTS = re.compile(r"""(?<![\w."'{])(model|optimizer|scheduler)(?![\w"'])""")
_NVME_FIX = '"offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}'


def read_terms(engine: EngineFacts) -> dict[str, str]:
    """Return the terms for the script of an ``engine`` event; if it is empty, those of a hand-written DeepSpeed loop."""
    is_loop, by_hand = engine.kind == LOOP, engine.library != TRAINER
    terms = {name: texts[by_hand] for name, texts in _TRAINER_TERMS.items()}
    terms |= {name: texts[is_loop] for name, texts in _DEEPSPEED_TERMS.items()}
    terms |= _name_batch(engine, is_loop=is_loop, by_hand=by_hand) | _name_host_memory(engine, terms)
    return {name: use_names(text, engine) if name.endswith("fix") else text for name, text in terms.items()}


def use_names(code: str, engine: EngineFacts) -> str:
    """Return code with what the script calls its model, optimizer and scheduler, where that is known."""
    names = engine.names or {}
    return _NAMED_PARTS.sub(lambda match: names.get(match[0], match[0]), code) if names else code


def set_accumulation(engine: EngineFacts, micro_steps: int) -> str:
    """Return the setting to accumulate over so many micro-steps; "" in a hand-written loop, whose names are unknown."""
    if engine.library == TRAINER:
        return f"gradient_accumulation_steps={micro_steps}"
    if engine.kind == LOOP:
        return ""
    return f'"gradient_accumulation_steps": {micro_steps}'


def set_interval(engine: EngineFacts, name: str, steps: int) -> str:
    """Return the setting to ``save`` or ``eval`` after so many steps; "" where a script does so by itself."""
    return f'{name}_strategy="steps", {name}_steps={steps}' if engine.library == TRAINER else ""


def _name_batch(engine: EngineFacts, *, is_loop: bool, by_hand: bool) -> dict[str, str]:
    rows, twice = engine.micro_batch, 2 * (engine.gradient_accumulation or 1)
    if not by_hand:
        name, assign = "per_device_train_batch_size", "{}={}"
        bf16 = "bf16=True"
    elif is_loop:
        name, assign = "the DataLoader's batch_size", "{}={}"
        bf16 = 'torch.autocast("cuda", dtype=torch.bfloat16)'
    else:
        name, assign = "train_micro_batch_size_per_gpu", '"{}": {}'
        bf16 = '"bf16": {"enabled": true}'
    return {
        "batch_size": name,
        "batch_size_fix": assign.format(name.rpartition(" ")[2], rows) if isinstance(rows, int) else "",
        "larger_batch_fix": _double_batch(engine, is_loop=is_loop, by_hand=by_hand) if isinstance(rows, int) else "",
        "smaller_batch_fix": assign.format(name.rpartition(" ")[2], rows // 2) if isinstance(rows, int) and rows > 1 else "",
        "accumulation_fix": "" if is_loop and by_hand else assign.format("gradient_accumulation_steps", twice),
        "bf16_fix": bf16,
    }


def _double_batch(engine: EngineFacts, *, is_loop: bool, by_hand: bool) -> str:
    """Return settings for twice as many rows in a micro-batch; "" in a hand-written loop, whose names are unknown.

    Where an even number of micro-batches is accumulated, the batch stays as large.
    """
    rows, whole = 2 * (engine.micro_batch or 0), engine.train_batch or 0
    accumulated, is_odd = divmod(engine.gradient_accumulation or 1, 2)
    if not by_hand:
        fewer = "" if is_odd else f", gradient_accumulation_steps={accumulated}"
        return f"per_device_train_batch_size={rows}{fewer}"
    # DeepSpeed refuses a configuration whose train_batch_size, if it has one, does not fit.
    rest = f'"train_batch_size": {2 * whole}' if is_odd else f'"gradient_accumulation_steps": {accumulated}'
    return "" if is_loop or not whole else f'"train_micro_batch_size_per_gpu": {rows}, {rest}'


def _name_host_memory(engine: EngineFacts, terms: Mapping[str, str]) -> dict[str, str]:
    fewer = terms["fewer_workers"]
    if engine.offload_optimizer == "cpu":
        return {"less_host_memory": f"move the optimizer to NVMe, or use {fewer}", "less_host_memory_fix": _NVME_FIX}
    return {
        "less_host_memory": f"use {fewer}, or run fewer ranks on a node",
        "less_host_memory_fix": terms["fewer_workers_fix"],
    }

"""How advice names the settings of the script at hand: DeepSpeed's and the Trainer's, or those of a loop without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotop.analysis.engine import LOOP, TRAINER

# Each term as the Trainer calls it, and in a loop that the Trainer does not run.
_TRAINER_TERMS = {
    "batch_size": ("Trainer's per_device_train_batch_size", "the DataLoader's batch_size"),
    "batch_size_alone": ("per_device_train_batch_size", "the DataLoader's batch_size"),
    "eval_batch_size": ("Trainer's per_device_eval_batch_size", "the evaluation's batch_size"),
    "or_accumulate_outputs": (", or set eval_accumulation_steps to 1", ", or move outputs to the host at once"),
    "recompute": (
        "set Trainer's gradient_checkpointing=True",
        "recompute activations with torch.utils.checkpoint (transformers: model.gradient_checkpointing_enable())",
    ),
    "fused_loss": (
        "Trainer's use_liger_kernel=True computes the loss without ever holding all logits.",
        "A fused linear cross entropy, as in Liger Kernel, computes the loss without ever holding all logits.",
    ),
    "bucket_view": (
        'The Trainer has no setting for it; fsdp="full_shard" divides gradients among the ranks instead.',
        "DistributedDataParallel(..., gradient_as_bucket_view=True) lets the gradients be views of the buckets.",
    ),
    "worker_count": ("Trainer's dataloader_num_workers", "the DataLoader's num_workers"),
    "worker_count_alone": ("dataloader_num_workers", "the DataLoader's num_workers"),
    "fewer_workers": ("fewer dataloader_num_workers", "fewer workers of the DataLoader"),
    "grouping": (" (Trainer: group_by_length=True)", ""),
    "save_less": (
        "Raise Trainer's save_steps, or set save_only_model=True",
        "Save less often, or without the optimizer's state",
    ),
    "saving_limits": ("Trainer's save_steps limits", "Frequent checkpoints limit"),
    "log_less": ("raise Trainer's logging_steps", "keep loss.item(), not the loss"),
    "eval_outputs": (
        "Set Trainer's prediction_loss_only=True or eval_accumulation_steps=1: logits then do not collect on the GPU.",
        "Evaluate under torch.no_grad(), and move outputs to the host at once: they then do not collect on the GPU.",
    ),
    "eval_tensors": (
        "Keep less of the evaluation: Trainer's prediction_loss_only=True, or eval_accumulation_steps=1, so that logits move"
        " to the host at once.",
        "Keep less of the evaluation: move outputs to the host at once, and sum up metrics batch by batch.",
    ),
}
# Each term with DeepSpeed, and without.
_DEEPSPEED_TERMS = {
    "tool": ("DeepSpeed", "PyTorch"),
    "breakdown": ('Set "wall_clock_breakdown": true in the DeepSpeed config', "Trace a few steps with torch.profiler"),
    "memory_breakdown": ('Set "memory_breakdown": true in the DeepSpeed config', "Look at one step with zerotop microscope"),
    "binding": ("deepspeed --bind_cores_to_rank", "numactl --physcpubind for each rank"),
    "own_cores": (
        "Start with deepspeed --bind_cores_to_rank: each rank gets its own cores (--bind_core_list chooses them).",
        "Start each rank with numactl --physcpubind and cores of its own.",
    ),
    "binding_too": (", or with deepspeed --bind_cores_to_rank, which sets it too", ""),
    "lower_scale": ('Set "fp16.initial_scale_power" lower', "Give GradScaler a lower init_scale"),
    "rarer_growth": ('Raise "fp16.loss_scale_window"', "Raise GradScaler's growth_interval"),
    "unpin": ('set "offload_optimizer.pin_memory": false', "set pin_memory=False in the DataLoader"),
    "unpin_or_workers": (
        '"offload_optimizer.pin_memory": false, or fewer dataloader_num_workers',
        "fewer workers of the DataLoader",
    ),
    "lower_host": (
        '"offload_optimizer.pin_memory": false, fewer dataloader_num_workers, or "offload_optimizer.device": "nvme"',
        "fewer workers of the DataLoader, or fewer ranks on a node",
    ),
    "nvme_or_workers": (
        'set "offload_optimizer.device": "nvme", or fewer dataloader_num_workers',
        "fewer workers of the DataLoader, or fewer ranks on a node",
    ),
}


def read_terms(engine: Mapping[str, Any]) -> dict[str, str]:
    """Return the terms for what an ``engine`` event describes; DeepSpeed's and the Trainer's where nothing is known."""
    is_loop = engine.get("kind") == LOOP
    by_hand = is_loop and engine.get("library") != TRAINER
    trainers = {name: texts[by_hand] for name, texts in _TRAINER_TERMS.items()}
    return trainers | {name: texts[is_loop] for name, texts in _DEEPSPEED_TERMS.items()}

"""Settings of the DeepSpeed config without effect: at another level than their own, misspelt, or of another ZeRO stage.

The keys that DeepSpeed reads from a configuration, at each level, and those of a configuration that it does not read.

DeepSpeed takes no notice of an unknown key at the top level and in some sections, and of offloading at a stage without it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop_probe.recording.events import Engine

# By section, "" for the top level; of DeepSpeed 0.19, with those that it has removed. A test compares it with DeepSpeed.
_KEYS = {
    section: frozenset(keys.split())
    for section, keys in {
        "": """
            activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger
            communication_data_type compile compression_training csv_monitor curriculum_learning data_efficiency
            data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue
            elasticity expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op
            gradient_clipping gradient_predivide_factor graph_harvesting hybrid_engine log_level
            managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
            progressive_layer_drop quantize_training scheduler seq_parallel_communication_data_type sparse_attention
            sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
            train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown
            wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization""",
        "activation_checkpointing": """
            contiguous_memory_optimization cpu_checkpointing number_checkpoints partition_activations profile
            synchronize_checkpoint_boundary""",
        "aio": """
            block_size intra_op_parallelism overlap_events queue_depth single_submit use_gds""",
        "bf16": """
            bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update""",
        "checkpoint": """
            checkpoint_serialization load_universal parallel_write tag_validation use_node_local_storage writer""",
        "comms_logger": """
            debug enabled prof_all prof_ops verbose""",
        "csv_monitor": """
            enabled job_name output_path""",
        "data_types": """
            buffer_dtype grad_accum_dtype keep_in_fp32_modules param_dtype""",
        "flops_profiler": """
            detailed enabled module_depth output_file profile_step recompute_fwd_factor top_modules""",
        "fp16": """
            auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power
            loss_scale loss_scale_window min_loss_scale""",
        "tensorboard": """
            enabled job_name output_path""",
        "torch_autocast": """
            dtype enabled lower_precision_safe_modules""",
        "wandb": """
            enabled group project team""",
        "zero_optimization": """
            allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients
            cpu_offload cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
            gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1
            load_from_fp32_weights log_trace_cache_warnings max_live_parameters max_reuse_distance
            memory_efficient_linear mics_hierarchical_params_gather mics_shard_size model_persistence_threshold
            module_granularity_threshold offload_optimizer offload_param overlap_comm override_module_apply
            param_persistence_threshold parameter_alignment pipeline_loading_checkpoint prefetch_bucket_size
            reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory stage
            stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save
            stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
            stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold
            stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size
            use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size
            zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights zeropp_loco_param""",
        "zero_optimization.offload_optimizer": """
            buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio
            super_offload""",
        "zero_optimization.offload_param": """
            buffer_count buffer_size device max_in_cpu nvme_path pin_memory""",
        "optimizer": "type params legacy_fusion",
        "scheduler": "type params",
    }.items()
}
KEYS: Mapping[str, Collection[str]] = _KEYS
# How similar two names are at least if one is a misspelling of the other; of "fp16" and "bf16" 0.75.
_SIMILAR = 0.85
_WITH_PARAMS = ("optimizer", "scheduler")
_SWITCHED = ("fp16", "bf16")


class UnusedSetting(NamedTuple):
    """A setting without effect."""

    key: str  # with its section: "zero_optimization.offload_param"
    reason: str  # completes "KEY has no effect: "
    fix: str  # the line to write instead; "" for none
    matters: bool = True  # False for a rest of another setup, which harms nothing


def find_unused_settings(config: Mapping[str, Any], zero_keys: Collection[str] | None) -> list[UnusedSetting]:
    """Return the settings that have no effect.

    ``config``: the effective configuration. ``zero_keys``: the keys that the user has set in ``zero_optimization``, where
    that contains all others too; None if they are not known.
    """
    return [*_find_unread_keys(config, zero_keys), *_find_idle_offloads(config, zero_keys), *_find_sections_off(config)]


def _find_unread_keys(config: Mapping[str, Any], zero_keys: Collection[str] | None) -> Iterator[UnusedSetting]:
    """Yield keys at another level than their own, and misspelt ones. An unknown key may be the user's own."""
    for section, known in _KEYS.items():
        values = _get_section(config, section)
        if values is None or (section.startswith("zero_optimization") and not _is_as_written(config, zero_keys)):
            continue
        for key in values:
            if not isinstance(key, str) or key in known:
                continue
            name = f"{section}.{key}".strip(".")
            if homes := _find_homes(key):
                place = " or ".join(home or "the top level" for home in homes)
                yield UnusedSetting(name, f"it belongs into {place}", _write_fix(homes[0], key))
            elif section in _WITH_PARAMS:
                yield UnusedSetting(name, f"it belongs into {section}.params", _write_fix(f"{section}.params", key))
            elif similar := difflib.get_close_matches(key, known, 1, _SIMILAR):
                yield UnusedSetting(name, f"the setting is {similar[0]}", _write_fix(section, similar[0]))


def _is_as_written(config: Mapping[str, Any], zero_keys: Collection[str] | None) -> bool:
    """Whether a configuration is as the user wrote it: one from an engine is checked, and completed, by DeepSpeed."""
    return zero_keys is not None and set(_get_section(config, "zero_optimization") or ()) <= set(zero_keys)


def _find_homes(key: str) -> list[str]:
    """Return the sections that have a key, if its name is specific enough to be meant for one of them."""
    homes = [section for section, known in _KEYS.items() if key in known]
    is_specific = "_" in key or key == "stage" or key in _KEYS[""]
    return homes if is_specific and key not in ("job_name", "output_path") else []


def _find_idle_offloads(config: Mapping[str, Any], zero_keys: Collection[str] | None) -> Iterator[UnusedSetting]:
    zero = _get_section(config, "zero_optimization")
    stage = zero.get("stage", 0) if zero is not None else 0
    if zero is None or not isinstance(stage, int):  # "auto"
        return
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        offload = zero.get(key)
        device = offload.get("device", "none") if isinstance(offload, Mapping) else "none"
        if stage < least and device != "none":
            stages = "stage 3" if least == 3 else "stage 1, 2 or 3"
            reason = f"it needs {stages}, and the stage is {stage}"
            yield UnusedSetting(f"zero_optimization.{key}", reason, f'"zero_optimization": {{"stage": {least}}}')
    if stage != 3:
        for key in zero_keys if zero_keys is not None else ():
            if key.startswith("stage3_"):
                yield UnusedSetting(f"zero_optimization.{key}", f"it is for stage 3, and the stage is {stage}", "", False)


def _find_sections_off(config: Mapping[str, Any]) -> Iterator[UnusedSetting]:
    """Yield sections with settings that do not say whether they are enabled: then they are not."""
    for section in _SWITCHED:
        values = _get_section(config, section)
        if values and "enabled" not in values:
            yield UnusedSetting(section, "it does not say enabled", f'"{section}": {{"enabled": true}}')


def _get_section(config: Mapping[str, Any], section: str) -> Mapping[str, Any] | None:
    value: Any = config
    for key in section.split(".") if section else ():
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else None


def _write_fix(section: str, key: str) -> str:
    line = f'"{key}": ...'
    for name in reversed(section.split(".") if section else []):
        line = f'"{name}": {{{line}}}'
    return line


_KIND = FindingKind(
    name="unused_settings",
    confidence=0.95,
    headline="{key}[ and {others:count other setting}] {verb} no effect",
    details="{reasons}",
    advice="Correct the DeepSpeed config.",
    fix="{setting_fix}",
)
_MOST_REASONS = 3


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt, when the first engine is there."""
    for event in window.items(window.subject.lead.events_of(Engine)[:1]):
        found = find_unused_settings(event.config, event.zero_keys) if event.config else []
        found.sort(key=lambda setting: not setting.matters)
        if not found:
            continue
        reasons = [f"{setting.key}: {setting.reason}." for setting in found[:_MOST_REASONS]]
        kind = _KIND if found[0].matters else _KIND.with_changes(severity=Severity.INFO, advice="", fix="")
        yield kind.at(
            window.subject,
            event.unix_ns,
            event.unix_ns,
            {"unused_settings": len(found)},
            key=found[0].key,
            others=len(found) - 1 or None,
            verb="has" if len(found) == 1 else "have",
            reasons=" ".join(reasons),
            setting_fix=found[0].fix,
        )

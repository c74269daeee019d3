"""Settings that DeepSpeed does not read, or that have no effect at a stage, found from the configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import recordings
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.findings.memory.unused_settings import KEYS, find_unused_settings
from zerotop.commands.common.deepspeed_file import read_deepspeed_config
from zerotop.demo import find_config
from zerotop_probe.recording.events import Engine

CPU = {"device": "cpu", "pin_memory": True}
STAGE_2 = {"stage": 2, "overlap_comm": True}
UNUSED: list[tuple[dict[str, Any], list[str]]] = [
    # at another level
    ({"zero_optimization": STAGE_2, "offload_optimizer": CPU}, ["offload_optimizer: it belongs into zero_optimization"]),
    ({"stage": 3}, ["stage: it belongs into zero_optimization"]),
    ({"zero_optimization": STAGE_2, "overlap_comm": False}, ["overlap_comm: it belongs into zero_optimization"]),
    ({"initial_scale_power": 12}, ["initial_scale_power: it belongs into fp16"]),
    (
        {"fp16": {"enabled": True, "gradient_clipping": 1.0}},
        ["fp16.gradient_clipping: it belongs into the top level"],
    ),
    ({"optimizer": {"type": "Adam", "lr": 1e-4}}, ["optimizer.lr: it belongs into optimizer.params"]),
    (
        {"optimizer": {"type": "Adam", "params": {}, "offload_optimizer": CPU}},
        ["optimizer.offload_optimizer: it belongs into zero_optimization"],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": CPU | {"offload_optimizer": CPU}}},
        ["zero_optimization.offload_param.offload_optimizer: it belongs into zero_optimization"],
    ),
    # misspelt
    ({"zero_optimisation": STAGE_2}, ["zero_optimisation: the setting is zero_optimization"]),
    ({"gradient_cliping": 1.0}, ["gradient_cliping: the setting is gradient_clipping"]),
    (
        {"zero_optimization": STAGE_2 | {"offload_optimiser": CPU}},
        ["zero_optimization.offload_optimiser: the setting is offload_optimizer"],
    ),
    (
        {"activation_checkpointing": {"partition_activation": True}},
        ["activation_checkpointing.partition_activation: the setting is partition_activations"],
    ),
    # at another stage
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": CPU}},
        ["zero_optimization.offload_optimizer: it needs stage 1, 2 or 3, and the stage is 0"],
    ),
    (
        {"zero_optimization": {"offload_optimizer": CPU, "offload_param": CPU}},
        [
            "zero_optimization.offload_optimizer: it needs stage 1, 2 or 3, and the stage is 0",
            "zero_optimization.offload_param: it needs stage 3, and the stage is 0",
        ],
    ),
    (
        {"zero_optimization": STAGE_2 | {"offload_param": CPU, "stage3_max_live_parameters": 1}},
        [
            "zero_optimization.offload_param: it needs stage 3, and the stage is 2",
            "zero_optimization.stage3_max_live_parameters: it is for stage 3, and the stage is 2",
        ],
    ),
    # never enabled
    ({"fp16": {"loss_scale": 0}}, ["fp16: it does not say enabled"]),
]
USED: list[dict[str, Any]] = [
    {},
    {"zero_optimization": {"stage": "auto", "offload_param": CPU}, "train_batch_size": "auto"},
    {"zero_optimization": STAGE_2 | {"offload_optimizer": CPU, "offload_param": {"device": "none"}}},
    {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}, "offload_param": None}},
    {"zero_optimization": {"stage": 3, "offload_param": CPU, "stage3_prefetch_bucket_size": 1}},
    {"zero_optimization": {"stage": 2, "cpu_offload": True}},
    {"fp16": {"enabled": False, "loss_scale": 0}, "bfloat16": {"enabled": True}},
    {"fp16": {}, "bf16": None},
    {"my_own_section": {"stage": 3, "offload_param": CPU}, "seed": 3, "model": "gpt2", "lr": 0.1, "device": "cpu"},
    {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "my_betas": [1, 2]}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    },
    {"aio": {"block_size": 1, "thread_count": 1}, "zero_optimization": [], "activation_checkpointing": "auto"},
]


def describe(config: dict[str, Any]) -> list[str]:
    zero = config.get("zero_optimization")
    return [f"{one.key}: {one.reason}" for one in find_unused_settings(config, list(zero) if isinstance(zero, dict) else [])]


@pytest.mark.parametrize(("config", "expected"), UNUSED)
def test_settings_without_effect_are_found(config: dict[str, Any], expected: list[str]) -> None:
    assert describe(config) == expected


@pytest.mark.parametrize("config", USED)
def test_settings_that_are_used_are_not_reported(config: dict[str, Any]) -> None:
    assert describe(config) == []


def test_the_ready_configs_have_no_unused_setting() -> None:
    paths = sorted(find_config("zero2_bf16").parent.glob("*.json"))
    assert len(paths) > 10
    for path in paths:
        assert describe(read_deepspeed_config(str(path))) == [], path


def test_deepspeeds_own_templates_have_no_unused_setting() -> None:
    deepspeed = pytest.importorskip("deepspeed")
    paths = sorted(Path(deepspeed.__file__).parent.glob("autotuning/config_templates/*.json"))
    assert paths
    for path in paths:
        assert describe(read_deepspeed_config(str(path))) == [], path


@pytest.mark.filterwarnings("ignore")
def test_the_keys_are_those_that_deepspeed_reads() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed_keys_read import find_read_keys

    for section, keys in find_read_keys().items():
        assert keys <= set(KEYS[section]), section


def test_a_recording_has_the_finding_at_its_start() -> None:
    def misplace(event: dict[str, Any]) -> object:
        if event.get("event") != "engine":
            return event
        return event | {
            "config": event["config"] | {"offload_optimizer": CPU},
            "zero_keys": ["stage", "stage3_max_reuse_distance"],
        }

    recording = recordings.rewrite_events("z2", misplace)
    engine_ns = recording.events_of(Engine)[0].unix_ns
    (finding,) = [one for one in detect_findings(recording, engine_ns) if one.name == "unused_settings"]
    assert finding.known_ns == finding.begin_ns == engine_ns
    assert finding.headline == "offload_optimizer and 1 other setting have no effect"
    assert finding.details == (
        "offload_optimizer: it belongs into zero_optimization. "
        "zero_optimization.stage3_max_reuse_distance: it is for stage 3, and the stage is 2."
    )
    assert finding.fix == '"zero_optimization": {"offload_optimizer": ...}'
    assert not [one for one in detect_findings(recordings.open_recording("z2"), engine_ns) if one.name == "unused_settings"]

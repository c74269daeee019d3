"""``zerotop estimate``: the memory that each stage and offload mode should need, before any run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerotop.analysis.engine import read_first_engine
from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.memory.expected.model_shape import ModelShape, parse_shape
from zerotop.analysis.memory.expected.peak_moments import DEFAULT_BUCKET, Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup, compute_expected, parse_setup
from zerotop.analysis.sweeps.estimates import (
    Hardware,
    OptionEstimate,
    TrainedModel,
    choose_option,
    estimate_all_rows,
    estimate_options,
)
from zerotop.analysis.sweeps.regimes import Regime, build_model
from zerotop.analysis.sweeps.settings import OFFLOAD_DEVICES
from zerotop.commands.common.deepspeed_file import read_deepspeed_config, read_zero_mode
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.estimate_text import (
    explain,
    format_options,
    format_own,
    format_states,
    recommend,
    recommend_recorded,
)
from zerotop.commands.common.model_config import read_model_config
from zerotop.session import catalog, sweeps
from zerotop.session.reader import Session, SessionError

_MOST = 10**11  # tokens, rows, GPUs, elements of a bucket
_SEQ_LENGTH, _MICRO_BATCH = 512, 1  # if neither the options nor a recording has them


@dataclass(frozen=True, slots=True)
class ModelCase:
    """The model to estimate, and the source of its activations."""

    name: str
    model: TrainedModel
    token_bytes: float | None  # activations
    basis: str  # of them, a sentence
    gpus: int | None = None  # on each node, where a recording says it
    nodes: int | None = None
    tokens: int | None = None  # of a micro-batch on one GPU, if a recording has it
    quantized: int = 0  # parameters whose bytes no formula gives: those of a recording are among its activations
    shape: ModelShape | None = None  # of a configuration


def estimate(options: argparse.Namespace) -> int:
    """Print the tables, or JSON. Return 0."""
    _refuse_combinations(options)
    subject = _find_subject(options)
    config = read_deepspeed_config(options.config) if options.config else None
    hardware = _find_hardware(options, subject)
    if options.framework == "none" and hardware.gpus * hardware.nodes > 1:
        raise Problem(
            "Without DeepSpeed, DDP or FSDP a process trains on one GPU: give --gpus 1, or --framework ddp or fsdp"
        )
    tokens = _choose_tokens(options, subject, config or {})
    work = _describe_work(options, config or {}, tokens) if subject.shape is not None else None
    rows = estimate_options(
        subject.model, hardware, token_bytes=subject.token_bytes, tokens=tokens, shape=subject.shape, work=work
    )
    if config is not None:
        rows = _choose_rows(rows, config)
    own = () if subject.model.is_loop else estimate_all_rows(subject.model, hardware)
    if options.json:
        facts = {"model": asdict(subject), "hardware": asdict(hardware), "tokens": tokens}
        content = {
            **facts,
            "options": [_to_json(row, hardware) for row in rows],
            "deepspeed_estimates": [asdict(row) for row in own],
        }
        print(json.dumps(content, indent=1))
        return 0
    table = format_states(rows, hardware, has_state=subject.model.state_each is not None)
    if subject.shape is not None:
        table = list(format_options(rows, hardware))
    lines = [
        *(recommend(rows, hardware) or recommend_recorded(rows, hardware)),
        *_describe_subject(subject, hardware, tokens),
        "",
        *table,
    ]
    if options.explain and subject.shape is not None:
        lines += explain(rows, choose_option(rows, hardware))
    if own:
        lines += ["", *format_own(own)]
    print(*map(escape_unprintable, lines), sep="\n")
    return 0


def _find_hardware(options: argparse.Namespace, subject: ModelCase) -> Hardware:
    gpus, gpu_bytes = options.gpus or subject.gpus, options.gpu_memory
    if gpus is None or gpu_bytes is None:
        from zerotop.commands.job.training_machine import count_visible_gpus, read_gpu_bytes  # it brings NVML

        gpus, gpu_bytes = gpus or max(1, count_visible_gpus()), gpu_bytes or read_gpu_bytes()
    return Hardware(gpus, options.nodes or subject.nodes or 1, gpu_bytes, options.gpu or "")


def _to_json(row: OptionEstimate, hardware: Hardware) -> dict[str, Any]:
    needed = row.memory.needed if row.memory is not None else None
    return {**asdict(row), "needed_bytes": needed, "fits": row.fits(hardware)}


def _choose_tokens(options: argparse.Namespace, subject: ModelCase, config: Mapping[str, Any]) -> int:
    """Return the tokens of a micro-batch on one GPU: from the options, else from the config, else from the recording."""
    given = config.get("train_micro_batch_size_per_gpu")  # or "auto"
    micro_batch = options.micro_batch or (given if isinstance(given, int) else None)
    if options.seq_length is None and micro_batch is None and subject.tokens is not None:
        return subject.tokens
    return int((options.seq_length or _SEQ_LENGTH) * (micro_batch or _MICRO_BATCH))


def _choose_rows(rows: list[OptionEstimate], config: Mapping[str, Any]) -> list[OptionEstimate]:
    """Return the row of the config's stage and offload mode. Raises Problem if there is none."""
    stage, *devices = read_zero_mode(config)
    offload = next((name for name, found in OFFLOAD_DEVICES.items() if found == tuple(devices)), None)
    chosen = [row for row in rows if (row.stage, row.offload) == (stage, offload)]
    if not chosen:
        raise Problem(f"DeepSpeed does not train with ZeRO stage {stage} and these offload devices: {', '.join(devices)}")
    return chosen


# --- the subject -----------------------------------------------------------------------------------------------------------


def _find_subject(options: argparse.Namespace) -> ModelCase:
    """Return the model, by the first that fits: a sweep, a recording, a preset, a file, a cached model."""
    sweep = sweeps.find_sweep(options.model)
    if sweep is not None:
        return _read_sweep(sweep)
    path = Path(options.model)
    is_model = (path.is_file() and path.suffix == ".json") or (path / "config.json").is_file()
    try:
        return _read_config(options) if is_model else _read_session(catalog.find_session(options.model))
    except SessionError:
        return _read_config(options)


def _read_config(options: argparse.Namespace) -> ModelCase:
    config = read_model_config(options.model)
    shape = parse_shape(config)
    if shape is None:
        raise Problem(f"{options.model} is not a decoder-only transformer: its configuration has no layers and hidden size")
    parameters = options.parameters or shape.parameters
    if parameters is None:
        raise Problem(
            f"The parameters of {options.model} cannot be counted from its configuration: give them with --parameters"
        )
    regime = Regime(
        dtype=options.dtype,
        optimizer=options.optimizer,
        lora_rank=options.lora_rank or 0,
        lora_targets=options.lora_targets.split(","),
        quantization=options.quantization or "",
        framework=options.framework,
    )
    positions = config.get("n_positions")  # learned: those of other families can be extended
    if isinstance(positions, int) and (options.seq_length or 0) > positions:
        raise Problem(f"{options.model} has {positions:,} positions, fewer than the sequence length, {options.seq_length:,}")
    if regime.lora_rank > shape.hidden:
        raise Problem(f"A rank of {regime.lora_rank:,} is more than the hidden size of {options.model}, {shape.hidden:,}")
    model = build_model(shape, parameters, regime)
    if regime.lora_rank and model.trainable == 0:
        raise Problem(f"{options.model} has no layer called {options.lora_targets}, or its layers are not known")
    activations = shape.count_activations(recompute=options.gradient_checkpointing)
    rule = "rule of thumb of Korthikanti et al. 2022 (arXiv:2205.05198)" if shape.kept is None else "what autograd saves"
    return ModelCase(options.model, model, activations.total, rule, shape=shape)


def _refuse_combinations(options: argparse.Namespace) -> None:
    """Raise Problem for settings that exclude each other, or that no machine has."""
    for name in ("seq_length", "micro_batch", "gpus", "nodes", "gradient_accumulation", "bucket"):
        if (getattr(options, name) or 0) > _MOST:
            raise Problem(f"--{name.replace('_', '-')} {getattr(options, name)} is more than any machine trains with")
    if options.quantization and not options.lora_rank:
        raise Problem("Quantized weights are not trained themselves: give the rank of their adapters with --lora-rank")
    if options.config and options.framework != "deepspeed":
        raise Problem(f"--config is DeepSpeed's, which --framework {options.framework} does not use: give one of them")
    if options.dtype == "bf16_master" and options.framework != "deepspeed":
        raise Problem("16-bit master weights are a setting of DeepSpeed: choose another --dtype without it")
    if options.dtype == "mixed" and options.framework != "deepspeed":
        options.dtype = "fp32_weights"  # which loops and FSDP call mixed precision


def _describe_work(options: argparse.Namespace, config: Mapping[str, Any], tokens: int) -> Workload:
    """Return the settings of a step: from the options, else from DeepSpeed's config, else the defaults."""
    zero = config.get("zero_optimization") or {}
    accumulation = options.gradient_accumulation or config.get("gradient_accumulation_steps")
    bucket = options.bucket or (zero.get("reduce_bucket_size") if isinstance(zero, Mapping) else None)
    sequence = options.seq_length or _SEQ_LENGTH
    return Workload(
        micro_batch=max(1, tokens // sequence),
        sequence=sequence,
        accumulation=accumulation if isinstance(accumulation, int) and accumulation > 0 else 1,
        checkpointing="full" if options.gradient_checkpointing else "none",
        loss=options.loss,
        has_score_matrices=options.eager_attention,
        foreach=options.optimizer == "adamw" and not options.fused,
        bucket=int(bucket) if isinstance(bucket, (int, float)) and bucket > 0 else DEFAULT_BUCKET,
    )


def _read_session(path: Path) -> ModelCase:
    """Return a recording's model, and its activations: the highest allocated memory beyond its model states."""
    from zerotop.analysis.sweeps.measurement import measure_point  # it brings all that explains failures

    session = Session.open(path)
    engine = read_first_engine(session.at())
    setup = parse_setup(engine)
    if setup is None:
        raise Problem(f"{session.name} has no DeepSpeed engine or loop, so the size of its model is unknown")
    measured = measure_point(session, 0)
    peak, tokens = measured["allocated_peak_bytes"], measured["micro_batch_tokens"]
    states = sum(compute_expected(setup).gpu.values())
    token_bytes = max(0, peak - states) / tokens if peak and tokens else None
    basis = "highest allocated memory of the recording beyond its model states, an upper bound"
    model = TrainedModel(
        setup.parameters,
        setup.trainable,
        setup.largest_layer,
        setup.bytes_each,
        _find_state_bytes(setup),
        frozen_bytes=setup.frozen_bytes if setup.trainable < setup.parameters else None,
    )
    nodes = max(1, len(session.at().nodes))
    gpus = max(1, setup.ranks // nodes)
    quantized = engine.quantized_parameters or 0
    return ModelCase(session.name, model, token_bytes, basis, gpus=gpus, nodes=nodes, tokens=tokens, quantized=quantized)


def _find_state_bytes(setup: EngineSetup) -> int | None:
    """Return the optimizer's state for each trained parameter; None where it is not known."""
    if setup.loop_state is None:
        return setup.state_each
    return round(setup.loop_state.moments / max(1, setup.trainable))


def _read_sweep(path: Path) -> ModelCase:
    """Return the model of a sweep's last recorded point, and the slope of its line as activations."""
    from zerotop.analysis.sweeps.series import ALLOCATED, fit_lines

    sweep = sweeps.read_sweep(path)
    sessions = [found for point in sweep.finished if (found := sweeps.find_point_session(path, point.result))]
    if not sessions:
        raise Problem(f"{path} has no point with a recording")
    subject = _read_session(sessions[-1])
    lines = [line for line in fit_lines(sweep) if line.measurement == ALLOCATED]
    if not lines:
        return subject
    line = max(lines, key=lambda one: one.fit.line_points)
    label = f" ({line.series.label})" if line.series.label else ""
    basis = f"slope of the sweep {sweep.name}{label}, R2 {line.fit.r_squared:.4f}"
    return replace(subject, name=sweep.name, token_bytes=line.fit.slope, basis=basis)


# --- text ------------------------------------------------------------------------------------------------------------------


def _describe_subject(subject: ModelCase, hardware: Hardware, tokens: int) -> list[str]:
    size = f", {format_bytes(hardware.gpu_bytes)} each" if hardware.gpu_bytes else ""
    gpus = f"{hardware.nodes} x {hardware.gpus} GPUs{size}"
    lines = [
        f"{subject.name}: {subject.model.parameters / 1e6:,.1f} M parameters on {gpus}",
        f"micro-batch of {tokens:,} tokens on each GPU",
    ]
    if subject.shape is not None:
        trained = (
            f", {subject.model.trainable / 1e6:,.1f} M of them trained" if subject.model.frozen_bytes is not None else ""
        )
        lines[0] += trained
        if subject.shape.counted is None:
            lines.append(f"layers of this family are not known: activations by the {subject.basis}")
    elif subject.token_bytes is not None:
        each = f"{subject.token_bytes / 1e3:,.1f} kB for each token"
        lines.append(f"activations: {each}, {format_bytes(subject.token_bytes * tokens)} ({subject.basis})")
        if subject.quantized:
            count = f"{subject.quantized / 1e6:,.1f} M quantized parameters"
            lines.append(f"  among them {count}, which have no formula: the states below leave them out")
    else:
        lines.append("activations: not known, as the recording has no GPU or counts no tokens")
    return lines

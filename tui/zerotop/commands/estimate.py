"""``zerotop estimate``: the memory that each stage and offload mode should need, before any run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerotop.analysis.formatting import format_bytes, format_count, format_parameters, format_seconds
from zerotop.analysis.memory.caching_allocator import AllocatorRules
from zerotop.analysis.memory.expected.beyond_allocated import MeasuredContext
from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate
from zerotop.analysis.memory.expected.model_shape import ModelShape, parse_shape
from zerotop.analysis.memory.expected.peak_moments import DEFAULT_BUCKET, Workload
from zerotop.analysis.memory.expected.zero_model import TrainedModel, estimate_job
from zerotop.analysis.sweeps.asked_setting import Changes, answer_changes
from zerotop.analysis.sweeps.baseline import NoBaselineError, read_baseline
from zerotop.analysis.sweeps.estimates import (
    EstimatedTime,
    Hardware,
    OptionEstimate,
    build_setup,
    estimate_all_rows,
    estimate_options,
    estimate_time,
)
from zerotop.analysis.sweeps.grading import Expectation, collect_figures
from zerotop.analysis.sweeps.ranking import choose_option, find_hardware, list_recorded, rank_model, rank_recorded
from zerotop.analysis.sweeps.regimes import PURE_DEEPSPEED, Regime, build_model
from zerotop.analysis.sweeps.settings import OFFLOAD, OFFLOAD_DEVICES, STAGE, find_excess, find_obstacle
from zerotop.analysis.sweeps.what_if_verdict import describe_baseline, describe_recorded, judge_gpu
from zerotop.commands.common.deepspeed_file import read_zero_mode
from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.estimate_text import explain, format_options, format_own, format_ranking, recommend
from zerotop.commands.common.grades import print_grades
from zerotop.commands.common.model_config import find_nearest_preset, read_model_config
from zerotop.commands.common.training_arguments import TrainingSettings, fill_options, resolve_batch
from zerotop.commands.measuring.machine_file import MachineFigures, MachineFileError, find_machine_file, read_figures
from zerotop.recording import catalog, sweeps
from zerotop.recording.reader import Recording, RecordingError

_SEQ_LENGTH, _MICRO_BATCH = 512, 1  # if the options do not have them


@dataclass(frozen=True, slots=True)
class ModelCase:
    """The model to estimate."""

    name: str
    model: TrainedModel
    shape: ModelShape


def estimate(options: argparse.Namespace) -> int:
    """Print the tables, or JSON. Return 0."""
    if options.grade:
        return print_grades(options)
    training = fill_options(options)
    if options.model is None:
        if options.parameters is not None:
            raise Problem(
                "Activations depend on the layers, not on their parameters alone: name a model, a config.json or a"
                f" recording. The preset of the nearest size is {find_nearest_preset(options.parameters)}",
                USAGE,
            )
        raise Problem("Name a model, a recording or a sweep; --grade needs none", USAGE)
    _refuse_combinations(options)
    recording = _find_recording(options.model)
    if recording is not None:
        return _estimate_recording(options, recording, training)
    hardware = _find_hardware(options)
    resolve_batch(training.config, options, hardware.gpus * hardware.nodes)
    subject = _read_config(options, training)
    if options.framework == "none" and hardware.gpus * hardware.nodes > 1:
        raise Problem(
            "Without DeepSpeed, DDP or FSDP a process trains on one GPU: give --gpus 1, or --framework ddp or fsdp"
        )
    work = _describe_work(options, training.config or {}, subject.shape)
    if options.all:
        fixed = options.micro_batch is not None
        rows = rank_model(subject.model, hardware, subject.shape, work, is_batch_fixed=fixed)
    else:
        rules = AllocatorRules(expandable_segments=options.expandable_segments)
        rows = estimate_options(subject.model, hardware, subject.shape, work, rules)
    rows = _choose_rows(rows, options, training)
    lines = _describe_subject(subject, hardware, training)
    lines.insert(1, _describe_batch(options, work))
    time = _estimate_time(rows, subject, hardware, work)
    lines.append(_describe_time(time))
    facts = {"model": asdict(subject), "hardware": asdict(hardware), "tokens": work.tokens, "time": asdict(time)}
    own = () if subject.model.is_loop else estimate_all_rows(subject.model, hardware)
    return _print_options(options, facts, rows, hardware, work, lines, own)


def _estimate_time(rows: Sequence[OptionEstimate], subject: ModelCase, hardware: Hardware, work: Workload) -> EstimatedTime:
    """Return the time of a step of the recommended option, else of the first."""
    row = choose_option(rows, hardware) or rows[0]
    chosen = replace(hardware, gpus=row.gpus)
    setup = build_setup(subject.model, chosen, row.stage, row.offload)
    return estimate_time(subject.shape, setup, replace(work, micro_batch=row.micro_batch), hardware.gpu, hardware.nodes)


def _estimate_recording(options: argparse.Namespace, path: Path, training: TrainingSettings) -> int:
    """Print what each stage and offload mode would need of a recorded training."""
    try:
        base = read_baseline(Recording.open(path))
        base = replace(base, host_bytes=options.host_memory or base.host_bytes)
        # A recording knows its own dtypes and optimizer.
        changes = Changes(
            micro_batch=options.micro_batch,
            seq_length=options.seq_length,
            accumulation=options.gradient_accumulation,
            gpus=options.gpus,
            nodes=options.nodes,
            checkpointing="on" if options.gradient_checkpointing else None,
        )
        answer = answer_changes(base, changes, options.gpu_memory)
        setting, hardware = answer.setting, find_hardware(answer)
        own = estimate_job(setting.setup, nodes=setting.nodes)
        if options.all:
            rows = rank_recorded(base, changes, options.gpu_memory, all_gpus=True)
        else:
            rows = list_recorded(base, changes, options.gpu_memory, own)
    except NoBaselineError as error:
        raise Problem(str(error)) from error
    rows = _choose_rows(rows, options, training)
    lines = [describe_baseline(base), _describe_batch(options, setting.work), *describe_recorded(answer)]
    if answer.failure is not None or answer.measured_more is not None:
        lines.append(judge_gpu(answer))
    facts = {"recording": base.name, "hardware": asdict(hardware), "tokens": setting.work.tokens}
    facts["recommendation"] = recommend(rows, hardware)
    return _print_options(options, facts, rows, hardware, setting.work, lines, own)


def _print_options(
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    rows: list[OptionEstimate],
    hardware: Hardware,
    work: Workload,
    about: list[str],
    own: Sequence[Estimate],
) -> int:
    recommendation = facts.get("recommendation") or recommend(rows, hardware)
    if options.json:
        content = {
            **facts,
            "expectation": asdict(_expect(rows[0], hardware, work)) if len(rows) == 1 else None,
            "recommendation": recommendation,
            "options": [_to_json(row, hardware) for row in rows],
            "deepspeed_estimates": [asdict(row) for row in own],
        }
        print(json.dumps(content, indent=1))
        return 0
    table = format_ranking(rows, hardware) if options.all else format_options(rows, hardware)
    lines = [recommendation, *about, "", *table]
    if options.explain:
        lines += explain(rows, choose_option(rows, hardware))
    if own:
        lines += ["", *format_own(own)]
    print(*map(escape_unprintable, lines), sep="\n")
    return 0


def _expect(row: OptionEstimate, hardware: Hardware, work: Workload) -> Expectation:
    ranks, batch = row.gpus * hardware.nodes, (row.micro_batch, work.sequence, work.accumulation)
    return Expectation(row.stage, row.offload, ranks, *batch, collect_figures(row.memory, None))


def _find_hardware(options: argparse.Namespace) -> Hardware:
    gpus, gpu_bytes = options.gpus, options.gpu_memory
    if gpus is None or gpu_bytes is None:
        from zerotop.commands.job.training_machine import count_visible_gpus, read_gpu_bytes  # it brings NVML

        gpus, gpu_bytes = gpus or max(1, count_visible_gpus()), gpu_bytes or read_gpu_bytes()
    gpu, measured = options.gpu or "", None
    # A memory size without a name is another machine's.
    if gpu or options.gpu_memory is None:
        figures = read_kept_figures()
        if figures is not None and gpu.upper() in figures.gpu.upper():
            gpu, context = figures.gpu, figures.values.get("context")
            measured = MeasuredContext(context, figures.values.get("nccl")) if context is not None else None
    return Hardware(gpus, options.nodes or 1, gpu_bytes, gpu, options.host_memory, measured)


def read_kept_figures() -> MachineFigures | None:
    """Return this machine's measurements; None without usable ones, with a warning if the file cannot be used."""
    try:
        return read_figures(find_machine_file())
    except MachineFileError as error:
        print(error, file=sys.stderr)
        return None


def _to_json(row: OptionEstimate, hardware: Hardware) -> dict[str, Any]:
    return {
        **asdict(row),
        "needed_bytes": row.measure_needed(hardware),
        "fits": row.fits(hardware),
        "is_usable": row.is_usable(hardware),
    }


def _choose_rows(
    rows: list[OptionEstimate], options: argparse.Namespace, training: TrainingSettings
) -> list[OptionEstimate]:
    """Return the rows of the stage and offload mode that a config or options ask for. Raises Problem if there is none."""
    asked = {name: value for name, value in ((STAGE, options.stage), (OFFLOAD, options.offload)) if value is not None}
    if training.config is not None:
        if asked:
            raise Problem(
                "The DeepSpeed config has a stage and an offload mode of its own: give it, or --stage and --offload"
            )
        stage, *devices = read_zero_mode(training.config)
        offload = next((name for name, found in OFFLOAD_DEVICES.items() if found == tuple(devices)), "")
        asked = {STAGE: stage, OFFLOAD: offload}
        reason = f"DeepSpeed does not train with ZeRO stage {stage} and these offload devices: {', '.join(devices)}"
    elif asked:
        reason = find_obstacle(asked, {}).rstrip(".") or "DeepSpeed does not train with this stage and offload mode"
    if asked and rows[0].is_loop:
        raise Problem("This training does not use DeepSpeed, whose settings stage and offload are")
    chosen = [row for row in rows if all(getattr(row, name) == value for name, value in asked.items())]
    if not chosen:
        raise Problem(reason)
    return chosen


# --- the subject -----------------------------------------------------------------------------------------------------------


def _find_recording(name: str) -> Path | None:
    """Return the recording of that name, or the last one of a sweep; None for a model."""
    sweep = sweeps.find_sweep(name)
    if sweep is not None:
        finished = sweeps.read_sweep(sweep).finished
        found = [path for point in finished if (path := sweeps.find_point_recording(sweep, point.result))]
        if not found:
            raise Problem(f"{sweep} has no point with a recording")
        return found[-1]
    path = Path(name)
    if (path.is_file() and path.suffix == ".json") or (path / "config.json").is_file():
        return None
    try:
        return catalog.find_recording(name)
    except RecordingError:
        return None


def _read_config(options: argparse.Namespace, training: TrainingSettings) -> ModelCase:
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
        trained=options.trained or 0,
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
    if regime.trained > parameters:
        raise Problem(f"{options.model} has {parameters:,} parameters, fewer than --trained {regime.trained:,}")
    model = build_model(shape, parameters, regime)
    if regime.lora_rank and model.trainable == 0:
        raise Problem(f"{options.model} has no layer called {options.lora_targets}, or its layers are not known")
    return ModelCase(options.model, replace(model, offloaded_share=training.offloaded_share), shape)


def _refuse_combinations(options: argparse.Namespace) -> None:
    """Raise Problem for settings that exclude each other, or that no machine has."""
    names = ("seq_length", "micro_batch", "gpus", "nodes", "gradient_accumulation", "bucket")
    if excess := find_excess({name: getattr(options, name) for name in names}):
        raise Problem(excess)
    if options.quantization and not options.lora_rank:
        raise Problem("Quantized weights are not trained themselves: give the rank of their adapters with --lora-rank")
    if options.trained and options.lora_rank:
        raise Problem("--lora-rank trains its adapters alone: give it, or --trained")
    if options.expandable_segments and options.all:
        raise Problem("--all does not simulate the allocator, whose setting --expandable-segments is: leave one of them")
    if options.dtype == "pure" and options.framework == "deepspeed":
        raise Problem(PURE_DEEPSPEED)
    if options.dtype == "bf16_master" and options.framework != "deepspeed":
        raise Problem("16-bit master weights are a setting of DeepSpeed: choose another --dtype without it")
    if options.dtype == "mixed" and options.framework != "deepspeed":
        options.dtype = "fp32_weights"  # which loops and FSDP call mixed precision


def _describe_work(options: argparse.Namespace, config: Mapping[str, Any], shape: ModelShape) -> Workload:
    """Return the settings of a step."""
    zero = config.get("zero_optimization")
    # The Trainer fills in the square of the hidden size.
    is_auto = isinstance(zero, Mapping) and zero.get("reduce_bucket_size") == "auto"
    return Workload(
        micro_batch=options.micro_batch or _MICRO_BATCH,
        sequence=options.seq_length or _SEQ_LENGTH,
        accumulation=options.gradient_accumulation or 1,
        checkpointing="full" if options.gradient_checkpointing else "none",
        loss=options.loss,
        has_score_matrices=options.eager_attention,
        foreach=options.optimizer == "adamw" and not options.fused,
        overlap_comm=isinstance(zero, Mapping) and zero.get("overlap_comm") is True,
        bucket=options.bucket or (shape.hidden**2 if is_auto else DEFAULT_BUCKET),
    )


# --- text ------------------------------------------------------------------------------------------------------------------


def _describe_batch(options: argparse.Namespace, work: Workload) -> str:
    if options.all and options.micro_batch is None:
        return f"rows of {work.sequence:,} tokens" if work.sequence else "rows of any length"
    size = f"{work.tokens:,} tokens" if work.sequence else format_count(work.micro_batch, "row")
    return f"micro-batch of {size} on each GPU"


def _describe_time(time: EstimatedTime) -> str:
    if time.seconds is None:
        return f"Time of a step: not known without a run. {time.reason}"
    low, likely, high = map(format_seconds, time.seconds)
    rates = f"{time.tokens_per_s:,.0f} tokens/s, MFU {100 * time.mfu:.0f} %"
    return f"Time of a step: {likely} ({low} to {high}), {rates}, by the FLOPs and what other trainings reach."


def _describe_subject(subject: ModelCase, hardware: Hardware, training: TrainingSettings) -> list[str]:
    size = f", {format_bytes(hardware.gpu_bytes)} each" if hardware.gpu_bytes else ""
    gpus = f"{hardware.nodes} x {format_count(hardware.gpus, 'GPU')}{size}"
    trained = (
        f", {format_parameters(subject.model.trainable)} of them trained" if subject.model.frozen_bytes is not None else ""
    )
    lines = [
        f"{subject.name}: {format_parameters(subject.model.parameters)} parameters on {gpus}{trained}",
    ]
    if training.read:
        lines.append(f"from the given arguments: {', '.join(training.read)}")
    if subject.shape.vision:
        size = f"{format_parameters(subject.shape.vision)} of them"
        lines.append(f"its vision part has {size}: its activations, which depend on the images, are not counted")
    if subject.shape.counted is None:
        rule = "rule of thumb of Korthikanti et al. 2022 (arXiv:2205.05198)"
        lines.append(f"layers of this family are not known: activations by the {rule}")
    return lines

"""The commands that compare settings: ``sweep``, ``fit``, ``estimate`` and ``what-if``."""

from __future__ import annotations

import argparse

from zerotop.commands.options.common_options import AddCommand
from zerotop.commands.options.option_types import (
    parse_count,
    parse_memory,
    parse_natural,
    parse_parameters,
    parse_price,
    parse_share,
)

_USAGE = "%(prog)s [-h] [OPTION]... [-- COMMAND with {placeholders}]"

_DTYPES = ("mixed", "pure", "bf16_master", "fp32_weights", "fp32")
_OPTIMIZERS = ("adamw", "adamw8bit", "lion", "muon", "sgd", "adafactor")

_OFFLOADS = ("none", "optimizer", "params", "optimizer_params", "nvme_optimizer", "nvme_params", "nvme_optimizer_params")


def add_sweep_commands(add_command: AddCommand) -> None:
    """Add the commands with their options."""
    sweep = add_command(
        "sweep",
        "measure memory and pace for every combination of settings",
        "zerotop sweep --model qwen-0.5b --seq-length 128:2048:128 --allocator default expandable_segments:True",
        "zerotop sweep --stage 0,1,2,3 --offload none,optimizer --price-per-hour 30",
        "zerotop sweep --seq-length 512,1024 -- torchrun train.py --length {seq_length} --deepspeed {deepspeed}",
        "zerotop sweep --resume 20250412-093000-tiny",
        usage=_USAGE,
    )
    _add_training_options(sweep)
    sweep.add_argument("--resume", metavar="SWEEP", help="resume an interrupted sweep: its name or folder")
    sweep.add_argument("--executor", choices=("local", "slurm"), default="local", help="where the points run [local]")
    sweep.add_argument(
        "--slurm",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="Slurm options of the jobs: partition=gpu gpus_per_node=1",
    )
    sweep.add_argument("--one-at-a-time", action="store_true", help="run one point at a time, even with GPUs for several")
    sweep.add_argument("--headless", action="store_true", help="without the screen; print a line for each point")
    sweep.add_argument("--yes", action="store_true", help="start a large matrix without asking")
    fit = add_command(
        "fit",
        "find the largest sequence length or micro-batch that fits",
        "zerotop fit --model qwen-0.5b --stage 2,3 --offload none,optimizer --seq-length 128:32768:128 --most-runs 20",
        "zerotop fit --micro-batch 1:64 -- torchrun train.py --batch {micro_batch}",
        usage=_USAGE,
    )
    _add_training_options(fit)
    fit.add_argument("--headless", action="store_true", help="without the screen; print a line for each run")
    fit.add_argument("--most-runs", type=parse_count, default=40, metavar="N", help="most runs, over all series [40]")
    fit.add_argument(
        "--gpu-memory", type=parse_memory, metavar="SIZE", help="memory of one GPU, such as 80GB [this machine's]"
    )
    fit.add_argument("--from", dest="recording", metavar="RECORDING", help="recorded run, to predict where to start")
    estimate = add_command(
        "estimate",
        "estimate memory for every stage and offload mode",
        "zerotop estimate llama-8b --gpus 8 --gpu-memory 80GB --seq-length 2048",
        "zerotop estimate brisk-otter --nodes 2",
        "zerotop estimate llama-8b --config ds.json --gpus 4 --gpu-memory 80GB",
        "zerotop estimate llama-8b -- torchrun --nproc_per_node 4 train.py --bf16 --deepspeed ds.json",
    )
    estimate.add_argument(
        "model", nargs="?", metavar="MODEL", help="preset, config.json or its folder, cached hub id, recording, or sweep"
    )
    estimate.add_argument(
        "--gpus", type=parse_count, metavar="N", help="GPUs of each node [those of the recording, or here]"
    )
    estimate.add_argument("--nodes", type=parse_count, metavar="N", help="number of nodes [1]")
    estimate.add_argument(
        "--gpu-memory", type=parse_memory, metavar="SIZE", help="memory of one GPU, such as 80GB [this machine's]"
    )
    estimate.add_argument(
        "--host-memory", type=parse_memory, metavar="SIZE", help="memory of one node [as recorded, or not judged]"
    )
    estimate.add_argument("--seq-length", type=parse_count, metavar="N", help="tokens per row [as recorded, or 512]")
    estimate.add_argument("--micro-batch", type=parse_count, metavar="N", help="rows per GPU [as recorded, or 1]")
    estimate.add_argument("--gradient-checkpointing", action="store_true", help="activations are recomputed")
    estimate.add_argument("--gradient-accumulation", type=parse_count, metavar="N", help="micro-batches per step [1]")
    add_regime_options(estimate)
    estimate.add_argument("--explain", action="store_true", help="show all rows, with their formulas")
    estimate.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="this ZeRO stage alone")
    estimate.add_argument("--offload", choices=_OFFLOADS, help="this offload mode alone")
    estimate.add_argument(
        "--grade", action="store_true", help="the errors over all recordings here, or those in the folder MODEL"
    )
    estimate.add_argument("--all", action="store_true", help="rank every stage, offload, micro-batch and number of GPUs")
    estimate.add_argument("--config", metavar="FILE", help="DeepSpeed config, or arguments of the Trainer in JSON or YAML")
    estimate.add_argument(
        "--parameters", type=parse_parameters, metavar="N", help="parameters of a model with unknown layers"
    )
    estimate.add_argument("--json", action="store_true", help="print JSON for programs, with sizes in bytes")

    _add_what_if(add_command)


def _add_what_if(add_command: AddCommand) -> None:
    command = add_command(
        "what-if",
        "predict memory and time of a recorded training at another setting",
        "zerotop what-if brisk-otter --stage 3 --offload optimizer",
        "zerotop what-if brisk-otter --micro-batch 4 --memory 80GB --explain",
    )
    command.add_argument("recording", metavar="RECORDING", help="name, start of a name, or path")
    command.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage")
    command.add_argument("--offload", choices=_OFFLOADS, help="what is offloaded")
    command.add_argument("--offload-ratio", type=parse_share, metavar="R", help="share of the optimizer, in stage 3")
    command.add_argument("--micro-batch", type=parse_count, metavar="N", help="rows per GPU")
    command.add_argument("--seq-length", type=parse_count, metavar="N", help="tokens per row")
    command.add_argument("--accumulation", type=parse_count, metavar="N", help="micro-batches per step")
    command.add_argument("--gpus", type=parse_count, metavar="N", help="GPUs of each node")
    command.add_argument("--nodes", type=parse_count, metavar="N", help="number of nodes")
    command.add_argument("--checkpointing", choices=("on", "off"), help="activations are recomputed")
    command.add_argument("--optimizer", choices=_OPTIMIZERS, help="another optimizer")
    command.add_argument("--dtype", choices=_DTYPES, help="data types of weights and states")
    command.add_argument(
        "--memory", dest="gpu_memory", type=parse_memory, metavar="SIZE", help="memory of one GPU, such as 80GB"
    )
    command.add_argument("--all", action="store_true", help="rank every combination of what is not given")
    command.add_argument("--explain", action="store_true", help="show all rows, with formula or measurement")
    command.add_argument("--json", action="store_true", help="print JSON for programs, with sizes in bytes")


def add_regime_options(command: argparse.ArgumentParser) -> None:
    """Add what describes a training; the choices are those of ``analysis.sweeps.regimes``, which takes long to import."""
    regime = command.add_argument_group("training", "For models without a recording; a recording has its own values.")
    regime.add_argument("--framework", choices=("deepspeed", "none", "ddp", "fsdp"), help="library [deepspeed]")
    regime.add_argument("--dtype", choices=_DTYPES, help="data types [mixed: bf16 or fp16, fp32 master]")
    regime.add_argument("--optimizer", choices=_OPTIMIZERS, help="optimizer [adamw]")
    regime.add_argument("--fused", action="store_true", help="use the fused optimizer [foreach]")
    regime.add_argument(
        "--trained", type=parse_parameters, metavar="N", help="parameters that are trained; others are frozen"
    )
    regime.add_argument("--lora-rank", type=parse_count, metavar="R", help="train adapters of this rank alone")
    regime.add_argument("--lora-targets", default="all-linear", metavar="NAMES", help="adapted layers [all-linear]")
    regime.add_argument("--quantization", choices=("nf4", "nf4-dq", "gptq4"), help="quantization of the frozen layers")
    regime.add_argument("--loss", choices=("logits", "fused", "chunked", "liger"), help="how the loss is computed [logits]")
    regime.add_argument("--eager-attention", action="store_true", help="attention keeps s x s matrices")
    regime.add_argument("--bucket", type=parse_count, metavar="N", help="reduce_bucket_size, elements [500000000]")
    regime.add_argument("--expandable-segments", action="store_true", help="PyTorch's allocator uses them")
    regime.add_argument("--gpu", metavar="NAME", help="type of GPU: H100, H200 or A100")


def _add_training_options(command: argparse.ArgumentParser) -> None:
    varied = command.add_argument_group(
        "settings", "Values separated by commas; numbers also as BEGIN:END:STEP, END included."
    )
    varied.add_argument("--stage", metavar="STAGES", help="ZeRO stages 0 to 3")
    offloads = "none, optimizer, params, optimizer_params, nvme_optimizer, nvme_params, nvme_optimizer_params"
    varied.add_argument("--offload", metavar="MODES", help=offloads)
    varied.add_argument("--seq-length", metavar="N", help="tokens per row")
    varied.add_argument("--micro-batch", metavar="N", help="rows per GPU and micro-batch")
    varied.add_argument("--gradient-accumulation", metavar="N", help="micro-batches per step")
    varied.add_argument("--gradient-checkpointing", metavar="off,on", help="recompute activations")
    varied.add_argument(
        "--allocator", nargs="+", metavar="CONF", help="PyTorch's allocator: default, or as in PYTORCH_CUDA_ALLOC_CONF"
    )
    varied.add_argument("--gpus", metavar="N", help="number of GPUs, or of ranks on a CPU")
    varied.add_argument("--set", action="append", metavar="NAME=VALUES", help="a {NAME} of your own in COMMAND")
    command.add_argument("--model", help="preset, folder or hub id, trained without COMMAND [tiny]")
    command.add_argument("--config", metavar="FILE", help="DeepSpeed config to start from [a ready one for the HF Trainer]")
    command.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="data type of the ready config [bf16]")
    command.add_argument("--nvme-path", metavar="DIR", help="folder for the nvme modes")
    command.add_argument(
        "--steps", type=parse_count, default=8, help="optimizer steps of each point, {steps} in COMMAND [8]"
    )
    command.add_argument("--warmup", type=parse_natural, default=3, metavar="STEPS", help="first steps, not measured [3]")
    command.add_argument("--retries", type=parse_natural, default=5, metavar="N", help="further attempts after a crash [5]")
    command.add_argument(
        "--hang-after", type=parse_count, default=300, metavar="SECONDS", help="longest time without output or a phase [300]"
    )
    command.add_argument("--price-per-hour", type=parse_price, metavar="PRICE", help="price of the machine, to show costs")
    command.add_argument("-o", "--output", metavar="DIR", help="folder of the results [a new one in the state directory]")
    command.add_argument(
        "--json", action="store_true", help="print JSON for programs, with sizes in bytes and times in seconds"
    )

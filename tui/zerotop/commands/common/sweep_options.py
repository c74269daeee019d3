"""The options of commands that train at several settings."""

from __future__ import annotations

import argparse

from zerotop.commands.common.option_types import parse_count, parse_natural, parse_price


def add_sweep_options(sweep: argparse.ArgumentParser) -> None:
    """Add the options of ``zerotop sweep``."""
    varied = sweep.add_argument_group(
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
    sweep.add_argument("--model", help="preset, folder or hub id, trained without COMMAND [tiny]")
    sweep.add_argument("--config", metavar="FILE", help="DeepSpeed config to start from [a ready one for the HF Trainer]")
    sweep.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of the ready config [bf16]")
    sweep.add_argument("--nvme-path", metavar="DIR", help="folder for the nvme modes")
    sweep.add_argument("--steps", type=parse_count, default=8, help="optimizer steps of each point, {steps} in COMMAND [8]")
    sweep.add_argument("--warmup", type=parse_natural, default=3, metavar="STEPS", help="first steps not to measure [3]")
    sweep.add_argument("--retries", type=parse_natural, default=5, metavar="N", help="further attempts after a crash [5]")
    sweep.add_argument(
        "--hang-after", type=parse_count, default=300, metavar="SECONDS", help="without output or a phase, it hangs [300]"
    )
    sweep.add_argument("--price-per-hour", type=parse_price, metavar="PRICE", help="of the machine, to show costs")
    sweep.add_argument("-o", "--output", metavar="DIR", help="folder of the sweep [a new one in the state directory]")
    sweep.add_argument("--resume", metavar="SWEEP", help="go on with an interrupted sweep: its name or folder")
    sweep.add_argument("--headless", action="store_true", help="without the screen; print a line for each point")
    sweep.add_argument(
        "--json", action="store_true", help="print JSON for programs, with sizes in bytes and times in seconds"
    )
    sweep.add_argument("--yes", action="store_true", help="start a large matrix without asking")

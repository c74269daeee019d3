"""The setting that the options of ``what-if`` and ``estimate`` ask of a recording, checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup
from zerotop.analysis.sweeps.baseline import Baseline
from zerotop.analysis.sweeps.regimes import size_states
from zerotop.analysis.sweeps.settings import OFFLOAD, STAGE, find_obstacle
from zerotop.analysis.sweeps.what_if import change_setup, name_offload
from zerotop.commands.common.errors import Problem

_MOST = 10**11  # tokens, rows, GPUs


@dataclass(frozen=True, slots=True)
class Setting:
    """A training as the formulas know it, and where it runs."""

    setup: EngineSetup
    work: Workload
    gpus: int  # on a node
    nodes: int


def choose_setting(base: Baseline, options: argparse.Namespace) -> Setting:
    """Return the recorded setting with the changes of the options. Raises Problem for what cannot be."""
    gpus, nodes = options.gpus or base.gpus, options.nodes or base.nodes
    for name, value in (("gpus", gpus), ("nodes", nodes)):
        if value > _MOST:
            raise Problem(f"--{name} {value} is more than any machine trains with")
    if gpus * nodes != base.setup.ranks:
        if base.gpus * base.nodes != base.setup.ranks:
            raise Problem(f"{base.name} does not train one replica on each GPU, so another number of GPUs has no formula")
        if base.setup.is_loop and base.setup.stage == 3 and 1 in (gpus * nodes, base.setup.ranks):
            raise Problem("FSDP gathers nothing on one GPU: give two or more, or `zerotop estimate MODEL --framework none`")
    setup = replace(base.setup, ranks=gpus * nodes)
    setup = _change_states(base, setup, getattr(options, "dtype", None), getattr(options, "optimizer", None))
    setup = _change_zero(base, setup, getattr(options, "stage", None), getattr(options, "offload", None))
    return Setting(setup, _change_work(base, options), gpus, nodes)


def _change_zero(base: Baseline, setup: EngineSetup, stage: int | None, offload: str | None) -> EngineSetup:
    if stage is None and offload is None:
        return setup
    if setup.is_loop:
        raise Problem(f"{base.name} trains without DeepSpeed, whose settings --stage and --offload are")
    mode = offload or name_offload(setup)
    chosen = setup.stage if stage is None else stage
    obstacle = find_obstacle({STAGE: chosen, OFFLOAD: mode}, {}) if mode else "Give --offload: its devices have no name"
    if obstacle:
        raise Problem(obstacle.rstrip("."))
    return change_setup(setup, chosen, mode)


def _change_states(base: Baseline, setup: EngineSetup, dtype: str | None, optimizer: str | None) -> EngineSetup:
    if dtype is None and optimizer is None:
        return setup
    if setup.is_loop or setup.trainable < setup.parameters:
        raise Problem(
            f"{base.name} trains without DeepSpeed, or only a part of its parameters: its states are measured, and another"
            " dtype or optimizer has no formula. `zerotop estimate MODEL` takes them"
        )
    recorded = "fp32" if setup.bytes_each == 4 else "mixed"
    weight, state, master = size_states(dtype or recorded, optimizer or "adamw")
    state = state if optimizer is not None or setup.state_each is None else setup.state_each
    computes_wide = (dtype or recorded) == "fp32"
    return replace(setup, bytes_each=weight, state_each=state, master_each=master, computes_wide=computes_wide)


def _change_work(base: Baseline, options: argparse.Namespace) -> Workload:
    work, length = base.work, options.seq_length
    if length and not work.sequence:
        raise Problem(f"{base.name} counts rows, not tokens, so another length has no formula: --micro-batch has one")
    rows, accumulation = options.micro_batch or work.micro_batch, options.gradient_accumulation or work.accumulation
    for name, value in (("seq-length", length or 0), ("micro-batch", rows), ("accumulation", accumulation)):
        if value > _MOST:
            raise Problem(f"--{name} {value} is more than any machine trains with")
    checkpointing = getattr(options, "checkpointing", None) or ("on" if options.gradient_checkpointing else None)
    kept = {"on": "full", "off": "none", None: work.checkpointing}[checkpointing]
    return replace(work, micro_batch=rows, sequence=length or work.sequence, accumulation=accumulation, checkpointing=kept)


def describe_baseline(base: Baseline) -> str:
    """Return a line about what was recorded."""
    size = f", {format_bytes(base.gpu_bytes)} each" if base.gpu_bytes else ""
    gpus = f"{base.nodes} x {base.gpus} {base.gpu or 'GPU'}{'s' if base.gpus > 1 else ''}{size}"
    return f"{base.name}: {base.setup.parameters / 1e6:,.1f} M parameters on {gpus}"

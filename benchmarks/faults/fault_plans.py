"""The plans of jobs with a fault, and the required findings of each kind of fault."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

SCRIPT = Path(__file__).with_name("faulty.py")
NO_FAULT = "none"
LINES = {
    line.rpartition("# fault: ")[2]: number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if "# fault: " in line
}


class Kind(NamedTuple):
    """A kind of fault, and the findings that it must have."""

    finding: str
    words: str  # in the headline or details, where the cause is named
    needs_gpu: bool = False
    needs_ranks: bool = False
    beside: str = ""  # what runs beside the job: "hogs" or "neighbour"
    also: tuple[str, ...] = ()  # other findings that are true of it


KINDS = {
    "sleep": Kind("iteration_shift", "{place}", also=("time_lost_in_line",)),
    "gc": Kind("iteration_shift", "{place}", also=("time_lost_in_line",)),
    "longer": Kind("iteration_shift", "tokens instead of", also=("memory_step",)),
    "rows": Kind("iteration_shift", "rows instead of", also=("memory_step",)),
    "slow_item": Kind("data_stall", "{place}"),
    "slow_rank": Kind("straggler", "{place}", needs_ranks=True, also=("iteration_shift",)),
    "checkpoint": Kind("checkpoint_pause", "A checkpoint stopped training"),
    "kill": Kind("dead_rank", "killed by signal 9", needs_ranks=True, also=("hung_ranks",)),
    "exception": Kind("dead_rank", "ValueError", needs_ranks=True, also=("hung_ranks",)),
    "hogs": Kind("cores_taken", "ther processes use", beside="hogs", also=("iteration_shift", "iteration_drift")),
    "empty_cache": Kind("cache_emptied", "emptied in each step", needs_gpu=True, also=("iteration_shift",)),
    "evaluation": Kind("validation_jump", "Evaluation raised", needs_gpu=True),
    "leak": Kind("memory_creep", "a step on rank", needs_gpu=True),
    "neighbour": Kind("iteration_shift", "of GPU", needs_gpu=True, beside="neighbour"),
}


class _Machine(NamedTuple):
    """The length and size of jobs on a kind of device: steps take about 100 ms on a CPU and about 10 ms on a GPU."""

    steps: int
    more_steps: int  # where samples of a second decide, or a look at what stays allocated
    first_steps: tuple[int, int]  # in which a fault may begin
    seconds: tuple[float, float]  # that a fault takes in each step
    scale: int  # of rows, tokens and widths
    objects: int  # that the garbage collector looks at


_CPU = _Machine(60, 240, (20, 35), (0.1, 0.25), 1, 500_000)
_GPU = _Machine(200, 450, (60, 90), (0.03, 0.08), 4, 150_000)


@dataclass(frozen=True)
class Plan:
    """One job."""

    fault: str  # NO_FAULT for a clean job
    line: int | None  # of the script, at which the fault takes its time or fails
    engine: str
    step: int
    rank: int
    seconds: float
    rows: int
    length: int
    width: int
    layers: int
    steps: int = 60
    objects: int = 500_000
    gpus: tuple[int, ...] = ()  # that it trains on; none on a CPU

    @property
    def ranks(self) -> int:
        """The ranks of the job; of DeepSpeed one for each GPU."""
        return 1 if self.engine == "plain" or (self.engine == "deepspeed" and len(self.gpus) == 1) else 2

    @property
    def place(self) -> str:
        """``faulty.py:42``; "" without a line."""
        return f"{SCRIPT.name}:{self.line}" if self.line is not None else ""

    def build_command(self, port: int) -> list[str]:
        """Return the command line of the job. ``port``: where its ranks meet."""
        chosen = f"--include=localhost:{','.join(map(str, self.gpus))}" if self.gpus else f"--num_gpus={self.ranks}"
        torchrun = ("-m", "torch.distributed.run", "--master-port", str(port), "--nproc-per-node", str(self.ranks))
        launchers = {
            "plain": [sys.executable],
            "ddp": [sys.executable, *torchrun],
            "deepspeed": [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port), chosen],
        }
        options = {name: value for name, value in asdict(self).items() if name not in ("fault", "line", "gpus")}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*launchers[self.engine], str(SCRIPT), self.fault, *words]


def read_plan(path: Path) -> Plan:
    """Return the plan that was written by ``write_plan``."""
    facts = json.loads(path.read_text())
    return Plan(**{**facts, "gpus": tuple(facts.get("gpus", ()))})


def write_plan(path: Path, plan: Plan) -> None:
    """Write what a job is, beside its recording."""
    path.write_text(json.dumps(asdict(plan)) + "\n")


@lru_cache(maxsize=1)
def count_gpus() -> int:
    """Return the GPUs that jobs may use: at most two."""
    return min(2, int(torch.cuda.device_count()))


def list_faults(jobs: int, chance: random.Random) -> list[str]:
    """Return the kinds of fault in a random order, each as often as the others, with a clean job after each two."""
    kinds = [name for name, kind in KINDS.items() if count_gpus() or not kind.needs_gpu]
    chance.shuffle(kinds)
    faults: list[str] = []
    while len(faults) < jobs:
        faults += [NO_FAULT] if len(faults) % 3 == 2 else [kinds[(len(faults) - len(faults) // 3) % len(kinds)]]
    return faults


def draw_plan(fault: str, engines: list[str], number: int, chance: random.Random) -> Plan:
    """Return a job with this fault, everything else of it by chance. ``number``: of the job, which chooses its GPU."""
    kind, machine, gpus = KINDS.get(fault), _GPU if count_gpus() else _CPU, count_gpus()
    needs_ranks = kind is not None and kind.needs_ranks
    engine = chance.choice([one for one in engines if one != "plain"] if needs_ranks else engines)
    if needs_ranks and engine == "deepspeed" and gpus == 1:
        engine = "ddp"
    return Plan(
        fault=fault,
        line=LINES.get(fault),
        engine=engine,
        step=chance.randint(*machine.first_steps),
        rank=chance.randint(0, 1) if engine != "plain" else 0,
        seconds=round(chance.uniform(*machine.seconds), 3),
        rows=chance.choice([4, 6]) * machine.scale,
        length=chance.choice([48, 64]) * machine.scale,
        width=chance.choice([96, 128]) * machine.scale,
        layers=chance.choice([2, 3]),
        steps=machine.more_steps if kind is not None and (kind.beside or fault == "leak") else machine.steps,
        objects=machine.objects,
        gpus=(number % gpus,) if gpus and engine == "plain" else tuple(range(gpus)),
    )

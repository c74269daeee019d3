"""Faults that are injected into real jobs at random: which findings follow, and whether they name cause, rank and line.

    python benchmarks/faults/causes.py [--jobs 24] [--seed 1] [--keep FOLDER]

A third of the jobs is clean. The others have one fault of a random kind, from a random step on and of a random strength, in
a plain loop, under DDP or under DeepSpeed, with a model and batch of random size. On a machine with GPUs they train there,
and faults of GPUs are drawn too. Jobs run one after the other. What is said of other work on the machine (cores and GPUs
that others use) is no false alarm. ``--keep`` packs the recordings with their labels, ``--judge`` reads such
a folder again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from zerotop.analysis.annotations import Annotation, Severity, find_annotations
from zerotop.session.reader import Session

SCRIPT = Path(__file__).with_name("faulty.py")
LINES = {
    line.rpartition("# fault: ")[2]: number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if "# fault: " in line
}
_STEPS = 60
_PATIENCE_S = 120.0
# Findings about other work on the machine, and explanations of memory that every job has.
_NOT_COUNTED = ("cores_taken", "crowded_cores", "others_on_gpu", "others_arrived", "steps_not_recorded")
_SAME_STEPS = 3

# They begin when they are told to.
_HOG = "input()\nwhile True: pass"
_NEIGHBOUR = """
import torch
one = torch.ones(4096, 4096, device="cuda")
keep = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
one @ one
input()
while True:
    for _ in range(50): one @ one
    torch.cuda.synchronize()
"""


class Kind(NamedTuple):
    """A kind of fault, and what must be said about it."""

    finding: str
    words: str  # in the headline or details, where the cause is named
    needs_gpu: bool = False
    needs_ranks: bool = False
    beside: str = ""  # a program that runs beside the job
    also: tuple[str, ...] = ()  # other findings that are true of it


_KINDS = {
    "sleep": Kind("iteration_shift", "{place}"),
    "gc": Kind("iteration_shift", "{place}"),
    "longer": Kind("iteration_shift", "tokens instead of", also=("memory_step",)),
    "rows": Kind("iteration_shift", "rows instead of", also=("memory_step",)),
    "slow_item": Kind("data_stall", "{place}"),
    "slow_rank": Kind("straggler", "{place}", needs_ranks=True, also=("iteration_shift",)),
    "checkpoint": Kind("checkpoint_pause", "A checkpoint stopped training"),
    "kill": Kind("dead_rank", "killed by signal 9", needs_ranks=True, also=("hung_ranks",)),
    "exception": Kind("dead_rank", "ValueError", needs_ranks=True, also=("hung_ranks",)),
    "hogs": Kind("cores_taken", "ther processes use", beside=_HOG, also=("iteration_shift", "iteration_drift")),
    "empty_cache": Kind("cache_emptied", "emptied in each step", needs_gpu=True, also=("iteration_shift",)),
    "evaluation": Kind("validation_jump", "Evaluation raised", needs_gpu=True),
    "leak": Kind("memory_creep", "GPU memory grows", needs_gpu=True),
    "neighbour": Kind("iteration_shift", "of GPU", needs_gpu=True, beside=_NEIGHBOUR),
}


@dataclass(frozen=True)
class Plan:
    """One job."""

    fault: str  # "none" for a clean job
    line: int | None  # of the script, at which the fault takes its time or fails
    engine: str
    step: int
    rank: int
    seconds: float
    rows: int
    length: int
    width: int
    layers: int

    def count_steps(self) -> int:
        """Longer jobs where samples of a second decide; steps on a GPU take some 10 ms."""
        return (20 if torch.cuda.is_available() else 4) * _STEPS if self.fault in ("hogs", "neighbour") else _STEPS

    def build_command(self) -> list[str]:
        """Return the command line of the job."""
        ranks = "1" if self.engine == "plain" else "2"
        launchers = {
            "plain": [sys.executable],
            "ddp": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks],
            "deepspeed": ["deepspeed", "--num_gpus", "1" if torch.cuda.device_count() == 1 else ranks],
        }
        options = {name: value for name, value in asdict(self).items() if name not in ("fault", "line")} | {
            "steps": self.count_steps()
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*launchers[self.engine], str(SCRIPT), self.fault, *words]


class Result(NamedTuple):
    """What was said about a job."""

    plan: Plan
    found: Annotation | None
    is_cause_right: bool
    is_rank_right: bool
    is_line_right: bool | None  # None where there is no line
    false_alarms: tuple[Annotation, ...]


def main() -> None:
    """Print a line for each job, then a table by kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=["plain", "ddp", "deepspeed"])
    parser.add_argument("--faults", nargs="+", choices=("none", *_KINDS), help="only these [all, and a third clean]")
    parser.add_argument("--most-load", type=float, default=float("inf"), help="wait until the machine's load is below this")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="only judge the recordings that were kept there")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recordings and their labels there")
    options = parser.parse_args()
    results = _judge_kept(options.judge) if options.judge else _run_jobs(options)
    _print_table(results)


def _judge_kept(folder: Path) -> list[Result]:
    results = []
    for number, path in enumerate(sorted(folder.glob("*.json"))):
        recording = Session.open(path.with_suffix(".zerotop"))
        findings = find_annotations(recording, recording.end_ns)
        results.append(_judge_findings(Plan(**json.loads(path.read_text())), findings))
        _print_job(number, results[-1])
    return results


def _run_jobs(options: argparse.Namespace) -> list[Result]:
    chance, results = random.Random(options.seed), []
    faults = options.faults or _list_faults(options.jobs, chance)
    for number in range(options.jobs):
        plan = _draw_plan(faults[number % len(faults)], options.engines, chance)
        while os.getloadavg()[0] > options.most_load:
            time.sleep(1)
        with tempfile.TemporaryDirectory() as folder:
            results.append(_run_job(plan, Path(folder, "session")))
            _print_job(number, results[-1])
            if options.keep:
                _keep_recording(Path(folder, "session"), options.keep, f"{options.seed}-{number:02}-{plan.fault}", plan)
    return results


def _list_faults(jobs: int, chance: random.Random) -> list[str]:
    """Return the kinds of fault in a random order, each as often as the others, with a clean job after each two."""
    kinds = [name for name, kind in _KINDS.items() if torch.cuda.is_available() or not kind.needs_gpu]
    chance.shuffle(kinds)
    faults: list[str] = []
    while len(faults) < jobs:
        faults += ["none"] if len(faults) % 3 == 2 else [kinds[(len(faults) - len(faults) // 3) % len(kinds)]]
    return faults


def _draw_plan(fault: str, engines: list[str], chance: random.Random) -> Plan:
    kind, scale = _KINDS.get(fault), 4 if torch.cuda.is_available() else 1
    needs_ranks = kind is not None and kind.needs_ranks
    engine = chance.choice([one for one in engines if one != "plain"] if needs_ranks else engines)
    has_two = engine == "ddp" or (engine == "deepspeed" and torch.cuda.device_count() != 1)
    if needs_ranks and not has_two:
        engine = "ddp"
    return Plan(
        fault=fault,
        line=LINES.get(fault),
        engine=engine,
        step=chance.randint(20, 35),
        rank=chance.randint(0, 1) if engine != "plain" else 0,
        seconds=round(chance.uniform(0.1, 0.25), 3),
        rows=chance.choice([4, 6]) * scale,
        length=chance.choice([48, 64]) * scale,
        width=chance.choice([96, 128]) * scale,
        layers=chance.choice([2, 3]),
    )


def _run_job(plan: Plan, session: Path) -> Result:
    kind = _KINDS.get(plan.fault)
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--session", str(session), "--", *plan.build_command()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as job:
        assert job.stdout is not None
        limit = threading.Timer(_PATIENCE_S, job.terminate)
        limit.start()
        with _run_beside(kind.beside if kind is not None else "") as begin:
            for line in job.stdout:
                if line.strip().endswith("FAULT"):
                    begin()
        limit.cancel()
    recording = Session.open(session)
    return _judge_findings(plan, find_annotations(recording, recording.end_ns))


@contextmanager
def _run_beside(code: str) -> Iterator[Callable[[], None]]:
    """Start another program, on the GPU or on each core, and give a function that lets it begin."""
    count = 0 if not code else 1 if code == _NEIGHBOUR else os.cpu_count() or 1
    children = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(count)]

    def begin_load() -> None:
        for child in children:
            assert child.stdin is not None
            if not child.stdin.closed:
                child.stdin.write(b"\n")
                child.stdin.close()

    try:
        yield begin_load
    finally:
        for child in children:
            child.kill()
            child.wait()


def _judge_findings(plan: Plan, findings: tuple[Annotation, ...]) -> Result:
    kind = _KINDS.get(plan.fault)
    told = [one for one in findings if kind is not None and _is_told(plan, kind, one)]
    # The other findings follow from that of the fault itself, and are linked to it.
    found = next((one for one in told if kind is not None and one.name == kind.finding), told[0] if told else None)
    allowed = (kind.finding, *kind.also) if kind is not None else ()
    alarms = tuple(one for one in findings if _is_alarm(one) and not (one.name in allowed and _is_in_time(plan, one)))
    if kind is None or found is None:
        return Result(plan, found, False, False, None, alarms)
    text, place = f"{found.headline} {found.details}", _name_place(plan)
    is_rank_right = plan.fault not in ("slow_rank", "kill", "exception") or found.ranks == (plan.rank,)
    is_line_right = place in f"{text} {found.fix}" if place else None
    return Result(plan, found, _names_cause(plan, kind, found), is_rank_right, is_line_right, alarms)


def _is_told(plan: Plan, kind: Kind, finding: Annotation) -> bool:
    is_right = finding.name == kind.finding or (finding.name in kind.also and _names_cause(plan, kind, finding))
    return is_right and _is_in_time(plan, finding)


def _names_cause(plan: Plan, kind: Kind, finding: Annotation) -> bool:
    return kind.words.format(place=_name_place(plan)) in f"{finding.headline} {finding.details}"


def _name_place(plan: Plan) -> str:
    return f"{SCRIPT.name}:{plan.line}" if plan.line is not None else ""


def _is_in_time(plan: Plan, finding: Annotation) -> bool:
    """Whether a finding begins with the fault; what runs beside the job takes a while to start."""
    if finding.step is None:
        return True
    if plan.fault == "hogs":  # on a machine that others use it is told earlier
        return finding.name == "cores_taken" or finding.step >= plan.step - _SAME_STEPS
    late = _STEPS if plan.fault == "neighbour" else _SAME_STEPS
    return plan.step - _SAME_STEPS <= finding.step <= plan.step + late


def _is_alarm(finding: Annotation) -> bool:
    return finding.severity is not Severity.INFO and finding.name not in _NOT_COUNTED


def _print_job(number: int, result: Result) -> None:
    plan = result.plan
    words = result.found.headline if result.found is not None else "-"
    alarms = "".join(f"\n    FALSE {one.name}@{one.step}: {one.headline} | {one.details}" for one in result.false_alarms)
    right = "".join(
        mark if is_right else "."
        for mark, is_right in (("c", result.is_cause_right), ("r", result.is_rank_right), ("l", result.is_line_right))
    )
    print(
        f"{number:3} {plan.fault:11} {plan.engine:9} step {plan.step} rank {plan.rank} {right} {words} {alarms}", flush=True
    )


def _keep_recording(session: Path, folder: Path, name: str, plan: Plan) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "zerotop", "pack", str(session), "-o", str(folder / f"{name}.zerotop")], check=True
    )
    (folder / f"{name}.json").write_text(json.dumps(asdict(plan)) + "\n")


def _print_table(results: list[Result]) -> None:
    by_kind = defaultdict(list)
    for result in results:
        by_kind[result.plan.fault].append(result)
    print("\n| fault | jobs | found | cause right | rank right | line right | false findings |")
    print("|---|---|---|---|---|---|---|")
    for kind in ("none", *_KINDS):
        if kind in by_kind:
            print(_format_row(kind, by_kind[kind]))
    faulty = [result for result in results if result.plan.fault != "none"]
    print(_format_row("all", results))
    found, false = sum(one.found is not None for one in faulty), sum(len(one.false_alarms) for one in results)
    precision, recall = found / max(1, found + false), found / max(1, len(faulty))
    counts = f"{len(faulty)} jobs with a fault, {len(results) - len(faulty)} clean"
    print(f"\nprecision {precision:.0%}, recall {recall:.0%}, {counts}")


def _format_row(name: str, results: list[Result]) -> str:
    lines = [one.is_line_right for one in results if one.is_line_right is not None]
    found = [one for one in results if one.found is not None]
    counts = (
        [str(len(found)), str(sum(one.is_cause_right for one in found)), str(sum(one.is_rank_right for one in found))]
        if name != "none"
        else ["", "", ""]
    )
    false = sum(len(one.false_alarms) for one in results)
    named = f"{sum(lines)} of {len(lines)}" if lines else ""
    return " | ".join(["", name, str(len(results)), *counts, named, str(false), ""]).strip()


if __name__ == "__main__":
    main()

"""Grade ``zerotop what-if``: predict a recorded run from another recording of the same model at another setting.

    python benchmarks/what_if.py                         # the runs below and the recordings of the tests
    python benchmarks/what_if.py --rows                  # each pair, too
    python benchmarks/what_if.py --kind held-out         # pairs with a run that is held out; or tuned, without
    python benchmarks/what_if.py --write FOLDER...       # keep what packed recordings measured, in what_if_runs.jsonl

    python benchmarks/what_if.py --times                 # also step times alone, of estimate_truths.jsonl
    python benchmarks/what_if.py --calibrate             # errors of tuned step times, of which `seen_errors.py` has the most

All recordings of one model on GPUs of one type make pairs, in both directions. The peer is the answer without this model:
the states exchanged by ZeRO's formulas, everything else, and the time, scaled by tokens. *needed*: how often the amount of
the verdict was enough for what the run allocated, with CUDA's context.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, permutations
from math import log
from pathlib import Path
from typing import NamedTuple

from estimate_truths import is_held_out, read_rows
from what_if_gpu import HELD_OUT

from zerotop.analysis.memory.caching_allocator import AllocatorRules
from zerotop.analysis.memory.expected.beyond_allocated import Interval
from zerotop.analysis.memory.expected.model_layers import Layers
from zerotop.analysis.memory.expected.model_shape import KeptBytes, ModelShape
from zerotop.analysis.memory.expected.optimizer_states import StateBytes
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup, compute_expected
from zerotop.analysis.sweeps.baseline import Baseline, NoBaselineError, read_baseline
from zerotop.analysis.sweeps.grading import ask_for, is_same_job
from zerotop.analysis.sweeps.phase_times import PhaseTimes
from zerotop.analysis.sweeps.recorded_moments import MicroStep
from zerotop.analysis.sweeps.seen_errors import RUNS, count_tokens, list_changes
from zerotop.analysis.sweeps.what_if import change_setup, predict_memory
from zerotop.analysis.sweeps.what_if_time import predict_time
from zerotop.recording.reader import Recording

_RUNS = Path(__file__).with_name("what_if_runs.jsonl")
_RECORDINGS = Path(__file__).parent.parent / "tests" / "recordings"
# Their memory changes during the run for a reason that was planted, or a switch of dtype or of checkpointing was.
_PLANTED = (
    "leak",
    "fp32",
    "logits_kept",
    "checkpointing_off",
    "ctx0",
    "streams",
    "lines-",
    "foreach",
    "counted",
    "unfreeze",
)
# Recordings whose batch or length changes before a step: both settings count.
_CHANGES = {"bigger": 24, "longer": 24, "gpu-long": 20}


def read_baselines(folders: Sequence[Path]) -> Iterator[tuple[str, Baseline]]:
    """Yield the settings of all recordings of training on a GPU, by name."""
    for path in sorted(path for folder in folders for path in folder.glob("*.zerotop")):
        if any(word in path.stem for word in _PLANTED) or path.stem.startswith("h-"):  # as hand-, in the tests
            continue
        for step in (None, _CHANGES.get(path.stem)):
            try:
                found = read_baseline(Recording.open(path), step)
            except NoBaselineError:
                continue
            yield path.stem + (f" until step {step}" if step else ""), found
            if path.stem not in _CHANGES:
                break


def parse_run(line: str) -> tuple[str, Baseline]:
    """Return the name and the measurements of one line of ``what_if_runs.jsonl``."""
    facts = json.loads(line)
    name, shape = facts.pop("run"), facts["shape"]
    if shape is not None:
        shape = ModelShape(**shape | {"kept": shape["kept"] and KeptBytes(**shape["kept"])})
        shape = replace(shape, counted=shape.counted and Layers(**shape.counted))
    setup, times = facts["setup"], facts["times"]
    loop = setup["loop_state"] and StateBytes(**setup["loop_state"])
    facts |= {
        "rules": AllocatorRules(**facts.get("rules") or {}),
        "shape": shape,
        "setup": EngineSetup(**setup | {"loop_state": loop}),
        "work": Workload(**facts["work"]),
    }
    facts |= {"times": times and PhaseTimes(**times)}
    return name, Baseline(**facts | {part: MicroStep(**facts[part]) for part in ("first", "last")})


def is_disturbed(*names: str) -> bool:
    """Return whether the time of a recording was changed on purpose."""
    words = ("slow", "gc", "late", "straggler", "empty", "save", "threads", "generate", "others")
    return any(word in name for name in names for word in words)


def name_change(one: Baseline, other: Baseline) -> str:
    """Return what differs, the hardest first; "" if nothing does."""
    return next(list_changes((one.setup, one.work), (other.setup, other.work)), "")


Key = tuple[object, ...]


def describe_setting(base: Baseline) -> Key:
    """Return what two recordings of one setting share."""
    setup, work = base.setup, base.work
    zero = (setup.stage, setup.offload_optimizer, setup.offload_parameters, setup.ranks)
    return (setup.parameters, base.gpu, *zero, work.micro_batch, work.sequence, work.accumulation, work.checkpointing)


def list_figures(base: Baseline, target: Baseline, is_timed: bool) -> Iterator[tuple[str, Interval, float, float]]:
    """Yield the name, the prediction, the truth and the peer's answer of each figure."""
    setup, work = ask_for(base, target)
    memory = predict_memory(base, setup, work)
    states = [sum(compute_expected(one).gpu.values()) for one in (base.setup, target.setup)]
    ratio = count_tokens(target.work) / count_tokens(base.work)
    peer = states[1] + (base.peak - states[0]) * ratio
    yield "allocated", memory.allocated, target.peak, peer
    yield "reserved", memory.reserved, target.reserved, base.reserved - base.peak + peer
    if base.nvml and target.nvml:
        yield "NVML", memory.device, target.nvml, base.nvml - base.peak + peer
        truth = target.peak + target.nvml - target.reserved
        yield "needed", Interval(0, memory.needed, memory.needed, ""), truth, base.nvml - base.reserved + peer
    if base.host_rss and target.host_rss:
        host = [sum(compute_expected(one).host.values()) for one in (base.setup, target.setup)]
        yield "host", memory.host, target.host_rss, base.host_rss - host[0] + host[1]
    time = predict_time(base, setup, work, target.nodes)
    if is_timed and time.rows and base.times is not None and target.times is not None:
        low, likely, high = time.seconds
        share = ratio * work.accumulation / base.work.accumulation
        yield "time", Interval(low, likely, high, ""), target.times.iteration, share * base.times.iteration


class TimedPair(NamedTuple):
    """A predicted time beside that of a run."""

    change: str  # "" if nothing differs
    group: str  # the model, and whether the run is of the recordings or of estimate_truths.jsonl
    setting: Key  # of both
    seconds: tuple[float, float, float]
    truth: float

    @property
    def error(self) -> float:
        """The logarithm of the truth by the prediction."""
        return log(self.truth / self.seconds[1])


def pair_times(runs: Sequence[tuple[str, Baseline]], kind: str | None) -> Iterator[TimedPair]:
    """Yield recordings with runs of which only settings and the time of a step are known.

    They ran the same model with DeepSpeed on the same type of GPU; if nothing changes, they tell the spread between runs.
    """
    for row in read_rows():
        seconds, offload = row["measured"].get("step_seconds"), row.get("offload", "none")
        if not seconds or kind not in (None, "held-out" if is_held_out(row) else "tuned"):
            continue
        for name, base in runs:
            key = (row["params"], row["framework"], row.get("gpu"))
            if base.setup.is_loop or key != (base.setup.parameters, "deepspeed", base.gpu.removeprefix("NVIDIA ")):
                continue
            setup = change_setup(replace(base.setup, ranks=row["gpus_per_node"]), row["stage"], offload)
            sizes = {
                "micro_batch": row["micro_batch"],
                "sequence": row["seq_len"],
                "accumulation": row.get("accumulation", 1),
            }
            work = replace(base.work, checkpointing=row.get("checkpointing", "none"), **sizes)
            time, target = predict_time(base, setup, work, 1), replace(base, setup=setup, work=work)
            if time.rows and not is_disturbed(name):
                settings = (*describe_setting(base), row["id"])
                yield TimedPair(
                    name_change(base, target), f"{base.setup.parameters}, truths", settings, time.seconds, seconds
                )


def pair_recordings(runs: Sequence[tuple[str, Baseline]]) -> Iterator[TimedPair]:
    """Yield predicted and measured times for pairs of recordings of the same job, without those held out."""
    for (name, base), (target_name, target) in permutations(runs, 2):
        if {name, target_name} & HELD_OUT or is_disturbed(name, target_name) or not is_same_job(base, target):
            continue
        try:
            time = predict_time(base, *ask_for(base, target), target.nodes)
        except NoBaselineError:
            continue
        if time.rows and target.times is not None and "hang" not in name:
            settings, group = (*describe_setting(base), *describe_setting(target)), f"{base.setup.parameters}, recordings"
            yield TimedPair(name_change(base, target), group, settings, time.seconds, target.times.iteration)


def find_quantile(pairs: Sequence[TimedPair], share: float = 0.9) -> float:
    """Return the error that a share of the pairs is below; those of the same two settings count once."""
    counts = Counter(pair.setting for pair in pairs)
    weights = sorted((abs(pair.error), 1 / counts[pair.setting]) for pair in pairs)
    total = sum(weight for _, weight in weights)
    below = accumulate(weight for _, weight in weights)
    return next(error for (error, _), sum_ in zip(weights, below, strict=True) if sum_ >= share * total * 0.999)


def calibrate(pairs: Sequence[TimedPair]) -> None:
    """Print how far 90 % of the predictions of each group were off, and how many of a group the others' error would hold."""
    print("| what changes | groups | pairs | 90 % of errors by group | the most | of a group in that of the others |")
    print("|---|---|---|---|---|---|")
    kinds = sorted({pair.change for pair in pairs})
    for change in kinds:
        groups: dict[str, list[TimedPair]] = defaultdict(list)
        for pair in pairs:
            if pair.change == change:
                groups[pair.group].append(pair)
        errors = {name: find_quantile(own) for name, own in groups.items()}
        held = [
            abs(pair.error) <= max(RUNS, *(size for other, size in errors.items() if other != name), 0.0)
            for name, own in groups.items()
            for pair in own
        ]
        sizes = ", ".join(f"{size:.2f}" for size in errors.values())
        share = f"{statistics.mean(held):.0%}" if len(groups) > 1 and change else ""
        most = max(errors.values())
        print(f"| {change or 'nothing'} | {len(groups)} | {len(held)} | {sizes} | {most:.2f} | {share} |")


def grade_times(pairs: Sequence[TimedPair]) -> None:
    """Print the errors, and how often the interval held the truth."""
    print("| what changes | pairs of runs | mean | median | max | in the interval |")
    print("|---|---|---|---|---|---|")
    for change in sorted({pair.change for pair in pairs}):
        own = [pair for pair in pairs if pair.change == change]
        sizes = [abs(pair.seconds[1] / pair.truth - 1) for pair in own]
        text = " | ".join(f"{100 * one:.1f} %" for one in (statistics.mean(sizes), statistics.median(sizes), max(sizes)))
        inside = statistics.mean(pair.seconds[0] <= pair.truth <= pair.seconds[2] for pair in own)
        print(f"| {change or 'nothing'} | {len(own)} | {text} | {inside:.0%} |")


def grade_recordings(runs: Sequence[tuple[str, Baseline]], kind: str | None, *, with_rows: bool) -> None:
    """Print the errors of recordings that predict each other."""
    errors: dict[tuple[str, str], dict[Key, list[tuple[float, float, bool]]]] = defaultdict(lambda: defaultdict(list))
    for (name, base), (target_name, target) in permutations(runs, 2):
        change = name_change(base, target)
        own_kind = "held-out" if {name, target_name} & HELD_OUT else "tuned"
        if not change or not is_same_job(base, target) or kind not in (None, own_kind):
            continue
        try:
            figures = list(list_figures(base, target, not is_disturbed(name, target_name)))
        except NoBaselineError:
            continue
        for figure, part, truth, peer in figures:
            error, inside = part.likely / truth - 1, part.low * 0.999 <= truth <= part.high * 1.001
            pair = (*describe_setting(base), *describe_setting(target))
            errors[figure, change][pair].append((abs(error), abs(peer / truth - 1), inside))
            if with_rows:
                unit = 1 if figure == "time" else 1e9
                sizes = f"{part.likely / unit:8.2f}{truth / unit:8.2f}{error:+8.1%}{'' if inside else '  outside'}"
                print(f"{change:22}{name:40}{target_name:40}{figure:10}{sizes}")
    print("| | what changes | pairs of settings | mean | median | 95 % | max | in the interval | peer: mean |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (figure, change), groups in sorted(errors.items()):
        # Recordings of the same two settings count once.
        means = [[statistics.mean(column) for column in zip(*values, strict=True)] for values in groups.values()]
        sizes = sorted(mean[0] for mean in means)
        figures_of = (statistics.mean(sizes), statistics.median(sizes), sizes[int(0.95 * len(sizes))], sizes[-1])
        text = " | ".join(f"{100 * one:.1f} %" for one in figures_of)
        inside_share, peer_mean = (statistics.mean(mean[place] for mean in means) for place in (2, 1))
        if figure == "needed":  # of interest is only whether it is enough
            text = " | ".join([""] * 4)
        print(f"| {figure} | {change} | {len(sizes)} | {text} | {inside_share:.0%} | {100 * peer_mean:.1f} % |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", nargs="+", type=Path, metavar="FOLDER", help="keep what recordings in folders measured")
    parser.add_argument("--rows", action="store_true", help="print each pair")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name has it")
    parser.add_argument("--times", action="store_true", help="grade with the step times of estimate_truths.jsonl alone")
    parser.add_argument("--calibrate", action="store_true", help="print errors of tuned times, which intervals are made of")
    parser.add_argument("--kind", choices=("tuned", "held-out"), help="pairs without or with a run that is held out")
    options = parser.parse_args()
    if options.write:
        lines = {json.loads(line)["run"]: line for line in _RUNS.read_text().splitlines()}
        found = ((name, replace(base, failure=None, leak=None)) for name, base in read_baselines(options.write))
        lines |= {name: json.dumps({"run": name, **asdict(base)}) for name, base in found}
        _RUNS.write_text("\n".join(lines.values()) + "\n")
        return
    runs = [*read_baselines([_RECORDINGS]), *map(parse_run, _RUNS.read_text().splitlines())]
    runs = [run for run in runs if options.only in run[0]]
    if options.times:
        grade_times([*pair_times(runs, options.kind)])
        return
    if options.calibrate:
        calibrate([*pair_recordings(runs), *pair_times(runs, "tuned")])
        return
    grade_recordings(runs, options.kind, with_rows=options.rows)


if __name__ == "__main__":
    main()

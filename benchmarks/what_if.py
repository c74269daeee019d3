"""Grade ``zerotop what-if``: predict a recorded run from another recording of the same model at another setting.

    python benchmarks/what_if.py [FOLDER...]    # the tables; FOLDER: more recordings, packed
    python benchmarks/what_if.py --rows         # each pair, too

All recordings of one model on GPUs of one type make pairs, in both directions. The peer is what a user would do without it:
the measured figure, with the states exchanged by ZeRO's formulas and nothing else (``--peer`` prints it beside).
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

from zerotop.analysis.memory.expected.beyond_allocated import Interval
from zerotop.analysis.memory.expected.zero_model import compute_expected
from zerotop.analysis.sweeps.baseline import Baseline, NoBaselineError, read_baseline
from zerotop.analysis.sweeps.what_if import predict_memory
from zerotop.analysis.sweeps.what_if_time import predict_time
from zerotop.session.reader import Session

_ROOT = Path(__file__).parent.parent
_FOLDERS = (_ROOT / "tests" / "recordings", _ROOT.parent.parent / "shared" / "recordings")
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
        if any(word in path.stem for word in _PLANTED) or path.stem.startswith("h-"):
            continue
        for step in (None, _CHANGES.get(path.stem)):
            try:
                found = read_baseline(Session.open(path), step)
            except NoBaselineError:
                continue
            yield path.stem + (f" until step {step}" if step else ""), found
            if path.stem not in _CHANGES:
                break


def is_disturbed(*names: str) -> bool:
    """Return whether the time of a recording was changed on purpose."""
    words = ("slow", "gc", "late", "straggler", "empty", "save", "threads", "generate", "others")
    return any(word in name for name in names for word in words)


def name_change(one: Baseline, other: Baseline) -> str:
    """Return what differs, the hardest first; "" if nothing does."""
    if one.setup.ranks != other.setup.ranks:
        return "GPUs"
    if one.setup.stage != other.setup.stage:
        return "stage"
    if (one.setup.offload_optimizer, one.setup.offload_parameters) != (
        other.setup.offload_optimizer,
        other.setup.offload_parameters,
    ):
        return "offload"
    if one.work.checkpointing != other.work.checkpointing:
        return "checkpointing"
    if (one.work.micro_batch, one.work.sequence) != (other.work.micro_batch, other.work.sequence):
        return "batch, length"
    return "accumulation" if one.work.accumulation != other.work.accumulation else ""


def is_same_job(one: Baseline, other: Baseline) -> bool:
    """Return whether two settings are of one model, library and type of GPU."""
    keys = [(b.setup.parameters, b.setup.trainable, b.setup.is_loop, b.setup.bytes_each, b.gpu) for b in (one, other)]
    return keys[0] == keys[1]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="with more recordings")
    parser.add_argument("--rows", action="store_true", help="print each pair")
    options = parser.parse_args()
    settings = list(read_baselines([*_FOLDERS, *options.folders]))
    errors: dict[tuple[str, str], list[tuple[float, float, bool]]] = defaultdict(list)
    fits = [0, 0]
    for (name, base), (target_name, target) in permutations(settings, 2):
        change = name_change(base, target)
        if not change or not is_same_job(base, target):
            continue
        try:
            names = ("stage", "offload_optimizer", "offload_parameters", "ranks")
            setup = replace(base.setup, **{name: getattr(target.setup, name) for name in names})
            work = replace(target.work, foreach=base.work.foreach)
            memory = predict_memory(base, setup, work)
        except NoBaselineError:
            continue
        states = [sum(compute_expected(one).gpu.values()) for one in (base.setup, target.setup)]
        peers = base.peak - states[0] + states[1]
        figures = [("allocated", memory.allocated, target.peak, peers)]
        figures.append(("reserved", memory.reserved, target.reserved, base.reserved - base.peak + peers))
        if base.nvml and target.nvml:
            figures.append(("NVML", memory.device, target.nvml, base.nvml - base.peak + peers))
        if base.host_rss and target.host_rss:
            figures.append(("host", memory.host, target.host_rss, base.host_rss))
        time = predict_time(base, setup, work, target.nodes)
        if time.rows and base.times is not None and target.times is not None and not is_disturbed(name, target_name):
            low, likely, high = time.seconds
            seconds = target.times.iteration
            share = work.tokens * work.accumulation / max(1, base.work.tokens * base.work.accumulation)
            figures.append(("time", Interval(low, likely, high, ""), seconds, share * base.times.iteration))
        for figure, part, truth, peer in figures:
            error = part.likely / truth - 1
            errors[figure, change].append(
                (abs(error), abs(peer / truth - 1), part.low * 0.999 <= truth <= part.high * 1.001)
            )
            unit = 1 if figure == "time" else 1e9
            if options.rows:
                sizes = f"{part.likely / unit:8.2f}{truth / unit:8.2f}{error:+8.1%}"
                print(f"{change:14}{name:26}{target_name:26}{figure:10}{sizes}")
        fits[0] += 1
    print("| | what changes | pairs | mean | median | max | in the interval | states exchanged: mean |")
    print("|---|---|---|---|---|---|---|---|")
    for (figure, change), values in sorted(errors.items()):
        sizes = sorted(value[0] for value in values)
        text = " | ".join(f"{100 * one:.1f} %" for one in (statistics.mean(sizes), statistics.median(sizes), sizes[-1]))
        inside, peer = sum(value[2] for value in values) / len(values), statistics.mean(value[1] for value in values)
        print(f"| {figure} | {change} | {len(values)} | {text} | {inside:.0%} | {100 * peer:.1f} % |")


if __name__ == "__main__":
    main()

"""Replay a recorded step through the simulated allocator, beside PyTorch's own counters of that job.

    python benchmarks/allocator_replay.py

The job: Qwen2 0.5 B in ZeRO-2 on one H200, of which the microscope recorded every allocation of step 23
(``tests/recordings/gpu-microscope.zerotop``). The simulation starts as the job did, by DeepSpeed's source, and then runs
that step three times. The trace has no streams: of it the gradient partition alone is DeepSpeed's reduction stream's,
since ``overlap_comm`` is on. Neither has it what only a first step allocates: the workspaces of cuBLAS, as the recording's
inventory shows them, and the optimizer's states.

The second table has what ``estimate`` says from a model's formulas and the recorded settings alone, of jobs with PyTorch's
counters. The third one has what ``what-if`` says of each of them from each other of the same model, with a simulation of
both settings, and without it, as where a recording does not have the model's layers.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import numpy as np
from what_if import ask_for, name_change

from zerotop.analysis.memory.caching_allocator import AllocatorRules, Block, CachingAllocator
from zerotop.analysis.memory.expected.beyond_allocated import estimate_memory
from zerotop.analysis.memory.expected.model_shape import parse_shape
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.step_blocks import REDUCTION, WORKSPACE, StepReplay
from zerotop.analysis.memory.expected.zero_model import TrainedModel
from zerotop.analysis.sweeps.baseline import read_baseline
from zerotop.analysis.sweeps.estimates import Hardware, build_setup
from zerotop.analysis.sweeps.what_if import predict_memory
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import HISTORY_ACTIONS, PHASES

_RECORDING = Path(__file__).parents[1] / "tests" / "recordings" / "gpu-microscope.zerotop"
_QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "vocab_size": 32000,
}
# Without evaluation before the counters' highest value; "z2-fp16" skips its first steps.
JOBS: dict[str, dict[str, object]] = {
    **dict.fromkeys(("gpu-microscope", "z2", "z2-expandable", "z2-offload", "gpu-offload-110", "gpu-offload-4"), _QWEN2),
    **dict.fromkeys(("gpu-z3-all", "z3-offload-all", "x4-z3"), _QWEN2),
    "x2-zero3": _LLAMA,
}
_FIRST_STEPS = 5
_PARAMETERS, _ROWS, _TOKENS = 494_032_768, 4, 2048
_LAST = 2  # the column ``edge`` of a reading at the end of a phase
_ALLOC, _FREE = HISTORY_ACTIONS.index("alloc"), HISTORY_ACTIONS.index("free_completed")


@dataclass(frozen=True, slots=True)
class Reading:
    """The allocator's counters at one moment: PyTorch's, or the simulation's."""

    moment: str
    reserved: int
    segments: int
    peak: int  # of allocated bytes in the phase


def read_counters(recording: Recording) -> list[Reading]:
    """Return PyTorch's counters before and in the first step, in which reserved memory came to its height."""
    rows = recording.sources["allocator"][0].array
    rows = rows[rows["step"] == 0]
    readings = [_read_row("start", rows[0])]
    for phase in ("forward", "backward", "step"):
        ends = rows[(rows["phase"] == PHASES.index(phase)) & (rows["edge"] == _LAST)]
        readings.append(_read_row(phase, ends[-1]))
    return readings


def _read_row(moment: str, row: np.void) -> Reading:
    return Reading(moment, int(row["reserved_bytes"]), int(row["segments"]), int(row["allocated_peak_bytes"]))


def read_operations(recording: Recording) -> list[tuple[int, int, int]]:
    """Return action, address and size of every allocation and free of the recorded step."""
    rows = recording.sources["history"][0].array
    rows = rows[np.isin(rows["action"], (_ALLOC, _FREE))]
    return list(zip(rows["action"].tolist(), rows["address"].tolist(), rows["size_bytes"].tolist(), strict=True))


def simulate(operations: list[tuple[int, int, int]]) -> Iterator[Reading]:
    """Yield the simulation's counters at the moments of :func:`read_counters`, and after two more steps."""
    shape = parse_shape(_QWEN2)
    assert shape is not None
    setup = build_setup(TrainedModel(_PARAMETERS, _PARAMETERS, None), Hardware(), 2, "none")
    replay = StepReplay(shape, setup, Workload(_ROWS, _TOKENS // _ROWS), AllocatorRules())
    replay.start()
    allocator = replay.allocator
    yield _read(allocator, "start")
    for step in range(3):
        yield from _replay_step(replay, operations, is_first=step == 0)
    yield _read(allocator, "two more steps")


def _replay_step(replay: StepReplay, operations: list[tuple[int, int, int]], *, is_first: bool) -> Iterator[Reading]:
    allocator = replay.allocator
    sizes = [size if action == _ALLOC else 0 for action, _, size in operations]
    loss = [index for index, size in enumerate(sizes) if size == 4 * _TOKENS * _QWEN2["vocab_size"]][2]  # its gradient
    head = sizes.index(2 * _QWEN2["vocab_size"] * _QWEN2["hidden_size"], loss)
    partition = next(index for index, size in enumerate(sizes) if abs(size - 2 * _PARAMETERS) < 1 << 20)
    update = sizes.index(4 * _PARAMETERS)
    alive: dict[int, Block] = {}
    if is_first:
        allocator.allocate(WORKSPACE)
    for index, (action, address, size) in enumerate(operations):
        if action == _FREE:
            if address in alive:
                allocator.free(alive.pop(address))
            continue
        if is_first and index in (loss, update):
            yield _read(allocator, "forward" if index == loss else "backward")
        alive[address] = allocator.allocate(size, stream=REDUCTION if index == partition else 0)
        if is_first and index == head:
            allocator.allocate(WORKSPACE)
        if is_first and index == update:
            replay.make_states()
    if is_first:
        yield _read(allocator, "step")
    for block in alive.values():
        allocator.free(block)


def _read(allocator: CachingAllocator, moment: str) -> Reading:
    reading = Reading(moment, allocator.reserved, allocator.segments, allocator.allocated_peak)
    allocator.reset_peaks()
    return reading


def estimate_job(name: str) -> tuple[int, float]:
    """Return PyTorch's reserved peak of a job's first steps, and the estimate."""
    recording = Recording.open(_RECORDING.with_name(f"{name}.zerotop"))
    recording.refresh()
    rows = recording.sources["allocator"][0].array
    base, shape = read_baseline(recording), parse_shape(JOBS[name])
    assert shape is not None
    memory = estimate_memory(shape, base.setup, base.work, rules=base.rules)
    return int(rows["reserved_peak_bytes"][rows["step"] < _FIRST_STEPS].max()), memory.reserved.likely


def predict_pairs() -> dict[str, list[tuple[float, float]]]:
    """Return by what changes the errors of what-if's reserved memory of each pair, without a simulation and with it."""
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    bases = []
    for name in JOBS:
        recording = Recording.open(_RECORDING.with_name(f"{name}.zerotop"))
        recording.refresh()
        base = read_baseline(recording)
        if not base.rules.expandable_segments:
            bases.append(replace(base, shape=parse_shape(JOBS[name])))
    for base, target in permutations(bases, 2):
        change = name_change(base, target)
        if base.setup.parameters == target.setup.parameters and change:
            asked = ask_for(base, target)
            both = (predict_memory(one, *asked).reserved.likely for one in (replace(base, shape=None), base))
            without, simulated = (abs(likely / target.reserved - 1) for likely in both)
            errors[change].append((without, simulated))
    return errors


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    recording = Recording.open(_RECORDING)
    recording.refresh()
    counted = {reading.moment: reading for reading in read_counters(recording)}
    counted["two more steps"] = counted["step"]
    print("| after | reserved, PyTorch | simulated | | segments, PyTorch | simulated |\n|---|---|---|---|---|---|")
    for reading in simulate(read_operations(recording)):
        truth = counted[reading.moment]
        error = reading.reserved / truth.reserved - 1
        print(
            f"| {reading.moment} | {truth.reserved:,} | {reading.reserved:,} | {error:+.2%}"
            f" | {truth.segments} | {reading.segments} |"
        )
    print("\n| job | reserved, PyTorch | estimated | |\n|---|---|---|---|")
    for name in JOBS:
        measured, likely = estimate_job(name)
        print(f"| {name} | {measured / 1e9:.2f} GB | {likely / 1e9:.2f} GB | {likely / measured - 1:+.1%} |")
    print("\n| what changes | pairs | without simulation: mean | most | simulated: mean | most |\n|---|---|---|---|---|---|")
    for change, pairs in predict_pairs().items():
        figures = [figure for column in zip(*pairs, strict=True) for figure in (statistics.mean(column), max(column))]
        print(f"| {change} | {len(pairs)} | " + " | ".join(f"{figure:.1%}" for figure in figures) + " |")


if __name__ == "__main__":
    main()

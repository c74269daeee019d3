"""A line that makes a new iterator of a DataLoader in each step: its sampler begins again, and so do its workers."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.code_line import find_own
from zerotop.analysis.findings.support.causes.loader_causes import LoaderCause
from zerotop.analysis.findings.support.evidence import Process
from zerotop.analysis.findings.support.lines.stack_lines import StackLine
from zerotop.analysis.formatting import Text
from zerotop_probe.recording.events import SampledFrame, SampledStack, Stacks
from zerotop_probe.recording.tables import ANOTHER_ITERATOR

CAUSE = LoaderCause(
    Text("a new iterator of the DataLoader is made there in each step", {}),
    (
        "Make the iterator once, before the loop, and keep it: each new one at {location} begins with a whole pass of its"
        " sampler, or with new workers.",
        "batches = iter(loader)",
    ),
)
_LOADER_FILES, _SAMPLERS, _LOADERS = "torch/utils/data/", "torch/utils/data/sampler.py", "torch/utils/data/dataloader.py"
# What a sampler calls once in each pass, to shuffle, and functions that make an iterator.
_SHUFFLES = ("tolist", "torch.randperm", "randperm", "torch.Tensor.tolist")
_STARTS = (
    "DataLoader.__iter__",
    "DataLoader._get_iterator",
    "_BaseDataLoaderIter.__init__",
    "_SingleProcessDataLoaderIter.__init__",
    "_MultiProcessingDataLoaderIter.__init__",
)
# Steps and samples that show it, and the least share of the time in loaders that it takes.
_FEWEST_STEPS, _FEWEST_SAMPLES, _LEAST_SHARE = 3, 3, 0.5


def find_new_iterators(process: Process, begin_ns: int, end_ns: int) -> StackLine | None:
    """Return the line at which most time in loaders goes to new iterators, if those of all steps in a window are new."""
    if not _are_all_new(process, begin_ns, end_ns):
        return None
    total, samples = 0.0, 0
    lines: dict[tuple[str, int, str], float] = {}
    for event in process.events_of(Stacks):
        is_within = begin_ns <= event.begin_ns + process.source.offset_ns and event.unix_ns <= end_ns
        for stack in event.stacks if is_within else ():
            known = [event.frames[one] for one in stack.frames if 0 <= one < len(event.frames)]
            if stack.thread is not None or not any(_LOADER_FILES in frame.file for frame in known):
                continue
            total += stack.seconds or 0.0
            own = find_own(event.frames, stack) if _is_start(known, stack) else None
            if own is not None:
                lines[own[:3]] = lines.get(own[:3], 0.0) + (stack.seconds or 0.0)
                samples += stack.count or 0
    if samples < _FEWEST_SAMPLES:
        return None
    line = max(lines, key=lambda one: lines[one])
    share = lines[line] / max(total, 1e-9)
    if share < _LEAST_SHARE:
        return None
    return StackLine(*line, (), lines[line], share, is_on_gpu=process.is_on_gpu)


def _are_all_new(process: Process, begin_ns: int, end_ns: int) -> bool:
    """Whether the longest fetch of each step is from another iterator than that of the step before."""
    rows = process.read_phases(begin_ns, end_ns, "data").rows
    if not len(rows):
        return False
    longest = rows[np.argsort(rows["end_ns"] - rows["begin_ns"], kind="stable")[::-1]]
    steps, first = np.unique(longest["step"], return_index=True)
    return len(steps) >= _FEWEST_STEPS and bool(np.all(longest["flags"][first] & ANOTHER_ITERATOR))


def _is_start(frames: list[SampledFrame], stack: SampledStack) -> bool:
    inner = frames[0]
    is_shuffle = inner.file.endswith(_SAMPLERS) and inner.function.endswith(".__iter__") and stack.call in _SHUFFLES
    return is_shuffle or any(frame.file.endswith(_LOADERS) and frame.function in _STARTS for frame in frames)

"""A slowdown since which other code runs, on a real recording with stacks written into it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import recordings
from declared_events import check_event
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.findings.support.causes.code_causes import find_new_forward
from zerotop.recording.reader import Recording

TRAIN = ("train.py", 49, "main", True)
CALL = ("torch/_dynamo/eval_frame.py", 1024, "_TorchDynamoContext.__call__.<locals>.compile_wrapper", False)
LOSS = ("train.py", 37, "objective", True)
RUN = ("torch/_inductor/output_code.py", 656, "CompiledFxGraph.__call__", False)
MODULE = ("torch/nn/modules/module.py", 1790, "Module._call_impl", False)
COMPILED = [RUN, CALL, LOSS, CALL, TRAIN]
EAGER = [MODULE, LOSS, TRAIN]
BACKWARD = [("torch/_tensor.py", 631, "Tensor.backward", False), TRAIN]

Stack = list[tuple[str, int, str, bool]]


@pytest.mark.parametrize(
    ("before", "since", "found"),
    [
        ([(COMPILED, 9)], [(EAGER, 8)], True),
        ([(COMPILED, 9)], [(EAGER, 8), (COMPILED, 1)], False),  # it is still called
        ([(COMPILED, 9)], [(EAGER, 7)], False),  # it may have been missed
        ([(COMPILED, 9)], [(BACKWARD, 50)], False),  # what is called is unknown
        ([(COMPILED, 5), (EAGER, 6)], [(EAGER, 8)], False),  # most of it never was compiled
        ([(EAGER, 9)], [(EAGER, 8)], False),
    ],
)
def test_code_that_is_no_longer_compiled(
    tmp_path: Path, before: list[tuple[Stack, int]], since: list[tuple[Stack, int]], found: bool
) -> None:
    shift = add_samples(tmp_path, before, since)
    assert ("train.py:49 ran code of torch.compile in 9 samples before" in shift.details) == found
    assert (shift.fix == "train.py:49") == found


def run_model(line: int) -> Stack:
    return [MODULE, ("train.py", line, "sample", True), TRAIN]


@pytest.mark.parametrize(
    ("before", "since", "found"),
    [
        ([(run_model(28), 9)], [(run_model(26), 8)], True),
        ([(run_model(28), 9), (BACKWARD, 9)], [(run_model(26), 8), (BACKWARD, 8)], True),
        ([(run_model(28), 9)], [(run_model(26), 8), (BACKWARD, 9)], False),  # it takes less than half of the time
        ([(run_model(28), 9), (run_model(26), 1)], [(run_model(26), 8)], False),  # it ran before
        ([(run_model(28), 9)], [(run_model(26), 8), (run_model(28), 1)], False),  # the old line still runs
        ([(run_model(28), 9)], [(run_model(26), 7)], False),  # the old line may have been missed
        ([(run_model(28)[1:], 9)], [(run_model(26)[1:], 8)], False),  # lines of a function take turns
    ],
)
def test_a_line_that_runs_in_place_of_another_one(
    tmp_path: Path, before: list[tuple[Stack, int]], since: list[tuple[Stack, int]], found: bool
) -> None:
    shift = add_samples(tmp_path, before, since)
    assert ("; at the same time train.py:26 began to run in place of line 28." in shift.details) == found
    assert (shift.fix == "train.py:26") == found


def add_samples(tmp_path: Path, before: list[tuple[Stack, int]], since: list[tuple[Stack, int]]) -> Finding:
    """Write samples before and since the slowdown of a recording, and return the finding about it."""
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    (known,) = find_shifts(Recording.open(folder))
    (source,) = Recording.open(folder).sources["spans"]
    changed_ns, known_ns = known.begin_ns - source.offset_ns, known.known_ns - source.offset_ns
    (path,) = folder.glob("events-rank0-*.jsonl")
    with path.open("a") as file:
        for stacks, begin_ns, end_ns in ((before, changed_ns - 10**9, changed_ns), (since, changed_ns, known_ns)):
            frames = list(dict.fromkeys(frame for inside, _ in stacks for frame in inside))
            event = {
                "time_ns": end_ns,
                "event": "stacks",
                "where": "between phases",
                "why": "share",
                "begin_ns": begin_ns,
                "end_ns": end_ns,
                "frames": [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in frames],
                "stacks": [
                    {"count": count, "seconds": 0.01, "frames": [frames.index(frame) for frame in inside]}
                    for inside, count in stacks
                ],
            }
            check_event(event)
            file.write(json.dumps(event) + "\n")
    return find_shifts(Recording.open(folder))[-1]


def find_shifts(recording: Recording) -> list[Finding]:
    return [one for one in detect_findings(recording, recording.end_ns) if one.name == "iteration_shift"]


@pytest.mark.parametrize(
    ("before", "since", "found"),
    [
        ([(EAGER, 20)], [(EAGER, 10), (run_model(26), 4)], 26),
        ([(EAGER, 9)], [(EAGER, 10), (run_model(26), 4)], None),  # it may have been missed before
        ([(EAGER, 20), (run_model(26), 1)], [(EAGER, 10), (run_model(26), 4)], None),  # it ran before
        ([(EAGER, 40)], [(EAGER, 10), (run_model(26), 2)], None),
        ([(EAGER, 20), (run_model(26), 10)], [(EAGER, 10), (run_model(26), 40)], 26),  # it runs more often
        ([(EAGER, 20), (run_model(26), 10)], [(EAGER, 40), (run_model(26), 20)], None),  # all takes longer
        ([(EAGER, 40)], [(BACKWARD, 40)], None),
    ],
)
def test_the_line_of_a_new_forward(
    before: list[tuple[Stack, int]], since: list[tuple[Stack, int]], found: int | None
) -> None:
    known = [make_sampled(begin, stacks) for begin, stacks in ((0, before), (10, since))]
    process = SimpleNamespace(source=SimpleNamespace(offset_ns=0), events_of=lambda kind: known)
    change = SimpleNamespace(process=process, after={"begin_unix_ns": [10]}, latest_ns=20)
    line = find_new_forward(cast(Any, change), cast(Any, process))
    assert (line.line if line is not None else None) == found


def make_sampled(begin_ns: int, stacks: list[tuple[Stack, int]]) -> Any:
    frames = [SimpleNamespace(file=one[0], line=one[1], function=one[2], own=one[3]) for stack, _ in stacks for one in stack]
    begins = np.cumsum([0, *(len(stack) for stack, _ in stacks)])
    counted = [
        SimpleNamespace(frames=list(range(begin, end)), count=count)
        for (begin, end), (_, count) in zip(pairwise(begins.tolist()), stacks, strict=True)
    ]
    times = {"begin_ns": begin_ns, "end_ns": begin_ns + 5, "unix_ns": begin_ns + 5}
    return SimpleNamespace(why="share", frames=frames, stacks=counted, **times)

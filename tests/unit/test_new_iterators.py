"""A line that makes a new iterator of a DataLoader in each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from small_recording import make_identity
from zerotop.analysis.findings.support import Process
from zerotop.analysis.findings.support.causes.new_iterators import find_new_iterators
from zerotop_probe.recording.events import Stacks
from zerotop_probe.recording.tables import ANOTHER_ITERATOR

LOADER = "torch/utils/data/dataloader.py"
NEXT = (LOADER, "_BaseDataLoaderIter.__next__")
SHUFFLES = ("tolist", [("torch/utils/data/sampler.py", "RandomSampler.__iter__"), NEXT])
STARTS = ("fork", [(LOADER, "_MultiProcessingDataLoaderIter.__init__"), (LOADER, "DataLoader.__iter__")])
LOADS = ("open", [("torch/utils/data/_utils/fetch.py", "_MapDatasetFetcher.fetch"), NEXT])
NEW, KEPT = ANOTHER_ITERATOR, 0


@pytest.mark.parametrize(
    ("flags", "calls", "is_found"),
    [
        ((NEW, NEW, NEW), (SHUFFLES, SHUFFLES, LOADS), True),
        ((NEW, NEW, NEW), (STARTS, STARTS, LOADS), True),
        ((NEW, KEPT, NEW), (SHUFFLES, SHUFFLES, LOADS), False),  # short epochs
        ((NEW, NEW, NEW), (LOADS, LOADS, SHUFFLES), False),  # two loaders in turns
        ((NEW, NEW), (SHUFFLES, SHUFFLES, SHUFFLES), False),
    ],
)
def test_new_iterators_are_seen(flags: tuple[int, ...], calls: tuple[tuple[str, Any], ...], is_found: bool) -> None:
    fetches = [(step, 0, 1, KEPT) for step in range(len(flags))]  # of another, kept loader
    fetches += [(step, 0, 30, flag) for step, flag in enumerate(flags)]
    rows = np.array(fetches, [("step", "i8"), ("begin_ns", "i8"), ("end_ns", "i8"), ("flags", "u2")])
    written = []
    for call, inner in calls:
        frames = [{"file": file, "line": 1, "function": name, "own": False} for file, name in inner]
        frames.append({"file": "train.py", "line": 55, "function": "<module>", "own": True})
        stack = {"frames": [*range(len(frames))], "call": call, "count": 2, "seconds": 0.1}
        facts = {"where": "data", "why": "share", "begin_ns": 10, "end_ns": 20, "frames": frames, "stacks": [stack]}
        written.append(Stacks(facts, 20, make_identity(0)))
    process = SimpleNamespace(
        source=SimpleNamespace(offset_ns=0),
        is_on_gpu=True,
        events_of=lambda kind: written,
        read_phases=lambda begin_ns, end_ns, name: SimpleNamespace(rows=rows),
    )
    line = find_new_iterators(cast(Process, process), 5, 30)
    assert (line is not None and line.location == "train.py:55") is is_found

"""Workers of a DataLoader that are started again in each step, by made-up events of the probe."""

from __future__ import annotations

from pathlib import Path

import pytest

from in_pieces import find_at_end
from small_recording import BEGIN_NS, S, make_identity, make_span, write_table
from zerotop.analysis.findings.pace import data_stall, restarted_workers
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, SPANS
from zerotop_probe.recording.writer import EventWriter

STEP_S = 0.2
FRAMES = [
    {
        "file": "torch/utils/data/dataloader.py",
        "line": 1200,
        "function": "_MultiProcessingDataLoaderIter.__init__",
        "own": False,
    },
    {"file": "train.py", "line": 12, "function": "main", "own": True},
]


def write_job(folder: Path, started: list[int], *, sampled: bool, waits: bool = False) -> None:
    """Write 40 steps of 0.2 s, 0.15 s of it before the forward, and starts of two workers in these steps.

    ``waits``: the first 0.1 s are in the data phase.
    """
    spans = []
    for step in range(40):
        at = step * STEP_S
        spans += [make_span(at, at + 0.1, "data", step)] if waits else []
        for phase, begin, end in (("forward", 0.15, 0.17), ("backward", 0.17, 0.19), ("step", 0.19, 0.2)):
            spans.append(make_span(at + begin, at + end, phase, step, BOUNDARY * (phase == "step")))
    write_table(folder, SPANS, make_identity(0), *spans).close()
    writer = EventWriter(str(folder), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    for step in started:
        at_ns = int((step * STEP_S + 0.05) * S)
        writer.write(at_ns, events.LoaderStarted, workers=[100 + step, 200 + step], dataset="Words")
        if sampled:
            stacks = [{"seconds": 0.1, "count": 1, "frames": [0, 1]}]
            times = {"begin_ns": at_ns, "end_ns": at_ns + S // 20, "step": step, "last_step": step, "samples": 1}
            writer.write(
                at_ns + S // 20, events.Stacks, where="between phases", why="share", frames=FRAMES, stacks=stacks, **times
            )
    writer.close()


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("first", [0, 20])
def test_workers_that_start_in_each_step_are_told_with_their_line(tmp_path: Path, first: int, sampled: bool) -> None:
    write_job(tmp_path, [0, *range(first or 1, 40)], sampled=sampled)
    (found,) = find_at_end(tmp_path, [restarted_workers.detect])
    assert found.step is not None
    assert abs(found.step - first) <= 1
    assert found.headline == "In each step 2 loader workers start again" + (": train.py:12" if sampled else "")
    assert found.named_line == ("train.py:12" if sampled else "")
    assert found.evidence["own_s"] == pytest.approx(0.15, rel=0.01)
    assert found.cost == pytest.approx(0.75, rel=0.01)


def test_the_wait_for_their_data_is_no_second_finding(tmp_path: Path) -> None:
    write_job(tmp_path, list(range(40)), sampled=True, waits=True)
    detectors = [data_stall.detect, restarted_workers.detect]
    assert [one.name for one in find_at_end(tmp_path, detectors[:1])] == ["data_stall"]
    assert [one.name for one in find_at_end(tmp_path, detectors)] == ["workers_restarted"]


@pytest.mark.parametrize("started", [[0], [0, 10, 20, 30], list(range(0, 40, 2)), list(range(6))])
def test_epochs_that_start_workers_are_no_finding(tmp_path: Path, started: list[int]) -> None:
    write_job(tmp_path, started, sampled=True)
    assert not find_at_end(tmp_path, [restarted_workers.detect])

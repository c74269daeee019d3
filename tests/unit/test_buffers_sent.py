"""DDP's transfer of buffers before each forward, in samples of both ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_recording import BEGIN_NS, S, make_identity, make_span, read_recording, write_table
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.reports.finding_costs import rank_findings
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, SPANS
from zerotop_probe.recording.writer import EventWriter

DDP = "torch/nn/parallel/distributed.py"


def write_rank(folder: Path, rank: int, inside: int, parallelism: str) -> None:
    """Write a rank with 40 samples of whole iterations, so many of them in the transfer."""
    spans = []
    for step in range(200):
        at = 0.05 * step
        spans += [make_span(at, at + 0.02, "forward", step), make_span(at + 0.02, at + 0.05, "step", step, BOUNDARY)]
    write_table(folder, SPANS, make_identity(rank), *spans).close()
    writer = EventWriter(str(folder), make_identity(rank), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Hello)
    writer.write(0, events.Engine, engine=0, kind="loop", parallelism=parallelism, rank=rank, world_size=2)
    frames = [
        {"file": DDP, "line": 9, "function": "DistributedDataParallel._sync_buffers", "own": False},
        {"file": "train.py", "line": 20, "function": "train", "own": True},
    ]
    stacks = [{"count": 40 - inside, "seconds": 1.0, "frames": [1]}, {"count": 30, "seconds": 1.0, "frames": []}]
    stacks += [{"count": inside, "seconds": 1.0, "frames": [0, 1]}] if inside else []
    facts = {"step": 10, "last_step": 190, "begin_ns": S, "end_ns": 9 * S, "samples": 70, "frames": frames, "stacks": stacks}
    writer.write(9 * S, events.Stacks, where="unknown phase", why="share", **facts)
    writer.close()


@pytest.mark.parametrize(
    ("inside", "parallelism", "share"),
    [
        ((12, 30), "DDP", 0.3),
        pytest.param((30, 2), "DDP", None, id="the other rank waits there for one that is late"),
        ((12, 12), "", None),
    ],
)
def test_the_transfer_counts_where_it_takes_least(
    tmp_path: Path, inside: tuple[int, int], parallelism: str, share: float | None
) -> None:
    for rank, count in enumerate(inside):
        write_rank(tmp_path, rank, count, parallelism)
    recording = read_recording(tmp_path)
    found = [one for one in detect_findings(recording, recording.end_ns) if one.name == "buffers_sent"]
    assert [one.evidence["share"] for one in found] == ([share] if share is not None else [])
    for one in found:
        assert "12 of 40 samples of rank 0 up to step 179 were taken there" in one.details
        assert one.ranks == (0, 1)
        (cost,) = rank_findings(found, read_steps(recording), recording.end_ns)
        assert cost.seconds == pytest.approx(0.3 * 10.0, rel=0.1)

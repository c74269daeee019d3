"""The peak of every phase, to the byte, beside torch's own peaks and torch's own history; and nobody else sees a reset."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from loop_runs import Counted, run
from rank_recordings import table
from zerotop_probe.recording.tables import TICK

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
PHASES = ("forward", "backward", "step")


def trained(factory: pytest.TempPathFactory, *options: str, recorded: bool = True) -> Counted:
    folder = factory.mktemp("measuring")
    session = None if recorded else Path()
    return run("measuring", folder, *options, ranks=1, session=session, accelerator="cuda", bootstrap=recorded)


def recorded_peaks(counted: Counted, field: str) -> list[list[Any]]:
    """(phase, highest of that field in its windows) of every phase of the loop, by time."""
    rank, _ = counted.rank(0)
    (path,) = counted.session.glob("allocator-*.rec")
    rows = table(path)
    rows = rows[rows["edge"] != TICK]
    found: list[list[Any]] = []
    for name in PHASES:
        for span in rank.phase(name):
            inside = (rows["time_ns"] > span["begin_ns"]) & (rows["time_ns"] <= span["end_ns"])
            found.append([int(span["begin_ns"]), name, int(rows[field][inside].max())])
    return [entry[1:] for entry in sorted(found)]


@pytest.mark.parametrize("options", [("--stage", "2"), ("--stage", "2", "--offload"), ("--stage", "3")], ids=" ".join)
def test_a_jobs_own_peaks_are_those_without_us_and_ours_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, options: tuple[str, ...]
) -> None:
    watched = trained(tmp_path_factory, *options, "--resets")
    alone = trained(tmp_path_factory, *options, "--resets", recorded=False)
    assert watched.by_rank[0] == alone.by_rank[0]
    own = watched.by_rank[0]["peaks"]
    assert recorded_peaks(watched, "allocated_peak_bytes") == [[name, allocated] for name, allocated, _ in own]
    assert recorded_peaks(watched, "reserved_peak_bytes") == [[name, reserved] for name, _, reserved in own]


def test_against_the_history_of_every_allocation(tmp_path_factory: pytest.TempPathFactory) -> None:
    watched = trained(tmp_path_factory, "--history")
    alone = trained(tmp_path_factory, "--history", recorded=False)
    assert watched.by_rank[0] == alone.by_rank[0]
    assert recorded_peaks(watched, "requested_peak_bytes") == watched.by_rank[0]["history"]
    peaks = [re.findall(r"Max_(?:MA|CA) [\d.]+ GB", counted.output) for counted in (watched, alone)]
    assert peaks[0] == peaks[1]
    assert peaks[0]

"""The probe on a real GPU: the allocator's table, and that nobody else sees it reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loop_runs import Counted, run_loop
from rank_recordings import read_table_file
from zerotop_probe.recording.tables import BEGIN, END, PHASES

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.real,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

DIRECT = (
    "--stage",
    "2",
    "--dtype",
    "bf16",
    "--direct",
    "--accumulation",
    "2",
    "--steps",
    "20",
    "--torch-adam",
)
OFFLOAD = ("--stage", "2", "--dtype", "bf16", "--offload", "--width", "1024", "--torch-adam")


def run_on_cuda(factory: pytest.TempPathFactory, *options: str, recording: Path | None = None) -> Counted:
    folder = factory.mktemp("cuda")
    return run_loop("hand_written", folder, *options, ranks=1, recording=recording, accelerator="cuda")


@pytest.fixture(scope="module")
def direct_run(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """``loss.backward()``: on a GPU its beginning and end are told by autograd's own thread."""
    return run_on_cuda(tmp_path_factory, *DIRECT)


@pytest.fixture(scope="module")
def offloaded_run(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return run_on_cuda(tmp_path_factory, *OFFLOAD)


def test_backwards_in_autograds_thread(direct_run: Counted) -> None:
    rank, own = direct_run.read_rank(0)
    backwards = rank.select_phases("backward")
    assert backwards[["step", "micro_step"]].tolist() == [(s, m) for s in range(20) for m in range(2)]
    assert not np.any(backwards["flags"])
    assert not np.any(backwards["depth"])
    assert own["global_steps"] == 20
    assert rank.probe[-1][["lost", "errors"]].tolist() == (0, 0)


def test_the_allocator_at_every_edge_and_in_between(direct_run: Counted) -> None:
    rank, _ = direct_run.read_rank(0)
    (path,) = direct_run.recording.glob("allocator-*.rec")
    rows = read_table_file(path)
    assert np.all(rows["allocated_bytes"] <= rows["reserved_bytes"])
    assert np.all(rows["allocated_bytes"] <= rows["allocated_peak_bytes"])
    for edge in (BEGIN, END):
        for phase in ("forward", "backward", "step"):
            spans = rank.select_phases(phase)
            times = spans["begin_ns" if edge == BEGIN else "end_ns"]
            seen = rows[(rows["edge"] == edge) & (rows["phase"] == PHASES.index(phase))]
            if phase != "step":  # looked at where it updates, within the call
                assert np.all(np.isin(seen["time_ns"], times))
            assert edge == BEGIN or len(seen)
    assert rows["allocated_peak_bytes"].max() == direct_run.by_rank[0]["memory"]["allocated_bytes.all.peak"]


def test_the_jobs_own_counters_do_not_change(
    direct_run: Counted, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same allocations, peaks, losses and weights as without a recording."""
    blind = run_on_cuda(tmp_path_factory, *DIRECT, recording=tmp_path / "missing")
    for name in ("memory", "losses", "weights"):
        assert blind.by_rank[0][name] == direct_run.by_rank[0][name]


def test_the_device_and_an_optimizer_on_the_cpu(offloaded_run: Counted) -> None:
    rank, _ = offloaded_run.read_rank(0)
    (engine,) = rank.find_events("engine")
    (device,) = engine["devices"]
    properties = torch.cuda.get_device_properties(0)
    assert (device["ordinal"], device["total_bytes"]) == (0, properties.total_memory)
    assert device["uuid"].startswith("GPU-")
    parts = [part for part in rank.list_phases_inside(rank.select_phases("step")[-1]) if part != "grads_to_cpu"]
    assert parts == ["cpu_optimizer", "params_to_gpu", "allgather"]

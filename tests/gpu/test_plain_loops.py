"""Loops without DeepSpeed on a real GPU: peaks beside torch's own, a ledger that adds up to the device, skipped updates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loop_runs import LOOPS, Counted, run_loop
from rank_recordings import Rank, read_table_file
from real_jobs import make_environment
from zerotop.analysis.engine import read_first_engine
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.memory.expected.zero_model import compare_ledger, compute_expected, parse_setup
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.ledger_rows import ALLOCATED, UNEXPLAINED, GpuLedger
from zerotop.analysis.memory.peak_ledger import read_peak_ledgers
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import BOUNDARY, SKIPPED, TICK

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
LIMIT_S = 500
GIB = 1 << 30
PHASES = ("forward", "backward", "step")


def run_story(factory: pytest.TempPathFactory, *options: str, recorded: bool = True) -> Counted:
    """Run a story with the probe alone, or without it."""
    folder, recording = factory.mktemp("story"), None if recorded else Path()
    return run_loop(
        "stories",
        folder,
        *options,
        launcher="python",
        ranks=1,
        recording=recording,
        accelerator="cuda",
        bootstrap=recorded,
    )


def record_story(folder: Path, *options: str) -> tuple[Recording, dict[str, Any]]:
    """Run a story under ``zerotop run``; return its recording, and what it counted itself."""
    inherited = make_environment()
    del inherited["CUDA_VISIBLE_DEVICES"]
    recording = folder / "recording"
    script = [sys.executable, str(LOOPS / "stories.py"), *options, "--linger", "2.5", "--output", str(folder / "output")]
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(recording), "--", *script]
    path = os.environ.get("PYTHONPATH")
    variables = inherited | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("COUNTED ")]
    assert len(lines) == 1, done.stdout + done.stderr
    return Recording.open(recording), json.loads(lines[0][8:])


@pytest.fixture(scope="module")
def linear_story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, dict[str, Any]]:
    return record_story(tmp_path_factory.mktemp("linear"), "linear")


@pytest.fixture(scope="module")
def trainer_story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, dict[str, Any]]:
    return record_story(tmp_path_factory.mktemp("trainer"), "trainer")


def read_last_ledger(recording: Recording) -> GpuLedger:
    """Return the ledger a second before the end, when the rank lingers; check that it adds up."""
    last_ns = min(source.last_ns for source in recording.sources["allocator"] if source.last_ns is not None)
    (ledger,) = (one for one in read_ledgers(recording.at(last_ns - 1_000_000_000)) if one.ranks)
    assert sum(row.bytes for row in ledger.rows) == ledger.total_bytes
    assert ledger.sum_bytes(*ALLOCATED) == ledger.allocated_bytes
    assert ledger.sum_bytes(UNEXPLAINED) <= 0.02 * ledger.allocated_bytes
    return ledger


def test_peaks_are_torchs_own_to_the_byte(tmp_path_factory: pytest.TempPathFactory) -> None:
    counted, blind = run_story(tmp_path_factory, "linear"), run_story(tmp_path_factory, "linear", recorded=False)
    assert counted.by_rank[0] == blind.by_rank[0]
    rank, own = counted.read_rank(0)
    (path,) = counted.recording.glob("allocator-*.rec")
    rows = read_table_file(path)
    rows = rows[rows["edge"] != TICK]
    found: list[tuple[int, str, int]] = []
    for name in PHASES:
        for span in rank.select_phases(name):
            inside = (rows["time_ns"] > span["begin_ns"]) & (rows["time_ns"] <= span["end_ns"])
            found.append((int(span["begin_ns"]), name, int(rows["allocated_peak_bytes"][inside].max())))
    assert [list(entry[1:]) for entry in sorted(found)] == [[name, allocated] for name, allocated, _ in own["peaks"]]


def test_the_ledger_of_a_linear_layer(linear_story: tuple[Recording, dict[str, Any]]) -> None:
    recording, own = linear_story
    ledger, weights = read_last_ledger(recording), 4 * own["parameters"]
    for name, copies in (("parameters", 1), ("gradients", 1), ("optimizer_state", 2)):
        assert ledger.sum_bytes(name) == pytest.approx(copies * weights, rel=0.01)
    setup = parse_setup(read_first_engine(recording.at()))
    assert setup is not None
    for difference in compare_ledger(ledger, compute_expected(setup)):
        assert difference.expected_bytes == pytest.approx(difference.measured_bytes, rel=0.01)
    # The first AdamW step has weight, gradient, two moments and a temporary of the foreach implementation.
    (peak,) = read_peak_ledgers(recording.at(recording.end_ns))
    assert peak.peak.phase == "step"
    assert peak.ledger.allocated_bytes == max(allocated for _, allocated, _ in own["peaks"])
    assert "first_real_step" in {finding.name for finding in detect_findings(recording, recording.end_ns)}


def test_device_times_of_every_phase(linear_story: tuple[Recording, dict[str, Any]]) -> None:
    recording, _ = linear_story
    (path,) = recording.path.glob("device_times-*.rec")
    assert {int(phase) for phase in read_table_file(path)["phase"]} == {
        int(s["phase"][0]) for s in map(Rank(recording.path, 0).select_phases, PHASES)
    }


def test_the_trainer_on_gpt2(trainer_story: tuple[Recording, dict[str, Any]]) -> None:
    recording, own = trainer_story
    rank = Rank(recording.path, 0)
    (engine,) = rank.find_events("engine")
    facts = [engine[name] for name in ("library", "model", "micro_batch", "gradient_accumulation", "parameters")]
    assert facts == ["Trainer", "GPT2LMHeadModel", 8, 1, own["parameters"]]
    steps = rank.select_phases("step")
    assert (steps["flags"] & BOUNDARY).tolist() == [BOUNDARY] * own["steps"]
    assert rank.select_phases("forward")["tokens"].sum() == own["tokens"]
    read_last_ledger(recording)
    (peak,) = read_peak_ledgers(recording.at(recording.end_ns))
    assert peak.ledger.allocated_bytes == own["stats"]["allocated_bytes.all.peak"]
    assert peak.peak.phase in ("forward", "backward")
    # The logits and two copies of them in float32.
    assert peak.ledger.sum_bytes("activations") > 2 * own["logits_bytes"]
    print(f"\nGPT-2, batch 8 x 1024: peak {peak.ledger.allocated_bytes / GIB:.2f} GiB in {peak.peak.phase}")
    for row in peak.ledger.rows:
        print(f"  {row.describe():28}{row.bytes / GIB:8.2f} GiB  {row.basis}")


def test_skipped_updates_without_reading_the_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    counted, blind = run_story(tmp_path_factory, "scaler"), run_story(tmp_path_factory, "scaler", recorded=False)
    rank, own = counted.read_rank(0)
    assert own["losses"] == blind.by_rank[0]["losses"]
    assert own["scales"] == blind.by_rank[0]["scales"]
    steps, plain = rank.select_phases("step"), len(own["skipped"]) // 2
    assert len(steps) == len(own["skipped"])
    assert [bool(flag & SKIPPED) for flag in steps["flags"][:plain]] == own["skipped"][:plain]
    expected = [(step, *own["scales"][step]) for step in range(plain) if own["skipped"][step]]
    overflows = [(e["step"], e["loss_scale_before"], e["loss_scale_after"]) for e in rank.find_events("overflow")]
    # Of the fused optimizer only the GPU knows which updates it skips: nothing is said of them.
    assert overflows == expected != []


def test_cuda_graphs_are_captured_and_replayed(tmp_path_factory: pytest.TempPathFactory) -> None:
    counted, blind = run_story(tmp_path_factory, "graphs"), run_story(tmp_path_factory, "graphs", recorded=False)
    rank, own = counted.read_rank(0)
    without = blind.by_rank[0]
    # torch.compile gives up no graph, and a replayed step computes what it computes without the probe.
    assert (own["losses"], own["skips"]) == (without["losses"], without["skips"])
    assert not rank.find_events("probe_error")
    # A replay calls no Python: the last step that is seen is the one that was captured.
    assert len(rank.select_phases("step")) == own["steps"]

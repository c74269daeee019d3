"""The ledger, and what changed in the training, on a real GPU: each job knows its own truth. One takes about 16 seconds."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loop_runs import LOOPS
from rank_recordings import Rank
from real_jobs import make_environment, run_recorded
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.ledger_rows import ALLOCATED, HELD, OTHER_RANKS, OTHER_STREAMS, PRIVATE, GpuLedger
from zerotop.analysis.views.notices import describe_training
from zerotop.recording.reader import Recording
from zerotop_probe.recording.events import OutOfMemory

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
SCRIPT = "changes_on_gpu.py"
GIB = 1 << 30


class Watched(NamedTuple):
    """A recorded job, and what it counted itself."""

    recording: Recording
    counted: dict[str, Any]
    rank: Rank

    @property
    def findings(self) -> tuple[Finding, ...]:
        return detect_findings(self.recording, self.recording.end_ns)

    def find(self, name: str) -> Finding:
        found = [finding for finding in self.findings if finding.name == name]
        assert found, [(finding.name, str(finding.headline)) for finding in self.findings]
        return found[0]

    def place(self, mark: str) -> str:
        return f"{SCRIPT}:{self.counted['lines'][mark]}"

    def read_ledger(self) -> GpuLedger:
        """Return the ledger at the last reading of the allocator; check that it adds up."""
        last_ns = max(source.last_ns for source in self.recording.sources["allocator"] if source.last_ns is not None)
        (ledger,) = (one for one in read_ledgers(self.recording.at(last_ns)) if one.ranks)
        assert sum(row.bytes for row in ledger.rows) == ledger.total_bytes
        assert ledger.sum_bytes(*ALLOCATED) == ledger.allocated_bytes
        return ledger

    def list_changes(self) -> dict[str, dict[str, Any]]:
        events = self.rank.find_events("training_changed")
        return {change["name"]: change for event in events for change in event["changes"]}


@cache
def run_kind(kind: str, folder: Path) -> Watched:
    environment = make_environment() | {"DS_ACCELERATOR": "cuda"}
    del environment["CUDA_VISIBLE_DEVICES"]
    run = run_recorded([sys.executable, str(LOOPS / SCRIPT), kind, "cuda"], folder, environment)
    lines = [line for line in run.output.splitlines() if line.startswith("COUNTED ")]
    assert run.returncode == 0, run.output
    assert len(lines) == 1, run.output
    rank = Rank(run.recording, 0)
    assert not rank.find_events("probe_error"), rank.find_events("probe_error")
    watched = Watched(Recording.open(run.recording), json.loads(lines[0][8:]), rank)
    for finding in watched.findings:
        print(kind, finding.severity.value, finding.step, finding.headline, finding.details, finding.fix, sep=" | ")
    return watched


def list_texts(watched: Watched) -> str:
    return "\n".join(f"{finding.headline} {finding.details}" for finding in watched.findings)


@pytest.mark.parametrize(
    ("kind", "setting", "mark"),
    [
        ("unfreeze", "trained_parameters", "unfreeze"),
        ("method", "trained_parameters", "method"),
        ("float", "dtypes", "float"),
        ("recompute", "module.recompute", "recompute"),
        ("optimizer", "optimizer.fused", "optimizer"),
        ("option", "optimizer.foreach", "option"),
    ],
)
def test_a_change_of_the_training_is_named_with_its_line(kind: str, setting: str, mark: str, tmp_path: Path) -> None:
    watched = run_kind(kind, tmp_path)
    change = watched.list_changes()[setting]
    assert (change.get("file"), change.get("line")) == (SCRIPT, watched.counted["lines"][mark]), change
    shifted = {"iteration_shift", "memory_step"} & {finding.name for finding in watched.findings}
    assert shifted, list_texts(watched)
    assert watched.place(mark) in list_texts(watched), list_texts(watched)


def test_the_ledger_follows_another_dtype(tmp_path: Path) -> None:
    watched = run_kind("float", tmp_path)
    ledger = watched.read_ledger()
    parameters = json.loads(json.dumps(watched.rank.find_events("engine")[-1]["parameters"]))
    assert ledger.sum_bytes("parameters") == pytest.approx(4 * parameters, rel=0.02)
    assert ledger.sum_bytes("optimizer_state") == pytest.approx(8 * parameters, rel=0.02)
    assert watched.rank.find_events("tensors")[-1]["step"] > watched.counted["first"]


def test_tensors_that_the_script_keeps_have_a_row(tmp_path: Path) -> None:
    watched = run_kind("state", tmp_path)
    ledger = watched.read_ledger()
    parameters = watched.rank.find_events("engine")[-1]["parameters"]
    assert ledger.sum_bytes(HELD) >= 0.95 * 2 * parameters
    (note,) = (row.note for row in ledger.rows if row.key == HELD)
    assert "kept" in note, note


def test_a_view_that_keeps_its_block_is_named(tmp_path: Path) -> None:
    watched = run_kind("view", tmp_path)
    finding = watched.find("memory_creep")
    text = f"{finding.headline} {finding.details} {finding.advice} {finding.fix}"
    assert "views" in str(finding.headline), text
    assert watched.place("view") in text, text
    assert "A view of 8 x 16,000 keeps a block of 8 x 511 x 16,000" in text, text
    assert ".clone()" in text, text


def test_a_list_of_activations_is_named(tmp_path: Path) -> None:
    watched = run_kind("hook", tmp_path)
    finding = watched.find("memory_creep")
    assert "Keeper.seen" in str(finding.headline), finding
    assert watched.place("keep") in str(finding.details), finding
    change = watched.list_changes()["hooks"]
    assert change.get("line") == watched.counted["lines"]["hook"], change


def test_memory_of_another_stream_is_distinguished(tmp_path: Path) -> None:
    watched = run_kind("stream", tmp_path)
    assert watched.read_ledger().sum_bytes(OTHER_STREAMS) >= 7.9 * GIB
    finding = watched.find("unusable_memory")
    assert "stream" in str(finding.headline), finding
    assert finding.evidence["unused_bytes"] >= 7.9 * GIB


def test_memory_of_a_graph_is_distinguished(tmp_path: Path) -> None:
    watched = run_kind("graph", tmp_path)
    assert watched.read_ledger().sum_bytes(PRIVATE) >= 0.9 * GIB


def test_the_ledger_at_a_failure_is_what_pytorch_held(tmp_path: Path) -> None:
    watched = run_kind("oom", tmp_path)
    (error,) = watched.rank.find_events("out_of_memory")
    event = watched.recording.events_of(OutOfMemory, watched.recording.end_ns)[0]
    (ledger,) = (one for one in read_ledgers(watched.recording.at(event.unix_ns)) if one.ranks)
    assert ledger.allocated_bytes == error["allocated_bytes"]
    assert ledger.sum_bytes(*ALLOCATED) == error["allocated_bytes"]
    counts = [one for one in watched.rank.find_events("tensors") if one["when"] == "out_of_memory"]
    assert [one["step"] for one in counts] == [watched.counted["step"]]
    finding = watched.find("out_of_memory")
    assert re.search(r"8 x 409[56] tokens", str(finding.details)), finding  # with labels, or the model's own input
    assert "8 x 511 tokens" in str(finding.details), finding
    assert error["step"] == watched.counted["step"]


def test_replayed_steps_are_admitted(tmp_path: Path) -> None:
    watched = run_kind("replay", tmp_path)
    finding = watched.find("steps_unseen")
    assert "CUDA graph" in f"{finding.headline} {finding.details}", finding
    assert watched.place("replay") in str(finding.details), finding


def test_updates_by_hand_are_admitted(tmp_path: Path) -> None:
    watched = run_kind("by_hand", tmp_path)
    notices = describe_training(watched.recording.at(watched.recording.end_ns))
    assert any("no steps" in notice or "without steps" in notice for notice in notices), notices


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_context_on_the_gpu_of_another_rank_is_named(tmp_path: Path) -> None:
    environment = make_environment() | {"DS_ACCELERATOR": "cuda"}
    del environment["CUDA_VISIBLE_DEVICES"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(LOOPS / SCRIPT), "context", "cuda"]
    run = run_recorded(launch, tmp_path, environment)
    assert run.returncode == 0, run.output
    recording = Recording.open(run.recording)
    counted = next(json.loads(line[8:]) for line in run.output.splitlines() if line.startswith("COUNTED "))
    findings = detect_findings(recording, recording.end_ns)
    (finding,) = (one for one in findings if one.name == "context_elsewhere")
    assert "Rank 1" in str(finding.headline), finding
    assert f"{SCRIPT}:{counted['lines']['load']}" in str(finding.details), finding
    last_ns = min(source.last_ns for source in recording.sources["allocator"] if source.last_ns is not None)
    first = min(read_ledgers(recording.at(last_ns)), key=lambda ledger: ledger.index)
    assert first.sum_bytes(OTHER_RANKS) >= 0.1 * GIB

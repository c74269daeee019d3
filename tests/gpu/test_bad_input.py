"""Jobs on a real GPU that are put together oddly: each is shown as it is, and none makes the probe stumble."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from free_ports import find_free_port
from loop_runs import LOOPS
from rank_recordings import Rank, read_event_file, read_table_file
from real_jobs import make_environment
from zerotop.analysis.failures import oom_log_parser
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.views.memory_view import read_memory_view
from zerotop.recording.reader import Recording
from zerotop_probe.outside.sampling import nvml
from zerotop_probe.recording.tables import BOUNDARY, EVAL

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
LIMIT_S = 240
PARAMETERS = 2 * (1024 * 1024 + 1024)
# Long enough for NVML to have seen what is held at the end.
LINGER = ("--linger", "2.5")


@dataclass(frozen=True)
class Odd:
    """A finished job: its recording, what it printed, what each rank counted itself."""

    recording: Path
    output: str
    by_rank: dict[int, dict[str, Any]]

    def rank(self, number: int = 0) -> Rank:
        return Rank(self.recording, number)

    def gpus(self) -> tuple[GpuLedger, ...]:
        """The ledgers of all GPUs a second before the first rank left, when all of them linger."""
        recording = Recording.open(self.recording)
        # A rank's ticker reads its allocator until it leaves. The screen would look at a failure's moment instead.
        last_ns = [source.last_ns for source in recording.sources["allocator"] if source.last_ns is not None]
        left_ns = min(last_ns, default=read_memory_view(recording.at(recording.end_ns)).moment_ns)
        ledgers = read_ledgers(recording.at(left_ns - 1_000_000_000))
        for gpu in ledgers:
            assert sum(row.bytes for row in gpu.rows) == gpu.total_bytes
        return ledgers

    def gpu(self, number: int = 0) -> GpuLedger:
        """Return the ledger of the GPU that this rank allocates on."""
        (gpu,) = [gpu for gpu in self.gpus() if number in gpu.ranks]
        return gpu


def record_command(folder: Path, command: list[str], **variables: str) -> tuple[Path, str]:
    """Runs a command to its end under ``zerotop run``."""
    recording = folder / "recording"
    inherited = {name: value for name, value in make_environment().items() if name != "CUDA_VISIBLE_DEVICES"}
    own = {"DS_ACCELERATOR": "cuda", "PYTHONZEROTOP_DEBUG": "1", **variables}
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(recording), "--", *command],
            cwd=folder,
            env=inherited | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    text = (folder / "output").read_text(errors="replace")
    assert code == 0, text
    assert "is no longer measured" not in text, text
    return recording, text


def run_odd_job(folder: Path, *options: str, ranks: int = 1, **variables: str) -> Odd:
    """Runs the loop of odd jobs."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(find_free_port())]
    command = [sys.executable, *launcher, str(LOOPS / "odd.py"), *options]
    recording, text = record_command(folder, command, **variables)
    lines = [json.loads(line[8:]) for line in text.splitlines() if line.startswith("COUNTED ")]
    assert len(lines) == ranks, text
    for path in recording.glob("events-*.jsonl"):
        assert not [event for event in read_event_file(path) if event["event"] in ("probe_error", "sampler_error")]
    return Odd(recording, text, {line["rank"]: line for line in lines})


def list_uuids() -> list[str]:
    seen, _ = nvml.discover_gpus()
    return [gpu.uuid for gpu in seen.gpus]


def test_cuda_malloc_async(tmp_path: Path) -> None:
    """It counts what is allocated and reserved, but shows no blocks, keeps no history and tells nobody when it runs out."""
    total = torch.cuda.get_device_properties(0).total_memory
    options = ("--too-much", str(2 * total), *LINGER)
    odd_run = run_odd_job(tmp_path, *options, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    rank, stats = odd_run.rank(), odd_run.by_rank[0]["stats"]
    (engine,) = rank.find_events("engine")
    assert engine["allocator"] == "cudaMallocAsync"
    (path,) = odd_run.recording.glob("allocator-*.rec")
    rows = read_table_file(path)
    assert set(rows["segments"]) == set(rows["requested_peak_bytes"]) == {-1}
    assert (rows["allocated_bytes"] <= rows["reserved_bytes"]).all()
    # We have begun the peaks anew at every boundary, and the job has not seen it.
    assert rows["allocated_peak_bytes"].max() == stats["allocated_bytes.all.peak"]
    for told in rank.find_events("tensors"):
        assert (told["allocated_bytes"], told["device"]["parameters"]) == (None, 4 * PARAMETERS)
    gpu = odd_run.gpu()
    assert gpu.allocated_bytes in rows["allocated_bytes"][-40:]
    assert gpu.sum_bytes("parameters") == 4 * PARAMETERS
    assert gpu.sum_bytes("optimizer_state") >= 8 * PARAMETERS
    assert not gpu.sum_bytes("unattributed", "unexplained")
    assert any("shows no blocks" in note for note in gpu.notes)
    error = oom_log_parser.parse_output(odd_run.output)
    assert error is not None, odd_run.output
    assert error.kind == oom_log_parser.CUDA
    assert error.requested_bytes == pytest.approx(2 * total, rel=0.01)


def test_an_allocator_of_the_jobs_own(tmp_path: Path) -> None:
    """PyTorch knows nothing of what it holds; NVML does, and times are measured all the same."""
    odd_run = run_odd_job(tmp_path, "--own-allocator", "--gloo", *LINGER)
    rank = odd_run.rank()
    (engine,) = rank.find_events("engine")
    assert engine["allocator"] == "pluggable"
    assert "error" in odd_run.by_rank[0]["stats"]
    assert not list(odd_run.recording.glob("allocator-*.rec"))
    assert sum((span["flags"] & BOUNDARY) > 0 for span in rank.select_phases("step")) == 4
    assert rank.find_events("tensors")[-1]["device"]["parameters"] == 4 * PARAMETERS
    (gpu,) = [gpu for gpu in odd_run.gpus() if any("of its own" in note for note in gpu.notes)]
    assert gpu.ranks == ()
    assert gpu.total_bytes - gpu.sum_bytes("free") > 12 * PARAMETERS


def test_several_engines_on_a_gpu_named_by_its_uuid(tmp_path: Path) -> None:
    """The last GPU there is, by its UUID: it is ordinal 0 for the job."""
    uuid = list_uuids()[-1]
    odd_run = run_odd_job(tmp_path, "--engines", "2", *LINGER, CUDA_VISIBLE_DEVICES=uuid)
    rank = odd_run.rank()
    assert [event["engine"] for event in rank.find_events("engine")] == [0, 1]
    assert {event["devices"][0]["uuid"] for event in rank.find_events("engine")} == {uuid}
    steps = rank.select_phases("step")
    assert steps[["engine", "step"]].tolist() == [(engine, step) for step in range(4) for engine in range(2)]
    gpu = odd_run.gpu()
    assert gpu.index == len(list_uuids()) - 1
    assert 2 * 4 * PARAMETERS <= gpu.sum_bytes("parameters") < 2 * 4 * PARAMETERS + (1 << 20)
    assert gpu.sum_bytes("optimizer_state") >= 2 * 8 * PARAMETERS
    # What one engine holds is unclaimed by the other: counted twice it would be half of all.
    assert gpu.sum_bytes("unexplained") <= 0.25 * gpu.allocated_bytes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU cannot be reordered")
def test_gpus_in_another_order(tmp_path: Path) -> None:
    odd_run = run_odd_job(tmp_path, *LINGER, CUDA_VISIBLE_DEVICES="1,0")
    assert odd_run.gpu().index == 1


def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    odd_run = run_odd_job(tmp_path, "--gloo", "--one-gpu", *LINGER, ranks=2)
    gpu = odd_run.gpu()
    assert gpu.ranks == (0, 1)
    assert gpu.sum_bytes("parameters") >= 2 * 4 * PARAMETERS
    last = [read_table_file(path)["reserved_bytes"][-1] for path in odd_run.recording.glob("allocator-*.rec")]
    assert (len(last), gpu.reserved_bytes) == (2, sum(last))
    assert gpu.sum_bytes("outside_pytorch") > 100 << 20  # two contexts


def test_an_engine_without_optimizer(tmp_path: Path) -> None:
    odd_run = run_odd_job(tmp_path, "--no-optimizer", *LINGER)
    rank = odd_run.rank()
    (engine,) = rank.find_events("engine")
    assert engine["optimizer"] == ""
    assert [event["when"] for event in rank.find_events("tensors")] == ["init", "before_forward"]
    forwards = rank.select_phases("forward")
    assert (len(forwards), set(forwards["flags"])) == (4, {EVAL})
    gpu = odd_run.gpu()
    assert 4 * PARAMETERS <= gpu.sum_bytes("parameters") < 4 * PARAMETERS + (1 << 20)
    assert not gpu.sum_bytes("optimizer_state", "gradients", "master_weights")


def test_a_job_that_touches_no_gpu(tmp_path: Path) -> None:
    recording, _ = record_command(tmp_path, [sys.executable, "-c", "import time; time.sleep(3)"])
    gpus = Odd(recording, "", {}).gpus()
    assert len(gpus) == len(list_uuids())
    assert not any(gpu.ranks or gpu.allocated_bytes or gpu.sum_bytes("this_job") for gpu in gpus)
    opened = Recording.open(recording)
    assert not [one for one in detect_findings(opened, opened.end_ns) if one.name != "others_on_gpu"]

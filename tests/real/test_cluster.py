"""``zerotop sweep`` through submitit: its executors without a cluster, and a real Slurm where one answers."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agents import wait_for
from programs import make_environment, run_zerotop
from zerotop.analysis.sweeps.settings import build_points
from zerotop.commands.common.errors import Problem
from zerotop.commands.sweeping.cluster_runner import ClusterRunner, parse_parameters, read_ended_jobs
from zerotop.recording.sweeps import Plan, Sweep, read_sweep, write_sweep

pytest.importorskip("submitit")

SCRIPT = Path(__file__).with_name("loops") / "swept.py"


@functools.cache
def has_slurm() -> bool:
    """Whether a cluster has an idle node. Takes ten seconds where its controller does not run."""
    if shutil.which("sinfo") is None or shutil.which("sbatch") is None:
        return False
    done = subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode == 0 and bool(done.stdout.strip())


def require_slurm() -> None:
    """Skip a test here and now: asked while tests are collected, each worker would wait."""
    if not has_slurm():
        pytest.skip("no Slurm with an idle node answers here")


@pytest.fixture
def _slurm() -> None:
    require_slurm()


def make_sweep(path: Path) -> Sweep:
    command = (sys.executable, str(SCRIPT), "{case}", "{seq_length}", "{steps}", str(path / "attempts"))
    plan = Plan(settings={"case": ["flaky", "memory"], "seq_length": [8]}, command=command, retries=2)
    path.mkdir(parents=True)
    sweep = Sweep(path, plan, build_points(plan.settings, {}))
    write_sweep(sweep)
    return sweep


# submitit's debug executor leaves its log files open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("cluster", ["debug", "local", "slurm"])
def test_points_run_as_jobs(tmp_path: Path, cluster: str) -> None:
    if cluster == "slurm":
        require_slurm()
    path = tmp_path / "sweep"
    parameters = {"timeout_min": 5, "slurm_array_parallelism": 1} if cluster == "slurm" else {"timeout_min": 5}
    runner = ClusterRunner(make_sweep(path), parameters, cluster=cluster)
    runner.run()
    assert runner.problem == ""
    results = [point.result for point in read_sweep(path).points]
    assert [(one.outcome, one.attempts) for one in results if one is not None] == [("ok", 3), ("out_of_memory", 1)]
    assert all((path / one.recording / "session.json").is_file() for one in results if one is not None)


@pytest.mark.usefixtures("_slurm")
def test_a_job_that_slurm_kills_is_a_crash(tmp_path: Path) -> None:
    """Also without Slurm's accounts; the other points go on."""
    path = tmp_path / "sweep"
    command = (sys.executable, str(SCRIPT), "train", "8", "{steps}", "none")
    plan = Plan(settings={"seq_length": [8]}, command=command, steps=100_000, warmup=2)
    path.mkdir()
    sweep = Sweep(path, plan, build_points(plan.settings, {}))
    write_sweep(sweep)
    runner = ClusterRunner(sweep, {"timeout_min": 5})
    runner._ask_interval_s = 1.0
    thread = threading.Thread(target=runner.run)
    thread.start()
    wait_for(lambda: list(path.glob("points/*/spans-*.rec")), 60)
    (job,) = {log.name.split("_0_log")[0] for log in path.glob("slurm/*_0_log.out")}
    subprocess.run(["scancel", "--signal=KILL", "--full", job], check=True)
    thread.join(60)
    assert not thread.is_alive()
    result = runner.sweep.points[0].result
    assert result is not None
    assert (result.outcome, result.attempts) == ("crashed", 1)
    assert result.reason.startswith(f"The job {job} ended without a result: Slurm says ")
    assert str(path / "slurm") in result.reason


@pytest.mark.usefixtures("_slurm")
def test_jobs_that_slurm_refuses_are_reported(tmp_path: Path) -> None:
    options = ["--seq-length", "1,2", "--executor", "slurm", "--slurm", "partition=nowhere", "-o", str(tmp_path / "sweep")]
    done = run_zerotop(tmp_path, "sweep", *options, "--", sys.executable, "{seq_length}")
    assert done.returncode == 1
    assert b"\nSlurm refuses the jobs: invalid partition specified: nowhere. 0 of 2 points are done." in done.stderr
    assert b"Traceback" not in done.stderr


def test_jobs_that_slurm_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the answers of a real squeue."""
    squeue = tmp_path / "squeue"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    def answer(text: str, error: str = "", code: int = 0) -> None:
        squeue.write_text(f"#!/bin/sh\nprintf '%s\\n' '{text}'\nprintf '%s' '{error}' >&2\nexit {code}\n")
        squeue.chmod(0o755)

    jobs = ["13_0", "13_1", "13_2", "13_3"]
    answer("13_0 RUNNING\n13_1 COMPLETING\n13_2 CANCELLED")
    assert read_ended_jobs(jobs) == {"13_2": "CANCELLED", "13_3": "GONE"}
    answer("", "slurm_load_jobs error: Invalid job id specified", 1)
    assert read_ended_jobs(jobs) == dict.fromkeys(jobs, "GONE")
    answer("", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1)
    assert read_ended_jobs(jobs) == {}
    squeue.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_ended_jobs(jobs) == {}


def test_cluster_parameters_are_parsed() -> None:
    assert parse_parameters(["partition=gpu", "--gpus-per-node=2", "timeout_min=60", "time-min=5", "mem_gb=8"]) == {
        "slurm_partition": "gpu",
        "gpus_per_node": 2,
        "timeout_min": 60,
        "mem_gb": 8,
        "slurm_additional_parameters": {"time-min": "5"},
    }
    with pytest.raises(Problem, match="write KEY=VALUE"):
        parse_parameters(["gpu"])


def test_without_slurm_it_says_so(tmp_path: Path) -> None:
    options = ["--seq-length", "1,2", "--executor", "slurm", "-o", str(tmp_path / "sweep")]
    nowhere = make_environment(tmp_path, PATH=str(tmp_path))
    done = run_zerotop(tmp_path, "sweep", *options, "--", sys.executable, "{seq_length}", env=nowhere)
    assert done.returncode == 1
    assert b"Cannot submit jobs to slurm" in done.stderr

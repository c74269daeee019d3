"""``zerotop sweep`` on real, small jobs: outcomes, repeated attempts, interruption and bad input."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import polars
import pytest

from agents import wait_for
from programs import ZEROTOP, make_environment, run_zerotop, start_on_terminal
from terminals import Terminal
from zerotop.commands.sweeping.runner import SweepRunner
from zerotop.recording.reader import Recording
from zerotop.recording.sweeps import Plan, Point, Sweep, Value, read_sweep
from zerotop_probe.recording.events import Engine
from zerotop_probe.recording.tables import PHASE_CODE

SCRIPT = Path(__file__).with_name("loops") / "swept.py"
# With these, jobs start in half the time.
QUICK = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def make_command(attempts: Path, case: str = "{case}") -> list[str]:
    return ["--", sys.executable, str(SCRIPT), case, "{seq_length}", "{steps}", str(attempts)]


@pytest.fixture(scope="module")
def quick_start(job_environment: dict[str, str]) -> dict[str, str]:
    """Variables of the environment for a sweep whose jobs train."""
    return {name: job_environment[name] for name in QUICK}


@pytest.mark.real
def test_the_demo_s_script(tmp_path: Path, job_environment: dict[str, str]) -> None:
    options = ["--stage", "0,2", "--offload", "optimizer", "--seq-length", "32,64", "--micro-batch", "2"]
    options += ["--steps", "5", "--warmup", "2", "--json", "-o", str(tmp_path / "sweep")]
    done = run_zerotop(tmp_path, "sweep", *options, env=job_environment | make_environment(tmp_path), timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert [row["outcome"] for row in rows] == ["skipped", "skipped", "ok", "ok"]
    for row in rows[2:]:
        assert (row["steps"], row["micro_batch_tokens"]) == (3, 2 * row["seq_length"])
        assert row["tokens_per_s"] > row["iterations_per_s"] > 0
        assert row["step_cores"] > 0
        engine = Recording.open(tmp_path / "sweep" / row["recording"]).events_of(Engine)[0].facts
        assert (engine["zero_stage"], engine["offload_optimizer"]) == (2, "cpu")


@pytest.fixture(scope="module")
def sweep_outcomes(tmp_path_factory: pytest.TempPathFactory, quick_start: dict[str, str]) -> tuple[Path, dict[str, Any]]:
    """A sweep of one point for each outcome, and what it printed."""
    folder = tmp_path_factory.mktemp("outcomes")
    options = ["--seq-length", "32", "--set", "case=train,flaky,broken,memory", "--retries", "2"]
    options += ["--steps", "6", "--warmup", "2", "--json", "--price-per-hour", "36", "-o", str(folder / "sweep")]
    environment = make_environment(folder, **quick_start)
    done = run_zerotop(folder, "sweep", *options, *make_command(folder / "attempts"), env=environment)
    assert done.returncode == 1  # one point crashed
    return folder / "sweep", {row["case"]: row for row in json.loads(done.stdout)["results"]}


def test_each_outcome_is_a_result(sweep_outcomes: tuple[Path, dict[str, Any]]) -> None:
    _, results = sweep_outcomes
    assert {case: (row["outcome"], row["attempts"]) for case, row in results.items()} == {
        "train": ("ok", 1),
        "flaky": ("ok", 3),
        "broken": ("crashed", 3),
        "memory": ("out_of_memory", 1),
    }
    assert results["train"]["reason"] == ""
    assert results["flaky"]["reason"].startswith("No optimizer step was recorded")  # it trains nothing
    assert results["broken"]["reason"].endswith("Its last line: no such thing")
    assert "out of GPU memory" in results["memory"]["reason"]


def test_points_run_beside_each_other_on_gpus_of_their_own(tmp_path: Path) -> None:
    code = "import os, sys, time; begun = time.time(); time.sleep(4); open(sys.argv[1], 'a').write("
    code += "f'{os.environ.get(\"CUDA_VISIBLE_DEVICES\")} {begun} {time.time()}\\n')"
    values: list[dict[str, Value]] = [{"gpus": 1}, {"gpus": 1}, {"gpus": 2}, {"gpus": 1}]
    plan = Plan({"gpus": [1, 2]}, (sys.executable, "-c", code, str(tmp_path / "seen")), retries=0)
    points = tuple(Point(number, settings) for number, settings in enumerate(values))
    runner = SweepRunner(Sweep(tmp_path / "sweep", plan, points), gpus=["3", "GPU-5"])
    (tmp_path / "sweep").mkdir()
    runner.run()
    assert not runner.waiting, runner.problem
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    times = {gpu: [(float(a), float(b)) for one, a, b in seen if one == gpu] for gpu in ("3", "GPU-5", "None")}
    assert {gpu: len(one) for gpu, one in times.items()} == {"3": 2, "GPU-5": 1, "None": 1}
    (both,) = times["None"]  # the point that needs both GPUs sees what the sweep sees
    assert all(end < both[0] or begin > both[1] for gpu in ("3", "GPU-5") for begin, end in times[gpu])
    first, beside = times["3"][0], times["GPU-5"][0]
    assert max(first[0], beside[0]) < min(first[1], beside[1])
    assert [point.result.machine_share for point in runner.sweep.points if point.result] == [0.5, 0.5, 1.0, 0.5]


def test_a_job_that_hangs_is_stopped(tmp_path: Path) -> None:
    options = ["--seq-length", "8", "--hang-after", "5", "--json", "-o", str(tmp_path / "sweep")]
    done = run_zerotop(tmp_path, "sweep", *options, *make_command(tmp_path, "hang"))
    (row,) = json.loads(done.stdout)["results"]
    assert (row["outcome"], row["attempts"]) == ("hung", 1)
    assert "for too long" in row["reason"]
    assert Recording.open(tmp_path / "sweep" / "points" / "0000").is_over


def test_a_point_measures_pace_without_warm_up(sweep_outcomes: tuple[Path, dict[str, Any]]) -> None:
    path, results = sweep_outcomes
    row = results["train"]
    assert row["steps"] == 4
    (spans,) = (source.array for source in Recording.open(path / row["recording"]).sources["spans"])
    ends_ns = spans["end_ns"][spans["phase"] == PHASE_CODE["step"]]
    assert row["iterations_per_s"] == pytest.approx(3e9 / (ends_ns[5] - ends_ns[2]), rel=0.02)
    assert row["iterations_per_s"] < 20  # each iteration sleeps for 50 ms
    assert row["tokens_per_s"] == pytest.approx(row["iterations_per_s"] * 2 * 32)
    assert row["cost"] == pytest.approx(row["seconds"] * 0.01)
    assert row["host_peak_bytes"] > 50 << 20


def test_every_attempt_is_a_recording(sweep_outcomes: tuple[Path, dict[str, Any]]) -> None:
    path, results = sweep_outcomes
    assert sorted(folder.name for folder in (path / "points").iterdir()) == [
        "0000", "0001", "0001-2", "0001-3", "0002", "0002-2", "0002-3", "0003",
    ]  # fmt: skip
    assert results["flaky"]["recording"] == "points/0001-3"
    assert Recording.open(path / "points" / "0000").is_over
    assert polars.read_csv(path / "results.csv")["outcome"].to_list() == [row["outcome"] for row in results.values()]


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    options = ["sweep", "--seq-length", "8,16,24", "--retries", "0", "-o", str(tmp_path / "sweep")]
    held = tmp_path / "held"  # the points after the first last as long as it is there
    held.touch()
    waiting = f"while {{seq_length}} > 8 and os.path.exists({str(held)!r}): time.sleep(0.1)"
    slow = ["--", sys.executable, "-c", f"import os, time; time.sleep(2)\n{waiting}"]
    running = subprocess.Popen(
        [*ZEROTOP, *options, *slow], env=make_environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(lambda: (tmp_path / "sweep" / "points" / "0001").is_dir())
    again = run_zerotop(tmp_path, *options, *slow)
    assert again.returncode == 1
    assert b"Another sweep runs in" in again.stderr
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert b"1 of 3 points are done. Continue with: zerotop sweep --resume" in errors
    held.unlink()
    first = read_sweep(tmp_path / "sweep").points[0].result
    begun_s = time.monotonic()
    done = run_zerotop(tmp_path, "sweep", "--resume", str(tmp_path / "sweep"))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun_s > 4
    points = read_sweep(tmp_path / "sweep").points
    assert points[0].result == first
    assert [point.result is not None and point.result.outcome for point in points] == ["ok"] * 3


def test_results_that_cannot_be_written_end_the_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    # The first point replaces the results by a folder, as a full disk would refuse them.
    trouble = f"import os; os.remove('{folder}/results.csv'); os.mkdir('{folder}/results.csv')"
    job = ["--", sys.executable, "-c", f"{{seq_length}}; {trouble}"]
    done = run_zerotop(tmp_path, "sweep", "--seq-length", "1,2", "-o", str(folder), *job)
    assert done.returncode == 1
    assert b"Nothing can be written to" in done.stderr
    assert b"zerotop sweep --resume" in done.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--seq-length", "8,16", "--", "true"], "--seq-length varies, but the command has no {seq_length}"),
        (["--stage", "2,3", "--", "true", "{seq_length}"], "--stage varies, but the command has no {stage} or {deepspeed}"),
        (["--set", "lr=1,2", "--", "true", "{seq_length}", "{lr}"], "the command has {seq_length}: give its values"),
        (["--seq-length", "8", "--", "true", "{seq_length}", "--lr={rate}"], "the command has {rate}: give its values"),
        (["--seq-length", "2048:128:128"], "the range 2048:128:128 runs backwards"),
        (["--seq-length", "1:5:0"], "step of 0"),
        (["--seq-length", "8,"], "a value is missing"),
        (["--stage", "4"], "'4' is not one of 0, 1, 2, 3"),
        (["--stage", "0", "--offload", "optimizer"], "No combination can work: Stage 0 does not partition"),
        (["--seq-length", "1:20000"], "This is a matrix of 20,000 points; at 30 s each it takes 167 hours. Add --yes"),
        ([], "Nothing varies"),
        (["--model", "nosuch"], "There is no model 'nosuch'"),
        (["--seq-length", "8", "--steps", "4"], "leaves no interval"),
        (["--seq-length", "8,9", "--", "no-such-program", "{seq_length}"], "There is no command 'no-such-program'"),
        (["--resume", "nowhere", "--stage", "2"], "omit them"),
        (["--resume", "nowhere", "--steps", "20"], "--resume cannot change --steps of the sweep: omit it"),
        (["--set", "lr=1", "--set", "lr=2", "--", "true", "{lr}"], "--set lr is given twice: write all its values as"),
        (["--seq-length", "8,9", "--slurm", "partition=gpu"], "--slurm goes with --executor slurm"),
        (["--resume", "nowhere"], "There is no sweep 'nowhere'"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_runs(tmp_path: Path, options: list[str], sentence: str) -> None:
    done = run_zerotop(tmp_path, "sweep", *options)
    assert done.returncode in (1, 2)
    assert sentence in done.stderr.decode()


@pytest.mark.parametrize("command", ["sweep", "fit"])
def test_a_reader_that_leaves_ends_it_quietly(tmp_path: Path, quick_start: dict[str, str], command: str) -> None:
    """As ``zerotop sweep ... | head -1``. It can go on later, and no job stays."""
    folder = tmp_path / "sweep"
    values = "8,16" if command == "sweep" else "8:16:8"
    options = [command, "--headless", "--seq-length", values, "--steps", "6", "-o", str(folder)]
    job = ["--", sys.executable, str(SCRIPT), "train", "{seq_length}", "{steps}", "none"]
    words = shlex.join([sys.executable, "-m", "zerotop", *options, *job])
    done = subprocess.run(
        ["bash", "-c", f"{words} | head -n 1 > /dev/null; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        cwd=tmp_path,
        env=make_environment(tmp_path, **quick_start),
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert 1 <= len(read_sweep(folder).finished) <= 2  # the search finds out with its second line


def test_a_large_matrix_asks_first(tmp_path: Path) -> None:
    options = ["--seq-length", "1:10000", "-o", str(tmp_path / "sweep"), "--", "true", "{seq_length}"]
    with closing(start_on_terminal(tmp_path, "sweep", *options)) as terminal:
        terminal.wait_for("This is a matrix of 10,000 points", "Start? [y/N]")
        terminal.type_keys("n\r")
        terminal.wait_for("Not started")


def test_the_screen_opens_a_point_and_returns(tmp_path: Path, quick_start: dict[str, str]) -> None:
    job = ["--", sys.executable, str(SCRIPT), "train", "{seq_length}", "{steps}", "none"]
    options = ["sweep", "--seq-length", "8,16", "--steps", "6", "-o", str(tmp_path / "sweep"), "--price-per-hour", "30"]
    environment = make_environment(tmp_path, **quick_start)
    with closing(
        Terminal([*ZEROTOP, *options, *job], environment=environment, folder=tmp_path, rows=30, columns=110)
    ) as terminal:
        terminal.wait_for("2 of 2 points", "done", "Peak host memory")
        terminal.type_keys("\r")
        terminal.wait_for("Timeline", "Memory")
        terminal.type_keys("\x1b")
        terminal.wait_for("2 of 2 points")
        terminal.type_keys("q")
        assert terminal.exit_code() == 0
    assert polars.read_csv(tmp_path / "sweep" / "results.csv")["outcome"].to_list() == ["ok", "ok"]

"""The microscope looks by itself on a GPU: the lines are right, the results unchanged, and its cost is in the budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from loop_runs import LOOPS
from rank_recordings import Rank
from real_jobs import make_environment, run_recorded
from zerotop_probe.recording.directory import DEFAULT_BUDGET

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
SCRIPT = "memory_on_gpu.py"
STEPS = 600
# What the budget may advance to the first look, as in memory_watch.
ADVANCE_S = 30.0


class Watched(NamedTuple):
    """A run: its looks, in order, and what it counted itself."""

    looks: list[dict[str, Any]]
    counted: dict[str, Any]
    rank: Rank

    def find_lines(self, why: str) -> list[tuple[str, int, int]]:
        """Return file, line and bytes of the groups of the last look for a reason, by their innermost own frames."""
        look = [one for one in self.looks if one["why"] == why][-1]
        found = []
        for stack in look["stacks"]:
            frames = [look["frames"][number] for number in stack["frames"]]
            own = next((frame for frame in frames if frame["own"]), None)
            found.append((own["file"] if own else "", own["line"] if own else 0, stack["count"] * stack["size_bytes"]))
        return found


def make_command(kind: str, steps: int) -> list[str]:
    return [sys.executable, str(LOOPS / SCRIPT), kind, str(steps), "cuda"]


def make_cuda_environment() -> dict[str, str]:
    inherited = make_environment() | {"DS_ACCELERATOR": "cuda"}
    del inherited["CUDA_VISIBLE_DEVICES"]
    return inherited


def read_counted(output: str) -> dict[str, Any]:
    line = next(line for line in output.splitlines() if line.startswith("COUNTED "))
    return dict(json.loads(line[8:]))


def run_watched(kind: str, folder: Path, *options: str, steps: int = STEPS) -> Watched:
    run = run_recorded(make_command(kind, steps), folder, make_cuda_environment(), options)
    assert run.returncode == 0, run.output
    rank = Rank(run.recording, 0)
    assert not rank.find_events("probe_error")
    return Watched(rank.find_events("memory_lines"), read_counted(run.output), rank)


def describe_cost(watched: Watched) -> str:
    """What the steps that were looked at took more than the others, and what the probe says of it."""
    seconds = watched.counted["seconds"]
    usual = median(seconds[10:])
    parts = [f"usual {1e3 * usual:.1f} ms"]
    for look in watched.looks:
        steps = range(look["first_step"], look["first_step"] + look["steps"])
        felt = sum(seconds[step] - usual for step in steps if step < len(seconds))
        parts.append(
            f"{look['why']} at step {look['first_step']}: {look['entries']} entries, {1e3 * look['seconds']:.1f} ms on the"
            f" training thread, {1e3 * felt:.1f} ms felt"
        )
    return "; ".join(parts)


def test_a_clean_run_is_looked_at_once_and_comes_out_the_same(tmp_path: Path) -> None:
    watched = run_watched("nothing", tmp_path)
    print(describe_cost(watched))
    assert [look["why"] for look in watched.looks] == ["peak"]
    total_s = sum(watched.counted["seconds"])
    assert sum(look["seconds"] for look in watched.looks) <= DEFAULT_BUDGET * (total_s + ADVANCE_S)
    alone = subprocess.run(
        make_command("nothing", STEPS), env=make_cuda_environment(), capture_output=True, text=True, timeout=300, check=True
    )
    assert read_counted(alone.stdout)["losses"] == watched.counted["losses"]
    lines = watched.counted["lines"]
    assert (SCRIPT, lines["logits"]) in [line[:2] for line in watched.find_lines("peak")]


def test_the_line_of_a_leak_is_found(tmp_path: Path) -> None:
    watched = run_watched("leak", tmp_path)
    print(describe_cost(watched))
    whys = [look["why"] for look in watched.looks]
    assert whys[0] == "peak", "the first steps"
    assert "creep" in whys, "where the leak makes a new peak first, that is looked at too"
    assert watched.find_lines("creep") == [(SCRIPT, watched.counted["lines"]["leak"], 32 << 20)]


def test_the_line_of_a_new_peak_is_found(tmp_path: Path) -> None:
    watched = run_watched("jump", tmp_path)
    print(describe_cost(watched))
    looks = [(look["why"], look["first_step"] > watched.counted["first"]) for look in watched.looks]
    assert looks == [("peak", False), ("peak", True)]
    lines = watched.counted["lines"]
    assert (SCRIPT, lines["jump"]) in [line[:2] for line in watched.find_lines("peak")]


def test_the_line_of_an_evaluation_is_found(tmp_path: Path) -> None:
    watched = run_watched("eval", tmp_path)
    print(describe_cost(watched))
    assert [look["why"] for look in watched.looks] == ["peak", "evaluation"]
    lines = watched.counted["lines"]
    assert (SCRIPT, lines["logits"]) == watched.find_lines("evaluation")[0][:2]


def test_nothing_is_looked_at_without_stacks(tmp_path: Path) -> None:
    assert run_watched("leak", tmp_path, "--no-stacks", steps=60).looks == []


def test_the_history_of_a_job_is_its_own(tmp_path: Path) -> None:
    watched = run_watched("own", tmp_path, steps=60)
    assert watched.counted["entries"] > 0
    assert all(look["first_step"] < watched.counted["first"] for look in watched.looks)

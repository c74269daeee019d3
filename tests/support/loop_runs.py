"""Run the loops in tests/real/loops with the probe inside, as ``zerotop run`` does it: by two variables."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zerotop_probe
from free_ports import find_free_port
from job_state import describe_job
from rank_recordings import Rank
from real_jobs import QUICK_COMPILERS, RANKS, TIMEOUT_S, build_launch_command, make_environment
from zerotop_probe.recording.directory import BUDGET_VARIABLE, SESSION_VARIABLE

LOOPS = Path(__file__).resolve().parent.parent / "real" / "loops"
BOOTSTRAP = Path(zerotop_probe.__file__).parent / "bootstrap"
FORKED_RUNS = Path(__file__).with_name("forked_runs.py")
MISSING = "missing"
"""The variant of a loop whose recording is not there."""


@dataclass(frozen=True)
class Counted:
    """A finished run: its recording, and the script's own counts by rank."""

    recording: Path
    output: str
    by_rank: dict[int, dict[str, Any]]

    def read_rank(self, number: int) -> tuple[Rank, dict[str, Any]]:
        """Return the recording and the own counts of a rank."""
        return Rank(self.recording, number), self.by_rank[number]


def torch_version() -> tuple[int, int]:
    """Major and minor version of the installed PyTorch."""
    major, minor, *_ = importlib.metadata.version("torch").split(".")
    return int(major), int(minor)


def run_loop(  # noqa: PLR0913
    name: str,
    folder: Path,
    *options: str,
    launcher: str = "deepspeed",
    ranks: int = 2,
    recording: Path | None = None,
    accelerator: str = "cpu",
    bootstrap: bool = True,
    variables: Mapping[str, str] | None = None,
) -> Counted:
    """Run a loop to its end, with its recording in ``recording``, by default ``folder/recording``.

    Without ``bootstrap`` the script has the package on its path instead, to ask for it itself. An empty
    ``recording`` is none. ``variables``: further ones of its environment.

    Raises AssertionError with the output if it fails.
    """
    if recording is None:
        recording = folder / "recording"
        recording.mkdir()
    path = BOOTSTRAP if bootstrap else BOOTSTRAP.parent.parent
    recording_variable = {SESSION_VARIABLE: str(recording)} if recording != Path() else {}
    script = [str(LOOPS / f"{name}.py"), *options]
    command = build_launch_command(launcher, script, ranks=ranks)
    _run_command(command, folder, _make_variables(path, accelerator) | recording_variable | dict(variables or {}))
    return _read_counted(folder / "output", recording, ranks)


def run_loop_variants(
    name: str, folder: Path, variants: Mapping[str, Sequence[str]], modules: Sequence[str], *, bootstrap: bool = True
) -> dict[str, Counted]:
    """Run a loop once with the options of each variant, one after another, with two ranks.

    Each rank is forked from a process that has imported ``modules``. The recordings are in ``folder/<variant>/recording``;
    that of the variant MISSING is not there. Without ``bootstrap`` nothing is recorded.

    Raises AssertionError with the output if one fails.
    """
    runs = []
    for variant, options in variants.items():
        recording = folder / variant / "recording"
        (folder / variant if variant == MISSING else recording).mkdir(parents=True)
        runs.append(
            {
                "arguments": options,
                "variables": {SESSION_VARIABLE: str(recording), "MASTER_PORT": str(find_free_port())},
                "output": str(folder / variant / "output"),
            }
        )
    command = build_launch_command(
        "bare", [str(FORKED_RUNS), json.dumps(runs), ",".join(modules), str(LOOPS / f"{name}.py")]
    )
    # Only with a recording is the probe loaded; the process that imports does not train, and writes none.
    variables = {SESSION_VARIABLE: str(folder / "none")} if bootstrap else {}
    _run_command(command, folder, _make_variables(BOOTSTRAP if bootstrap else BOOTSTRAP.parent.parent) | variables)
    assert not (folder / "none").exists()
    return {
        variant: _read_counted(folder / variant / "output", folder / variant / "recording", RANKS) for variant in variants
    }


def _make_variables(path: Path, accelerator: str = "cpu") -> dict[str, str]:
    inherited = make_environment() | {"DS_ACCELERATOR": accelerator}
    if accelerator == "cuda":
        del inherited["CUDA_VISIBLE_DEVICES"]
        inherited["PATH"] = inherited["PATH"].removeprefix(f"{QUICK_COMPILERS}{os.pathsep}")  # its models are larger
    # A few steps on a busy machine are to be recorded with their phases all the same.
    detail = {"PYTHONZEROTOP_DEBUG": "1", BUDGET_VARIABLE: "50"}
    return inherited | {"PYTHONPATH": os.pathsep.join((str(path), inherited["PYTHONPATH"])), **detail}


def _run_command(command: Sequence[str], folder: Path, variables: dict[str, str]) -> None:
    """Run a command to its end, with its output in ``folder/output``."""
    with open(folder / "output", "w+b") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(TIMEOUT_S)
        except BaseException:
            print((folder / "output").read_text(errors="replace"), describe_job(process.pid), sep="\n\n")
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _read_counted(output: Path, recording: Path, ranks: int) -> Counted:
    text = output.read_text(errors="replace")
    lines = [json.loads(line[8:]) for line in text.splitlines() if line.startswith("COUNTED ")]
    assert len(lines) == ranks, text
    assert "zerotop:" not in text, text
    return Counted(recording, text, {line.get("rank", 0): line for line in lines})

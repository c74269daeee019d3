"""Runs the loops in tests/real/loops with the probe inside, as ``zerotop run`` does it: by two variables."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zerotop_probe
from rank_recordings import Rank
from real_jobs import TIMEOUT_S, build_launch_command, make_environment
from zerotop_probe.recording.directory import SESSION_VARIABLE

LOOPS = Path(__file__).resolve().parent.parent / "real" / "loops"
BOOTSTRAP = Path(zerotop_probe.__file__).parent / "bootstrap"


@dataclass(frozen=True)
class Counted:
    """A finished run: its recording, and by rank what the script counted itself."""

    session: Path
    output: str
    by_rank: dict[int, dict[str, Any]]

    def read_rank(self, number: int) -> tuple[Rank, dict[str, Any]]:
        """Return the recording and the own counts of a rank."""
        return Rank(self.session, number), self.by_rank[number]


def torch_version() -> tuple[int, int]:
    """Major and minor version of the installed PyTorch."""
    major, minor, *_ = importlib.metadata.version("torch").split(".")
    return int(major), int(minor)


def run_loop(
    name: str,
    folder: Path,
    *options: str,
    launcher: str = "deepspeed",
    ranks: int = 2,
    session: Path | None = None,
    accelerator: str = "cpu",
    bootstrap: bool = True,
) -> Counted:
    """Runs a loop to its end, with its recording in ``folder/session`` unless told otherwise.

    Without ``bootstrap`` the script has the package on its path instead, to ask for it itself. An empty
    ``session`` is none.

    Raises AssertionError with the output if it fails.
    """
    if session is None:
        session = folder / "session"
        session.mkdir()
    inherited = make_environment() | {"DS_ACCELERATOR": accelerator}
    if accelerator == "cuda":
        del inherited["CUDA_VISIBLE_DEVICES"]
    path = BOOTSTRAP if bootstrap else BOOTSTRAP.parent.parent
    variables = {"PYTHONPATH": str(path), "PYTHONZEROTOP_DEBUG": "1"}
    if session != Path():
        variables[SESSION_VARIABLE] = str(session)
    script = [str(LOOPS / f"{name}.py"), *options]
    command = build_launch_command(launcher, script, ranks=ranks)
    with open(folder / "output", "w+b") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=inherited | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    text = (folder / "output").read_text(errors="replace")
    lines = [json.loads(line[8:]) for line in text.splitlines() if line.startswith("COUNTED ")]
    assert len(lines) == ranks, text
    assert "zerotop:" not in text, text
    return Counted(session, text, {line.get("rank", 0): line for line in lines})

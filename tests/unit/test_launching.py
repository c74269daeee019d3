"""The recording of a command, before it is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zerotop.commands.job import launching
from zerotop.recording.reader import Recording


@pytest.mark.parametrize(
    ("arguments", "launcher"),
    [
        (["-m", "torch.distributed.run", "train.py"], "torchrun"),
        (["-m", "torch.distributed.launch", "train.py"], "torchrun"),
        (["-m", "deepspeed.launcher.runner", "train.py"], "deepspeed"),
        (["-u", "-m", "accelerate.commands.launch", "train.py"], "accelerate"),
        (["/usr/local/bin/torchrun", "train.py"], "torchrun"),
        (["train.py", "-m", "torchrun"], ""),
    ],
)
def test_a_recording_names_the_launcher_of_its_command(tmp_path: Path, arguments: list[str], launcher: str) -> None:
    with launching.make_recording([sys.executable, *arguments], str(tmp_path / "recording")) as recording:
        assert Recording.open(Path(recording)).info["launcher"] == launcher


def test_programs_of_mpi_and_slurm_are_launchers(tmp_path: Path) -> None:
    for program, launcher in (("mpirun", "mpi"), ("srun", "slurm"), ("accelerate-launch", "accelerate")):
        path = tmp_path / program
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        with launching.make_recording([str(path), "train.py"], str(tmp_path / f"{program}.recording")) as recording:
            assert Recording.open(Path(recording)).info["launcher"] == launcher

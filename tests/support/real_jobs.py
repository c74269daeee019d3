"""Start real training jobs under zerotop, the way users start them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from free_ports import find_free_port
from job_state import describe_job
from operators import operators_folder
from zerotop import demo

BIN = Path(sys.executable).parent
LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "python")
RANKS = 2
TIMEOUT_S = 900.0
BARE_RANKS = Path(__file__).with_name("bare_ranks.py")
IN_TURN = Path(__file__).with_name("finetunes_in_turn.py")
QUICK_PYTHONS = Path(__file__).with_name("quick_pythons")
QUICK_COMPILERS = Path(__file__).with_name("quick_compilers")
EARLY_COMPILER = {"EARLY_COMPILER": "1"}
"""Variables of a job that imports PyTorch's compiler where PyTorch and DeepSpeed do, see quick_pythons/late_compiler.py."""
SMALL = ("--model", "tiny", "--steps", "3", "--seq-length", "64", "--micro-batch", "2")


@dataclass(frozen=True)
class Run:
    """A finished job: its exit code, its stdout and stderr together, its recording, and how long it took."""

    returncode: int
    output: str
    recording: Path
    seconds: float
    folder: Path
    """Of this run alone. Its part ``tmp`` was the job's TMPDIR, ``checkpoints`` is free for --output-dir."""


def make_environment() -> dict[str, str]:
    """Return the environment of a real run."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONZEROTOP")}
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(QUICK_PYTHONS), os.environ.get("PYTHONPATH")))),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": os.pathsep.join((str(QUICK_COMPILERS), str(BIN), os.environ.get("PATH", os.defpath))),
        "TORCH_EXTENSIONS_DIR": str(operators_folder()),
    }


def build_launch_command(launcher: str, script: Sequence[str], *, ranks: int = RANKS) -> list[str]:
    """Return the command that runs ``script`` (a path and its arguments) by ``launcher``; python is one rank.

    "bare" is bare_ranks.py, where the launcher is not what is tested: that of DeepSpeed imports torch twice.
    """
    several = {
        "deepspeed": ("deepspeed --num_gpus", "--master_port"),
        "torchrun": ("torchrun --nproc_per_node", "--master_port"),
        "accelerate": ("accelerate launch --use_deepspeed --num_processes", "--main_process_port"),
    }
    if launcher == "python":
        return [sys.executable, *script]
    if launcher == "bare":
        return [sys.executable, str(BARE_RANKS), str(ranks), str(find_free_port()), *script]
    head, port = several[launcher]
    program, *arguments = head.split()
    return [str(BIN / program), *arguments, str(ranks), port, str(find_free_port()), *script]


def finetune_command(launcher: str, config: Path | None, options: Sequence[str]) -> list[str]:
    """Return the command of finetune.py on the tiny model, for three steps unless ``options`` say otherwise."""
    chosen = [] if config is None else ["--deepspeed", str(config)]
    return build_launch_command(launcher, [str(demo.SCRIPT_PATH), *SMALL, *chosen, *options])


def finetunes_in_turn(
    runs: dict[str, tuple[str | None, Sequence[str]]], folder: Path, environment: dict[str, str]
) -> dict[str, Run]:
    """Run finetune.py with each (config, options), by name, all in one job of two ranks and in one recording.

    A run that was not reached, or that not all ranks ended well, has the exit code 1.
    """
    folders = {name: folder / name for name in runs}
    for name, (config, options) in runs.items():
        (folders[name] / "tmp").mkdir(parents=True)
        chosen = [] if config is None else ["--deepspeed", str(prepared_config(config, folders[name]))]
        (folders[name] / "arguments.json").write_text(json.dumps([*SMALL, *chosen, *options]))
        (folders[name] / "output").touch()
    whole = run_recorded(build_launch_command("torchrun", [str(IN_TURN), *map(str, folders.values())]), folder, environment)

    def read_result(path: Path) -> Run:
        codes = [exit_code.read_text() for exit_code in path.glob("exit-*")]
        output = (path / "output").read_text(errors="replace")
        well = codes == ["0"] * RANKS
        return Run(0 if well else 1, output if well else output + whole.output, whole.recording, whole.seconds, path)

    return {name: read_result(path) for name, path in folders.items()}


def prepared_config(name: str, folder: Path) -> Path:
    """Return the ready config of that name; a config that swaps to NVMe gets a folder to swap to."""
    path = demo.find_config(name)
    content = json.loads(path.read_text())
    swaps = [part for part in content["zero_optimization"].values() if isinstance(part, dict) and "nvme_path" in part]
    if not swaps:
        return path
    for part in swaps:
        part["nvme_path"] = str(folder / "nvme")
    (folder / "nvme").mkdir()
    edited = folder / path.name
    edited.write_text(json.dumps(content))
    return edited


def run_recorded(command: Sequence[str], folder: Path, environment: dict[str, str], options: Sequence[str] = ()) -> Run:
    """Run ``command`` to its end, headless under zerotop, with its recording in ``folder/recording``.

    ``options`` are zerotop's own.

    Raises subprocess.TimeoutExpired after TIMEOUT_S, with everything of the job killed.
    """
    recording = folder / "recording"
    arguments = [
        sys.executable,
        "-m",
        "zerotop",
        "run",
        "--headless",
        "--recording",
        str(recording),
        *options,
        "--",
        *command,
    ]
    (folder / "tmp").mkdir()
    begin = time.monotonic()
    with open(folder / "output", "w+b") as output, _shorten_path(folder / "tmp") as temporary:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment | {"TMPDIR": str(temporary)},
            start_new_session=True,
        )
        try:
            returncode = process.wait(TIMEOUT_S)
        except BaseException:
            print((folder / "output").read_text(errors="replace"), describe_job(process.pid), sep="\n\n")
            os.killpg(process.pid, signal.SIGKILL)
            raise
        seconds = time.monotonic() - begin
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Run(returncode, text, recording, seconds, folder)


@contextmanager
def _shorten_path(folder: Path) -> Iterator[Path]:
    """Give a folder a short path: loader workers bind sockets in TMPDIR, and a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="zt-") as parent:
        link = Path(parent) / "t"
        link.symlink_to(folder)
        yield link

"""``zerotop demo``: a real DeepSpeed fine-tune of two ranks, launched here and watched."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import socket
import sys
import time
from pathlib import Path

import pynvml

from zerotop.commands.launching import new_session
from zerotop.commands.problems import FAILED, Problem
from zerotop.commands.run import has_terminal
from zerotop.demo import SCRIPT, config_path
from zerotop.ui.ports import Source
from zerotop_probe.outside import agent, control

_NEEDED = ("torch", "deepspeed", "transformers", "datasets", "accelerate")
_CONFIG = "zero2_offload_optimizer_bf16"
_RANKS = 2
_LOOK_S = 2.0
_EVAL_EVERY = 5
_BUILD_NOTE = (
    "If DeepSpeed has not yet compiled its CPU optimizer on this machine, it does so now: a minute or two"
)


def demo(options: argparse.Namespace) -> int:
    """Returns the job's exit code."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Problem(f"The demo trains, and needs {', '.join(missing)}: pip install 'zerotop[train]'")
    gpus = _gpu_count()
    os.environ.update(_environment(gpus))
    command = command_line(options.steps, gpus)
    with new_session(command, None) as session:
        agent.launch_in_background(session, command)
    if not has_terminal():
        return _follow(Path(session))
    from zerotop.commands.screen import watch_job

    return watch_job(session)


def command_line(steps: int, gpus: int) -> list[str]:
    """What is run: on up to two GPUs, or two ranks of a small model on the CPU."""
    ranks, model = (min(_RANKS, gpus), "qwen-0.5b") if gpus else (_RANKS, "tiny")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
    # One checkpoint, at the last step: the Trainer saves there in any case.
    often = ["--eval-every", str(_EVAL_EVERY), "--save-every", str(steps)]
    return [
        *launcher, "--num_gpus", str(ranks), "--master_port", str(_free_port()), str(SCRIPT),
        "--model", model, "--steps", str(steps), *often, "--deepspeed", str(config_path(_CONFIG)),
    ]  # fmt: skip


def _environment(gpus: int) -> dict[str, str]:
    # DeepSpeed compiles its operators with the ninja that pip put beside this Python.
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {"PATH": path} if gpus else {"PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def _gpu_count() -> int:
    """How many GPUs the training can use: 0 as well where torch was built for the CPU alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1") or "+cpu" in importlib.metadata.version("torch"):
        return 0
    try:
        pynvml.nvmlInit()
        try:
            count = int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
    return count if visible is None else min(count, len(visible.split(",")))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _follow(path: Path) -> int:
    """Prints progress until the job has ended, then what was measured."""
    from zerotop.analysis.source import RecordingSource
    from zerotop.analysis.summary import summary
    from zerotop.commands.screen import exit_code
    from zerotop.session.reader import Session

    print(f"Recording in {path}", _BUILD_NOTE, sep="\n", flush=True)
    session = Session.open(path)
    source = RecordingSource(session)
    while control.job_alive(str(path)) or control.sampler_alive(str(path)):
        try:
            time.sleep(_LOOK_S)
            source.refresh()
            print(progress_line(source), flush=True)
        except KeyboardInterrupt:
            control.request_stop(str(path))
    source.refresh()
    code = exit_code(session)
    if code:
        print(*source.view(None).output[-20:], sep="\n", file=sys.stderr)
    print(summary(session))
    return FAILED if code is None else code


def progress_line(source: Source) -> str:
    """Step, rate and time of the end of a recording, in a line."""
    view = source.view(None)
    progress = view.progress
    elapsed = f"{progress.elapsed_s:4.0f} s"
    if progress.step is None:
        return f"{elapsed}  {view.job.exit_text or 'starting'}"
    total = "" if progress.total_steps is None else f" of {progress.total_steps}"
    rate = f"  {1 / progress.iteration_s:.2f} it/s" if progress.iteration_s > 0 else ""
    return f"{elapsed}  step {progress.step}{total}{rate}"

"""``zerotop demo``: launch a real DeepSpeed fine-tune with two ranks and watch it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.job.launching import make_session
from zerotop.commands.job.training_machine import (
    build_environment,
    check_packages,
    count_usable_gpus,
    find_free_port,
    remove_shared_memory,
)
from zerotop.demo import RECORDING_PATH, SCRIPT_PATH, find_config
from zerotop_probe.outside.job import agent, job_control
from zerotop_probe.outside.sampling.ranks.build_locks import find_extensions_folder, remove_stale_locks

_CONFIG = "zero2_offload_optimizer_bf16"
_RANKS = 2
_EVAL_EVERY = 5
_BUILD_NOTE = "On the first run, DeepSpeed compiles its CPU optimizer, which takes 1-2 minutes"


def demo(options: argparse.Namespace) -> int:
    """Run the demo. Return the job's exit code; 0 after a replay."""
    if options.recorded:
        return _show_recorded()
    check_packages("The demo")
    gpus = count_usable_gpus()
    for lock in remove_stale_locks(find_extensions_folder(os.environ)):
        print(f"Removed the lock of a killed build: {lock}", flush=True)
    os.environ.update(build_environment(gpus))
    port = find_free_port()
    command = build_command(options.steps, gpus, port)
    with make_session(command, None) as session:
        agent.launch_in_background(session, command)
    try:
        return _show_job(session)
    finally:
        if not job_control.is_job_alive(session):
            remove_shared_memory(port)


def _show_job(session: str) -> int:
    if not has_terminal():
        from zerotop.commands.common.progress import follow_job

        print(f"Recording in {session}", _BUILD_NOTE, sep="\n", flush=True)
        return follow_job(Path(session))
    from zerotop.commands.job.watch import watch_job

    return watch_job(session)


def _show_recorded() -> int:
    """Replay the bundled recording from its first step; without a terminal, print its summary."""
    from zerotop.session.reader import Session

    session = Session.open(RECORDING_PATH)
    if not has_terminal():
        from zerotop.analysis.reports.headline import summarize_session

        print(summarize_session(session))
        return 0
    from zerotop.analysis.views.recording_source import RecordingSource
    from zerotop.commands.common.user_settings import load_settings
    from zerotop.ui.app.app import ZerotopApp

    source = RecordingSource(session)
    app = ZerotopApp(source, title=session.name, play_from_ns=source.first_step_ns, settings=load_settings())
    app.run()
    return app.return_code or 0


def build_command(steps: int, gpus: int, port: int) -> list[str]:
    """Return the launch command: up to two GPUs, or two ranks of a small model on the CPU."""
    ranks, model = (min(_RANKS, gpus), "qwen-0.5b") if gpus else (_RANKS, "tiny")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
    # One checkpoint, at the last step, where the Trainer saves in any case.
    intervals = ["--eval-every", str(_EVAL_EVERY), "--save-every", str(steps)]
    return [
        *launcher, "--num_gpus", str(ranks), "--master_port", str(port), str(SCRIPT_PATH),
        "--model", model, "--steps", str(steps), *intervals, "--deepspeed", str(find_config(_CONFIG)),
    ]  # fmt: skip

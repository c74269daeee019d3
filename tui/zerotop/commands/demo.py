"""``zerotop demo``: train a small model with two ranks and one planted fault, and watch it; or replay a recording."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zerotop.analysis.formatting import format_count
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.terminal import has_terminal
from zerotop.demo import FAULTY_SCRIPT_PATH, RECORDING_PATH

if TYPE_CHECKING:
    from zerotop.analysis.views.recording_source import RecordingSource
    from zerotop.commands.job.controller import JobController
    from zerotop.ui.app.demo_app import DemoApp, Guide

_RANKS = 2
_STEPS, _GPU_STEPS = 200, 600
_BUILD_NOTE = "On the first run, DeepSpeed compiles its CPU optimizer, which takes 1-2 minutes"
_TRAIN_NOTE = "{why} Until then this is a recording: 8 B parameters on four GPUs."


def demo(options: argparse.Namespace) -> int:
    """Run the demo. Return the job's exit code; 0 after a replay."""
    from zerotop.commands.job.training_machine import check_packages

    if options.recorded:
        return _show_recorded()
    try:
        check_packages("The demo", ("torch", "deepspeed"))
    except Problem as problem:
        if not has_terminal():
            raise
        return _show_recorded(_TRAIN_NOTE.format(why=f"{problem}."))
    return _train(options)


def _train(options: argparse.Namespace) -> int:
    from zerotop.commands.job.launching import make_recording
    from zerotop.commands.job.training_machine import (
        build_environment,
        count_usable_gpus,
        find_free_port,
        remove_shared_memory,
    )
    from zerotop_probe.outside.job import agent, job_control
    from zerotop_probe.outside.sampling.ranks.build_locks import find_extensions_folder, remove_stale_locks

    gpus = count_usable_gpus()
    folder = find_extensions_folder(os.environ)
    if locks := remove_stale_locks(folder):
        print(f"Removed {format_count(len(locks), 'lock')} of killed builds in {folder}", flush=True)
    os.environ.update(build_environment(gpus))
    port = find_free_port()
    command = build_command(options, gpus, port)
    with make_recording(command, None) as recording:
        agent.launch_in_background(recording, command)
    try:
        return _show_job(Path(recording), options)
    finally:
        if not job_control.is_job_alive(recording):
            remove_shared_memory(port)


def build_command(options: argparse.Namespace, gpus: int, port: int) -> list[str]:
    """Return the launch command: up to two GPUs, or two ranks of a small model on the CPU."""
    steps = options.steps or (_GPU_STEPS if gpus else _STEPS)
    chosen = [f"--{name}" for name in ("fixed", "offload") if getattr(options, name)]
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(min(_RANKS, gpus) or _RANKS),
        "--master-port", str(port), str(FAULTY_SCRIPT_PATH), "--steps", str(steps), *chosen,
    ]  # fmt: skip


def _show_job(recording: Path, options: argparse.Namespace) -> int:
    if has_terminal():
        from zerotop.commands.job.watch import watch_job
        from zerotop.ui.app.demo_app import Guide

        guide = Guide(is_fixed=options.fixed)
        code = watch_job(recording, run_app=partial(_run_live, guide=guide))
    else:
        from zerotop.commands.common.progress import follow_job

        print(f"Recording in {recording}", *[_BUILD_NOTE] * options.offload, sep="\n", flush=True)
        code = follow_job(recording)
    name = shlex.quote(recording.name)
    again = (
        f"zerotop compare {name} OTHER  # with the fault: zerotop recordings lists its name"
        if options.fixed
        else "zerotop demo --fixed"
    )
    print("Try next:", f"zerotop findings {name}", f"zerotop report {name}", again, "zerotop demo --recorded", sep="\n  ")
    return code


def _run_live(source: RecordingSource, controller: JobController, guide: Guide) -> DemoApp:
    """Show the job, and the recording whenever the user asks for it."""
    from zerotop.commands.common.user_settings import load_settings
    from zerotop.ui.app.demo_app import DemoApp
    from zerotop.ui.base.interfaces import Leaving

    while True:
        app = DemoApp(source, controller, title=source.recording.name, settings=load_settings(), guide=guide)
        if app.run() is not Leaving.FOR_STORY:
            return app
        _show_recorded()


def _show_recorded(note: str = "") -> int:
    """Replay the bundled recording from its first step; without a terminal, print its summary."""
    from zerotop.recording.reader import Recording

    recording = Recording.open(RECORDING_PATH)
    if not has_terminal():
        from zerotop.analysis.reports.headline import summarize_recording

        print(summarize_recording(recording))
        return 0
    from zerotop.analysis.views.recording_source import RecordingSource
    from zerotop.commands.common.user_settings import load_settings
    from zerotop.ui.app.demo_app import DemoApp, guide_story

    source = RecordingSource(recording)
    app = DemoApp(
        source,
        title=recording.name,
        play_from_ns=source.first_step_ns,
        settings=load_settings(),
        guide=guide_story(note),
    )
    app.run()
    return app.return_code or 0

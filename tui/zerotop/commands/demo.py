"""``zerotop demo``: launch a real DeepSpeed fine-tune with two ranks and watch it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import socket
import sys
from pathlib import Path

import pynvml

from zerotop.analysis.formatting import format_count
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.job.launching import make_session
from zerotop.demo import RECORDING_PATH, SCRIPT_PATH, find_config
from zerotop_probe.outside.job import agent, job_control
from zerotop_probe.outside.sampling.build_locks import find_extensions_folder, remove_stale_locks
from zerotop_probe.recording import events

_REQUIRED_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "accelerate")
_CONFIG = "zero2_offload_optimizer_bf16"
_RANKS = 2
_EVAL_EVERY = 5
_BUILD_NOTE = "On the first run, DeepSpeed compiles its CPU optimizer, which takes 1-2 minutes"


def demo(options: argparse.Namespace) -> int:
    """Run the demo. Return the job's exit code; 0 after a replay."""
    if options.recorded:
        return _show_recorded()
    missing = [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise Problem(f"The demo needs {', '.join(missing)} to train: pip install 'zerotop[train]'")
    gpus = _count_usable_gpus()
    for lock in remove_stale_locks(find_extensions_folder(os.environ)):
        print(f"Removed the lock of a killed build: {lock}", flush=True)
    os.environ.update(_build_environment(gpus))
    port = _find_free_port()
    command = build_command(options.steps, gpus, port)
    with make_session(command, None) as session:
        agent.launch_in_background(session, command)
    try:
        return _show_job(session)
    finally:
        if not job_control.is_job_alive(session):
            _remove_shared_memory(port)


def _show_job(session: str) -> int:
    if not has_terminal():
        from zerotop.commands.common.progress import follow_job

        print(f"Recording in {session}", _BUILD_NOTE, sep="\n", flush=True)
        return follow_job(Path(session))
    from zerotop.commands.job.watch import watch_job

    return watch_job(session)


def _show_recorded() -> int:
    """Replay the bundled recording from where the model is ready; without a terminal, print its summary."""
    from zerotop.session.reader import Session

    session = Session.open(RECORDING_PATH)
    if not has_terminal():
        from zerotop.analysis.reports.headline import summarize_session

        print(summarize_session(session))
        return 0
    from zerotop.analysis.views.recording_source import RecordingSource
    from zerotop.commands.common.user_settings import load_settings
    from zerotop.ui.app.app import ZerotopApp

    ready_ns = min(event.unix_ns for event in session.events_named(events.ENGINE))
    app = ZerotopApp(RecordingSource(session), title=session.name, play_from_ns=ready_ns, settings=load_settings())
    app.run()
    return app.return_code or 0


def _remove_shared_memory(port: int) -> None:
    """Remove shared buffers, 66 MiB each, that DeepSpeed's ranks on a CPU leave behind until the next reboot."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        path.unlink(missing_ok=True)


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


def _build_environment(gpus: int) -> dict[str, str]:
    # DeepSpeed compiles its operators with the ninja that pip installed next to this Python.
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {"PATH": path} if gpus else {"PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def _count_usable_gpus() -> int:
    """Return how many GPUs the training can use; print a message if torch was built without CUDA."""
    count = _count_visible_gpus()
    if not count or _torch_has_cuda():
        return count
    gpus = format_count(count, "GPU")
    print(f"This machine has {gpus}, but the installed torch was built without CUDA: the demo trains on the CPU")
    return 0


def _torch_has_cuda() -> bool:
    """Return whether ``torch.version.cuda`` is set, without importing torch, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        text = Path(folder, "version.py").read_text()
        return re.search(r"^cuda\b.*=\s*['\"]", text, re.MULTILINE) is not None
    return False


def _count_visible_gpus() -> int:
    """Return how many NVIDIA GPUs this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        try:
            count = int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
    return count if visible is None else min(count, len(parse_visible_devices(visible)))


def parse_visible_devices(text: str) -> list[str]:
    """Return the devices in ``CUDA_VISIBLE_DEVICES`` up to the first invalid one, as CUDA does."""
    devices = []
    for device in text.split(","):
        if not device.strip() or device.strip().startswith("-"):
            break
        devices.append(device.strip())
    return devices


def _find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])

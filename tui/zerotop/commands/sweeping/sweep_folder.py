"""The folder of a sweep: finding and locking it; and signals that stop a sweep."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zerotop.commands.common.errors import Problem
from zerotop.recording import sweeps
from zerotop.recording.sweeps import Plan, Sweep

_LOCK_FILE = ".lock"


def make_folder(output: str | None, plan: Plan) -> Path:
    """Create the folder of a plan and return it. Raises Problem if it holds something else."""
    if not output:
        return _make_default_folder(plan)
    folder = Path(output).absolute()
    if folder.is_dir() and not sweeps.is_sweep(folder) and any(name != _LOCK_FILE for name in os.listdir(folder)):
        raise Problem(f"{folder} is not empty and holds no sweep. Choose another folder with -o DIR")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _refuse_folder(folder, error) from error
    return folder


def _make_default_folder(plan: Plan) -> Path:
    """Make a new folder in the state directory; sweeps that start in the same second get different ones."""
    first = _choose_default_path(plan)
    number = 1
    while True:
        folder = first.with_name(f"{first.name}-{number}") if number > 1 else first
        try:
            first.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _refuse_folder(folder, error) from error
        else:
            return folder


def _refuse_folder(folder: Path, error: OSError) -> Problem:
    return Problem(f"Cannot create the folder {folder}: {error.strerror}. Choose another one with -o DIR")


def _choose_default_path(plan: Plan) -> Path:
    words = [Path(word).stem for word in plan.command if word.endswith(".py")] or [plan.model.rpartition("/")[2] or "sweep"]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", words[0])[:40]
    return sweeps.find_default_folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"


def reopen_sweep(path: Path, plan: Plan | None = None) -> Sweep:
    """Return a folder's sweep to continue it. Raises Problem if its plan differs, or it cannot continue."""
    opened = sweeps.read_sweep(path)
    if plan is not None and _compare_key(plan) != _compare_key(opened.plan):
        raise Problem(f"{path} holds another sweep, with other settings. Choose another folder with -o DIR")
    is_done = len(opened.finished) == len(opened.points) and plan is None  # its results are only shown
    if not is_done and opened.plan.working_directory and not Path(opened.plan.working_directory).is_dir():
        raise Problem(f"The folder {opened.plan.working_directory}, in which the sweep's jobs run, is gone")
    return opened


def _compare_key(plan: Plan) -> str:
    """Return the settings that must be equal for a sweep to continue."""
    return json.dumps(
        [{name: list(values) for name, values in plan.settings.items()}, plan.command, plan.model, plan.config]
    )


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Keep other sweeps out of a folder. Raises Problem if one runs there."""
    descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Problem(f"Another sweep runs in {path}. Wait for its end, or choose another folder with -o DIR") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let the usual termination signals stop the sweep with its job, except those that the caller ignores."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handled = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, lambda *_: stop())
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])

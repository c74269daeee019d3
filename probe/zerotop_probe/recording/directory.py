"""The folder of a recording: its path, its name and its ``session.json``."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import stat
from collections.abc import Sequence
from typing import Any

from zerotop_probe.recording import clock, redact
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR

SESSION_FILE = "session.json"
STACKS_SETTING = "stacks"
OUTPUT_SETTING = "output"
# What was predicted before the job started.
EXPECTED = "expected"
# Why the recording is in a temporary folder.
ELSEWHERE = "elsewhere"
# Of a recording that was collected from a job's nodes over the network: the job's name and the server's address. No process
# is signalled because of what such a recording says.
COLLECTED = "collected"

# Limits, in a recording's first file: ``max_bytes`` and ``full_detail_s``, the seconds for which everything is kept.
# With ``redact_output`` secrets are replaced in the recorded output, too. With ``stacks: false`` ranks sample no stacks.
# With ``output: false`` no output is recorded.
MAX_BYTES = 2_000_000_000
MIN_BYTES = 20_000_000
FULL_DETAIL_S = 3600.0
# Names that are tried before one gets a number.
_TRIES = 20

# Named PYTHON... because DeepSpeed's multi-node launchers pass such variables to the ranks, and no others of ours.
SESSION_VARIABLE = "PYTHONZEROTOP_SESSION"
# A request to the ranks: {"request": number, "steps": number of steps, "stacks": whether to record Python stacks}.
MICROSCOPE_FILE = "microscope.json"
# "0" keeps the probe from resetting the peak counters of PyTorch's allocator.
PHASE_PEAKS_VARIABLE = "PYTHONZEROTOP_PHASE_PEAKS"
# The percentage of the training time that the probe may take, see ``inside.budget``.
BUDGET_VARIABLE = "PYTHONZEROTOP_BUDGET"
DEFAULT_BUDGET = 0.003
# "0" keeps the probe from using its compiled code, see ``inside.native``.
NATIVE_VARIABLE = "PYTHONZEROTOP_NATIVE"


def find_default_root() -> str:
    """Return the default folder of recordings: ``zerotop/sessions`` in the user's state directory (XDG base directories)."""
    state = os.environ.get("XDG_STATE_HOME") or ""
    if not os.path.isabs(state):  # which is invalid
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "zerotop", "sessions")


def find_script_name(command: Sequence[str]) -> str:
    """Return a short name of a command: the stem of its first Python file, else of the program."""
    for argument in command:
        if argument.endswith(".py"):
            return _sanitize_word(os.path.basename(argument)[:-3])
    return _sanitize_word(os.path.basename(command[0])) if command else "job"


def _sanitize_word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_.-")[:40] or "job"


def create_recording(command: Sequence[str], *, path: str | None = None, launcher: str = "", **facts: Any) -> str:
    """Create a recording folder for ``command`` and return its path.

    The directory is private to the user (mode 0700). ``path`` may exist if it is empty and the user's own; others lose the
    right to write to it. Without ``path`` the recording has a name of two words, see ``names``. ``facts`` are added to
    ``session.json``.

    Raise FileExistsError if ``path`` is not empty, PermissionError with a sentence and no number if it belongs to somebody
    else, OSError if the directory cannot be created; nothing new remains then.
    """
    chosen = None if path is None else os.path.abspath(path)  # "" is the working directory
    existed = chosen is not None and os.path.isdir(chosen)
    path = _make_default_folder() if chosen is None else _make_chosen_folder(chosen)
    content = {
        "zerotop": [FORMAT_MAJOR, FORMAT_MINOR],
        "name": os.path.basename(path),
        "command": redact.redact_command(command),
        "launcher": launcher,
        "working_directory": _find_working_directory(),
        "host": clock.read_hostname(),
        "boot": clock.read_boot_id(),
        "clock": clock.read_clock_pair(),
        **facts,
    }
    try:
        _write_json(os.path.join(path, SESSION_FILE), content)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(path, SESSION_FILE))
        with contextlib.suppress(OSError):
            if not existed:
                os.rmdir(path)
        raise
    return path


def read_recording_info(path: str) -> dict[str, Any]:
    """Return the content of the recording file; empty if it cannot be read."""
    try:
        with open(os.path.join(path, SESSION_FILE), "rb") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def has_recording(path: str) -> bool:
    """Whether the folder of a recording exists and has its ``session.json`` and events."""
    try:
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path)}
    except OSError:
        return False
    has_events = any(size for name, size in sizes.items() if name.startswith("events-"))
    return has_events and sizes.get(SESSION_FILE, 0) > 0


def _make_default_folder() -> str:
    from zerotop_probe.recording.names import make_name  # ranks, which also import this module, need no names

    root = find_default_root()
    if not os.path.isabs(root):
        raise FileNotFoundError("the user has no home folder. Set HOME or XDG_STATE_HOME")
    os.makedirs(root, exist_ok=True)
    for number in itertools.count():
        name = make_name()
        path = os.path.join(root, name if number < _TRIES else f"{name}-{number}")
        # The one that creates the directory owns the name.
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            break
    return path


def _make_chosen_folder(path: str) -> str:
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise FileExistsError(f"{path} exists and is not empty")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        _make_private(path)
    return path


def _make_private(path: str) -> None:
    """Forbid others to write to our own directory, where they could plant events. Raise PermissionError for another's."""
    status = os.stat(path)
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to another user, who could change the recording. Name a new folder, such as"
            f" {os.path.join(path, 'run1')}"
        )
    if status.st_mode & 0o022:
        os.chmod(path, stat.S_IMODE(status.st_mode) & ~0o022)


def _find_working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _write_json(path: str, content: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")

"""The two places where a job can run: alone, and under ``zerotop run --headless``."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from installed import install_command
from patience import lengthen

# Every process of an experiment inherits it, so that what is left of one can be found.
_MARK = "CONFORMANCE_PLACE"
_PATIENCE_S = 20.0
_OWN_LINES = re.compile(rb"zerotop: [^\r\n]*\r?\n")


class Finished(NamedTuple):
    """The result of a command that has ended."""

    ending: str
    output: bytes
    errors: bytes
    # As it came, with the lines that zerotop itself adds.
    raw_errors: bytes
    seconds: float


class Place:
    """A folder in which jobs run, all of them alone or all of them recorded."""

    def __init__(self, folder: Path, *, recorded: bool) -> None:
        self.folder = folder
        self.recorded = recorded
        self._recordings = 0
        for name in ("home", "tmp", "work"):
            (folder / name).mkdir(parents=True)
        inherited = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        self.environment = inherited | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
            _MARK: str(folder),
        }

    @property
    def work(self) -> Path:
        """The working directory of jobs."""
        return self.folder / "work"

    def build_command(self, *job: str, options: Sequence[str] = (), recording: str = "") -> list[str]:
        """Return the command line that runs ``job`` here; every call names a new recording, or ``recording``."""
        if not self.recorded:
            return list(job)
        self._recordings += 1
        chosen = recording or str(self.folder / f"recording-{self._recordings}")
        return [install_command(), "run", "--headless", *options, "--recording", chosen, "--", *job]

    def fill_script(self, script: str) -> str:
        """Replace every ``Z`` in command position by the command that runs the rest of its line here."""
        return re.sub(
            r"(?<![\w/$-])Z (?=\S)", lambda _: shlex.join(self.build_command()) + " " if self.recorded else "", script
        )

    def start_command(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command line, in a session and process group of its own."""
        chosen: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "cwd": self.work,
            "env": self.environment,
            "start_new_session": True,
        }
        return subprocess.Popen(command, **chosen | options)

    def run_shell(self, script: str, **options: Any) -> Finished:
        """Run a bash script in which ``Z`` stands before the command that is the job."""
        return self._run_to_end(lambda **more: self.start_command("bash", "-c", self.fill_script(script), **more), **options)

    def run_job(self, *job: str, **options: Any) -> Finished:
        """Run a job to its end."""
        return self.run_command(*self.build_command(*job), **options)

    def run_command(self, *command: str, **options: Any) -> Finished:
        """Run a command line to its end."""
        return self._run_to_end(lambda **more: self.start_command(*command, **more), **options)

    def _run_to_end(self, start: Callable[..., subprocess.Popen[bytes]], **options: Any) -> Finished:
        typed = options.pop("typed", None)
        if typed is not None:
            options["stdin"] = subprocess.PIPE
        begin = time.monotonic()
        with start(**options) as process:
            try:
                output, errors = process.communicate(typed, lengthen(_PATIENCE_S))
                ending = describe_ending(process.returncode)
            except subprocess.TimeoutExpired:
                self.end_everything()
                output, errors = process.communicate()
                ending = f"not ended after {_PATIENCE_S:.0f} s"
        seconds = time.monotonic() - begin
        return Finished(ending, drop_own_lines(output or b""), drop_own_lines(errors or b""), errors or b"", seconds)

    @contextmanager
    def start_job(self, *job: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
        """Start a job; kill its remaining processes at the end of the block."""
        with self.start_command(*self.build_command(*job), **options) as process:
            try:
                yield process
            finally:
                self.end_everything()

    def list_processes(self) -> list[int]:
        """Return all living processes of this place."""
        mark, found = f"{_MARK}={self.folder}".encode(), []
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                with suppress(OSError):
                    if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                        found.append(int(entry))
        return sorted(found)

    def count_left(self, seconds: float = 5.0) -> str:
        """Describe how many processes are left, once they have had some time to end."""
        deadline = time.monotonic() + seconds
        while (left := self.list_processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return f"{len(left)} processes left" if left else "nothing left"

    def end_everything(self) -> None:
        """Kill all processes of this place."""
        while left := self.list_processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def join_output(done: Finished) -> str:
    """Return the lines of stdout and stderr, and the ending."""
    return ", ".join((*(done.output + done.errors).decode(errors="replace").splitlines(), done.ending))


def drop_own_lines(output: bytes) -> bytes:
    """Remove the lines that zerotop adds after the job's output."""
    return _OWN_LINES.sub(b"", output)


def describe_ending(returncode: int) -> str:
    """Describe a wait status as subprocess gives it: "exit 3", "killed by SIGTERM"."""
    return f"exit {returncode}" if returncode >= 0 else f"killed by {name_signal(-returncode)}"


def name_signal(number: int) -> str:
    """Return a name such as "SIGTERM", or "SIGRTMIN+3"."""
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return signal.Signals(number).name


def small_python(code: str, *arguments: str) -> list[str]:
    """Return a Python job that starts fast, without the packages of the environment."""
    return [sys.executable, "-S", "-E", "-c", code, *arguments]


def wait_until(condition: Callable[..., Any], seconds: float = 15.0, *arguments: Any) -> bool:
    """Wait until ``condition(*arguments)`` holds; return whether it came true."""
    deadline = time.monotonic() + seconds
    while not condition(*arguments):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def read_soon(file: IO[bytes] | None, count: int, seconds: float = 8.0) -> bytes:
    """Read up to ``count`` bytes from a pipe, until its end or for some seconds."""
    assert file is not None
    data, deadline = b"", time.monotonic() + seconds
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    while len(data) < count and waiting.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        piece = os.read(file.fileno(), count - len(data))
        if not piece:
            break
        data += piece
    return data


def summarize_observations(observations: Sequence[tuple[str, str]], usual: str) -> str:
    """Return ``usual``, with the exceptions among (name, observation) named."""
    others: dict[str, list[str]] = {}
    for name, seen in observations:
        if seen != usual:
            others.setdefault(seen, []).append(name)
    exceptions = "; ".join(f"{seen}: {' '.join(names)}" for seen, names in others.items())
    count = len(observations) - sum(map(len, others.values()))
    return f"{count} of {len(observations)} {usual}; {exceptions}" if others else f"all {len(observations)} {usual}"

"""The state of a job's processes, for the output of a test that waited for the job's end in vain."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil

from zerotop_probe.outside.sampling.stuck import py_spy


def describe_job(pid: int) -> str:
    """Return state, kernel function and stacks of a process and of all that it has started."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return f"process {pid} is gone"
    return "\n\n".join(_describe_process(process) for process in processes)


def _describe_process(process: psutil.Process) -> str:
    try:
        head = f"process {process.pid} of {process.ppid()} ({process.status()}): {' '.join(process.cmdline())}"
    except psutil.Error as error:
        return str(error)
    threads = (_describe_thread(path) for path in sorted(Path(f"/proc/{process.pid}/task").glob("*")))
    return "\n".join([head, *threads, _dump_stacks(process.pid)])


def _describe_thread(path: Path) -> str:
    try:
        state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        return f"  thread {path.name}: {state} in {(path / 'wchan').read_text()}"
    except OSError as error:
        return f"  thread {path.name}: {error}"


def _dump_stacks(pid: int) -> str:
    program = py_spy.find_program()
    if program is None:
        return "  py-spy is not installed"
    command = [program, "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "  py-spy takes too long"
    return done.stdout + done.stderr

"""``zerotop doctor``: what this machine lets us see, and what to do about what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import locale
import os
import platform
import shlex
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import pynvml

from zerotop_probe.outside.sampling.build_locks import extensions_folder, stale_locks
from zerotop_probe.recording import directory

_TRAIN = "pip install 'zerotop[train]', in the environment that trains"
_PACKAGES = ("torch", "deepspeed", "transformers", "datasets")
_PTRACE = "/proc/sys/kernel/yama/ptrace_scope"


@dataclass(frozen=True)
class Finding:
    """One thing looked for and what to do if it is missing; without one that is ``needed`` nothing works."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    needed: bool = False


def doctor(options: argparse.Namespace) -> int:
    """Prints all findings. Returns 1 if something is missing that recording needs, else 0."""
    findings = examine()
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(_line(finding))
    return int(any(finding.needed and not finding.ok for finding in findings))


def _line(finding: Finding) -> str:
    text = f"{'ok' if finding.ok else 'missing':<8} {finding.name:<20} {finding.found}"
    return text if finding.ok or not finding.advice else f"{text}; {finding.advice}"


def examine() -> list[Finding]:
    """Looks at everything. Loads neither torch nor DeepSpeed."""
    return [
        Finding("Python", True, f"{platform.python_version()} at {sys.executable}"),
        _state_folder(),
        *_gpus(),
        *map(_package, _PACKAGES),
        _program("C++ compiler", (os.environ.get("CXX", "c++"), "c++", "g++"), "apt install g++, or alike"),
        _program("ninja", ("ninja",), "pip install ninja"),
        _builds(),
        _ptrace(),
        _memfd(),
        _locale(),
    ]


def _state_folder() -> Finding:
    folder = directory.default_root()
    existing = Path(folder)
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Finding("state directory", True, folder, needed=True)
    except OSError as error:
        advice = "set XDG_STATE_HOME to a directory that can be written"
        return Finding("state directory", False, f"{folder}: {error.strerror}", advice, needed=True)


def _gpus() -> list[Finding]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        advice = "without an NVIDIA driver everything but GPU figures is shown"
        return [Finding("NVIDIA driver", False, str(error), advice)]
    try:
        driver = Finding("NVIDIA driver", True, str(pynvml.nvmlSystemGetDriverVersion()))
        return [driver, *map(_gpu, range(pynvml.nvmlDeviceGetCount()))]
    except pynvml.NVMLError as error:
        return [Finding("NVIDIA driver", False, str(error), "see what nvidia-smi says")]
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Finding:
    name = f"GPU {index}"
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        model = str(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError as error:
        return Finding(name, False, str(error), "see what nvidia-smi says")
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError as error:
        advice = "memory used by each rank cannot be told from other processes'"
        return Finding(name, False, f"{model}, no memory per process: {error}", advice)
    hidden = sum(process.usedGpuMemory is None for process in processes)
    if hidden:
        advice = "the driver hides it here: MIG or WSL do so"
        return Finding(name, False, f"{model}, no memory for {hidden} of {len(processes)} processes", advice)
    return Finding(name, True, f"{model}, {len(processes)} processes with their memory")


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not in this environment, needed to train but not to watch", _TRAIN)


def _program(name: str, candidates: tuple[str, ...], how: str) -> Finding:
    # DeepSpeed finds what pip put beside the interpreter only when that is on the PATH; zerotop demo adds it.
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    for candidate in candidates:
        # CXX may hold options as well.
        found = shutil.which((candidate.split() or [""])[0], path=path)
        if found:
            return Finding(name, True, found)
    return Finding(name, False, "DeepSpeed's offload operators cannot be compiled", how)


def _builds() -> Finding:
    folder = extensions_folder(os.environ)
    stale = stale_locks(folder)
    if not stale:
        return Finding("operator builds", True, f"in {folder}")
    found = "a build was killed and has left its lock: DeepSpeed would wait for it without end"
    return Finding("operator builds", False, found, f"rm {shlex.join(map(str, stale))}")


def _ptrace() -> Finding:
    try:
        scope = Path(_PTRACE).read_text().strip()
    except OSError:
        return Finding("ptrace", True, "not restricted by Yama")
    if scope == "0" or (scope != "3" and os.geteuid() == 0):
        return Finding("ptrace", True, f"scope {scope}")
    how = "restart the machine without" if scope == "3" else "be root, or sudo sysctl kernel.yama.ptrace_scope=0"
    return Finding("ptrace", False, f"scope {scope}: no running job can be entered", f"{how}; zerotop run does without")


def _memfd() -> Finding:
    try:
        os.close(os.memfd_create("zerotop-doctor"))
    except (OSError, AttributeError) as error:
        advice = "a temporary file takes the job's output instead"
        return Finding("memfd", False, str(error), advice)
    return Finding("memfd", True, "the job's output is kept in memory until it is recorded")


def _locale() -> Finding:
    name = locale.getpreferredencoding(False)
    if name.lower().replace("-", "") == "utf8":
        return Finding("UTF-8", True, name)
    return Finding("UTF-8", False, f"the locale says {name}", "set LC_ALL=C.UTF-8; until then ASCII is drawn")

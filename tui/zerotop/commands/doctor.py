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

from zerotop_probe.outside.sampling.build_locks import find_extensions_folder, find_stale_locks
from zerotop_probe.recording import directory

_TRAIN_ADVICE = "pip install 'zerotop[train]', in the environment that trains"
_PACKAGES = ("torch", "deepspeed", "transformers", "datasets")
_PTRACE = "/proc/sys/kernel/yama/ptrace_scope"


@dataclass(frozen=True)
class Check:
    """One thing looked for and what to do if it is missing; without one that is ``needed`` nothing works."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    needed: bool = False


def doctor(options: argparse.Namespace) -> int:
    """Prints all findings. Returns 1 if something is missing that recording needs, else 0."""
    findings = examine_machine()
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(_format_check(finding))
    return int(any(finding.needed and not finding.ok for finding in findings))


def _format_check(finding: Check) -> str:
    text = f"{'ok' if finding.ok else 'missing':<8} {finding.name:<20} {finding.found}"
    return text if finding.ok or not finding.advice else f"{text}; {finding.advice}"


def examine_machine() -> list[Check]:
    """Looks at everything. Loads neither torch nor DeepSpeed."""
    return [
        Check("Python", True, f"{platform.python_version()} at {sys.executable}"),
        _check_state_folder(),
        *_check_gpus(),
        *map(_check_package, _PACKAGES),
        _check_program("C++ compiler", (os.environ.get("CXX", "c++"), "c++", "g++"), "apt install g++, or alike"),
        _check_program("ninja", ("ninja",), "pip install ninja"),
        _check_builds(),
        _check_ptrace(),
        _check_memfd(),
        _check_locale(),
    ]


def _check_state_folder() -> Check:
    folder = directory.find_default_root()
    existing = Path(folder)
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Check("state directory", True, folder, needed=True)
    except OSError as error:
        advice = "set XDG_STATE_HOME to a directory that can be written"
        return Check("state directory", False, f"{folder}: {error.strerror}", advice, needed=True)


def _check_gpus() -> list[Check]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        advice = "without an NVIDIA driver everything but GPU figures is shown"
        return [Check("NVIDIA driver", False, str(error), advice)]
    try:
        driver = Check("NVIDIA driver", True, str(pynvml.nvmlSystemGetDriverVersion()))
        return [driver, *map(_check_gpu, range(pynvml.nvmlDeviceGetCount()))]
    except pynvml.NVMLError as error:
        return [Check("NVIDIA driver", False, str(error), "see what nvidia-smi says")]
    finally:
        pynvml.nvmlShutdown()


def _check_gpu(index: int) -> Check:
    name = f"GPU {index}"
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        model = str(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError as error:
        return Check(name, False, str(error), "see what nvidia-smi says")
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError as error:
        advice = "memory used by each rank cannot be told from other processes'"
        return Check(name, False, f"{model}, no memory per process: {error}", advice)
    hidden = sum(process.usedGpuMemory is None for process in processes)
    if hidden:
        advice = "the driver hides it here: MIG or WSL do so"
        return Check(name, False, f"{model}, no memory for {hidden} of {len(processes)} processes", advice)
    return Check(name, True, f"{model}, {len(processes)} processes with their memory")


def _check_package(name: str) -> Check:
    try:
        return Check(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, "not in this environment, needed to train but not to watch", _TRAIN_ADVICE)


def _check_program(name: str, candidates: tuple[str, ...], advice: str) -> Check:
    # DeepSpeed finds what pip put beside the interpreter only when that is on the PATH; zerotop demo adds it.
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    for candidate in candidates:
        # CXX may hold options as well.
        found = shutil.which((candidate.split() or [""])[0], path=path)
        if found:
            return Check(name, True, found)
    return Check(name, False, "DeepSpeed's offload operators cannot be compiled", advice)


def _check_builds() -> Check:
    folder = find_extensions_folder(os.environ)
    stale = find_stale_locks(folder)
    if not stale:
        return Check("operator builds", True, f"in {folder}")
    found = "a build was killed and has left its lock: DeepSpeed would wait for it without end"
    return Check("operator builds", False, found, f"rm {shlex.join(map(str, stale))}")


def _check_ptrace() -> Check:
    try:
        scope = Path(_PTRACE).read_text().strip()
    except OSError:
        return Check("ptrace", True, "not restricted by Yama")
    if scope == "0" or (scope != "3" and os.geteuid() == 0):
        return Check("ptrace", True, f"scope {scope}")
    how = "restart the machine without" if scope == "3" else "be root, or sudo sysctl kernel.yama.ptrace_scope=0"
    return Check("ptrace", False, f"scope {scope}: no running job can be entered", f"{how}; zerotop run does without")


def _check_memfd() -> Check:
    try:
        os.close(os.memfd_create("zerotop-doctor"))
    except (OSError, AttributeError) as error:
        advice = "a temporary file takes the job's output instead"
        return Check("memfd", False, str(error), advice)
    return Check("memfd", True, "the job's output is kept in memory until it is recorded")


def _check_locale() -> Check:
    name = locale.getpreferredencoding(False)
    if name.lower().replace("-", "") == "utf8":
        return Check("UTF-8", True, name)
    return Check("UTF-8", False, f"the locale says {name}", "set LC_ALL=C.UTF-8; until then ASCII is drawn")

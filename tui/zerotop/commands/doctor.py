"""``zerotop doctor``: check this machine's setup, with a fix for each problem."""

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

from zerotop.analysis.formatting import format_count
from zerotop.analysis.text_tables import align_columns
from zerotop.commands.measuring.measurement import measure_machine
from zerotop_probe.inside import native
from zerotop_probe.outside.sampling.ranks.build_locks import find_extensions_folder, find_stale_locks
from zerotop_probe.recording import directory

_TRAIN_ADVICE = "in the training environment: pip install 'zerotop[train]'"
_PACKAGES = ("torch", "deepspeed", "transformers", "datasets")
_PTRACE = "/proc/sys/kernel/yama/ptrace_scope"


@dataclass(frozen=True)
class DoctorCheck:
    """The result of one check and the fix if it failed; recording is impossible without a ``needed`` one."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    needed: bool = False


def doctor(options: argparse.Namespace) -> int:
    """Print all checks. Return 1 if something is missing that recording needs, else 0."""
    if options.measure:
        return measure_machine(is_json=options.json)
    checks = examine_machine()
    if options.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        print(*align_columns(map(_format_check, checks), "<<<"), sep="\n")
    return int(any(check.needed and not check.ok for check in checks))


def _format_check(check: DoctorCheck) -> tuple[str, str, str]:
    advice = f"; {check.advice}" if check.advice and not check.ok else ""
    return "ok" if check.ok else "missing", check.name, check.found + advice


def examine_machine() -> list[DoctorCheck]:
    """Run all checks, without loading torch or DeepSpeed."""
    return [
        DoctorCheck("Python", True, f"{platform.python_version()} at {sys.executable}"),
        _check_state_folder(),
        *_check_gpus(),
        *map(_check_package, _PACKAGES),
        _check_program("C++ compiler", (os.environ.get("CXX", "c++"), "c++", "g++"), "apt install g++, or similar"),
        _check_program("ninja", ("ninja",), "pip install ninja"),
        _check_builds(),
        _check_native_code(),
        _check_ptrace(),
        _check_memfd(),
        _check_locale(),
    ]


def _check_state_folder() -> DoctorCheck:
    folder = directory.find_default_root()
    existing = Path(folder)
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            return DoctorCheck("state directory", True, folder, needed=True)
    except OSError as error:
        advice = "set XDG_STATE_HOME to a writable directory"
        return DoctorCheck("state directory", False, f"{folder}: {error.strerror}", advice, needed=True)


def _check_gpus() -> list[DoctorCheck]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [DoctorCheck("NVIDIA driver", False, str(error), "GPU metrics are off")]
    try:
        driver = DoctorCheck("NVIDIA driver", True, str(pynvml.nvmlSystemGetDriverVersion()))
        return [driver, *map(_check_gpu, range(pynvml.nvmlDeviceGetCount()))]
    except pynvml.NVMLError as error:
        return [DoctorCheck("NVIDIA driver", False, str(error), "run nvidia-smi to see the error")]
    finally:
        pynvml.nvmlShutdown()


def _check_gpu(index: int) -> DoctorCheck:
    name = f"GPU {index}"
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        model = str(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError as error:
        return DoctorCheck(name, False, str(error), "run nvidia-smi to see the error")
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError as error:
        advice = "each rank's memory cannot be separated from other processes'"
        return DoctorCheck(name, False, f"{model}, no per-process memory: {error}", advice)
    hidden = sum(process.usedGpuMemory is None for process in processes)
    if hidden:
        advice = "the driver hides it, as with MIG or WSL"
        return DoctorCheck(
            name, False, f"{model}, no memory for {hidden} of {format_count(len(processes), 'process')}", advice
        )
    return DoctorCheck(name, True, f"{model}, per-process memory of {format_count(len(processes), 'process')}")


def _check_package(name: str) -> DoctorCheck:
    try:
        return DoctorCheck(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return DoctorCheck(name, False, "not in this environment; needed for training only", _TRAIN_ADVICE)


def _check_program(name: str, candidates: tuple[str, ...], advice: str) -> DoctorCheck:
    # DeepSpeed finds programs that pip installed only if their folder is on the PATH; zerotop demo adds it.
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    for candidate in candidates:
        # CXX may contain options too.
        program = shutil.which((candidate.split() or [""])[0], path=path)
        if program:
            return DoctorCheck(name, True, program)
    return DoctorCheck(name, False, "DeepSpeed's offload operators cannot be compiled", advice)


def _check_builds() -> DoctorCheck:
    folder = find_extensions_folder(os.environ)
    stale = find_stale_locks(folder)
    if not stale:
        return DoctorCheck("operator builds", True, f"in {folder}")
    problem = "a killed build left its lock, on which DeepSpeed would wait forever"
    return DoctorCheck("operator builds", False, problem, f"rm {shlex.join(map(str, stale))}")


def _check_native_code() -> DoctorCheck:
    if native.counted_steps is not None:
        return DoctorCheck("probe's C code", True, str(native.counted_steps.__file__))
    found = f"switched off by {directory.NATIVE_VARIABLE}" if directory.NATIVE_VARIABLE in os.environ else "not compiled"
    return DoctorCheck(
        "probe's C code", False, found, "watching short steps costs less with it: reinstall zerotop with a C compiler"
    )


def _check_ptrace() -> DoctorCheck:
    try:
        scope = Path(_PTRACE).read_text().strip()
    except OSError:
        return DoctorCheck("ptrace", True, "not restricted by Yama")
    if scope == "0" or (scope != "3" and os.geteuid() == 0):
        return DoctorCheck("ptrace", True, f"scope {scope}")
    fix = "reboot with a lower scope" if scope == "3" else "as root, or after sudo sysctl kernel.yama.ptrace_scope=0"
    return DoctorCheck(
        "ptrace", False, f"scope {scope}: attach --enter is not permitted", f"{fix}; zerotop run does not need it"
    )


def _check_memfd() -> DoctorCheck:
    try:
        os.close(os.memfd_create("zerotop-doctor"))
    except (OSError, AttributeError) as error:
        return DoctorCheck("memfd", False, str(error), "the job's output is buffered in a temporary file instead")
    return DoctorCheck("memfd", True, "the job's output is buffered in memory")


def _check_locale() -> DoctorCheck:
    name = locale.getpreferredencoding(False)
    if name.lower().replace("-", "") == "utf8":
        return DoctorCheck("UTF-8", True, name)
    return DoctorCheck("UTF-8", False, f"the locale uses {name}", "set LC_ALL=C.UTF-8; until then charts are drawn in ASCII")

"""Why something of zerotop's own failed: a limit of this process, or a machine without ``/proc``."""

from __future__ import annotations

import errno
import os

_NO_PROC = "there is no /proc here, from which zerotop reads processes"
_DESCRIPTORS = 20
_LIMITS = {
    errno.EMFILE: "no file descriptor is free: zerotop needs about 20. Raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has no file descriptor left",
    errno.EFBIG: "no file may grow further. Raise the limit (ulimit -f)",
    errno.EAGAIN: "no more processes may be started. Raise the limit (ulimit -u, or pids.max of the control group)",
    errno.ENOMEM: "there is too little memory. Raise the limit (ulimit -v), or end other programs",
}


def describe_cause(error: OSError) -> str:
    """Return why a system call failed, as the end of a sentence."""
    if error.errno == errno.ENOENT and not has_proc():
        return _NO_PROC
    return _LIMITS.get(error.errno or 0) or error.strerror or str(error)


def has_proc() -> bool:
    """Whether processes can be read."""
    return os.path.exists("/proc/self/stat")


def check_needs() -> None:
    """Raise OSError, with a sentence, if processes cannot be read because there is no ``/proc`` or no descriptor is free."""
    if not has_proc():
        raise OSError(f"{_NO_PROC[0].upper()}{_NO_PROC[1:]}: mount it (mount -t proc proc /proc)")
    opened = []
    try:
        for _ in range(_DESCRIPTORS):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in opened:
            os.close(descriptor)

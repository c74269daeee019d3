"""Find out from the functions on its stack what a thread waits for, or works on for long."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from zerotop.analysis.hangs.stacks import StackFrame, ThreadStack


class WaitKind(Enum):
    COLLECTIVE = "collective"  # for other ranks
    BACKWARD = "backward"  # in PyTorch's backward, where DDP's and FSDP's collectives are awaited
    DEVICE = "device"  # for the GPU, whose kernels may wait for other ranks
    SLEEP = "sleep"
    LOCK = "lock"
    FILE = "file"  # read or write
    SAVE = "save"
    LOAD = "load"
    COMPILE = "compile"
    BUILD_LOCK = "build lock"  # of a build of an extension by another process
    NETWORK = "network"
    DATA = "data"  # of a DataLoader
    WORKERS = "workers"  # of a DataLoader, to end: PyTorch waits up to 5 s for each
    EXIT = "exit"  # for threads and processes to end, as Python does when the script is over
    OTHER = "other"


FOR_OTHERS = frozenset((WaitKind.COLLECTIVE, WaitKind.BACKWARD, WaitKind.DEVICE))
"""A rank that waits like this has arrived: other ranks keep it waiting."""
LONG_WORK = frozenset(
    (
        *(WaitKind.SAVE, WaitKind.LOAD, WaitKind.COMPILE, WaitKind.BUILD_LOCK, WaitKind.NETWORK, WaitKind.DEVICE),
        *(WaitKind.WORKERS, WaitKind.EXIT),
    )
)
"""Work that may take minutes in which nothing else happens."""
ENDS = (WaitKind.EXIT, WaitKind.WORKERS)
"""Ends of the script: it cannot go on to train, and Python waits."""


DESTROYING = "destroy_process_group"
"""The collective that a script calls when it has trained."""
A_THREAD, THREADS = "a thread", "the end of threads"
"""Names of waits for threads to end: for one, and for all that keep Python from exiting."""


class Wait(NamedTuple):
    """The function in which a thread waits, or works for long, and the kind of the wait or work."""

    kind: WaitKind
    name: str  # the function, for example "all_reduce", "time.sleep" or "torch.save"; "" if it is the job's own line


# torch.utils.cpp_extension waits there until the process that builds an extension removes its lock.
_BATON = "torch/utils/file_baton.py"
_DISTRIBUTED = "torch/distributed/distributed_c10d.py"
# Functions that DDP and FSDP call when they are created: ranks compare their parameters, or copy those of the first one.
_WRAPPING = "torch/distributed/utils.py"
_WRAPPING_CALLS = re.compile(r"_verify_param_shape_across_processes|_sync_\w+")
_COLLECTIVES = re.compile(
    r"all_reduce|reduce|broadcast|barrier|monitored_barrier|all_gather|gather|scatter|reduce_scatter|all_to_all|send|recv"
    r"|batch_isend_irecv|init_process_group|new_group|destroy_process_group|all_reduce_coalesced|all_gather_coalesced"
    r"|all_gather_into_tensor|reduce_scatter_tensor|all_to_all_single|broadcast_object_list"
    r"|(?:all_)?gather_object|scatter_object_list|(?:send|recv)_object_list"
)
# Files of libraries, by the beginning of their names, and functions in them; the outermost frame that matches counts.
_LIBRARIES: tuple[tuple[WaitKind, str, str, str], ...] = (
    (WaitKind.LOAD, "<frozen importlib", ".*", "import"),
    (WaitKind.SAVE, "torch/serialization.py", "save", "torch.save"),
    (WaitKind.LOAD, "torch/serialization.py", "load", "torch.load"),
    (WaitKind.SAVE, "torch/distributed/checkpoint/", r"save|async_save", "checkpoint save"),
    (WaitKind.LOAD, "torch/distributed/checkpoint/", "load", "checkpoint load"),
    (WaitKind.SAVE, "safetensors/", r"save\w*", "safetensors save"),
    (WaitKind.LOAD, "safetensors/", r"\w*load\w*", "safetensors load"),
    (WaitKind.SAVE, "", r"(?:\w+\.)*save_(?:checkpoint|pretrained|model|state)", ""),
    (WaitKind.LOAD, "", r"(?:\w+\.)*(?:load_checkpoint|from_pretrained)", ""),
    (WaitKind.COMPILE, "torch/utils/cpp_extension.py", ".*", "a build of an extension"),
    (WaitKind.COMPILE, "torch/_dynamo/", ".*", "torch.compile"),
    (WaitKind.COMPILE, "torch/_inductor/", ".*", "torch.compile"),
    (WaitKind.COMPILE, "triton/", ".*", "Triton's compiler"),
    *((WaitKind.NETWORK, f"{name}/", ".*", name) for name in ("huggingface_hub", "requests", "urllib3", "httpx", "fsspec")),
    *((WaitKind.NETWORK, name, ".*", name.partition("/")[0]) for name in ("urllib/", "wandb/", "boto3/", "botocore/")),
    (WaitKind.NETWORK, "subprocess.py", r"(?:Popen\.)?(?:wait|communicate|_communicate|run|call|check_\w+)", "a subprocess"),
    (
        WaitKind.WORKERS,
        "torch/utils/data/",
        r"(?:\w+\.)?(?:_clean_up_worker|_shutdown_workers|__del__)",
        "the end of loader workers",
    ),
    (WaitKind.DATA, "torch/utils/data/", ".*", "the data loader"),
    (WaitKind.BACKWARD, "torch/autograd/graph.py", "_engine_run_backward", "backward"),
    (WaitKind.DEVICE, "torch/cuda/__init__.py", "synchronize", "torch.cuda.synchronize"),
    (WaitKind.DEVICE, "torch/cuda/streams.py", r"(?:\w+\.)?synchronize", "synchronize"),
    (WaitKind.EXIT, "threading.py", "_shutdown", THREADS),
    (WaitKind.EXIT, "multiprocessing/util.py", "_exit_function", "the end of processes"),
    (WaitKind.LOCK, "multiprocessing/pool.py", r"(?:\w+\.)?(?:join|__exit__|terminate)", "a process pool"),
    (WaitKind.LOCK, "multiprocessing/process.py", r"(?:\w+\.)?join", "a process"),
    (WaitKind.LOCK, "concurrent/futures/thread.py", r"(?:\w+\.)?shutdown", "a thread pool"),
    (WaitKind.LOCK, "concurrent/futures/process.py", r"(?:\w+\.)?shutdown", "a process pool"),
    (WaitKind.LOCK, "threading.py", r"(?:\w+\.)?join", A_THREAD),
    (WaitKind.LOCK, "threading.py", r"(?:\w+\.)?(?:wait|acquire|_wait_for_tstate_lock)", "a lock"),
    (WaitKind.LOCK, "queue.py", r"(?:\w+\.)?(?:get|put|join)", "a queue"),
    (WaitKind.LOCK, "filelock/", ".*", "a file lock"),
)
# C functions that a frame calls, by the last part of their names: as Python's code names them, or as py-spy sees them.
_CALLS = {
    WaitKind.SLEEP: ("sleep", "clock_nanosleep", "nanosleep"),
    WaitKind.LOCK: ("acquire", "flock", "lockf", "__enter__"),
    WaitKind.FILE: (
        "open",
        "read",
        "readline",
        "readlines",
        "readinto",
        "write",
        "writelines",
        "flush",
        "fsync",
        "fdatasync",
    ),
    WaitKind.NETWORK: ("recv", "recv_into", "recvfrom", "accept", "accept4", "connect", "select", "poll", "epoll_wait"),
    WaitKind.DEVICE: ("item", "tolist", "cpu", "to", "cuda", "copy_", "synchronize", "nonzero"),
}
_NAMES = {"clock_nanosleep": "sleep", "nanosleep": "sleep", "acquire": "a lock", "__enter__": "a lock"}
# Methods of a Work of torch.distributed, which is an object in C++.
_WORK_CALLS = ("wait", "synchronize")


def find_wait(stack: ThreadStack) -> Wait:
    """Return the kind of wait that a thread is in."""
    outermost_first = tuple(reversed(stack.frames))
    last_name = stack.call.rpartition(".")[2]
    if (name := _find_collective(outermost_first)) is not None:
        return Wait(WaitKind.COLLECTIVE, name)
    if any(frame.file == _BATON and not frame.own for frame in stack.frames):
        return Wait(WaitKind.BUILD_LOCK, "the lock of an extension's build")
    for frame in outermost_first:
        for kind, file, function, name in _LIBRARIES:
            is_named = re.fullmatch(function, frame.function) is not None
            if is_named and not frame.own and frame.file.startswith(file):
                return Wait(kind, name or frame.function.rpartition(".")[2])
    if stack.call and stack.frames[0].own and last_name in _WORK_CALLS:
        return Wait(WaitKind.COLLECTIVE, stack.call)
    for kind, names in _CALLS.items():
        if last_name in names:
            return Wait(kind, _NAMES.get(stack.call, stack.call))
    return Wait(WaitKind.OTHER, stack.call or _name_library_call(stack.frames))


def _find_collective(outermost_first: Iterable[StackFrame]) -> str | None:
    """Return the function of torch.distributed that the job, or a library, calls."""
    for frame in outermost_first:
        if frame.file == _DISTRIBUTED and _COLLECTIVES.fullmatch(frame.function):
            return frame.function
        if frame.file == _WRAPPING and _WRAPPING_CALLS.fullmatch(frame.function):
            return frame.function.removeprefix("_")
    return None


def _name_library_call(frames: tuple[StackFrame, ...]) -> str:
    """Return the function of a library that the job's innermost own frame calls; "" without one."""
    index = next((number for number, frame in enumerate(frames) if frame.own), len(frames))
    return frames[index - 1].function if index else ""

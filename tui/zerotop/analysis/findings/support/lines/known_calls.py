"""Calls that take time for a known reason, recognized by the functions called from a line of the job's code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class KnownCall(NamedTuple):
    """Advice about a call, as templates of Text."""

    names: tuple[str, ...]  # full names of functions, names of methods, or modules that end in a dot
    advice: str
    fix: str = "{location}"  # where to change the script, if nothing better can be copied
    waits_for_gpu: bool = False  # the time is the GPU's: whatever it computes takes it
    waits_for_ranks: bool = False  # the time is that of the other ranks, and of the exchange with them
    is_direct: bool = False  # only where the line itself calls it: what it means within others is unknown
    title: str = ""  # how a sentence names it, where its functions are of no use to a reader


RECOMPILES = "TORCH_LOGS=recompiles {command}"
"""Makes torch.compile print each assumption that failed."""
EMPTY_CACHE = "torch.cuda.empty_cache"

COMPILE = KnownCall(
    (
        "torch._dynamo.CatchErrorsWrapper.__call__",
        "torch._dynamo.ConvertFrame.__call__",
        "torch._dynamo.ConvertFrameAssert.__call__",
        "torch._dynamo.backends.AotAutograd.__call__",
        "torch._functorch._aot_autograd._AutogradBackwardCompiler.get_or_compile",
        "torch._inductor.compile_fx",
        "torch._inductor.compile_fx_inner",
        "torch._inductor.GraphLowering.compile_to_module",
    ),
    "An assumption of torch.compile at {location} keeps changing: see which one. If it is a shape, dynamic=True compiles for"
    " all shapes; or pad batches to a few lengths.",
    RECOMPILES,
    title="torch.compile, which compiles again",
)

_NAMES = (
    *("all_reduce", "reduce", "broadcast", "broadcast_object_list", "all_gather", "all_gather_into_tensor", "gather"),
    *("all_gather_object", "gather_object", "scatter", "scatter_object_list", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "all_reduce_coalesced"),
)
# Of tensors on the CPU: those on a GPU are exchanged while the host goes on.
_COLLECTIVE = KnownCall(
    tuple(f"torch.distributed.{name}" for name in _NAMES),
    "See which rank is late at {location}, as the others wait for it; else exchange less often, or in fewer and larger"
    " tensors.",
    waits_for_ranks=True,
)

_CALLS = (
    COMPILE,
    KnownCall(("time.sleep",), "Remove the pause at {location}, if nothing needs it: training stands still meanwhile."),
    KnownCall(
        ("gc.collect",),
        "Call gc.collect() at {location} rarely or not at all: it looks at every object, and Python collects by itself.",
    ),
    KnownCall(
        ("torch.cuda.graph.__enter__", "torch.cuda.make_graphed_callables"),
        "Capture the CUDA graph at {location} once, and copy what changes into its static inputs: each capture takes time"
        " and memory of its own.",
        title="torch.cuda.graph, which captures again",
    ),
    KnownCall(
        (EMPTY_CACHE, "torch._C._cuda_emptyCache"),
        "Remove torch.cuda.empty_cache() at {location}: the step after it asks the driver for its memory again. Against"
        " fragmentation, use expandable segments.",
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    KnownCall(
        (
            *("item", "cpu", "cuda", "to", "tolist", "numpy", "nonzero", "float", "bool", "synchronize", "wait", "copy_"),
            *("torch.cuda.synchronize", "torch._C._cuda_synchronize", "torch.cuda.Event.synchronize"),
            *("torch.cuda.Stream.synchronize", "_local_scalar_dense", "is_nonzero", "unique", "masked_select"),
            *("math.exp", "math.isfinite", "math.isinf", "math.isnan", "math.log", "math.sqrt"),  # long only of a tensor
        ),
        "Read values from the GPU at {location} only now and then: each time the host waits until the GPU has finished.",
        waits_for_gpu=True,
    ),
    KnownCall(
        ("acquire", "__enter__", "threading.Condition.__enter__"),
        "Another thread holds the lock that {location} waits for: make it hold the lock for less time.",
        is_direct=True,
    ),
    KnownCall(
        ("torch.cuda._dump_snapshot", "torch.cuda._snapshot", "torch._C._cuda_memorySnapshot"),
        "Take a snapshot of the memory at {location} once, where it is needed: it writes the whole recorded history.",
    ),
    KnownCall(
        ("torch.save", "os.fsync", "posix.fsync"),
        "Write at {location} less often, or in a separate thread.",
    ),
    KnownCall(
        ("json.dump", "pickle.dump", "_pickle.dump"),
        "Write at {location} in fewer iterations, or only what is new.",
        is_direct=True,
    ),
    KnownCall(
        ("print", "logging."),
        "Print less at {location}, or in fewer iterations: training waits until the text is written.",
        is_direct=True,
    ),
    KnownCall(
        ("copy.deepcopy",),
        "Copy at {location} into an object that exists, as load_state_dict() does, or in fewer iterations: copy.deepcopy()"
        " makes all of it anew.",
        is_direct=True,
    ),
    KnownCall(
        (
            *("open", "io.open", "_io.open", "os.open", "posix.open", "read", "readline", "readlines", "os.read"),
            *("posix.read", "torch.load", "mmap.mmap"),
        ),
        "Prefetch the data for {location}, in the workers of a DataLoader or in a separate thread.",
    ),
    KnownCall(
        ("subprocess.", "socket.", "ssl.", "http.", "urllib.", "urllib3.", "requests."),
        "Move the work of {location} to a separate thread: training waits for it.",
    ),
)


def find_known_call(callees: Sequence[str], *, is_on_gpu: bool = True) -> KnownCall | None:
    """Return the first known call among the functions called from a line, outermost first.

    ``is_on_gpu``: whether the process trains on a GPU. Elsewhere a collective returns once the ranks have exchanged data.
    """
    return _find_known_call(tuple(callees), is_on_gpu)


@lru_cache(maxsize=4096)
def _find_known_call(callees: tuple[str, ...], is_on_gpu: bool) -> KnownCall | None:
    calls = _CALLS if is_on_gpu else (_COLLECTIVE, *_CALLS)
    for depth, name in enumerate(callees):
        for known in calls:
            if not (known.is_direct and depth) and any(
                name == one or (one.endswith(".") and name.startswith(one)) for one in known.names
            ):
                return known
    return None

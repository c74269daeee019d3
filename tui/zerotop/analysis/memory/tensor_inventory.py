"""The inventory of a rank's tensors that applies at a cursor: its bytes by category.

A rank takes inventories when its engine is created, before its first forward, before its first update, and after its first
real update; later after steps whose memory has changed, and while an allocation fails. Between two of them only gradients
come and go: they exist from the end of a step's first backward to the end of its update. In a loop without DeepSpeed they
exist until zero_grad(): another inventory, at the forward after that update, shows whether it was called by then. One more,
before the first backward, has the parameters that FSDP has gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from zerotop.analysis.engine import LOOP, find_takeovers, keep_latest
from zerotop.analysis.formatting import format_bytes
from zerotop.recording.keys import RankProcess
from zerotop.recording.moments.at import At
from zerotop_probe.recording.event_values import AGAIN, FAILURE
from zerotop_probe.recording.events import Engine, HoldingVariable, Tensors
from zerotop_probe.recording.tables import BOUNDARY, EVAL, FAILED, PHASE_CODE

PARAMETERS, GRADIENTS = "parameters", "gradients"
MASTER_WEIGHTS, OPTIMIZER_STATE, BUFFERS = "master_weights", "optimizer_state", "buffers"
FROZEN_PARAMETERS, QUANTIZED_PARAMETERS = "frozen_parameters", "quantized_parameters"
UNSHARDED_PARAMETERS, GRADIENT_BUCKETS = "unsharded_parameters", "gradient_buckets"
MODEL_STATES = (
    PARAMETERS,
    FROZEN_PARAMETERS,
    QUANTIZED_PARAMETERS,
    UNSHARDED_PARAMETERS,
    GRADIENTS,
    GRADIENT_BUCKETS,
    MASTER_WEIGHTS,
    OPTIMIZER_STATE,
)
CATEGORIES = (*MODEL_STATES, BUFFERS)
CATEGORY_LABELS = {name: name.replace("_", " ") for name in MODEL_STATES} | {
    UNSHARDED_PARAMETERS: "gathered by FSDP",
    GRADIENT_BUCKETS: "DDP gradient buckets",
    BUFFERS: "DeepSpeed buffers",
}
# Categories of the inventories of an engine, and of a loop, that are shown even if nothing is in them.
_ENGINE_CATEGORIES = (PARAMETERS, GRADIENTS, MASTER_WEIGHTS, OPTIMIZER_STATE, BUFFERS)
_LOOP_CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE)

NO_INVENTORY = "No inventory of tensors so far: it is taken when the engine is ready, and not by old versions of zerotop."

INIT, BEFORE_UPDATE, AFTER_UPDATE, NEXT_FORWARD = "init", "before_update", "after_update", "next_forward"
BEFORE_FORWARD, BEFORE_BACKWARD = "before_forward", "before_backward"
MOMENT_TEXTS = {
    INIT: "before the first update",
    BEFORE_FORWARD: "before the first forward",
    BEFORE_BACKWARD: "before the first backward",
    BEFORE_UPDATE: "before the first update",
    AFTER_UPDATE: "after the first update",
    NEXT_FORWARD: "before the forward after the first update",
    AGAIN: "after the update",
    FAILURE: "while the allocation failed",
}
# When permanent tensors were counted, best first.
_STATIC_MOMENTS = (AGAIN, AFTER_UPDATE, BEFORE_UPDATE, BEFORE_FORWARD, INIT)
# Bytes that PyTorch allocates for each stream of cuBLAS (aten/src/ATen/cuda/CublasHandlePool.cpp): 4096 x 8 KiB from
# Hopper on, 4096 x 2 KiB + 16 x 8 KiB before.
_CUBLAS_WORKSPACES = (33_554_432, 8_519_680)
_MOST_WORKSPACES = 4  # of each size: more blocks of it are others
_UNSPLIT = 1 << 20  # bytes that a block may have more than was asked for (kSmallSize of c10/cuda/CUDACachingAllocator)
_LEAST_GROWTH = 1 << 25  # bytes; less is outputs and losses of other batches
# Kinds of values that are added to.
_CONTAINERS = ("list", "dict", "set", "deque", "defaultdict", "OrderedDict")
# When tensors were counted between two steps.
_BETWEEN_STEPS = (AFTER_UPDATE, NEXT_FORWARD, AGAIN)
# Spans to look back through for the last backward; an evaluation in between has many.
_TAIL = 4096
_FORWARD, _BACKWARD, _STEP = PHASE_CODE["forward"], PHASE_CODE["backward"], PHASE_CODE["step"]


# Optimizers of one class that are listed one by one: more are parts of one, as with one for each parameter.
_MOST_LISTED = 3


def is_after_update(basis: str) -> bool:
    """Whether the words for a moment say that an update had been done."""
    return any(MOMENT_TEXTS[when] in basis for when in (AFTER_UPDATE, AGAIN))


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """The state of one of several optimizers."""

    name: str  # of its class
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """Device memory that a variable of the script keeps."""

    name: str  # ``seen``, or ``Trainer.seen`` for an attribute
    text: str  # in a sentence: ``the list seen in main() (train.py)``
    bytes: int
    count: int  # tensors in it
    keeps_graph: bool
    shape: tuple[int, ...]  # of the tensor with the largest block
    view_of: tuple[int, ...]  # the shape whose block that tensor keeps, if it is a small view; else empty
    line: str  # the only line that adds to it, ``train.py:97``; else empty
    step: int | None = None  # after which it was searched
    may_grow: bool = True  # False for a local variable that is no container and to which no line adds: it is replaced


@dataclass(frozen=True, slots=True)
class Pool:
    """Segments of one rank's allocator that only one stream, or one CUDA graph or MemPool, can use. Bytes."""

    is_private: bool  # of a CUDA graph or a MemPool
    is_current: bool  # of the stream that trains
    reserved: int
    allocated: int
    sparse: int  # unused, in segments that a few small blocks keep


class CountedGrowth(NamedTuple):
    """By how much the blocks in no category, of no known variable, had grown at the last count between two steps."""

    since_step: int  # after which they were first counted, or the holders of all of them were searched
    bytes: int
    step: int  # of the last count
    unix_ns: int
    allocated_bytes: int | None  # at that count, after the step; None if it was at another moment


@dataclass(frozen=True, slots=True)
class TensorInventory:
    """One rank's bytes, over all its engines. Keys of the tables are :data:`CATEGORIES`."""

    categories: tuple[str, ...]  # those that make sense for what trains, in the order of CATEGORIES
    device: dict[str, int]  # on its GPU, in blocks of PyTorch's allocator; empty where the allocator shows none
    host: dict[str, int]
    host_pinned: dict[str, int]  # the pinned part of ``host``
    basis: str  # words: when all but gradients were counted
    gradients_basis: str  # words: when gradients were counted
    may_free_gradients: bool  # of a loop: zero_grad() may have freed them since ``gradients_basis``
    has_gradients: bool  # a backward has ended since the last update
    gradients_alive: int  # bytes of gradients on its GPU before the first update; 0 before that
    cublas_bytes: int  # on the GPU, in no category, in blocks of the size of cuBLAS's workspaces
    unclaimed_bytes: int  # on the GPU, in no category, in other blocks
    unclaimed_largest: tuple[int, ...]  # sizes of the largest of those blocks, largest first
    pinned_allocator: dict[str, int] | None  # allocated_bytes, active_bytes; None where this torch does not count them
    blocks_bytes: int | None  # all blocks in use at that moment; None without CUDA
    optimizer_states: tuple[OptimizerBytes, ...] = ()  # parts of the optimizer state, of a loop with several optimizers
    counted_ns: int = 0  # when all but gradients were counted
    held: tuple[HeldTensors, ...] = ()  # what variables of the script keep, the most first; no part of unclaimed_bytes
    held_basis: str = ""  # words: when their holders were searched
    growth: CountedGrowth | None = None
    pools: tuple[Pool, ...] = ()

    @property
    def held_bytes(self) -> int:
        return sum(one.bytes for one in self.held)

    def describe_optimizer_states(self, *, on_device: bool) -> str:
        """Return ``Optimizer state: 1.20 GiB of AdamW, 0.01 GiB of SGD.``; "" with one optimizer, or without state there."""
        parts: dict[str, list[int]] = {}
        for state in self.optimizer_states:
            parts.setdefault(state.name, []).append(state.device_bytes if on_device else state.host_bytes)
        if not any(map(any, parts.values())):
            return ""
        texts = (
            f"{format_bytes(sum(sizes))} of {len(sizes)} x {name}"
            if len(sizes) > _MOST_LISTED
            else ", ".join(f"{format_bytes(size)} of {name}" for size in sizes)
            for name, sizes in parts.items()
        )
        return f"Optimizer state: {', '.join(texts)}."


def read_inventory(at: At, process: RankProcess, *, at_failure: bool = False) -> TensorInventory | None:
    """Return the inventory that applies at the cursor; None before the first.

    ``at_failure``: the cursor is at an out-of-memory error, whose inventory was taken then and there.
    """
    engines = at.process_events(Engine, process)
    takeovers = find_takeovers(engines)
    by_engine: dict[int, list[Tensors]] = {}
    for event in at.process_events(Tensors, process):
        number = event.engine or 0
        is_failure = event.when == FAILURE
        if event.unix_ns >= takeovers.get(number, 0) and (at_failure or not is_failure):
            by_engine.setdefault(number, []).append(event)
    if not by_engine:
        return None
    chosen = [_choose_events(at, process, engine, events) for engine, events in sorted(by_engine.items())]
    loops = any(event.kind == LOOP for event in keep_latest(engines))
    # The engines share one allocator: unclaimed bytes are those of the last inventory less what other engines claim.
    latest = max((static for static, _ in chosen), key=lambda event: event.unix_ns)
    by_others = sum(sum(_read_sizes(static, "device").values()) for static, _ in chosen if static is not latest)
    unclaimed = max(0, (latest.unclaimed_bytes or 0) - by_others)
    largest = latest.unclaimed_largest or ()
    # In the middle of a step activations may be of that size, or hide them.
    settled = [event for events in by_engine.values() for event in events if event.when != FAILURE]
    cublas = min(unclaimed, _sum_workspaces(settled[-1] if settled else latest))
    searched = next((event for event in reversed(settled) if event.held is not None), None)
    held = _read_held(searched, unclaimed - cublas) if searched is not None else ()
    held_bytes = sum(one.bytes for one in held)
    unexplained = min(_limit_unexplained(by_engine, unclaimed - cublas), unclaimed - cublas - held_bytes)
    largest = largest if unexplained == unclaimed - cublas else ()
    unclaimed = unexplained + cublas
    with_pools = next((event for event in reversed(settled) if event.pools), None)
    before_update = [event for events in by_engine.values() for event in events if event.when == BEFORE_UPDATE]
    device, host = _sum_categories(chosen, "device"), _sum_categories(chosen, "host")
    for number, events in by_engine.items():
        gathered = next((event for event in events if event.when == BEFORE_BACKWARD), None)
        if gathered is not None and _is_gathered(at, process, number):
            for table, sizes in (("device", device), ("host", host)):
                if UNSHARDED_PARAMETERS in _read_sizes(gathered, table):
                    sizes[UNSHARDED_PARAMETERS] = _read_sizes(gathered, table)[UNSHARDED_PARAMETERS]
    shown = {*(_LOOP_CATEGORIES if loops else _ENGINE_CATEGORIES), *device, *host}
    return TensorInventory(
        categories=tuple(name for name in CATEGORIES if name in shown),
        device=device,
        host=host,
        host_pinned=_sum_categories(chosen, "host_pinned"),
        basis=_describe_moment(latest),
        gradients_basis=_describe_moment(max((gradients for _, gradients in chosen), key=lambda event: event.unix_ns)),
        may_free_gradients=loops,
        has_gradients=any(has_gradients(at, process, engine) for engine in by_engine),
        gradients_alive=sum(_read_sizes(event, "device").get(GRADIENTS, 0) for event in before_update),
        cublas_bytes=cublas,
        unclaimed_bytes=unclaimed - cublas,
        unclaimed_largest=tuple(size for size in largest if _find_workspace(size) is None) if not by_others else (),
        pinned_allocator=latest.pinned_allocator or None,
        blocks_bytes=latest.allocated_bytes,
        optimizer_states=tuple(
            OptimizerBytes(state.class_, state.device, state.host) for state in latest.optimizer_states or ()
        ),
        counted_ns=latest.unix_ns,
        held=held,
        held_basis=_describe_moment(searched) if searched is not None else "",
        growth=_measure_growth(by_engine[latest.engine or 0], held_bytes),
        pools=read_pools(with_pools) if with_pools is not None else (),
    )


def _sum_workspaces(event: Tensors) -> int:
    """Return the bytes of cuBLAS's workspaces, by their size.

    A rank has one for each thread and stream; beside one of the exact size there may be some in blocks that were not split.
    """
    groups = [group for group in event.unclaimed_groups or () if len(group) == 2]  # a damaged recording may have others
    groups = groups or [[size, 1] for size in event.unclaimed_largest or ()]
    found: dict[int, list[int]] = {size: [] for size in _CUBLAS_WORKSPACES}
    for size, count in sorted(groups):
        if (exact := _find_workspace(size)) is not None:
            found[exact] += [size] * min(_MOST_WORKSPACES, max(0, count))
    return sum(sum(sizes[:_MOST_WORKSPACES]) for exact, sizes in found.items() if exact in sizes)


def _find_workspace(size: int) -> int | None:
    """Return the size of cuBLAS's workspace that a block may be; None of another block."""
    return next((exact for exact in _CUBLAS_WORKSPACES if 0 <= size - exact <= _UNSPLIT), None)


def _measure_growth(events: list[Tensors], held_bytes: int) -> CountedGrowth | None:
    """Return the growth of one engine's unclaimed bytes since the first count between steps, or since the last search."""
    counted = [event for event in events if event.when in _BETWEEN_STEPS and event.unclaimed_bytes is not None]
    if not counted:
        return None
    last, unclaimed = counted[-1], counted[-1].unclaimed_bytes or 0
    at_begin = [event for event in counted if event.when != AGAIN]
    base = at_begin[-1] if at_begin else counted[0]
    size = unclaimed - (base.unclaimed_bytes or 0) - held_bytes
    searched = next((event for event in reversed(counted) if event.held), None)
    since_search = unclaimed - (searched.unclaimed_bytes or 0) if searched is not None else -1
    # The search has found the holders of all that had grown by then.
    if searched is not None and since_search >= size - _LEAST_GROWTH:
        base, size = searched, since_search
    allocated = last.allocated_bytes if last.when == AGAIN else None
    return CountedGrowth(find_step(base), size, find_step(last), last.unix_ns, allocated)


def _read_held(event: Tensors, unclaimed: int) -> tuple[HeldTensors, ...]:
    """Return what variables kept when that was searched, as far as there is still as much in no category."""
    held: list[HeldTensors] = []
    for one in read_held(event):
        size = min(one.bytes, unclaimed - sum(other.bytes for other in held))
        held += [replace(one, bytes=size)] if size > 0 else []
    return tuple(held)


def read_held(event: Tensors) -> list[HeldTensors]:
    """Return the entries of ``held`` of a ``tensors`` event."""
    return [_read_holder(one, find_step(event)) for one in event.held or () if one.name and _is_plain(one)]


def _is_plain(one: HoldingVariable) -> bool:
    return all((text or "").isprintable() for text in (one.name, one.owner, one.file, one.kind, one.added_file))


def _read_holder(one: HoldingVariable, step: int) -> HeldTensors:
    name, scope, owner, file = one.name, one.scope, one.owner, one.file
    place = f" ({file})" if file else ""
    where = {"local": f"{name} in {owner}(){place}", "attribute": f"{owner}.{name}{place}"}.get(scope)
    kind = "tensor" if one.kind in ("Tensor", "Parameter") else one.kind
    where = where or (f"{name} of {file or owner}" if file or owner else name)
    return HeldTensors(
        name=f"{owner}.{name}" if scope == "attribute" else name,
        text=f"a {kind} within {where}" if one.levels else f"the {kind} {where}",
        bytes=one.bytes,
        count=one.count,
        keeps_graph=bool(one.keeps_graph),
        shape=tuple(one.shape or ()),
        view_of=tuple(one.view_of or ()),
        line=f"{one.added_file}:{one.added_line}" if one.added_file and one.added_line else "",
        step=step,
        may_grow=scope != "local" or bool(one.added_line) or one.kind in _CONTAINERS,
    )


def read_pools(event: Tensors) -> tuple[Pool, ...]:
    """Return the pools of a ``tensors`` event."""
    stream = event.stream or 0
    return tuple(
        Pool(
            is_private=pool.private,
            is_current=pool.stream == stream,
            reserved=pool.reserved,
            allocated=pool.allocated,
            sparse=pool.sparse or 0,
        )
        for pool in event.pools or ()
    )


def _limit_unexplained(by_engine: dict[int, list[Tensors]], unclaimed: int) -> int:
    """Return the part of unclaimed bytes that was there before the first forward.

    The rest are outputs and losses that the script still holds when tensors are counted: they are activations. What was
    entered later has been seen between two steps at best, when some may have had a holder; before that, in a loop's first
    backward, all count as activations.
    """
    first = []
    for events in by_engine.values():
        by_moment = {event.when: event.unclaimed_bytes or 0 for event in events}
        if list(by_moment) == [BEFORE_BACKWARD]:
            return 0
        known = [by_moment[when] for when in (BEFORE_FORWARD, INIT) if when in by_moment]
        seen = (events[0].unclaimed_bytes or 0) - sum(one.bytes for one in events[0].held or ())
        first += known[:1] or [max(0, seen)]
    return min([unclaimed, *first])


def _choose_events(at: At, process: RankProcess, engine: int, events: list[Tensors]) -> tuple[Tensors, Tensors]:
    """Return one engine's inventory for permanent tensors, and that for gradients."""
    by_moment = {event.when: event for event in events}
    if FAILURE in by_moment and by_moment[FAILURE] is events[-1]:
        return events[-1], events[-1]
    static = next((by_moment[when] for when in _STATIC_MOMENTS if when in by_moment), events[-1])
    # A loop's gradients are alive after an update, an engine's are not.
    again = by_moment.get(AGAIN)
    newest = again if again is not None and _read_sizes(again, "device").get(GRADIENTS) else None
    if BEFORE_UPDATE in by_moment and has_gradients(at, process, engine):
        return static, newest or by_moment[BEFORE_UPDATE]
    if NEXT_FORWARD in by_moment and is_in_forward(at, process, engine):
        is_kept = bool(_read_sizes(by_moment[NEXT_FORWARD], "device").get(GRADIENTS))
        return static, newest if newest is not None and is_kept else by_moment[NEXT_FORWARD]
    return static, newest or by_moment.get(AFTER_UPDATE, by_moment.get(INIT, static))


def _is_gathered(at: At, process: RankProcess, engine: int) -> bool:
    """Return whether the cursor is between a step's first forward and the end of its first backward."""
    has_begun = is_in_forward(at, process, engine)
    return has_begun and not has_gradients(at, process, engine)


def has_gradients(at: At, process: RankProcess, engine: int) -> bool:
    """Return whether a backward has ended since the engine's last update."""
    spans = at.find_table("spans", process)
    if spans is None:
        return False
    tail = spans.until(at.cursor_ns)[-_TAIL:]
    update = (tail["phase"] == _STEP) & (tail["flags"] & BOUNDARY != 0)
    either = (update | (tail["phase"] == _BACKWARD)) & (tail["flags"] & (EVAL | FAILED) == 0) & (tail["engine"] == engine)
    indices = np.flatnonzero(either)
    return len(indices) > 0 and not update[indices[-1]]


def is_in_forward(at: At, process: RankProcess, engine: int) -> bool:
    """Return whether a forward has begun since the engine's last update."""
    begins, spans = (at.find_table(name, process) for name in ("begins", "spans"))
    if begins is None or spans is None:
        return False
    begun, ended = begins.until(at.cursor_ns)[-_TAIL:], spans.until(at.cursor_ns)[-_TAIL:]
    forwards = begun["time_ns"][(begun["phase"] == _FORWARD) & (begun["engine"] == engine)]
    update = (ended["phase"] == _STEP) & (ended["flags"] & BOUNDARY != 0) & (ended["engine"] == engine)
    return len(forwards) > 0 and int(forwards[-1]) > int(ended["end_ns"][update].max(initial=0))


def _sum_categories(chosen: list[tuple[Tensors, Tensors]], table: str) -> dict[str, int]:
    """Return bytes by category over all engines."""
    total: dict[str, int] = {}
    for static, gradients in chosen:
        for category in CATEGORIES:
            sizes = _read_sizes(gradients if category == GRADIENTS else static, table)
            if category in sizes:
                total[category] = total.get(category, 0) + sizes[category]
    return total


def _read_sizes(event: Tensors, table: str) -> dict[str, int]:
    sizes: dict[str, int] | None = getattr(event, table)
    return sizes or {}


def _describe_moment(event: Tensors) -> str:
    when = str(event.when)
    return "tensors counted " + ("" if when == INIT else f"in step {find_step(event)}, ") + MOMENT_TEXTS.get(when, when)


def find_step(event: Tensors) -> int:
    """Return the step of an inventory: the engine counts a step when its update is over."""
    return (event.step or 0) - (event.when in (AFTER_UPDATE, NEXT_FORWARD))

"""Reserved memory of a training: the blocks of its start and first steps, replayed through the simulated allocator.

What a step allocates is that of :mod:`zerotop.analysis.memory.expected.peak_moments`, here tensor by tensor and in order.
The order of a layer, of the loss and of the update is that of a recorded step (``gpu-microscope``, Qwen2 in ZeRO-2 on an
H200); that of the start is DeepSpeed's ``stage_1_and_2.py`` and ``stage3.py``: parameters one by one, then flat
copies of them, whose temporary blocks stay in the cache. The first step splits these, so that the states, which the
optimizer makes at its end, need segments of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zerotop.analysis.memory.caching_allocator import AllocatorRules, Block, CachingAllocator
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.peak_moments import (
    Workload,
    count_updated,
    list_gathered,
    list_gradients,
    list_held_gradients,
    list_lasting_buffers,
    list_states,
)
from zerotop.analysis.memory.expected.zero_model import EngineSetup
from zerotop.analysis.memory.tensor_inventory import MASTER_WEIGHTS, OPTIMIZER_STATE, PARAMETERS

STEPS = 2  # the second finds what the first has left; later ones repeat it
REDUCTION, _GATHERING = 1, 2  # streams of ZeRO beside the default one, whose blocks no other stream gets
WORKSPACE = 32 << 20  # of cuBLAS on Hopper, for each thread that multiplies


class StepReplay:
    """One rank's allocator, with what the start of a job has left in it."""

    def __init__(self, shape: ModelShape, setup: EngineSetup, work: Workload, rules: AllocatorRules) -> None:
        assert shape.counted is not None
        self._shape, self._setup, self._work, self._counted = shape, setup, work, shape.counted
        self.allocator = CachingAllocator(rules)
        self._states = {row.name.replace(" ", "_"): row.bytes for row in list_states(setup)}
        self._width = 2 if setup.computes_wide else 1
        self._is_frozen = setup.trainable < setup.parameters

    def run(self) -> None:
        self.start()
        for step in range(STEPS):
            self._train(is_first=step == 0)

    def _allocate(self, size: float, *, stream: int = 0) -> Block:
        return self.allocator.allocate(max(1, int(size)), stream=stream)

    def _pass(self, *sizes: float) -> None:
        """Allocate blocks together, and free them."""
        blocks = [self._allocate(size) for size in sizes]
        for block in blocks:
            self.allocator.free(block)

    def _free(self, *blocks: Block) -> None:
        for block in blocks:
            self.allocator.free(block)

    # --- the start -------------------------------------------------------------------------------------------------------

    def _list_tensors(self) -> list[int]:
        """Return the elements of each parameter; small ones of a layer as one."""
        counted = self._counted
        matrices = [each * out for each, out, count in counted.linears.values() for _ in range(count)]
        rest = max(0, counted.layer - sum(matrices))
        ends = [self._shape.vocabulary * self._shape.hidden]
        ends *= max(1, round(counted.embeddings / ends[0]))
        return [*ends[:1], *[*matrices, rest] * self._shape.layers, *ends[1:]]

    def start(self) -> None:
        setup, tensors = self._setup, self._list_tensors()
        scale = sum(self._states.get(name, 0) for name in (PARAMETERS, "frozen_parameters")) / max(1, sum(tensors))
        loaded = [self._allocate(scale * size) for size in tensors] if self._states.get(PARAMETERS, 0) else []
        if setup.is_loop:
            for row in list_lasting_buffers(setup, self._work):
                self._allocate(row.bytes)
            return
        weights, master = self._states.get(PARAMETERS, 0), self._states.get(MASTER_WEIGHTS, 0)
        if setup.stage == 3:
            self._free(*loaded)
            self.allocator.empty_cache()
        if weights:
            self._allocate(weights)
        if setup.stage < 3:
            self._free(*loaded)
        if master:
            self._pass(setup.bytes_each * setup.trainable / setup.ranks)  # cloned before it becomes fp32
            self._allocate(master)
            self._pass(master)  # a gradient of zeros
        if not setup.stage:
            self.make_states()
        for row in list_lasting_buffers(setup, self._work):
            self._allocate(row.bytes)

    def make_states(self) -> None:
        """Make the moments of an optimizer of DeepSpeed: in the first step, but in stage 0 at the start."""
        for _ in range(2):
            self._allocate(self._states.get(OPTIMIZER_STATE, 0) / 2)

    # --- a step ----------------------------------------------------------------------------------------------------------

    def _train(self, *, is_first: bool) -> None:
        if is_first:
            self._allocate(WORKSPACE)
        setup, work = self._setup, self._work
        held = [self._allocate(row.bytes) for row in list_held_gradients(setup, work)]
        gathered = [self._allocate(row.bytes, stream=_GATHERING) for row in list_gathered(self._shape, setup)]
        kept = [self._run_layer() for _ in range(self._shape.layers)]
        self._run_loss(is_first=is_first)
        gradients = self._run_backward(kept)
        self._free(*gathered)
        self._update(held + gradients, is_first=is_first)

    def _list_kept(self) -> tuple[list[float], list[float]]:
        """Return the blocks that a layer keeps: of its hidden size, and inside its MLP."""
        hidden, counted = self._shape.hidden, self._counted
        total = counted.kept_frozen if self._is_frozen else counted.kept
        inner = 2 * counted.inner
        count = 3 if self._is_frozen else 4
        within = [inner] * count if total > inner * count else []
        rest = total - sum(within)
        wide = [4 * hidden] * 2 if rest > 8 * hidden else []
        rest -= sum(wide)
        narrow = [2 * hidden] * int(rest // (2 * hidden))
        narrow += [rest % (2 * hidden)] if rest % (2 * hidden) else []
        half = len(narrow) // 2
        outer = [*wide[:1], *narrow[:half], *wide[1:], *narrow[half:]]
        tokens = self._work.tokens * self._width
        return [tokens * size for size in outer], [tokens * size for size in within]

    def _run_layer(self, *, is_recomputed: bool = False) -> list[Block]:
        """Run the forward of a layer, and return the blocks that stay for its backward."""
        work, hidden = self._work, 2 * self._shape.hidden * self._work.tokens * self._width
        recomputes = work.checkpointing != "none" and not is_recomputed
        inputs = [self._allocate(hidden)] if recomputes else []
        outer, within = self._list_kept()
        kept = []
        for size in outer:
            kept.append(self._allocate(size))
            if size > hidden:
                self._pass(size, size)  # squares and normed values in fp32
        if work.has_score_matrices:
            kept.append(self._allocate(5 * self._shape.heads * work.sequence * work.tokens * self._width))
        self._pass(hidden, hidden)
        kept += [self._allocate(size) for size in within]
        self._pass(hidden)
        if not recomputes:
            return kept
        self._free(*kept)
        return inputs

    def _run_loss(self, *, is_first: bool) -> None:
        tokens, vocabulary = self._work.tokens, self._shape.vocabulary
        logits = 2 * vocabulary * tokens
        ends = self._allocate(self._counted.ends * tokens)
        if self._work.loss == "logits":
            half, wide = self._allocate(logits), self._allocate(2 * logits)
            softmax = self._allocate(2 * logits)
            self._free(wide, half)
            self._pass(2 * logits, 2 * logits)
            half = self._allocate(logits)
            self._free(softmax)
        elif self._work.loss == "fused":
            half = self._allocate(logits)
            self._pass(2 * logits)
            self._pass(logits)
        elif self._work.loss == "chunked":
            half = self._allocate(logits)
        else:
            chunks = -(-vocabulary // self._shape.hidden)
            chunk = min(tokens, 1 << (-(-tokens // chunks) - 1).bit_length())
            for _ in range(min(4, chunks)):
                self._pass(2 * chunk * vocabulary, 4 * chunk * vocabulary)
            half = self._allocate(1)
        gradient = self._allocate(2 * vocabulary * self._shape.hidden if not self._is_frozen else 1)
        if is_first:
            self._allocate(WORKSPACE)
        self._free(gradient, half, ends)

    def _run_backward(self, kept: list[list[Block]]) -> list[Block]:
        """Run the backward of all layers, and return gradients that stay until the update."""
        setup, work = self._setup, self._work
        hidden, inner = (2 * size * work.tokens * self._width for size in (self._shape.hidden, self._counted.inner))
        rows = list_gradients(setup, work)
        is_flat = bool(rows) and not setup.is_loop and setup.stage == 2
        gradients = [self._allocate(rows[0].bytes, stream=REDUCTION)] if is_flat else []
        incoming = self._allocate(hidden)
        matrices = [
            each * out * setup.bytes_each for each, out, count in self._counted.linears.values() for _ in range(count)
        ]
        stays = bool(rows) and not is_flat and not self._is_frozen
        for blocks in reversed(kept):
            if work.checkpointing != "none":
                inputs, blocks = blocks, self._run_layer(is_recomputed=True)
            else:
                inputs = []
            outgoing = self._allocate(hidden)
            self._pass(inner, inner, inner)
            self._pass(2 * hidden, 2 * hidden, 2 * hidden)
            for size in matrices if not self._is_frozen else ():
                gradient = self._allocate(size)
                if stays:
                    gradients.append(gradient)
                else:
                    self._free(gradient)
            self._pass(2 * hidden, 2 * hidden, hidden)
            self._free(*blocks, *inputs, incoming)
            incoming = outgoing
        self._free(incoming)
        if stays:
            gradients.append(self._allocate(2 * self._shape.vocabulary * self._shape.hidden))
        return gradients

    def _update(self, gradients: list[Block], *, is_first: bool) -> None:
        setup, work = self._setup, self._work
        count = count_updated(setup)
        state = self._states.get(OPTIMIZER_STATE, 0)
        if setup.is_loop:
            tensors = self._list_tensors() if not self._is_frozen else [setup.trainable]
            if is_first and state:
                whole = sum(tensors)
                for _ in range(2):
                    for size in tensors:
                        self._allocate(state * size / (2 * whole))
            if work.foreach and count and not work.update_in_backward:
                self._pass(*(setup.bytes_each * count * size / sum(tensors) for size in tensors))
            self._free(*gradients)
            return
        flat = [self._allocate(setup.bytes_each * count)] if count and setup.stage else []
        each = [setup.master_each * size for size in self._list_tensors()] if not setup.stage else []
        wide = [*map(self._allocate, each), self._allocate(setup.master_each * count)] if count else []
        self._free(*flat)
        if setup.stage:
            self._free(*gradients)
        if is_first and setup.stage:
            self.make_states()
        if count:
            self._pass(setup.master_each * count if work.foreach else setup.bytes_each * count)
        self._free(*wide)
        if not setup.stage:
            self._free(*gradients)


def is_simulated(shape: ModelShape, setup: EngineSetup) -> bool:
    """Return whether the order of blocks is known: DeepSpeed's stages 1 to 3, all parameters trained, a known family."""
    trains_all = setup.trainable == setup.parameters
    return shape.counted is not None and trains_all and setup.stage > 0 and not setup.is_loop and setup.on_gpu


def simulate_beyond(shape: ModelShape, setup: EngineSetup, work: Workload, rules: AllocatorRules) -> int:
    """Return the bytes that segments have beyond the peak of allocated blocks, after the second step."""
    # What is offloaded leaves the same on the GPU wherever it goes.
    devices = ["cpu" if device == "nvme" else device for device in (setup.offload_optimizer, setup.offload_parameters)]
    return _replay(shape, replace(setup, offload_optimizer=devices[0], offload_parameters=devices[1]), work, rules)


@lru_cache(maxsize=64)
def _replay(shape: ModelShape, setup: EngineSetup, work: Workload, rules: AllocatorRules) -> int:
    replay = StepReplay(shape, setup, work, rules)
    replay.run()
    return replay.allocator.reserved_peak - replay.allocator.allocated_peak

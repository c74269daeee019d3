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
from zerotop.analysis.memory.expected import peak_moments
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.zero_model import EngineSetup
from zerotop.analysis.memory.tensor_inventory import MASTER_WEIGHTS, OPTIMIZER_STATE, PARAMETERS

_MOST_LAYERS = 512  # of any model: more would take seconds
STEPS = 2  # the second finds what the first has left; later ones repeat it
REDUCTION, _GATHERING = 1, 2  # streams of ZeRO beside the default one, whose blocks no other stream gets
WORKSPACE = 32 << 20  # of cuBLAS on Hopper, for each thread that multiplies


class StepReplay:
    """One rank's allocator, with what the start of a job has left in it."""

    def __init__(self, shape: ModelShape, setup: EngineSetup, work: peak_moments.Workload, rules: AllocatorRules) -> None:
        assert shape.counted is not None
        self._shape, self._setup, self._work, self._counted = shape, setup, work, shape.counted
        self.allocator = CachingAllocator(rules)
        self._states = {row.name.replace(" ", "_"): row.bytes for row in peak_moments.list_states(setup)}
        self._width = 2 if setup.computes_wide else 1
        self._reduction = REDUCTION if setup.stage == 3 or work.overlap_comm else 0
        self._matrix = 2 * shape.vocabulary * shape.hidden  # the gradient of embedding or head
        self._buckets: list[Block] = []
        self._filled = 0.0  # bytes of gradients in the bucket
        self._is_tied = shape.counted.embeddings < 1.5 * shape.vocabulary * shape.hidden

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

    def _list_matrices(self) -> list[int]:
        """Return the elements of a layer's matrices; those of all experts are one."""
        return [each * out * count for each, out, count in self._counted.linears.values()]

    def _list_tensors(self) -> list[int]:
        """Return the elements of each parameter; small ones of a layer as one."""
        counted, matrices = self._counted, self._list_matrices()
        rest = max(0, counted.layer - sum(matrices))
        ends = [self._shape.vocabulary * self._shape.hidden]
        ends *= max(1, round(counted.embeddings / ends[0]))
        return [*ends[:1], *[*matrices, rest] * self._shape.layers, *ends[1:]]

    def start(self) -> None:
        setup, tensors = self._setup, self._list_tensors()
        weights, master = self._states.get(PARAMETERS, 0), self._states.get(MASTER_WEIGHTS, 0)
        if not setup.stage:  # nothing is flat
            self._allocate_parts(weights)
            self._allocate_parts(master)
            return
        # Stage 3 gives all that was loaded back to the device (``defragment``).
        loaded = [self._allocate(weights * size / sum(tensors)) for size in tensors] if setup.stage < 3 else []
        if weights:
            self._allocate(weights)
        self._free(*loaded)
        if setup.stage < 3 or master:
            clone = self._allocate(setup.bytes_each * setup.trainable / setup.ranks)
            if master:
                self._allocate(master)
            self._free(clone)
        if master:
            self._pass(master)  # a gradient of zeros
        for row in peak_moments.list_lasting_buffers(setup, self._work):
            self._allocate(row.bytes)

    def make_states(self) -> None:
        """Make the optimizer's moments, at the end of the first step."""
        for _ in range(2):
            self._allocate_parts(self._states.get(OPTIMIZER_STATE, 0) / 2)

    def _allocate_parts(self, size: float) -> list[Block]:
        """Allocate something of the size of the parameters: a block for each in stage 0, else a flat one."""
        tensors = self._list_tensors() if size and not self._setup.stage else [1]
        return [self._allocate(size * part / sum(tensors)) for part in tensors] if size else []

    # --- a step ----------------------------------------------------------------------------------------------------------

    def _train(self, *, is_first: bool) -> None:
        if is_first:
            self._allocate(WORKSPACE)
        setup, work = self._setup, self._work
        held = [self._allocate(row.bytes) for row in peak_moments.list_held_gradients(setup, work)]
        gathered = [self._allocate(row.bytes, stream=_GATHERING) for row in peak_moments.list_gathered(self._shape, setup)]
        kept = [self._run_layer() for _ in range(self._shape.layers)]
        head = self._run_loss(is_first=is_first)
        gradients = self._run_backward(kept, head)
        self._free(*gathered)
        self._update(held + gradients, is_first=is_first)

    def _list_kept(self) -> tuple[list[float], list[float]]:
        """Return the blocks that a layer keeps: of its hidden size, and inside its MLP."""
        hidden, counted = self._shape.hidden, self._counted
        inner = 2 * counted.inner
        within = [inner] * 4 if counted.kept > 4 * inner else []
        rest = counted.kept - sum(within)
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

    def _run_loss(self, *, is_first: bool) -> list[Block]:
        """Run the loss and its backward, and return the head's gradient, if the embedding's is added to it."""
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
        gradient = self._allocate(self._matrix)
        if is_first:
            self._allocate(WORKSPACE)
        self._buckets = [self._allocate(size) for size in peak_moments.list_buckets(self._setup, self._work)]
        self._fill_bucket(self._matrix)
        self._free(half, ends)
        if self._is_tied:
            return [gradient]
        self._free(gradient)
        return []

    def _run_backward(self, kept: list[list[Block]], head: list[Block]) -> list[Block]:
        """Run the backward of all layers, and return gradients that stay until the update."""
        setup, work = self._setup, self._work
        hidden, inner = (2 * size * work.tokens * self._width for size in (self._shape.hidden, self._counted.inner))
        rows = peak_moments.list_gradients(setup, work)
        is_flat = bool(rows) and setup.stage == 2
        gradients = [self._allocate(rows[0].bytes, stream=self._reduction)] if is_flat else []
        incoming = self._allocate(hidden)
        matrices = [setup.bytes_each * size for size in self._list_matrices()]
        stays = bool(rows) and not is_flat
        for blocks in reversed(kept):
            if work.checkpointing != "none":
                inputs, blocks = blocks, self._run_layer(is_recomputed=True)
            else:
                inputs = []
            outgoing = self._allocate(hidden)
            self._pass(inner, inner, inner)
            self._pass(2 * hidden, 2 * hidden, 2 * hidden)
            for size in matrices:
                gradient = self._allocate(size)
                self._fill_bucket(size)
                if stays:
                    gradients.append(gradient)
                else:
                    self._free(gradient)
            self._pass(2 * hidden, 2 * hidden, hidden)
            self._free(*blocks, *inputs, incoming)
            incoming = outgoing
        self._free(incoming)
        if setup.stage == 3 and setup.ranks > 1:
            # The bucket's gradients, put together for the reduce-scatter (``reduce_scatter_coalesced``).
            bucket = setup.bytes_each * min(work.bucket, setup.trainable)
            self._free(self._allocate(bucket, stream=self._reduction))
        embedding = self._allocate(self._matrix)
        total = self._allocate(self._matrix) if head else embedding
        self._free(*head, *[embedding] * bool(head))
        if setup.offload_optimizer != "none":
            self._send_gradient()
        self._fill_bucket(self._matrix, is_last=True)
        if stays:
            gradients.append(total)
        else:
            self._free(total)
        self._free(*self._buckets)
        return gradients

    def _fill_bucket(self, size: float, *, is_last: bool = False) -> None:
        """Put a gradient of ``size`` bytes into the bucket of stages 1 and 2; a full one is cut by ranks into a copy."""
        bucket = self._setup.bytes_each * self._work.bucket
        if self._filled + size > bucket or is_last:
            if self._buckets and self._setup.ranks > 1 and self._filled:
                self._free(self._allocate(self._filled, stream=self._reduction))
            self._filled = 0.0
        self._filled += 0.0 if is_last else size

    def _send_gradient(self) -> None:
        """Bring the largest gradient to host memory: a copy of it in stage 3, and its norm from one in fp64."""
        share = self._matrix / (self._setup.ranks if self._setup.stage == 3 else 1)
        sizes = [share, 4 * share] if self._setup.stage == 3 else [4 * share]
        blocks = [self._allocate(size, stream=self._reduction) for size in sizes]
        self._free(*blocks)

    def _update(self, gradients: list[Block], *, is_first: bool) -> None:
        setup, work, count = self._setup, self._work, peak_moments.count_updated(self._setup)
        if setup.stage < 3 and setup.offload_optimizer == "none":
            self._pass(4 * self._matrix)  # for the norm of the largest gradient, in fp64
        flat = [self._allocate(setup.bytes_each * count)] if setup.stage else []
        wide = self._allocate_parts(setup.master_each * count)
        self._free(*flat, *(gradients if setup.stage else []))
        if is_first:
            self.make_states()
        if work.foreach:
            self._free(*self._allocate_parts(setup.master_each * count))
        elif setup.stage == 3:
            self._pass(setup.bytes_each * count)
        self._free(*wide, *([] if setup.stage else gradients))


def is_simulated(shape: ModelShape, setup: EngineSetup) -> bool:
    """Return whether the order of blocks is known: DeepSpeed, all parameters trained, a known family."""
    is_known = shape.counted is not None and shape.layers <= _MOST_LAYERS
    return is_known and setup.trainable == setup.parameters and not setup.is_loop and setup.on_gpu


def simulate_beyond(shape: ModelShape, setup: EngineSetup, work: peak_moments.Workload, rules: AllocatorRules) -> int:
    """Return the bytes that segments have beyond the peak of allocated blocks, after the second step."""
    # What is offloaded leaves the same on the GPU wherever it goes.
    devices = ["cpu" if device == "nvme" else device for device in (setup.offload_optimizer, setup.offload_parameters)]
    return _replay(shape, replace(setup, offload_optimizer=devices[0], offload_parameters=devices[1]), work, rules)


@lru_cache(maxsize=64)
def _replay(shape: ModelShape, setup: EngineSetup, work: peak_moments.Workload, rules: AllocatorRules) -> int:
    replay = StepReplay(shape, setup, work, rules)
    replay.run()
    return replay.allocator.reserved_peak - replay.allocator.allocated_peak

"""The events of a recording: every event's name and fields, with type and meaning, in one place.

An event is a rare fact. :class:`~zerotop_probe.recording.writer.EventWriter` writes it as one JSON line: ``time_ns``,
``event`` (the name of the class in lower case, with ``_`` between words) and the fields declared here. A value that could
not be read is null or absent, never guessed. Readers keep events and fields that they do not know, and replace values of
another type with null. See :mod:`~zerotop_probe.recording.event_base` for the types.
"""

from __future__ import annotations

from typing import Any

from zerotop_probe.recording.event_base import EVENTS, Event, Facts

__all__ = ["EVENTS", "Event", "Facts"]

# --- shared by several events --------------------------------------------------------------------------------------------


class ErrorEvent(Event):
    """A part that failed."""

    where: str | None  # the part that failed
    error: str | None  # the exception or the reason, redacted


class RankFacts(Facts):
    """A rank's process."""

    rank: int | None  # global rank; null if unknown
    local_rank: int | None  # rank within the node (rank_found only)
    pid: int | None  # process id on the node that wrote the event
    start: int | None  # its start in clock ticks since boot (rank_found and the events about a command only)


class RankEvent(RankFacts, Event):
    """An event about a rank's process."""


class CommandEvent(RankEvent):
    """A job and its command."""

    command: list[str] | None  # the launcher's command line, redacted
    launcher: str | None  # kind of launcher (this and the following: attached and joined only)
    age_s: float | None  # seconds that the job had been running
    ranks: list[RankFacts] | None  # the job's rank processes on this node
    text: str | None  # one sentence about the missing parts of the recording


class CodePlace(Facts):
    """A line of the job's own code; absent if unknown."""

    file: str | None  # relative to the script's folder
    line: int | None  # its number
    function: str | None  # the function around it


class VariableFacts(Facts):
    """A container or another object, and the variable or attribute that holds it."""

    name: str  # of the variable or attribute
    scope: str  # local, global, or attribute
    owner: str  # qualified name of the function or class, name of the module
    file: str  # of the owner, relative to the script's folder or its library's
    own: bool | None  # whether the file belongs to the job itself, not to a library or to Python
    levels: int | None  # 0: it is the variable's value; 1: within that value, and so on
    kind: str  # its type
    added_file: str | None  # file of the only line that adds to it; absent if unknown
    added_line: int | None  # its line
    added_function: str | None  # its function


class LossEvent(Event):
    """The end of a rank's recording."""

    lost: int | None  # records that could not be written
    step: int | None  # the last finished optimizer step, recorded or not; null without one


class EndEvent(Event):
    """The end of a command."""

    exit_code: int | None  # 128 + n after signal n; null if the sampler that saw the end had not started the command
    signal: str | None  # name of the signal that ended it; null without one
    seconds: float | None  # duration of the recorded part of the job
    oom_kills: int | None  # processes of the cgroup that the kernel killed for memory during the recording
    text: str | None  # the end in one sentence


class SampledFrame(Facts):
    """A frame of a stack."""

    file: str  # relative to the script's folder, or to where the library is installed
    line: int  # line number
    function: str  # qualified name, from Python 3.11 on; in memory_lines never qualified
    own: bool | None  # whether the file belongs to the job itself, not to a library or to Python


class SampledStack(Facts):
    """A stack that was sampled."""

    count: int | None  # samples
    seconds: float | None  # time that these samples stand for; absent if silent
    thread: str | None  # name of the thread; absent for the training thread
    daemon: bool | None  # whether Python ends without waiting for the thread; absent for threads that Python did not start
    call: str | None  # function in C that the innermost frame calls; absent without one, or if unknown
    frames: list[int]  # indexes into the event's frames, innermost first


class StackEvent(Event):
    """Sampled stacks."""

    frames: list[SampledFrame]  # the frames of the stacks, without the probe's own
    stacks: list[SampledStack]  # the stacks that took the most time


# --- written by a rank ----------------------------------------------------------------------------------------------------


class Hello(Event):
    """The probe starts because this process constructs a DeepSpeed engine, or trains with PyTorch's own optimizers."""

    rank: int | None  # global rank
    local_rank: int | None  # rank within the node
    node_rank: int | None  # number of the node
    world_size: int | None  # ranks of the job
    launcher: str | None  # torchrun, deepspeed, accelerate, mpi, slurm or python
    python: str | None  # version
    torch: str | None  # version
    deepspeed: str | None  # version
    transformers: str | None  # version, if imported
    accelerate: str | None  # version, if imported
    arguments: list[str] | None  # the script's own command line, redacted
    environment: dict[str, str] | None  # the variables that control memory, devices and threads
    watches_threads: bool | None  # whether it writes busy_thread
    native: bool | None  # whether the probe's C code is in use; absent in older recordings


class Sharding(Facts):
    """How FSDP shards a loop's models."""

    ranks: int | None  # that share the parameters
    groups: int | None  # of parameters that are gathered together
    largest_group: int | None  # elements of the largest of them
    reshards: bool | None  # whether parameters are freed after the forward, and gathered again for the backward
    dtype: str | None  # dtype of computation; null for the parameters' own


class ParameterKind(Facts):
    """Parameters of one shape and dtype."""

    shape: list[int]  # of a parameter, also where ranks share it
    dtype: str  # as that of the event
    count: int  # parameters of that kind
    state_bits: int | None  # of an element of state in bitsandbytes; null elsewhere


class EngineOptimizer(Facts):
    """An optimizer of a loop, or the one that DeepSpeed wraps, of which parameters and tensors are not known."""

    class_: str | None  # class name
    package: str | None  # the package of its class: torch, transformers, bitsandbytes
    parameters: int | None  # elements that it updates
    # its parameters, by kind; null for FSDP1's flat parameters, and if there are too many kinds
    tensors: list[ParameterKind] | None
    settings: dict[str, Any] | None  # its defaults: numbers, truth values and words


class EngineDevice(Facts):
    """The GPU of a process."""

    ordinal: int | None  # CUDA ordinal in this process
    uuid: str | None  # as NVML writes it; that of a MIG instance may begin with GPU-
    name: str | None  # product name
    total_bytes: int | None  # device memory
    limit_bytes: int | None  # what PyTorch may reserve, where the process is limited to a fraction
    visible: str | None  # its entry in CUDA_VISIBLE_DEVICES; null without one
    unified: bool | None  # it is integrated: its memory is the host's
    free_bytes: int | None  # of unified memory, cudaMemGetInfo's figure: less than is available by what the host caches


class PipelineStage(Facts):
    """A rank's part of a model that DeepSpeed's pipeline engine divides."""

    stage: int | None  # of this rank, from 0
    stages: int | None  # of the model
    parameters: int | None  # elements of this stage's parameters, without those tied to an earlier stage
    trainable_parameters: int | None  # elements of those that require gradients


class EngineFacts(Facts):
    """What is known of a DeepSpeed engine, or of a loop without one."""

    engine: int | None  # number of the engine or loop in this process; an engine takes over that of a loop before it
    kind: str | None  # loop; absent for a DeepSpeed engine
    parallelism: str | None  # of a loop: DDP, DataParallel, FSDP or FSDP2; empty without
    sharding: Sharding | None  # how FSDP shards a loop's models; null without
    library: str | None  # of a loop: Trainer, Lightning or Accelerate; empty if it is hand-written
    compiled: bool | None  # of a loop: whether a model went through torch.compile
    engine_class: str | None  # class name of a DeepSpeed engine
    rank: int | None  # global rank
    local_rank: int | None  # local rank
    zero_stage: int | None  # 0 to 3; absent for a loop
    offload_optimizer: str | None  # none, cpu or nvme
    offload_parameters: str | None  # none, cpu or nvme
    dtype: str | None  # fp32, fp16 or bf16; of a loop, that of most trainable parameters, perhaps fp64
    frozen_dtype: str | None  # of a loop's frozen parameters that are not quantized; null if they have several, or none
    quantized_parameters: int | None  # elements of a loop's quantized parameters
    autocast: str | None  # dtype of autocast; null if it is off
    micro_batch: int | None  # rows in a micro-batch of one rank
    gradient_accumulation: int | None  # micro-batches in an optimizer step
    train_batch: int | None  # rows in an optimizer step of all ranks
    world_size: int | None  # ranks of the job
    data_parallel: int | None  # data-parallel ranks
    # of DeepSpeed's pipeline engine, whose other facts of parameters are those of the stage; null without
    pipeline: PipelineStage | None
    parameters: int | None  # elements of all parameters
    trainable_parameters: int | None  # elements of those that require gradients
    rank_parameters: int | None  # elements that this rank stores; fewer than all in stage 3
    largest_layer_parameters: int | None  # elements of the module that owns the most
    # of a transformers model: vocabulary, hidden, intermediate, heads, key_heads, layers; else null
    dimensions: dict[str, int] | None
    model: str | None  # class name of the module
    optimizer: str | None  # class name; empty without one
    inner_optimizer: str | None  # class name of the optimizer that DeepSpeed wraps; of a loop, as optimizer
    optimizers: list[EngineOptimizer] | None  # the optimizers of a loop, or the one that DeepSpeed wraps
    names: dict[str, str] | None  # what the script calls a loop's model, optimizer, scheduler, by these words
    device: str | None  # torch device of the engine
    devices: list[EngineDevice] | None  # the GPU of this process, if it has one
    allocator: str | None  # native, cudaMallocAsync or pluggable; null without CUDA
    activation_checkpointing: bool | None  # whether a module or DeepSpeed has it enabled
    wall_clock_breakdown: bool | None  # whether DeepSpeed's own timers are on
    global_steps: int | None  # optimizer steps done when the engine was constructed, as after loading a checkpoint
    config: dict[str, Any] | None  # the effective DeepSpeed configuration, redacted
    zero_keys: list[str] | None  # the keys of its zero_optimization that the user has set
    unread: dict[str, str] | None  # error by name, for each of these fields that could not be read


class Engine(EngineFacts, Event):
    """A DeepSpeed engine is ready, or the first update of a loop that trains without one.

    Written once for each, and of a loop again after a ``training_changed``. All loops of a process count as one.
    """


class TotalSteps(Event):
    """The number of optimizer steps that are planned."""

    steps: int  # steps
    source: str | None  # trainer or config


class SteppedOptimizer(Facts):
    """An optimizer that is alive."""

    number: int  # in order of creation
    class_: str | None  # class name
    parameters: int | None  # elements that it updates
    steps: int | None  # its steps so far
    counts: bool | None  # false for one that lags behind the others


class Optimizers(Event):
    """The optimizers whose steps end an iteration of a loop: it ends when each of them has stepped since the last one.
    Written when they change, and when a loop with several optimizers ends.
    """

    engine: int | None  # as in the engine event
    step: int | None  # iterations done
    optimizers: list[SteppedOptimizer]  # the optimizers that are alive


class Overflow(Event):
    """An fp16 update was skipped because gradients overflowed."""

    engine: int | None  # as in the engine event
    step: int | None  # optimizer step
    loss_scale_before: float | None  # loss scale of that step
    loss_scale_after: float | None  # loss scale of the next one


class ScaledClipping(CodePlace, Event):
    """Gradients were clipped before ``scaler.unscale_()``, in several updates in a row. Once. The line clips them."""

    engine: int | None  # as in the engine event
    step: int  # optimizer step of the last of these updates
    updates: int  # how many there were
    max_norm: float  # the norm to which they were clipped
    loss_scale: float  # the loss scale by which they were multiplied


class LateNoSync(CodePlace, Event):
    """DDP's ``no_sync()`` began after the forward, in several steps in a row, and had no effect. Once. The line calls it."""

    step: int  # optimizer step after which it was known
    micro_steps: int  # in each of these steps; all backwards but the last one were within no_sync()


class SkippedUpdates(Event):
    """Updates in a row, of which a fused optimizer skipped some on the GPU because fp16 gradients overflowed.

    The loss scale is read about once a second, and tells how many. Written if some were skipped, and for the first updates
    after those of which none was.
    """

    engine: int | None  # as in the engine event
    first_step: int  # optimizer step of the first update
    last_step: int  # and of the last
    updates: int  # how many there were
    skipped: int  # at least so many of them were skipped
    good_last: int  # so many of them, the last ones, were not
    loss_scale_before: float  # loss scale of the first update
    loss_scale_after: float  # loss scale after the last


class AllocatorPool(Facts):
    """Segments of the allocator."""

    stream: int  # number of the stream that alone can use the blocks
    private: bool  # whether they belong to a CUDA graph or a MemPool
    reserved: int  # bytes
    allocated: int  # bytes in live tensors
    sparse: int | None  # unused bytes in segments that a few small blocks keep from being released


class HoldingVariable(VariableFacts):
    """A variable that keeps blocks in no category."""

    count: int  # tensors in it that hold unclaimed blocks
    bytes: int  # of these blocks
    keeps_graph: bool | None  # whether one of them keeps the graph that computed it
    shape: list[int] | None  # of the tensor that holds the largest block
    block_bytes: int | None  # size of that block
    view_of: list[int] | None  # shape of the tensor that it is a small view of, or the elements of its storage


class OptimizerState(Facts):
    """The state of one optimizer of a loop."""

    class_: str  # class name
    device: int  # bytes as in ``device``
    host: int  # bytes as in ``host``


class Tensors(Event):
    """Tensor bytes by category, each storage counted once.

    Categories: parameters, gradients, master_weights, optimizer_state, buffers; of a loop also frozen_parameters,
    quantized_parameters, unsharded_parameters (that FSDP has gathered) and gradient_buckets (of DistributedDataParallel).
    The fields from ``device`` on are present only if CUDA is in use.
    """

    engine: int | None  # as in the engine event
    step: int | None  # optimizer step
    # init, before_forward, before_update or after_update: the first of each; the last of an update that was not skipped. Of
    # a loop init is before the first forward, and there are next_forward, after that update: zero_grad() may have freed
    # gradients; and before_backward, the first. again: after a step, when memory or the training had changed, and rarely
    # otherwise; out_of_memory: while an allocation failed
    when: str | None
    output_shape: list[int] | None  # of the model's output, of its logits if it has some (before_backward only)
    output_item_bytes: int | None  # bytes of an element of that output
    host: dict[str, int] | None  # bytes in host memory, by category
    host_pinned: dict[str, int] | None  # bytes in pinned host memory, by category
    unread: int | None  # tensors whose storage could not be read
    seconds: float | None  # duration of the inventory
    device: dict[str, int] | None  # sizes of the allocator's blocks, by category; storage sizes if it shows no blocks
    allocated_bytes: int | None  # all blocks in use; null if the allocator shows none
    unclaimed_bytes: int | None  # blocks in no category
    unclaimed_largest: list[int] | None  # bytes of the largest of those blocks
    unclaimed_groups: list[list[int]] | None  # size and number of those blocks, of the sizes that hold the most
    pinned_allocator: dict[str, int] | None  # allocated_bytes and active_bytes of PyTorch's allocator for pinned host memory
    contexts: list[int] | None  # CUDA ordinals of other devices on which this process has a context
    # with ``contexts``: the only line that loads a file without map_location; absent if unknown
    context_line: CodePlace | None
    stream: int | None  # number of the current stream's handle; 0 is the default stream
    pools: list[AllocatorPool] | None  # segments of the allocator by stream, those that reserve the most
    # variables that keep blocks in no category, those that keep the most; absent if they were not searched
    held: list[HoldingVariable] | None
    # the parts of optimizer_state, of a loop with several optimizers, in order of their creation
    optimizer_states: list[OptimizerState] | None


class ChangedSetting(CodePlace):
    """A setting of the training that differs from the last look, and the line that changed it."""

    # autocast, other_autocast (of a model that is not trained), dtypes, devices, parameters, trained_parameters, modules,
    # training_layers (those in training mode that act otherwise in evaluation mode), hooks, parameter_hooks, compiled,
    # attention, no_sync (on if the first micro-step of a step was within DDP's no_sync(), else off; bypassed if the model is
    # called without its DDP), unoptimized (parameters that are trained and in no optimizer any more), optimizers,
    # optimizer_objects, one of PyTorch's flags, optimizer.OPTION, inputs.CLASS (the sizes of a row of a model's inputs, and
    # their dtype), or module.ATTRIBUTE: number of modules that have it true
    name: str
    before: str  # value before; empty if there was none
    after: str  # value now
    changed_ns: int | None  # when the line ran, CLOCK_MONOTONIC; absent if unknown
    begin_ns: int | None  # when it was last read as before, likewise; absent if that was at the last look


class TrainingChanged(Event):
    """The training itself is another one than at the last look.

    The probe looks after steps whose time or memory has shifted, and rarely otherwise. Values are numbers, words and counts.
    """

    last_step: int  # the last finished optimizer step at the look before
    step: int  # and at this one
    begin_ns: int  # time of the look before, CLOCK_MONOTONIC
    changes: list[ChangedSetting]  # the settings that differ


class LoaderStarted(CodePlace, Event):
    """A data loader has started workers. The line is the begin of the function that reads its dataset."""

    workers: list[int]  # their process ids
    dataset: str  # its class, or the class of the dataset within PyTorch's own, such as Subset


class TorchFlags(Event):
    """PyTorch's flags for the whole process, at the first look at the training: once. Absent where PyTorch has none."""

    step: int  # the last finished optimizer step
    deterministic_algorithms: bool | None  # torch.use_deterministic_algorithms
    cudnn_deterministic: bool | None  # torch.backends.cudnn.deterministic
    cudnn_benchmark: bool | None  # torch.backends.cudnn.benchmark
    matmul_precision: str | None  # of float32
    flash_attention: bool | None  # whether scaled_dot_product_attention may use this kernel
    efficient_attention: bool | None  # likewise the memory-efficient one
    cudnn_attention: bool | None  # cuDNN's
    math_attention: bool | None  # the one of single operations


class GraphReplays(CodePlace, Event):
    """CUDA graphs were replayed: written with the first, second, fourth, eighth replay, and so on, at least each 1,024.

    The line is the one beneath which the last replay was.
    """

    begin_ns: int  # the first one, CLOCK_MONOTONIC
    replays: int  # so far


class EvaluationGraphs(CodePlace):
    """Forwards of an evaluation that had gradients enabled, and the line of the first."""

    forwards: int | None  # number of them since the last backward


class OutOfMemoryFacts(Facts):
    """What is known of a failed allocation: its size, its device, and the step in which it failed."""

    device: int | None  # CUDA ordinal in this process
    requested_bytes: int | None  # size of the failed allocation
    limit_bytes: int | None  # capacity of the device, or less if the process is limited to a fraction
    free_bytes: int | None  # free memory of the device
    phase: str | None  # innermost phase; empty between phases
    step: int | None  # optimizer step
    micro_step: int | None  # micro-step
    rows: int | None  # rows of the last micro-batch
    sequence: int | None  # its sequence length
    tokens: int | None  # its tokens
    evaluation_graphs: EvaluationGraphs | None  # forwards in evaluation mode since the last backward; absent if none
    allocated_bytes: int | None  # bytes in live tensors
    reserved_bytes: int | None  # bytes reserved from the driver
    inactive_split_bytes: int | None  # bytes in unused remainders of split blocks
    largest_free_block_bytes: int | None  # largest unused block
    retries: int | None  # allocations that needed a cache flush so far
    ooms: int | None  # out-of-memory errors so far


class OutOfMemory(OutOfMemoryFacts, Event):
    """PyTorch's allocator ran out of device memory, whether or not the job survives that.

    The fields from ``allocated_bytes`` on are the counters of the allocator and present only if it is the recorded one.
    """


class Microscope(Event):
    """A microscope request was carried out or refused."""

    request: int  # number of the request
    state: str | None  # recorded or refused
    why: str | None  # reason of a refusal
    first_step: int  # first optimizer step recorded
    steps: int  # number of steps
    begin_ns: int  # begin, CLOCK_MONOTONIC
    end_ns: int  # end, CLOCK_MONOTONIC
    baseline: dict[str, int]  # allocated_bytes, requested_bytes and reserved_bytes at the begin
    entries: int | None  # entries of PyTorch's memory history
    snapshot: str | None  # name of PyTorch's own snapshot file beside the recording; null without one
    seconds: float | None  # time spent writing the result


class CollectiveReport(Facts):
    """The collectives of a process group, as PyTorch's flight recorder reports them."""

    group: str | None  # name of the process group
    called: int | None  # collectives that this rank has called in it
    waits_for: int | None  # number of the first of them that has not ended; -1 without one
    name: str | None  # its function


class CollectiveCall(CodePlace):
    """A collective, and the innermost line of the job's own code that called it."""

    group: str | None  # name of the process group
    number: int | None  # number of the collective in it
    name: str | None  # its function
    shape: list[int] | None  # sizes of its first tensor; absent if unknown


class Stacks(StackEvent):
    """Python stacks of the training thread, sampled while the rank was slow, in gaps and data loading that take a large
    share of its iterations, and in phases at first and after they have become longer; of all threads while it was silent.
    """

    where: str  # the outermost phase; else as in ``event_values``: between phases, or in a counted step
    # slow: it took clearly longer than usual; share: it usually takes a notable share of an iteration; silent: no phase has
    # begun or ended for long. A stack without frames: the sample came too late to show what took the time
    why: str
    step: int | None  # optimizer step of the first sample
    last_step: int | None  # that of the last one, if samples of several iterations are counted together
    begin_ns: int  # begin of the first phase or gap that was sampled, CLOCK_MONOTONIC
    end_ns: int  # the last sample, CLOCK_MONOTONIC
    samples: int | None  # samples of the training thread, at unequal distances
    # of a silent rank: the report of PyTorch's flight recorder, the last used group first
    collectives: list[CollectiveReport] | None
    # of a rank that stays silent with a collective that has not ended: the last ones of each group, oldest first
    calls: list[CollectiveCall] | None
    # of a silent rank: blocks that PyTorch's allocator has handed out on its GPU so far, as last read; null if unknown
    allocations: int | None


class TrainingStack(StackEvent):
    """One stack of the training thread in a phase that computes: it shows through which lines the job's loop runs."""


class ThreadNames(Event):
    """What threads of a rank are that the kernel shows under the name of their program. Written again for further ones."""

    pid: int | None  # process id of the rank
    python: dict[int, str] | None  # by thread id: names of threads that Python code has started; from the rank itself
    libraries: dict[int, str] | None  # by thread id: the OpenMP library in which threads sleep; from the sampler


class BusyThread(StackEvent):
    """Another Python thread of the rank began to use a core: Python runs one thread at a time. At most ten in all."""

    thread: str  # its name
    tid: int | None  # the kernel's id of it
    begin_ns: int  # when it was last seen to use less, CLOCK_MONOTONIC
    busy_ns: int  # when it was first seen to be busy
    end_ns: int  # the last sample
    cores: float  # its processor time per wall time while it was sampled
    lock_wait_s: float | None  # average time that another thread then waited for Python's lock
    held_s: float | None  # of it, that in which the rank's threads other than the training thread computed
    samples: int | None  # samples of its stack


class GrownContainer(VariableFacts):
    """A list, dict, set, deque, OrderedDict, defaultdict or lru_cache, and its owner. The line of a cache defines it."""

    length: int  # entries at the end
    added: int  # added entries
    added_bytes: int | None  # estimate of the host memory that the added entries hold
    entry: str | None  # type of the newest entry
    limit: int | None  # the most entries that it can hold, of an lru_cache or deque; absent of others
    viewed_bytes: int | None  # what the added tensors show of larger memory that they keep; absent if they are no views
    keeps_graph: bool | None  # whether entries are tensors in host memory with the graph that computed them


class GrowingContainers(Event):
    """Lists, dicts and other containers that became longer while host memory grew, and their owners.

    Written once such growth has lasted some seconds, and rarely again. Values are never recorded.
    """

    first_step: int  # last finished optimizer step when the look began
    last_step: int  # and when it ended
    begin_ns: int  # begin, CLOCK_MONOTONIC
    end_ns: int  # end, CLOCK_MONOTONIC
    grown_bytes: int | None  # growth of the rank's resident memory during the look
    seconds: float | None  # time that it took from the training thread
    containers: list[GrownContainer]  # containers whose new entries hold a notable share of the growth, the largest first


class AllocationStack(Facts):
    """Blocks of one size, and the stack that allocated them."""

    count: int  # blocks
    size_bytes: int  # requested size of each
    unix_us: int | None  # when the first of them was allocated, unix time in microseconds
    frames: list[int]  # indexes into the event's frames, innermost first


class MemoryLines(Event):
    """The lines that allocated blocks of device memory, by PyTorch's own history of some steps.

    Written if memory creeps, once after the first steps, and after new peaks of steps and evaluations.
    """

    # creep: the blocks of all steps but the last that were not freed until its end; peak: those of one step that were
    # alive when it had allocated the most; evaluation: likewise of the first second of an evaluation
    why: str
    first_step: int  # first optimizer step of the look; for an evaluation, the step after it
    steps: int | None  # number of steps; 0 for an evaluation
    begin_ns: int  # begin, CLOCK_MONOTONIC
    end_ns: int  # end, CLOCK_MONOTONIC
    entries: int | None  # entries of PyTorch's memory history
    complete: bool | None  # whether the history has the whole steps, not only their last part
    seconds: float | None  # time that it took from the training thread
    staying_bytes: int | None  # creep: in all blocks that stayed
    peak_bytes: int | None  # peak and evaluation: requested bytes of all blocks
    before_bytes: int | None  # peak and evaluation: bytes of older blocks, whose stacks are unknown
    frames: list[SampledFrame]  # the frames of the stacks, without the probe's own
    # blocks of one size and one stack, those that hold the most; no frames: allocated by a thread without Python
    stacks: list[AllocationStack]


class Garbage(Event):
    """Python's garbage collector ran for at least 10 ms since the last such event.

    Written at most once a second, later once a minute. Collections of the youngest objects do not count.
    """

    step: int | None  # optimizer step of the last collection
    begin_ns: int  # begin of the first of these collections, CLOCK_MONOTONIC
    seconds: float  # total time of the collector
    collections: int | None  # how often


class FailedGuard(CodePlace):
    """An assumption of compiled code that failed, so that torch.compile compiled again, and the line that made it."""

    guard: str  # as PyTorch prints it, such as ``self.every == 1``; without texts
    setting: str | None  # of torch._dynamo.config, in PyTorch's hint how to go without it; absent if it has none


class Compiled(Event):
    """torch.compile compiled while training ran; counted at the end of a step, at most five times a second."""

    step: int | None  # the last finished optimizer step
    begin_ns: int  # time of the previous look at the counters, CLOCK_MONOTONIC
    graphs: int  # graphs that were compiled since then
    seconds: float | None  # time that compiling took; null if this version of PyTorch does not count it
    failed: list[FailedGuard] | None  # the first guard that failed for each of the last ones; absent if it keeps none


class DebugMode(CodePlace, Event):
    """A line switched a mode for debugging on or off: seen at the end of a step, at most five times a second and 20 times in
    all.
    """

    mode: str  # anomaly: autograd's anomaly mode; profiler: PyTorch's profiler records
    on: bool  # whether it has been on since then, or in a part of each step
    begin_ns: int  # the earliest time of the change, CLOCK_MONOTONIC
    step: int | None  # the last finished optimizer step


class StreamWaits(Event):
    """How long the compute stream waited for other streams of its GPU, in a few steps in a row.

    Under ZeRO-3 and FSDP these gather parameters from other ranks. Written rarely.
    """

    first_step: int  # number of the first of these optimizer steps
    waited_ns: list[int]  # total wait in each of the steps
    waits: list[int]  # number of waits, including those for work that was complete
    starved: list[int]  # number of waits at which the compute stream was idle


class CheckpointLine(CodePlace, Event):
    """A line of the job's own code begins to save a checkpoint: written with its first, second, fourth, eighth save, and so
    on.
    """

    saves: int  # saves from this line so far, with this one


class CacheCleared(CodePlace, Event):
    """A line of the job's own code emptied the allocator's cache: written with its first, second, fourth, eighth call, and
    so on.
    """

    begin_ns: int  # begin of the first call, CLOCK_MONOTONIC
    calls: int  # calls from this line so far
    seconds: float  # total duration of these calls


class UnusedGraphs(CodePlace, Event):
    """Forwards with gradients enabled whose graphs were freed before any backward, since the last backward.

    The line is the innermost one through which no training's forwards run, if there is one.
    Written with the first, second, fourth, eighth series of such forwards that began at this line, and so on.
    """

    step: int | None  # optimizer step in which the last series began
    begin_ns: int  # begin of its first forward, CLOCK_MONOTONIC
    end_ns: int  # end of its last forward, likewise
    series: int  # series from this line so far
    forwards: int  # forwards of all these; of a series of a model in training mode at most 15
    seconds: float  # their total duration
    training: bool | None  # whether the model was in training mode


class GpuProcess(Event):
    """One of several processes on a GPU, when it was first seen there: of the job or of another one."""

    pid: int  # process id as NVML reports it
    program: str | None  # its program and script without their folders and arguments; null if it cannot be read
    user: str | None  # its owner's name, or number; null if it cannot be read
    of_job: bool | None  # this job has started it, as an inference engine; null in older recordings
    parents: list[int] | None  # of one of this job: the processes above it, nearest first; null in older recordings


class ProbeError(ErrorEvent):
    """A part of the probe failed and was switched off; training goes on."""


class RecordsLost(Event):
    """Spans could not be written from here on; again after some were written, a few times at most."""

    step: int | None  # optimizer step in progress
    why: str | None  # the system's error message


class Entered(Event):
    """The probe was injected into this running rank. It records from the next whole step on."""


class Left(LossEvent):
    """The probe was removed from this rank, which goes on."""


class ExitCall(CodePlace, Event):
    """The rank called ``os._exit`` with a code other than 0: it ends at once, and without a goodbye."""

    exit_code: int  # as it was called: others see its last 8 bits


class Goodbye(LossEvent):
    """The rank's interpreter exited normally."""


# --- written by a node's sampler ------------------------------------------------------------------------------------------


class NodeGpu(Facts):
    """A GPU of a node, or a MIG instance."""

    index: int  # NVML index; MIG instances are numbered after the last GPU
    uuid: str | None  # NVML UUID
    name: str  # product name
    total_bytes: int | None  # device memory
    mig_of: str | None  # UUID of the GPU of a MIG instance; null for a whole GPU
    unified: bool | None  # NVML has no figure of its memory, which is the host's: /proc/meminfo takes its place


class NumaNode(Facts):
    """A NUMA node with cores."""

    node: int  # NUMA node
    cpus: str  # its cores, such as "0-31,64-95"


class Node(Event):
    """The sampler runs."""

    host: str | None  # short host name
    cores: int | None  # cores that this job may use
    memory_bytes: int | None  # host memory
    shared_memory_bytes: int | None  # size of /dev/shm; null without one; absent in older recordings
    kernel: str | None  # kernel release
    cpu: str | None  # processor model
    driver: str | None  # version of the NVIDIA driver; null without one
    gpus: list[NodeGpu] | None  # the GPUs of the node; the MIG instances of a divided GPU replace it
    gpu_notice: str | None  # why some GPUs are not visible, as a sentence; null if all are
    numa: list[NumaNode] | None  # NUMA nodes with cores; absent in older recordings
    sampler_pid: int | None  # process id of the sampler
    sampler_start: int | None  # its start in clock ticks since boot


class OperationalEvent(Facts):
    """The driver's structured report of a fault: a GPU Operational Event, whose numbers may change with the driver."""

    module: str | None  # the part of GPU or driver that reported it, such as GPU-RAS
    code: int | None  # the module's number for it
    category: int | None  # the driver's number for its kind
    severity: int | None  # 10: information, 20: corrected, 30: recoverable, 40: fatal
    group: int | None  # the same for the events of one incident; null if it has no other
    traits: list[str] | None  # such as uncontained, or simulated: a test of the driver


class GpuFault(Event):
    """NVML shows an error of a GPU, or less than the GPU has: written when it is seen, and again when it becomes more."""

    gpu: int | None  # NVML index of the whole GPU
    gpus: list[int] | None  # as numbered in the node event: itself, or its MIG instances
    # xid: the driver reported one. lost: NVML cannot reach the GPU any more.
    # Counters: ecc_corrected, ecc_uncorrected (memory errors), rows_corrected, rows_uncorrected (rows of memory that were
    # remapped because of them), pcie_replays, nvlink_crc, nvlink_replays, nvlink_recoveries.
    # States: rows_pending, pages_pending (bad memory is replaced at the next reset), rows_failed (none is left for that),
    # recovery (the driver asks for NVML's recovery action). nvlinks: active links. pcie_width, pcie_generation: the link.
    # Others are types of NVML's events: dram_retired, dram_failed, poison, poison_fatal, unavailable.
    # operational: the driver reported a GPU Operational Event, whose Xid is the value if it has one.
    kind: str
    report: OperationalEvent | None  # of a GPU Operational Event
    value: int | None  # the Xid; the counter; the state; the active links; the lanes or generation now
    before: int | None  # the counter at the first reading; links that were active, or are on its peers; the possible width
    rise: int | None  # of a counter, in the last ``seconds``
    seconds: float | None  # time since the previous event about the counter, or since its first reading


class GpuFaultsHidden(Event):
    """Some hardware faults of a GPU cannot be seen here. Each kind of them is written once for each GPU."""

    gpu: int | None  # NVML index of the whole GPU; null for all of them
    hidden: dict[str, str] | None  # NVML's reason, by xid, operational or the kind of a fault


class GpuSilent(Event):
    """A call of NVML has not returned for some seconds, or returned after such a time."""

    gpu: int | None  # NVML index of the GPU that it concerns, or number of the MIG instance; null if unknown
    gpus: list[int] | None  # as numbered in the node event: itself, or the MIG instances of a whole GPU
    seconds: float | None  # how long it had lasted
    back: bool | None  # whether it has returned


class NcclFigure(Facts):
    """The collectives of one kind in one communicator that a rank finished, as NCCL's Inspector measured them."""

    communicator: str | None  # NCCL's name of it, the same in all its ranks
    collective: str | None  # such as AllReduce
    n_ranks: int | None  # ranks of the communicator
    nnodes: int | None  # their nodes
    count: int | None  # collectives
    missed: int | None  # those among them that the Inspector left out, as small ones
    seconds: float | None  # the sum of their times on the GPU, in which a rank also waits for the others
    bytes: float | None  # the sum of their sizes
    bus_gbs: float | None  # the highest bus bandwidth of one of them, in GB/s


class NcclFigures(Event):
    """Figures of NCCL's Inspector about a rank; written when they differ from the last by a tenth, or once a minute."""

    pid: int | None  # process id of the rank
    start: int | None  # its start in clock ticks since boot
    seconds: float | None  # the time before the event that they are about
    figures: list[NcclFigure] | None  # of each communicator and collective


class RayMonitor(Event):
    """Processes of the job are workers of Ray, which kills some when memory runs short. Written once on each node."""

    pid: int | None  # process id of the raylet
    share: float | None  # of the memory limit of node or cgroup, from which on it kills
    free_bytes: int | None  # or from which on less than this is free, if that is later; null without


class JobStarted(CommandEvent):
    """zerotop started the command."""


class OutputHolder(Event):
    """A process reads the job's output from now on and records it. Written again when it was replaced."""

    pid: int | None  # process id
    start: int | None  # its start in clock ticks since boot
    pipes: dict[str, str] | None  # the kernel's names of the pipes that it reads, by stream
    passes_on: bool | None  # whether it also passes the output on to the user


class Attached(CommandEvent):
    """Recording of a job that somebody else started begins here; takes the place of JobStarted."""


class Detached(Event):
    """Recording of an attached job ended on request; the job goes on."""


class Joined(CommandEvent):
    """As Attached, for this node's part of a job that was attached from another node.

    If the clocks of the two differ by much, the header of this event's file has ``aligned: true`` and the attaching node's
    unix time, which holds for this whole boot.
    """


class Parted(EndEvent):
    """Recording of this node's part ended: with the fields of JobEnded because that part ended, without any because of a
    detach.
    """


class Reached(Event):
    """Another node was reached through ssh."""

    name: str | None  # host name given to ssh
    host: str | None  # the node's own host name
    ranks: int | None  # ranks of the job on it
    joined: bool | None  # whether its part is recorded from now on, or no longer


class NotReached(Event):
    """Another node of the job is not recorded."""

    name: str | None  # host name given to ssh
    why: str | None  # the reason


class NodeLost(Event):
    """A node of a collected recording has sent nothing for some seconds, or none can be heard."""

    host: str | None  # the node's own host name; null if the collector's connection to its server is lost
    seconds: float | None  # how long it has been silent


class NodeReturned(Event):
    """A lost node sends again, or the server is back."""

    host: str | None  # the node's own host name; null for the server
    seconds: float | None  # how long it was silent


class NodeDetail(Event):
    """How much a node sends from now on; written only where not all nodes send full detail."""

    host: str | None  # the node's own host name
    is_full: bool | None  # else steps, phases, GPU memory and events only


class NotEntered(RankEvent):
    """The probe could not be injected into a rank."""

    why: str | None  # the reason in one sentence
    pending: bool | None  # whether the rank may still take the probe in later


class RankFound(RankEvent):
    """A rank process was discovered."""


class OutputFiles(RankEvent):
    """The files that a rank's output goes to, if its stdout or stderr is one. Written again when the rank has ended."""

    stdout: str | None  # path of its stdout; null if that is no file, and at the end if it is empty
    stderr: str | None  # path of its stderr, likewise; the same if both go to one file


class RankSilent(RankEvent):
    """A process that looks like a rank has not reported, although it had time to construct an engine."""

    why: str | None  # the likely reason


class ProbeMissing(RankEvent):
    """A process of the job has imported PyTorch, and the probe was not loaded in it.

    Of a rank, written again when that is known.
    """

    is_rank: bool | None  # whether it is a rank: a launcher numbered it, or it has had PyTorch for some seconds
    program: str | None  # the program and its script, without folders and arguments
    # pythonpath: its PYTHONPATH lacks zerotop's entry; unset: it has none; environment: nor has it zerotop's variables;
    # option: python -E, -I or -S; session: PYTHONZEROTOP_SESSION was not passed on; hidden: it sees other folders; shadowed:
    # another sitecustomize.py comes first; unreadable: it belongs to another user;
    # user: likewise, and its variables show that it cannot write to the recording
    reason: str | None
    # the option or file behind it, or who changed the environment: script, command (the job's own) or a program
    by: str | None


class Affinity(Event):
    """The cores that a rank or launcher may run on; written again when they change."""

    pid: int | None  # process id
    cpus: str | None  # cores of its first thread, such as "0-15"
    threads: dict[int, str] | None  # cores by thread id, for busy threads whose own cores have changed


class RankGone(RankEvent):
    """A rank process is gone."""

    exit_code: int | None  # negative for a signal; unset where it was 0, and where its parent had waited for it already


class RankStopped(RankEvent):
    """A signal stopped a rank process or launcher (SIGSTOP, or Ctrl-Z), as far as the sampler saw it at its ticks."""


class LaunchedOperations(Facts):
    """The operations that a rank of a communicator has launched."""

    operation: str | None  # a collective, such as AllReduce; in older versions of NCCL: collective
    rank: int | None  # rank in the communicator
    pid: int | None  # its process
    launched: int | None  # how many the rank has launched on its GPU


class RankStacks(RankEvent, StackEvent):
    """Stacks of the threads of a rank that has written nothing for long, or nothing yet, from py-spy.

    Files of C code have the line 0.
    """

    idle_s: float | None  # how long it had neither computed nor waited for a disk; only if it has written nothing yet
    # NCCL's report if ranks of a communicator have launched different numbers of operations
    launched: list[LaunchedOperations] | None


class LoaderStacks(RankEvent, StackEvent):
    """The stack of a DataLoader worker while its rank waited for data, from py-spy: in the order in which the workers were
    started, of the first ones until three that load a batch were read, of eight at most. Once a minute on a node, and twice
    more where half of them were idle. ``pid`` is the rank's. Files of C code have the line 0.
    """

    worker: int  # process id of the worker


class RankContinued(RankEvent):
    """A stopped rank process or launcher goes on."""


class Compiling(RankEvent):
    """A rank runs compilers, as when DeepSpeed builds its operators at first use.

    Written once, and once for each extension.
    """

    extension: str | None  # name of the extension; empty if not known


class BuildLocked(Event):
    """A rank sleeps, nothing compiles, and torch's build folder holds a lock that no process of this node owns: ranks may
    wait for it forever. Written once for each lock.
    """

    path: str  # path of the lock


class StopSent(Event):
    """Somebody asked to stop the job."""

    signal: str | None  # name of the signal sent


class JobEnded(EndEvent):
    """The command ended."""


class SamplerError(ErrorEvent):
    """A part of the sampler failed; the rest goes on."""


class RecordsLate(Event):
    """Records of a rank waited in shared memory, because the recording's file system was too slow. None is lost by that."""

    rank: int | None  # global rank
    seconds: float | None  # how long the oldest of them waited
    why: str | None  # the reason


class SamplerEnded(Event):
    """The sampler stops normally, after the job."""

    lost_records: int | None  # records that could not be written
    lost_output_bytes: int | None  # output that could not be written

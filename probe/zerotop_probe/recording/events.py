"""The events of a recording: every event's name and fields, with type and meaning, in one place.

An event is a rare fact. :class:`~zerotop_probe.recording.writer.EventWriter` writes it as one JSON line: ``time_ns``,
``event`` (the name) and the fields declared here. A value that could not be read is null or absent, never guessed. Readers
keep events and fields that they do not know, and replace values of another type with null.

Types: ``int``, ``float`` (which admits integers), ``str``, ``bool``, ``dict`` (any content), ``[type]`` for a list,
``{str: type}`` for a mapping (``{int: type}`` if its keys are decimal numbers) and a tuple of fields for an object.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Field(NamedTuple):
    """One value of an event or of an object in it. Readers drop an event that lacks a required one."""

    name: str
    type: Any
    meaning: str
    required: bool = False


EVENTS: dict[str, tuple[Field, ...]] = {}
"""The fields of every event, by its name."""


def _declare_event(name: str, *fields: Field) -> str:
    EVENTS[name] = fields
    return name


_BYTES = {str: int}

_ERROR = (
    Field("where", str, "the part that failed"),
    Field("error", str, "the exception or the reason, redacted"),
)
_RANK = (
    Field("rank", int, "global rank; null if unknown"),
    Field("local_rank", int, "rank within the node (rank_found only)"),
    Field("pid", int, "process id on the node that wrote the event"),
    Field("start", int, "its start in clock ticks since boot (rank_found and the events about a command only)"),
)
_COMMAND = (
    *_RANK,
    Field("command", [str], "the launcher's command line, redacted"),
    Field("launcher", str, "kind of launcher (this and the following: attached and joined only)"),
    Field("age_s", float, "seconds that the job had been running"),
    Field("ranks", [_RANK], "the job's rank processes on this node"),
    Field("text", str, "one sentence about the missing parts of the recording"),
)
_LOSSES = (
    Field("lost", int, "records that could not be written"),
    Field("step", int, "the last finished optimizer step, recorded or not; null without one"),
)
_END = (
    Field("exit_code", int, "128 + n after signal n; null if the sampler that saw the end had not started the command"),
    Field("signal", str, "name of the signal that ended it; null without one"),
    Field("seconds", float, "duration of the recorded part of the job"),
    Field("oom_kills", int, "processes of the cgroup that the kernel killed for memory during the recording"),
    Field("text", str, "the end in one sentence"),
)

_FRAMES = Field(
    "frames",
    [
        (
            Field("file", str, "relative to the script's folder, or to where the library is installed", required=True),
            Field("line", int, "line number", required=True),
            Field("function", str, "qualified name, from Python 3.11 on; in memory_lines never qualified", required=True),
            Field("own", bool, "whether the file belongs to the job itself, not to a library or to Python"),
        )
    ],
    "the frames of the stacks, without the probe's own",
    required=True,
)
_INDEXES = Field("frames", [int], "indexes into the event's frames, innermost first", required=True)
_STACK_FIELDS = (
    _FRAMES,
    Field(
        "stacks",
        [
            (
                Field("count", int, "samples"),
                Field("seconds", float, "time that these samples stand for; absent if silent"),
                Field("thread", str, "name of the thread; absent for the training thread"),
                Field("call", str, "function in C that the innermost frame calls; absent without one, or if unknown"),
                _INDEXES,
            )
        ],
        "the stacks that took the most time",
        required=True,
    ),
)

_PLACE = (
    Field("file", str, "file of the job's own code, relative to the script's folder", required=True),
    Field("line", int, "its line", required=True),
    Field("function", str, "its function"),
)

# --- written by a rank ---------------------------------------------------------------------------------------------------

# The probe starts because this process constructs a DeepSpeed engine, or trains with PyTorch's own optimizers.
HELLO = _declare_event(
    "hello",
    Field("rank", int, "global rank"),
    Field("local_rank", int, "rank within the node"),
    Field("node_rank", int, "number of the node"),
    Field("world_size", int, "ranks of the job"),
    Field("launcher", str, "torchrun, deepspeed, accelerate, mpi, slurm or python"),
    Field("python", str, "version"),
    Field("torch", str, "version"),
    Field("deepspeed", str, "version"),
    Field("transformers", str, "version, if imported"),
    Field("accelerate", str, "version, if imported"),
    Field("arguments", [str], "the script's own command line, redacted"),
    Field("environment", {str: str}, "the variables that control memory, devices and threads"),
    Field("watches_threads", bool, "whether it writes busy_thread"),
    Field("native", bool, "whether the probe's C code is in use; absent in older recordings"),
)

# A DeepSpeed engine is ready, or the first update of a loop that trains without one. Written once for each, and of a loop
# again after a ``training_changed``. All loops of a process count as one.
ENGINE = _declare_event(
    "engine",
    Field("engine", int, "number of the engine or loop in this process; an engine takes over that of a loop before it"),
    Field("kind", str, "loop; absent for a DeepSpeed engine"),
    Field("parallelism", str, "of a loop: DDP, DataParallel, FSDP or FSDP2; empty without"),
    Field(
        "sharding",
        (
            Field("ranks", int, "that share the parameters"),
            Field("groups", int, "of parameters that are gathered together"),
            Field("largest_group", int, "elements of the largest of them"),
            Field("reshards", bool, "whether parameters are freed after the forward, and gathered again for the backward"),
            Field("dtype", str, "dtype of computation; null for the parameters' own"),
        ),
        "how FSDP shards a loop's models; null without",
    ),
    Field("library", str, "of a loop: Trainer, Lightning or Accelerate; empty if it is hand-written"),
    Field("compiled", bool, "of a loop: whether a model went through torch.compile"),
    Field("engine_class", str, "class name of a DeepSpeed engine"),
    Field("rank", int, "global rank"),
    Field("local_rank", int, "local rank"),
    Field("zero_stage", int, "0 to 3; absent for a loop"),
    Field("offload_optimizer", str, "none, cpu or nvme"),
    Field("offload_parameters", str, "none, cpu or nvme"),
    Field("dtype", str, "fp32, fp16 or bf16; of a loop, that of most trainable parameters"),
    Field("frozen_dtype", str, "of a loop's frozen parameters that are not quantized; null if they have several, or none"),
    Field("quantized_parameters", int, "elements of a loop's quantized parameters"),
    Field("autocast", str, "dtype of autocast; null if it is off"),
    Field("micro_batch", int, "rows in a micro-batch of one rank"),
    Field("gradient_accumulation", int, "micro-batches in an optimizer step"),
    Field("train_batch", int, "rows in an optimizer step of all ranks"),
    Field("world_size", int, "ranks of the job"),
    Field("data_parallel", int, "data-parallel ranks"),
    Field(
        "pipeline",
        (
            Field("stage", int, "of this rank, from 0"),
            Field("stages", int, "of the model"),
            Field("parameters", int, "elements of this stage's parameters, without those tied to an earlier stage"),
            Field("trainable_parameters", int, "elements of those that require gradients"),
        ),
        "of DeepSpeed's pipeline engine, whose other facts of parameters are those of the stage; null without",
    ),
    Field("parameters", int, "elements of all parameters"),
    Field("trainable_parameters", int, "elements of those that require gradients"),
    Field("rank_parameters", int, "elements that this rank stores; fewer than all in stage 3"),
    Field("largest_layer_parameters", int, "elements of the module that owns the most"),
    Field(
        "dimensions",
        {str: int},
        "of a loop's transformers model: vocabulary, hidden, intermediate, heads, layers; else null",
    ),
    Field("model", str, "class name of the module"),
    Field("optimizer", str, "class name; empty without one"),
    Field("inner_optimizer", str, "class name of the optimizer that DeepSpeed wraps; of a loop, as optimizer"),
    Field(
        "optimizers",
        [
            (
                Field("class", str, "class name"),
                Field("package", str, "the package of its class: torch, transformers, bitsandbytes"),
                Field("parameters", int, "elements that it updates"),
                Field(
                    "tensors",
                    [
                        (
                            Field("shape", [int], "of a parameter, also where ranks share it", required=True),
                            Field("dtype", str, "as that of the event", required=True),
                            Field("count", int, "parameters of that kind", required=True),
                            Field("state_bits", int, "of an element of state in bitsandbytes; null elsewhere"),
                        )
                    ],
                    "its parameters, by kind; null for FSDP1's flat parameters, and if there are too many kinds",
                ),
                Field("settings", dict, "its defaults: numbers, truth values and words"),
            )
        ],
        "the optimizers of a loop",
    ),
    Field("device", str, "torch device of the engine"),
    Field(
        "devices",
        [
            (
                Field("ordinal", int, "CUDA ordinal in this process"),
                Field("uuid", str, "as NVML writes it; that of a MIG instance may begin with GPU-"),
                Field("name", str, "product name"),
                Field("total_bytes", int, "device memory"),
                Field("visible", str, "its entry in CUDA_VISIBLE_DEVICES; null without one"),
            )
        ],
        "the GPU of this process, if it has one",
    ),
    Field("allocator", str, "native, cudaMallocAsync or pluggable; null without CUDA"),
    Field("activation_checkpointing", bool, "whether a module or DeepSpeed has it enabled"),
    Field("wall_clock_breakdown", bool, "whether DeepSpeed's own timers are on"),
    Field("global_steps", int, "optimizer steps done when the engine was constructed, as after loading a checkpoint"),
    Field("config", dict, "the effective DeepSpeed configuration, redacted"),
    Field("zero_keys", [str], "the keys of its zero_optimization that the user has set"),
    Field("unread", {str: str}, "error by name, for each of these fields that could not be read"),
)

# The number of optimizer steps that are planned.
TOTAL_STEPS = _declare_event(
    "total_steps",
    Field("steps", int, "steps", required=True),
    Field("source", str, "trainer or config"),
)

# The optimizers whose steps end an iteration of a loop: it ends when each of them has stepped since the last one. Written
# when they change, and when a loop with several optimizers ends.
OPTIMIZERS = _declare_event(
    "optimizers",
    Field("engine", int, "as in the engine event"),
    Field("step", int, "iterations done"),
    Field(
        "optimizers",
        [
            (
                Field("number", int, "in order of creation", required=True),
                Field("class", str, "class name"),
                Field("parameters", int, "elements that it updates"),
                Field("steps", int, "its steps so far"),
                Field("counts", bool, "false for one that lags behind the others"),
            )
        ],
        "the optimizers that are alive",
        required=True,
    ),
)

# An fp16 update was skipped because gradients overflowed.
OVERFLOW = _declare_event(
    "overflow",
    Field("engine", int, "as in the engine event"),
    Field("step", int, "optimizer step"),
    Field("loss_scale_before", float, "loss scale of that step"),
    Field("loss_scale_after", float, "loss scale of the next one"),
)

# Tensor bytes by category, each storage counted once. Categories: parameters, gradients, master_weights, optimizer_state,
# buffers; of a loop also frozen_parameters, quantized_parameters, unsharded_parameters (that FSDP has gathered) and
# gradient_buckets (of DistributedDataParallel). The fields from ``device`` on are present only if CUDA is in use.
TENSORS = _declare_event(
    "tensors",
    Field("engine", int, "as in the engine event"),
    Field("step", int, "optimizer step"),
    Field(
        "when",
        str,
        "init, before_forward, before_update or after_update: the first of each; the last of an update that was not skipped."
        " Of a loop init is before the first forward, and there are next_forward, after that update: zero_grad() may have"
        " freed gradients; and before_backward, the first. again: after a step, when memory or the training had changed, and"
        " rarely otherwise; out_of_memory: while an allocation failed",
    ),
    Field("output_shape", [int], "of the model's output, of its logits if it has some (before_backward only)"),
    Field("output_item_bytes", int, "bytes of an element of that output"),
    Field("host", _BYTES, "bytes in host memory, by category"),
    Field("host_pinned", _BYTES, "bytes in pinned host memory, by category"),
    Field("unread", int, "tensors whose storage could not be read"),
    Field("seconds", float, "duration of the inventory"),
    Field("device", _BYTES, "sizes of the allocator's blocks, by category; storage sizes if it shows no blocks"),
    Field("allocated_bytes", int, "all blocks in use; null if the allocator shows none"),
    Field("unclaimed_bytes", int, "blocks in no category"),
    Field("unclaimed_largest", [int], "bytes of the largest of those blocks"),
    Field("unclaimed_groups", [[int]], "size and number of those blocks, of the sizes that hold the most"),
    Field("pinned_allocator", _BYTES, "allocated_bytes and active_bytes of PyTorch's allocator for pinned host memory"),
    Field("contexts", [int], "CUDA ordinals of other devices on which this process has a context"),
    Field(
        "context_line", _PLACE, "with ``contexts``: the only line that loads a file without map_location; absent if unknown"
    ),
    Field("stream", int, "number of the current stream's handle; 0 is the default stream"),
    Field(
        "pools",
        [
            (
                Field("stream", int, "number of the stream that alone can use the blocks", required=True),
                Field("private", bool, "whether they belong to a CUDA graph or a MemPool", required=True),
                Field("reserved", int, "bytes", required=True),
                Field("allocated", int, "bytes in live tensors", required=True),
                Field("sparse", int, "unused bytes in segments that a few small blocks keep from being released"),
            )
        ],
        "segments of the allocator by stream, those that reserve the most",
    ),
    Field(
        "held",
        [
            (
                Field("name", str, "of the variable or attribute", required=True),
                Field("scope", str, "local, global, or attribute", required=True),
                Field("owner", str, "qualified name of the function or class, name of the module", required=True),
                Field("file", str, "of the owner, relative to the script's folder or its library's", required=True),
                Field("own", bool, "whether the file belongs to the job itself, not to a library or to Python"),
                Field("levels", int, "0: it is the variable's value; 1: within that value, and so on"),
                Field("kind", str, "its type", required=True),
                Field("count", int, "tensors in it that hold unclaimed blocks", required=True),
                Field("bytes", int, "of these blocks", required=True),
                Field("keeps_graph", bool, "whether one of them keeps the graph that computed it"),
                Field("shape", [int], "of the tensor that holds the largest block"),
                Field("block_bytes", int, "size of that block"),
                Field("view_of", [int], "shape of the tensor that it is a small view of, or the elements of its storage"),
                Field("added_file", str, "file of the only line that adds to it; absent if unknown"),
                Field("added_line", int, "its line"),
                Field("added_function", str, "its function"),
            )
        ],
        "variables that keep blocks in no category, those that keep the most; absent if they were not searched",
    ),
    Field(
        "optimizer_states",
        [
            (
                Field("class", str, "class name", required=True),
                Field("device", int, "bytes as in ``device``", required=True),
                Field("host", int, "bytes as in ``host``", required=True),
            )
        ],
        "the parts of optimizer_state, of a loop with several optimizers, in order of their creation",
    ),
)

# The training itself is another one than at the last look. The probe looks after steps whose time or memory has shifted, and
# rarely otherwise. Values are numbers, words and counts.
TRAINING_CHANGED = _declare_event(
    "training_changed",
    Field("last_step", int, "the last finished optimizer step at the look before", required=True),
    Field("step", int, "and at this one", required=True),
    Field("begin_ns", int, "time of the look before, CLOCK_MONOTONIC", required=True),
    Field(
        "changes",
        [
            (
                Field(
                    "name",
                    str,
                    "autocast, dtypes, devices, parameters, trained_parameters, modules, hooks, parameter_hooks, compiled,"
                    " attention, optimizers, optimizer_objects, one of PyTorch's flags, optimizer.OPTION, or"
                    " module.ATTRIBUTE: number of modules that have it true",
                    required=True,
                ),
                Field("before", str, "value before; empty if there was none", required=True),
                Field("after", str, "value now", required=True),
                Field("changed_ns", int, "when the line ran, CLOCK_MONOTONIC; absent if unknown"),
                Field("file", str, "file of the job's own code that changed it; absent if unknown"),
                Field("line", int, "its line"),
                Field("function", str, "its function"),
            )
        ],
        "the settings that differ",
        required=True,
    ),
)

# CUDA graphs were replayed: written with the first, second, fourth, eighth replay, and so on, at least each 1,024.
GRAPH_REPLAYS = _declare_event(
    "graph_replays",
    Field("begin_ns", int, "the first one, CLOCK_MONOTONIC", required=True),
    Field("replays", int, "so far", required=True),
    Field("file", str, "file of the job's own code beneath which the last one was; absent if unknown"),
    Field("line", int, "its line"),
    Field("function", str, "its function"),
)

# PyTorch's allocator ran out of device memory, whether or not the job survives that. The fields from ``allocated_bytes`` on
# are the counters of the allocator and present only if it is the recorded one.
OUT_OF_MEMORY = _declare_event(
    "out_of_memory",
    Field("device", int, "CUDA ordinal in this process"),
    Field("requested_bytes", int, "size of the failed allocation"),
    Field("limit_bytes", int, "capacity of the device, or less if the process is limited to a fraction"),
    Field("free_bytes", int, "free memory of the device"),
    Field("phase", str, "innermost phase; empty between phases"),
    Field("step", int, "optimizer step"),
    Field("micro_step", int, "micro-step"),
    Field("rows", int, "rows of the last micro-batch"),
    Field("sequence", int, "its sequence length"),
    Field("tokens", int, "its tokens"),
    Field("allocated_bytes", int, "bytes in live tensors"),
    Field("reserved_bytes", int, "bytes reserved from the driver"),
    Field("inactive_split_bytes", int, "bytes in unused remainders of split blocks"),
    Field("largest_free_block_bytes", int, "largest unused block"),
    Field("retries", int, "allocations that needed a cache flush so far"),
    Field("ooms", int, "out-of-memory errors so far"),
)

# A microscope request was carried out or refused.
MICROSCOPE = _declare_event(
    "microscope",
    Field("request", int, "number of the request", required=True),
    Field("state", str, "recorded or refused"),
    Field("why", str, "reason of a refusal"),
    Field("first_step", int, "first optimizer step recorded", required=True),
    Field("steps", int, "number of steps", required=True),
    Field("begin_ns", int, "begin, CLOCK_MONOTONIC", required=True),
    Field("end_ns", int, "end, CLOCK_MONOTONIC", required=True),
    Field("baseline", _BYTES, "allocated_bytes, requested_bytes and reserved_bytes at the begin", required=True),
    Field("entries", int, "entries of PyTorch's memory history"),
    Field("snapshot", str, "name of PyTorch's own snapshot file beside the recording; null without one"),
    Field("seconds", float, "time spent writing the result"),
)

# Python stacks of the training thread, sampled while the rank was slow, or in gaps and data loading that take a large share
# of its iterations; of all threads while it was silent.
STACKS = _declare_event(
    "stacks",
    Field(
        "where", str, "the outermost phase; else as in ``event_values``: between phases, or in a counted step", required=True
    ),
    Field(
        "why",
        str,
        "slow: it took clearly longer than usual; share: it usually takes a notable share of an iteration; silent: no phase"
        " has begun or ended for long",
        required=True,
    ),
    Field("step", int, "optimizer step of the first sample"),
    Field("last_step", int, "that of the last one, if samples of several iterations are counted together"),
    Field("begin_ns", int, "begin of the first phase or gap that was sampled, CLOCK_MONOTONIC", required=True),
    Field("end_ns", int, "the last sample, CLOCK_MONOTONIC", required=True),
    Field("samples", int, "samples of the training thread, at unequal distances"),
    Field(
        "collectives",
        [
            (
                Field("group", str, "name of the process group"),
                Field("called", int, "collectives that this rank has called in it"),
                Field("waits_for", int, "number of the first of them that has not ended; -1 without one"),
                Field("name", str, "its function"),
            )
        ],
        "of a silent rank: the report of PyTorch's flight recorder, the last used group first",
    ),
    Field(
        "calls",
        [
            (
                Field("group", str, "name of the process group"),
                Field("number", int, "number of the collective in it"),
                Field("name", str, "its function"),
                Field("shape", [int], "sizes of its first tensor; absent if unknown"),
                Field("file", str, "the innermost line of the job's own code that called it; absent if unknown"),
                Field("line", int, "line number"),
                Field("function", str, "function around it"),
            )
        ],
        "of a rank that stays silent with a collective that has not ended: the last ones of each group, oldest first",
    ),
    Field(
        "allocations",
        int,
        "of a silent rank: blocks that PyTorch's allocator has handed out on its GPU so far, as last read; null if unknown",
    ),
    *_STACK_FIELDS,
)

# Another Python thread of the rank began to use a core: Python runs one thread at a time. At most ten in all.
BUSY_THREAD = _declare_event(
    "busy_thread",
    Field("thread", str, "its name", required=True),
    Field("begin_ns", int, "when it was last seen to use less, CLOCK_MONOTONIC", required=True),
    Field("busy_ns", int, "when it was first seen to be busy", required=True),
    Field("end_ns", int, "the last sample", required=True),
    Field("cores", float, "its processor time per wall time while it was sampled", required=True),
    Field("lock_wait_s", float, "average time that another thread then waited for Python's lock"),
    Field("samples", int, "samples of its stack"),
    *_STACK_FIELDS,
)

# Lists, dicts and other containers that became longer while host memory grew, and their owners. Written once such growth has
# lasted some seconds, and rarely again. Values are never recorded.
GROWING_CONTAINERS = _declare_event(
    "growing_containers",
    Field("first_step", int, "last finished optimizer step when the look began", required=True),
    Field("last_step", int, "and when it ended", required=True),
    Field("begin_ns", int, "begin, CLOCK_MONOTONIC", required=True),
    Field("end_ns", int, "end, CLOCK_MONOTONIC", required=True),
    Field("grown_bytes", int, "growth of the rank's resident memory during the look"),
    Field("seconds", float, "time that it took from the training thread"),
    Field(
        "containers",
        [
            (
                Field("name", str, "of the variable or attribute that holds it", required=True),
                Field("scope", str, "local, global, or attribute", required=True),
                Field("owner", str, "qualified name of the function or class, name of the module", required=True),
                Field("file", str, "of the owner, relative to the script's folder or its library's", required=True),
                Field("own", bool, "whether the file belongs to the job itself, not to a library or to Python"),
                Field("levels", int, "0: it is the variable's value; 1: within that value, and so on"),
                Field("kind", str, "its type: list, dict, set, deque, OrderedDict or defaultdict", required=True),
                Field("length", int, "entries at the end", required=True),
                Field("added", int, "added entries", required=True),
                Field("added_bytes", int, "estimate of the host memory that the added entries hold"),
                Field("entry", str, "type of the newest entry"),
                Field("keeps_graph", bool, "whether entries are tensors in host memory with the graph that computed them"),
            )
        ],
        "containers whose new entries hold a notable share of the growth, the largest first",
        required=True,
    ),
)

# The lines that allocated blocks of device memory, by PyTorch's own history of a step or two. Written if memory creeps, once
# after the first steps, and after new peaks of steps and evaluations.
MEMORY_LINES = _declare_event(
    "memory_lines",
    Field(
        "why",
        str,
        "creep: the blocks are those of the first step that the second one has not freed; peak: those of one step that were"
        " alive when it had allocated the most; evaluation: likewise of the first second of an evaluation",
        required=True,
    ),
    Field("first_step", int, "first optimizer step of the look; for an evaluation, the step after it", required=True),
    Field("steps", int, "number of steps; 0 for an evaluation"),
    Field("begin_ns", int, "begin, CLOCK_MONOTONIC", required=True),
    Field("end_ns", int, "end, CLOCK_MONOTONIC", required=True),
    Field("entries", int, "entries of PyTorch's memory history"),
    Field("complete", bool, "whether the history has the whole steps, not only their last part"),
    Field("seconds", float, "time that it took from the training thread"),
    Field("staying_bytes", int, "creep: in all blocks that stayed"),
    Field("peak_bytes", int, "peak and evaluation: requested bytes of all blocks"),
    Field("before_bytes", int, "peak and evaluation: bytes of older blocks, whose stacks are unknown"),
    _FRAMES,
    Field(
        "stacks",
        [
            (
                Field("count", int, "blocks", required=True),
                Field("size_bytes", int, "requested size of each", required=True),
                Field("unix_us", int, "when the first of them was allocated, unix time in microseconds"),
                _INDEXES,
            )
        ],
        "blocks of one size and one stack, those that hold the most; no frames: allocated by a thread without Python",
        required=True,
    ),
)

# Python's garbage collector ran for at least 10 ms since the last such event. Written at most once a second, later once a
# minute. Collections of the youngest objects do not count.
GARBAGE = _declare_event(
    "garbage",
    Field("step", int, "optimizer step of the last collection"),
    Field("begin_ns", int, "begin of the first of these collections, CLOCK_MONOTONIC", required=True),
    Field("seconds", float, "total time of the collector", required=True),
    Field("collections", int, "how often"),
)

# torch.compile compiled while training ran; counted at the end of a step, at most five times a second.
COMPILED = _declare_event(
    "compiled",
    Field("step", int, "the last finished optimizer step"),
    Field("begin_ns", int, "time of the previous look at the counters, CLOCK_MONOTONIC", required=True),
    Field("graphs", int, "graphs that were compiled since then", required=True),
    Field("seconds", float, "time that compiling took; null if this version of PyTorch does not count it"),
)

# A mode for debugging was switched on or off: seen at the end of a step, at most five times a second and 20 times in all.
DEBUG_MODE = _declare_event(
    "debug_mode",
    Field("mode", str, "anomaly: autograd's anomaly mode; profiler: PyTorch's profiler records", required=True),
    Field("on", bool, "whether it has been on since then, or in a part of each step", required=True),
    Field("begin_ns", int, "the earliest time of the change, CLOCK_MONOTONIC", required=True),
    Field("step", int, "the last finished optimizer step"),
    Field("file", str, "file of the job's own code that switched it, relative to the script's folder; absent if unknown"),
    Field("line", int, "its line"),
    Field("function", str, "its function"),
)

# How long the compute stream waited for other streams of its GPU, in a few steps in a row. Under ZeRO-3 and FSDP these
# gather parameters from other ranks. Written rarely.
STREAM_WAITS = _declare_event(
    "stream_waits",
    Field("first_step", int, "number of the first of these optimizer steps", required=True),
    Field("waited_ns", [int], "total wait in each of the steps", required=True),
    Field("waits", [int], "number of waits, including those for work that was complete", required=True),
    Field("starved", [int], "number of waits at which the compute stream was idle", required=True),
)

# A line of the job's own code emptied the allocator's cache: written with its first, second, fourth, eighth call, and so on.
CACHE_CLEARED = _declare_event(
    "cache_cleared",
    Field("begin_ns", int, "begin of the first call, CLOCK_MONOTONIC", required=True),
    Field("calls", int, "calls from this line so far", required=True),
    Field("seconds", float, "total duration of these calls", required=True),
    Field("file", str, "file of the job's own code that called it, relative to the script's folder; absent if unknown"),
    Field("line", int, "its line"),
    Field("function", str, "its function"),
)

# One of several processes on a GPU, when it was first seen there: of the job or of another one.
GPU_PROCESS = _declare_event(
    "gpu_process",
    Field("pid", int, "process id as NVML reports it", required=True),
    Field("program", str, "its program and script without their folders and arguments; null if it cannot be read"),
    Field("user", str, "its owner's name, or number; null if it cannot be read"),
)

# A part of the probe failed and was switched off; training goes on.
PROBE_ERROR = _declare_event("probe_error", *_ERROR)

# Spans could not be written from here on; again after some were written, a few times at most.
RECORDS_LOST = _declare_event(
    "records_lost",
    Field("step", int, "optimizer step in progress"),
    Field("why", str, "the system's error message"),
)

# The probe was injected into this running rank. It records from the next whole step on.
ENTERED = _declare_event("entered")

# The probe was removed from this rank, which goes on.
LEFT = _declare_event("left", *_LOSSES)

# The rank's interpreter exited normally.
GOODBYE = _declare_event("goodbye", *_LOSSES)

# --- written by a node's sampler -----------------------------------------------------------------------------------------

# The sampler runs.
NODE = _declare_event(
    "node",
    Field("host", str, "short host name"),
    Field("cores", int, "cores that this job may use"),
    Field("memory_bytes", int, "host memory"),
    Field("shared_memory_bytes", int, "size of /dev/shm; null without one; absent in older recordings"),
    Field("kernel", str, "kernel release"),
    Field("cpu", str, "processor model"),
    Field("driver", str, "version of the NVIDIA driver; null without one"),
    Field(
        "gpus",
        [
            (
                Field("index", int, "NVML index; MIG instances are numbered after the last GPU", required=True),
                Field("uuid", str, "NVML UUID"),
                Field("name", str, "product name", required=True),
                Field("total_bytes", int, "device memory"),
                Field("mig_of", str, "UUID of the GPU of a MIG instance; null for a whole GPU"),
            )
        ],
        "the GPUs of the node; the MIG instances of a divided GPU replace it",
    ),
    Field("gpu_notice", str, "why some GPUs are not visible, as a sentence; null if all are"),
    Field(
        "numa",
        [
            (
                Field("node", int, "NUMA node", required=True),
                Field("cpus", str, 'its cores, such as "0-31,64-95"', required=True),
            )
        ],
        "NUMA nodes with cores; absent in older recordings",
    ),
    Field("sampler_pid", int, "process id of the sampler"),
    Field("sampler_start", int, "its start in clock ticks since boot"),
)

# zerotop started the command.
JOB_STARTED = _declare_event("job_started", *_COMMAND)

# A process reads the job's output from now on and records it. Written again when it was replaced.
OUTPUT_HOLDER = _declare_event(
    "output_holder",
    Field("pid", int, "process id"),
    Field("start", int, "its start in clock ticks since boot"),
    Field("pipes", {str: str}, "the kernel's names of the pipes that it reads, by stream"),
    Field("passes_on", bool, "whether it also passes the output on to the user"),
)

# Recording of a job that somebody else started begins here; takes the place of JOB_STARTED.
ATTACHED = _declare_event("attached", *_COMMAND)

# Recording of an attached job ended on request; the job goes on.
DETACHED = _declare_event("detached")

# As ATTACHED, for this node's part of a job that was attached from another node. If the clocks of the two differ by much,
# the header of this event's file has ``aligned: true`` and the attaching node's unix time, which holds for this whole boot.
JOINED = _declare_event("joined", *_COMMAND)

# Recording of this node's part ended: with the fields of JOB_ENDED because that part ended, without any because of a detach.
PARTED = _declare_event("parted", *_END)

# Another node was reached through ssh.
REACHED = _declare_event(
    "reached",
    Field("name", str, "host name given to ssh"),
    Field("host", str, "the node's own host name"),
    Field("ranks", int, "ranks of the job on it"),
    Field("joined", bool, "whether its part is recorded from now on, or no longer"),
)

# Another node of the job is not recorded.
NOT_REACHED = _declare_event(
    "not_reached",
    Field("name", str, "host name given to ssh"),
    Field("why", str, "the reason"),
)

# The probe could not be injected into a rank.
NOT_ENTERED = _declare_event(
    "not_entered",
    *_RANK,
    Field("why", str, "the reason in one sentence"),
    Field("pending", bool, "whether the rank may still take the probe in later"),
)

# A rank process was discovered.
RANK_FOUND = _declare_event("rank_found", *_RANK)

# The files that a rank's output goes to, if its stdout or stderr is one. Written again when the rank has ended.
OUTPUT_FILES = _declare_event(
    "output_files",
    *_RANK,
    Field("stdout", str, "path of its stdout; null if that is no file, and at the end if it is empty"),
    Field("stderr", str, "path of its stderr, likewise; the same if both go to one file"),
)

# A process that looks like a rank has not reported, although it had time to construct an engine.
RANK_SILENT = _declare_event("rank_silent", *_RANK, Field("why", str, "the likely reason"))

# A process of the job has imported PyTorch, and the probe was not loaded in it. Of a rank, written again when that is known.
PROBE_MISSING = _declare_event(
    "probe_missing",
    *_RANK,
    Field("is_rank", bool, "whether it is a rank: a launcher numbered it, or it has had PyTorch for some seconds"),
    Field("program", str, "the program and its script, without folders and arguments"),
    Field(
        "reason",
        str,
        "pythonpath: its PYTHONPATH lacks zerotop's entry; unset: it has none; environment: nor has it zerotop's variables;"
        " option: python -E, -I or -S; session: PYTHONZEROTOP_SESSION was not passed on; hidden: it sees other folders;"
        " shadowed: another sitecustomize.py comes first; unreadable: it belongs to another user",
    ),
    Field(
        "by",
        str,
        "the option or file behind it, or who changed the environment: script, command (the job's own) or a program",
    ),
)

# The cores that a rank or launcher may run on; written again when they change.
AFFINITY = _declare_event(
    "affinity",
    Field("pid", int, "process id"),
    Field("cpus", str, 'cores of its first thread, such as "0-15"'),
    Field("threads", {int: str}, "cores by thread id, for busy threads whose own cores have changed"),
)

# A rank process is gone.
RANK_GONE = _declare_event("rank_gone", *_RANK)

# A signal stopped a rank process or launcher (SIGSTOP, or Ctrl-Z), as far as the sampler saw it at its ticks.
RANK_STOPPED = _declare_event("rank_stopped", *_RANK)

# Stacks of the threads of a rank that has written nothing for long, or nothing yet, from py-spy. Files of C code have the
# line 0.
RANK_STACKS = _declare_event(
    "rank_stacks",
    *_RANK,
    Field("idle_s", float, "how long it had neither computed nor waited for a disk; only if it has written nothing yet"),
    Field(
        "launched",
        [
            (
                Field("operation", str, "a collective, such as AllReduce; in older versions of NCCL: collective"),
                Field("rank", int, "rank in the communicator"),
                Field("pid", int, "its process"),
                Field("launched", int, "how many the rank has launched on its GPU"),
            )
        ],
        "NCCL's report if ranks of a communicator have launched different numbers of operations",
    ),
    *_STACK_FIELDS,
)

# The stack of a DataLoader worker while its rank waited for data, from py-spy: of up to three workers, at most once a
# minute on a node. ``pid`` is the rank's. Files of C code have the line 0.
LOADER_STACKS = _declare_event(
    "loader_stacks", *_RANK, Field("worker", int, "process id of the worker", required=True), *_STACK_FIELDS
)

# It goes on.
RANK_CONTINUED = _declare_event("rank_continued", *_RANK)

# A rank runs compilers, as when DeepSpeed builds its operators at first use. Written once, and once for each extension.
COMPILING = _declare_event("compiling", *_RANK, Field("extension", str, "name of the extension; empty if not known"))

# A rank sleeps, nothing compiles, and torch's build folder holds a lock that no process of this node owns: ranks may wait
# for it forever. Written once for each lock.
BUILD_LOCKED = _declare_event("build_locked", Field("path", str, "path of the lock", required=True))

# Somebody asked to stop the job.
STOP_SENT = _declare_event("stop_sent", Field("signal", str, "name of the signal sent"))

# The command ended.
JOB_ENDED = _declare_event("job_ended", *_END)

# A part of the sampler failed; the rest goes on.
SAMPLER_ERROR = _declare_event("sampler_error", *_ERROR)

# Records of a rank waited in shared memory, because the session's file system was too slow. None is lost by that.
RECORDS_LATE = _declare_event(
    "records_late",
    Field("rank", int, "global rank"),
    Field("seconds", float, "how long the oldest of them waited"),
    Field("why", str, "the reason"),
)

# The sampler stops normally, after the job.
SAMPLER_ENDED = _declare_event(
    "sampler_ended",
    Field("lost_records", int, "records that could not be written"),
    Field("lost_output_bytes", int, "output that could not be written"),
)

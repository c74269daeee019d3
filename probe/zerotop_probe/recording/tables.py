"""The tables of a recording: every field's name, type, unit and meaning, in one place.

A table is a file of fixed-size little-endian records after a one-line JSON header. Fields are ordered and padded so that
every field of a memory-mapped file is naturally aligned. Released codes never change their meaning; a new field goes to the
end of its table and raises ``FORMAT_MINOR``.

Times are nanoseconds of CLOCK_MONOTONIC on the machine that wrote them; the header's clock pair converts them to unix time.
An unknown integer is -1, an unknown float is NaN.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from zerotop_probe.recording.metrics import BYTES, BYTES_PER_S, CORES, NUMBER, SECONDS, SHARE, WATTS, Metric

FORMAT_MAJOR = 1
FORMAT_MINOR = 9

UNKNOWN = -1

# How long a sample stands for the time after it. If the last one is older, the process or its sampler is gone.
FRESH_NS = 3_000_000_000


class Field(NamedTuple):
    """One column: its ``struct`` code, its meaning, and the ``FORMAT_MINOR`` that introduced it."""

    name: str
    code: str
    meaning: str
    folds: str = ""  # HIGHEST or LOWEST remains of a minute of samples; else the mean of floats, the last of integers
    since: int = 0

    @property
    def dtype(self) -> str:
        """The NumPy dtype string, for example ``<i8``."""
        return "S" + self.code[:-1] if self.code.endswith("s") else _NUMPY[self.code]


HIGHEST, LOWEST = "highest", "lowest"
_NUMPY = {"q": "<i8", "Q": "<u8", "i": "<i4", "I": "<u4", "H": "<u2", "B": "|u1", "f": "<f4", "d": "<f8"}


class Table(NamedTuple):
    """A named list of fields. ``time_column`` is the time at which a record was written: earlier cursors do not show it."""

    name: str
    time_column: str
    fields: tuple[Field, ...]
    metrics: tuple[Metric, ...] = ()
    """What screens, reports and exports show of them."""

    @property
    def record_struct(self) -> struct.Struct:
        """The struct that packs one record, without padding: the fields themselves are aligned."""
        return struct.Struct("<" + "".join(field.code for field in self.fields))

    @property
    def dtype(self) -> list[list[str]]:
        """The NumPy dtype as headers store it: ``[["begin_ns", "<i8"], ...]``."""
        return [[field.name, field.dtype] for field in self.fields]


# The phases of a rank; records store the index.
PHASES = (
    "other",
    "init",
    "data",
    "forward",
    "backward",
    "reduce",
    "step",
    "grads_to_cpu",
    "cpu_optimizer",
    "params_to_gpu",
    "optimizer",
    "allgather",
    "eval",
    "checkpoint_save",
    "checkpoint_load",
    "generate",
    "stage_wait",  # of a pipeline: receiving from another stage, which is mostly waiting for it
    "stage_send",  # likewise: sending to another stage
)
PHASE_CODE = {name: code for code, name in enumerate(PHASES)}

# Bits of ``flags`` in a span.
BOUNDARY = 1  # a step span with an optimizer update (the gradient-accumulation boundary)
SKIPPED = 2  # the update was skipped because fp16 gradients overflowed
EVAL = 4  # a forward of an evaluation, not of a training step
FAILED = 8  # an exception ended the phase
INCOMPLETE = 16  # a step span: spans were lost since the last recorded end of a step of engine 0
LIGHT = 32  # a step span: since the last end of a step of engine 0 the device was read only at the end of this one
COUNTED = 64  # a step span: phases of training since the last end of a step of engine 0 are missing, and so are readings
ANOTHER_ITERATOR = 128  # a fetch of data, not from the iterator of the last batch before a backward or an update

# ``edge`` of an allocator sample.
TICK, BEGIN, END = 0, 1, 2

# ``action`` in the allocator's history. A requested free completes once other streams no longer use the block.
HISTORY_ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
)

# ``stream`` of an output record.
STREAMS = ("output", "stdout", "stderr")

_STEP_FIELDS = (
    Field("step", "i", "optimizer step in progress, the engine's global_steps"),
    Field("micro_step", "i", "micro-batch within that step, counted from 0; -1 unknown"),
)

SPANS = Table(
    "spans",
    "end_ns",
    (
        Field("begin_ns", "q", "begin of the phase on the host"),
        Field("end_ns", "q", "end of the phase on the host"),
        Field("tokens", "q", "tokens of the micro-batch; -1 if its inputs are not token ids, or outside of a forward"),
        *_STEP_FIELDS,
        Field("rows", "i", "rows (samples) of the micro-batch; -1 outside of a forward"),
        Field("sequence", "i", "sequence length of the micro-batch in tokens; -1 if unknown"),
        Field("phase", "H", "index into PHASES"),
        Field("flags", "H", "BOUNDARY | SKIPPED | EVAL | FAILED | INCOMPLETE | LIGHT | COUNTED | ANOTHER_ITERATOR"),
        Field("depth", "B", "nesting depth, 0 outermost; the innermost span of lower depth around it is its parent"),
        Field("engine", "B", "number of the DeepSpeed engine in this process, in order of creation"),
        Field("pad", "H", "0"),
    ),
    (Metric("iteration", SECONDS, "", "iteration", "iteration", "accent"),),
)

BEGINS = Table(
    "begins",
    "time_ns",
    (
        Field("time_ns", "q", "begin of the phase; a span with this begin follows when it ends"),
        *_STEP_FIELDS,
        Field("phase", "H", "index into PHASES"),
        Field("depth", "B", "as in spans"),
        Field("engine", "B", "as in spans"),
        Field("pad", "I", "0"),
    ),
)

# The header's ``peaks`` defines a peak: the highest value since the last BEGIN or END record of the file ("window"), or
# since the process started or its script reset the peaks ("process").
ALLOCATOR = Table(
    "allocator",
    "time_ns",
    (
        Field("time_ns", "q", "time at which the counters were read"),
        Field("allocated_bytes", "q", "PyTorch: bytes in live tensors"),
        Field("allocated_peak_bytes", "q", "highest allocated bytes in the window that ends here, see above"),
        Field("reserved_bytes", "q", "PyTorch: bytes reserved from the driver"),
        Field("reserved_peak_bytes", "q", "highest reserved bytes, likewise"),
        Field("requested_peak_bytes", "q", "highest sum of requested sizes, before rounding, likewise"),
        Field("inactive_split_bytes", "q", "reserved bytes in unused remainders of split blocks"),
        Field("retries", "i", "allocations that needed a cache flush so far"),
        Field("ooms", "i", "out-of-memory errors so far"),
        *_STEP_FIELDS,
        Field("phase", "H", "innermost phase"),
        Field("edge", "B", "BEGIN or END of that phase, or TICK between them"),
        Field("device", "B", "CUDA ordinal in the process"),
        Field("segments", "i", "segments of reserved memory", since=1),
        Field("device_allocs", "i", "calls of cudaMalloc so far, also for parts of expandable segments", since=4),
        Field("device_frees", "i", "calls of cudaFree so far, likewise", since=4),
    ),
    (
        Metric("allocated", BYTES, "allocated_bytes", "memory", "allocated", "memory-allocated", "allocated bytes"),
        Metric("reserved", BYTES, "reserved_bytes", "memory", "reserved", "memory-reserved", "reserved bytes"),
        Metric("peak", BYTES, "allocated_peak_bytes", "memory", "peak", "peak"),
    ),
)

# Written after a microscope request was carried out; the microscope event says which steps it covers.
HISTORY = Table(
    "history",
    "time_ns",
    (
        Field("time_ns", "q", "time of the action, to a microsecond"),
        Field("address", "q", "device address of the block or segment"),
        Field("size_bytes", "q", "requested size of a block, size of a segment"),
        Field("request", "i", "number of the request"),
        Field("action", "H", "index into HISTORY_ACTIONS"),
        Field("device", "H", "CUDA ordinal in the process"),
    ),
)

# Only of steps in full detail, see LIGHT.
DEVICE_TIMES = Table(
    "device_times",
    "time_ns",
    (
        Field("time_ns", "q", "time at which the result was read, some time after the phase"),
        Field("begin_ns", "q", "begin_ns of the span of the same writer"),
        Field("device_ns", "q", "from reaching the phase's begin on the current CUDA stream to finishing its work"),
        *_STEP_FIELDS,
        Field("phase", "H", "index into PHASES"),
        Field("depth", "B", "as in spans"),
        Field("engine", "B", "as in spans"),
        Field("pad", "I", "0"),
    ),
)

# PCIe bytes never decrease: they are summed from 32-bit counters, read every 50 to 500 ms. More than 4 GiB between two reads
# is undercounted by multiples of 4 GiB.
GPUS = Table(
    "gpus",
    "time_ns",
    (
        Field("time_ns", "q", "the sampler's tick; all GPUs of a node share it"),
        Field("used_bytes", "q", "NVML: device memory in use by all processes", HIGHEST),
        Field("total_bytes", "q", "NVML: device memory"),
        Field("pcie_tx_bytes", "q", "bytes sent to the host so far, a lower bound (see above); -1 unsupported"),
        Field("pcie_rx_bytes", "q", "bytes received from the host so far, likewise"),
        Field("throttle_reasons", "q", "NVML clocks-event-reasons bit mask; -1 unsupported"),
        Field("utilization_percent", "f", "share of the last 200 ms during which a kernel ran"),
        Field("memory_utilization_percent", "f", "share of the last 200 ms during which device memory was accessed"),
        Field("power_w", "f", "instantaneous power if supported, else the driver's one-second average"),
        Field("temperature_c", "f", "GPU core temperature"),
        Field("sm_clock_mhz", "f", "streaming multiprocessor clock"),
        Field("gpu", "i", "NVML index on this node, or a higher number for a MIG instance; see the node event"),
    ),
    (
        Metric("utilization", SHARE, "utilization_percent", "utilization", trace="utilization", scale=100),
        Metric("power", WATTS, "power_w", "power", "power", "muted", "power"),
        Metric("device", BYTES, "used_bytes", "memory", "process", "memory-other", "device memory used"),
        Metric("sent", BYTES_PER_S, "pcie_tx_bytes", "pcie", "PCIe D2H", "series-2"),
        Metric("received", BYTES_PER_S, "pcie_rx_bytes", "pcie", "PCIe H2D", "series-1"),
    ),
)

GPU_PROCESSES = Table(
    "gpu_processes",
    "time_ns",
    (
        Field("time_ns", "q", "the sampler's tick; a row of every process if memory in use has changed, else once a second"),
        Field("used_bytes", "q", "NVML: device memory used by this process, context included; -1 unknown", HIGHEST),
        Field("pid", "i", "process id as NVML reports it, which in a container may be another than the local one"),
        Field("gpu", "i", "NVML index on this node"),
        Field(
            "sm_percent", "f", "share of the last second in which its kernels ran; of several processes on a GPU", since=4
        ),
        Field("pad", "I", "0", since=4),
    ),
    (Metric("process", BYTES, "used_bytes", "memory", "process", "memory-other"),),
)

PROCESSES = Table(
    "processes",
    "time_ns",
    (
        Field("time_ns", "q", "the sampler's tick; all rank processes of a node share it"),
        Field("rss_bytes", "q", "resident set size, VmRSS", HIGHEST),
        Field("shared_bytes", "q", "shared memory in the resident set, RssShmem (often includes pinned buffers)", HIGHEST),
        Field("pinned_bytes", "q", "VmPin", HIGHEST),
        Field("locked_bytes", "q", "VmLck", HIGHEST),
        Field("swap_bytes", "q", "VmSwap", HIGHEST),
        Field("cpu_ns", "q", "processor time so far of all its threads, ended ones included"),
        Field("cores_used", "f", "processor time per wall time since the previous sample"),
        Field("waiting_cores", "f", "time that threads were runnable but not running, per wall time, as with too few cores"),
        Field("thread_count", "i", "threads alive"),
        Field("busy_threads", "i", "threads that ran for at least half of the time since the previous sample"),
        Field("pid", "i", "process id on this node"),
        Field("rank", "i", "global rank; -1 for a launcher"),
        Field("major_faults", "q", "page faults so far that waited for a disk; read once a second", since=4),
        Field("loader_workers", "i", "its DataLoader workers, once a second; -1 unknown", since=4),
        Field("loader_cores", "f", "processor time of these per wall time", since=4),
        Field("loader_waiting_cores", "f", "time that these were runnable but not running, per wall time", since=4),
        Field("loader_blocked", "f", "how many of these waited for a disk at that moment", since=4),
        Field("held_bytes", "q", "resident without pages of files: RssAnon + RssShmem; -1 unknown", HIGHEST, since=6),
        Field("loader_private_bytes", "q", "anonymous pages of its DataLoader workers alone; -1 unknown", HIGHEST, since=6),
        Field(
            "child_processes", "i", "other processes that its first thread has started, once a second; -1 unknown", since=9
        ),
        Field("child_cores", "f", "processor time of these per wall time", since=9),
    ),
    (
        Metric("cores", CORES, "cores_used", "cores", trace="cores in use"),
        Metric("rss", BYTES, "rss_bytes", "host memory", trace="resident memory"),
        Metric("all_cores", CORES, "cores_used", "cores"),
        Metric("all_rss", BYTES, "rss_bytes", "host memory"),
    ),
)

THREADS = Table(
    "threads",
    "time_ns",
    (
        Field("time_ns", "q", "the sampler's tick; only the busiest threads of each rank are recorded"),
        Field("cpu_ns", "q", "processor time of the thread so far"),
        Field("wait_ns", "q", "time that it was runnable but not running so far"),
        Field("cores_used", "f", "processor time per wall time since its previous sample"),
        Field("pid", "i", "process id on this node"),
        Field("tid", "i", "thread id on this node"),
        Field("processor", "i", "core it last ran on"),
        Field("name", "16s", "thread name (comm)"),
    ),
)

HOSTS = Table(
    "hosts",
    "time_ns",
    (
        Field("time_ns", "q", "the sampler's tick"),
        Field("memory_total_bytes", "q", "host memory"),
        Field("memory_available_bytes", "q", "host memory available without swapping", LOWEST),
        Field("swap_used_bytes", "q", "swap in use on the host", HIGHEST),
        Field("cgroup_used_bytes", "q", "memory charged to the job's cgroup; -1 without one", HIGHEST),
        Field("cgroup_limit_bytes", "q", "memory limit of the cgroup; -1 without one"),
        Field("cores_used", "f", "processor time of the whole host per wall time"),
        Field("load", "f", "one-minute load average"),
        Field("cores", "i", "cores that this job may use"),
        Field("cgroup_oom_kills", "i", "processes of the cgroup killed for memory so far; -1 without one"),
        Field("swap_in_bytes", "q", "bytes read from swap since boot; -1 unknown", since=4),
        Field("swap_out_bytes", "q", "bytes written to swap since boot; -1 unknown", since=4),
        Field("cpu_mhz", "f", "clock of a few cores on average, every five seconds; NaN where the kernel hides it", since=4),
        Field("pad", "I", "0", since=4),
        Field("shared_bytes", "q", "shared memory and files in memory (tmpfs, /dev/shm) of all processes", HIGHEST, since=6),
        Field("cgroup_cache_bytes", "q", "pages of files among the cgroup's memory; -1 without a limit", since=8),
        Field("swap_left_bytes", "q", "swap that the host has and the cgroup allows; -1 unknown", LOWEST, since=8),
    ),
    (
        Metric("host_cores", CORES, "cores_used", "cores", trace="cores in use"),
        Metric("host_memory", BYTES, "", "host memory"),
        Metric("available", BYTES, "memory_available_bytes", trace="available memory"),
    ),
)

PROBE = Table(
    "probe",
    "time_ns",
    (
        Field("time_ns", "q", "end of an optimizer step"),
        Field("cost_ns", "q", "time that the probe took from the training so far, by its own measurement"),
        Field("boundaries", "q", "phase boundaries recorded so far"),
        Field("lost", "i", "records that could not be written so far"),
        Field("errors", "i", "internal errors of the probe so far"),
        Field("one_time_ns", "q", "time for facts that are recorded once, such as all tensors; not in cost_ns", since=3),
    ),
)

# Bits of ``known`` in a record of LOGGED, by the columns that they stand for: a loss may be NaN, which is not unknown.
LOGGED_BITS = {"loss": 1, "grad_norm": 2, "learning_rate": 4}
# Further bits of ``known``: the values are of the step that begins, not of the last one that had ended; the loss is what an
# engine's ``backward`` was given, which a library may log, too, or the script print; the learning rate is that in a loop's
# optimizer, which a library logs as its scheduler has it; the rates of all groups of parameters are at most NO_RATE.
OF_NEXT_STEP, ENGINE_LOSS, OPTIMIZER_RATE, RATES_ARE_0 = 8, 16, 32, 64
# So small a learning rate changes no parameter, in any number of steps: fp32 tells apart 1e-7 of its value.
NO_RATE = 1e-12

# What the training's library logged as numbers of Python, and what an engine has on the host: nothing is read from a device.
LOGGED = Table(
    "logged",
    "time_ns",
    (
        Field(
            "time_ns",
            "q",
            "time at which it was logged; it is of the last step that had ended then, but for OF_NEXT_STEP",
            since=7,
        ),
        Field("loss", "d", "loss of training, often a mean over the steps since it was logged before", since=7),
        Field("grad_norm", "d", "norm of all gradients before clipping", since=7),
        Field("learning_rate", "d", "learning rate of the optimizer's first group of parameters", since=7),
        Field("known", "I", "LOGGED_BITS of the values that are known, and the bits OF_NEXT_STEP to RATES_ARE_0", since=7),
        Field("pad", "I", "0", since=7),
    ),
    (
        Metric("loss", NUMBER, "loss", "loss", "loss", "accent"),
        Metric("grad_norm", NUMBER, "grad_norm", "gradient norm", "grad norm", "load"),
        Metric("learning_rate", NUMBER, "learning_rate", "learning rate", "lr", "muted"),
    ),
)

OUTPUT = Table(
    "output",
    "time_ns",
    (
        Field("time_ns", "q", "time at which these bytes were read"),
        Field("offset", "q", "their offset in the output-*.log file of the same writer"),
        Field("length", "i", "number of bytes"),
        Field("stream", "H", "index into STREAMS"),
        Field("pad", "H", "0"),
    ),
)

# Sums over the spans of a step in nanoseconds, by column, and the phases summed in each. Those in OUTERMOST_PHASES count
# only at depth 0: within an evaluation they are the evaluation's time. Spans with the flag EVAL do not count.
STEP_SUMS = {
    "data": ("data",),
    "forward": ("forward",),
    "backward": ("backward",),
    "step": ("step",),
    "optimizer": ("optimizer", "cpu_optimizer"),
    "eval": ("eval",),
    "checkpoint": ("checkpoint_save", "checkpoint_load"),
}
OUTERMOST_PHASES = ("data", "eval", "checkpoint_save", "checkpoint_load")

# What remains of the oldest steps of a rank when its other records are deleted: one record a step, or one for a block of
# consecutive steps. Written by the folder of the rank's node, under the rank's name.
FOLDED = Table(
    "folded",
    "end_ns",
    (
        Field("end_ns", "q", "end of the span that ends the last step", since=2),
        Field("begin_ns", "q", "begin of the first phase of the first step; init and checkpoint_load do not count", since=2),
        *(Field(f"{name}_ns", "q", f"time in {' and '.join(phases)}", since=2) for name, phases in STEP_SUMS.items()),
        Field("loading_ns", "q", "time in checkpoint_load before begin_ns; only in the rank's first record", since=2),
        Field(
            "shortest_ns",
            "q",
            "duration of the shortest step, evaluation and checkpoints excluded; -1 if incomplete",
            since=2,
        ),
        Field("longest_ns", "q", "duration of the longest step, likewise", since=2),
        Field("rows", "q", "rows of all micro-batches; -1 if unknown", since=2),
        Field("tokens", "q", "tokens of all micro-batches; -1 if unknown", since=2),
        Field("allocated_peak_bytes", "q", "highest allocated bytes; -1 if unknown", since=2),
        Field("reserved_peak_bytes", "q", "highest reserved bytes; -1 if unknown", since=2),
        Field("host_rss_bytes", "q", "highest sampled resident set size; -1 if unknown", since=2),
        Field("nvml_process_bytes", "q", "highest sampled device memory of the process; -1 if unknown", since=2),
        Field("step", "i", "number of the last step", since=2),
        Field("steps", "i", "number of steps", since=2),
        Field("skipped_steps", "i", "number of them whose update was skipped", since=2),
        Field("micro_steps", "i", "micro-steps of all of them that were not counted, as other sums", since=2),
        Field("counted_steps", "i", "number of them that were only counted: no phases, rows and tokens", since=5),
        Field("pad", "I", "0", since=5),
        Field("host_held_bytes", "q", "highest sampled resident memory without pages of files; -1 unknown", since=6),
    ),
)

FOLDED_TABLES = frozenset(
    table.name for table in (SPANS, BEGINS, ALLOCATOR, DEVICE_TIMES, PROBE, GPUS, GPU_PROCESSES, PROCESSES, THREADS, HOSTS)
)
"""The tables that are divided into segments, of which old ones are folded and deleted."""

TABLES = {
    table.name: table
    for table in (
        SPANS,
        BEGINS,
        ALLOCATOR,
        DEVICE_TIMES,
        HISTORY,
        GPUS,
        GPU_PROCESSES,
        PROCESSES,
        THREADS,
        HOSTS,
        PROBE,
        LOGGED,
        OUTPUT,
        FOLDED,
    )
}

METRICS = {
    metric.name: metric
    for table in (ALLOCATOR, GPU_PROCESSES, GPUS, PROCESSES, HOSTS, SPANS, LOGGED)
    for metric in table.metrics
}
"""All metrics, by name."""

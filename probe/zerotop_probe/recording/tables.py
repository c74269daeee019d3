"""The tables of a recording: every field's name, type, unit and meaning, in one place.

A table is a file of fixed-size little-endian records behind a one-line JSON header. Fields are ordered and padded so that
every field of a memory-mapped file is naturally aligned. Codes, once released, never change their meaning; a new field goes
to the end of its table and raises ``FORMAT_MINOR``.

Times are nanoseconds of CLOCK_MONOTONIC on the machine that wrote them; the header's clock pair turns them into unix time.
An unknown integer is -1, an unknown float is NaN.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

FORMAT_MAJOR = 1
FORMAT_MINOR = 1

UNKNOWN = -1


class Field(NamedTuple):
    """One column: its ``struct`` code, what a value means, and from which ``FORMAT_MINOR`` on recordings have it."""

    name: str
    code: str
    meaning: str
    since: int = 0

    @property
    def dtype(self) -> str:
        """The NumPy dtype string, for example ``<i8``."""
        return "S" + self.code[:-1] if self.code.endswith("s") else _NUMPY[self.code]


_NUMPY = {"q": "<i8", "Q": "<u8", "i": "<i4", "I": "<u4", "H": "<u2", "B": "|u1", "f": "<f4", "d": "<f8"}


class Table(NamedTuple):
    """A named list of fields. ``known`` is the field from whose time on a record can have been read."""

    name: str
    time_column: str
    fields: tuple[Field, ...]

    @property
    def record_struct(self) -> struct.Struct:
        """Packs one record; no padding is added, the fields themselves are aligned."""
        return struct.Struct("<" + "".join(field.code for field in self.fields))

    @property
    def dtype(self) -> list[list[str]]:
        """The header's form of the NumPy dtype: ``[["begin_ns", "<i8"], ...]``."""
        return [[field.name, field.dtype] for field in self.fields]


# What a rank does between two boundaries. The first ten are an iteration's; indices are the codes in records.
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
)
PHASE_CODE = {name: code for code, name in enumerate(PHASES)}

# Bits of ``flags`` in a span.
BOUNDARY = 1  # a step span in which the optimizer was asked to update (the gradient-accumulation boundary)
SKIPPED = 2  # that update was skipped: fp16 gradients overflowed
EVAL = 4  # a forward that belongs to an evaluation, not to a training step
FAILED = 8  # the phase was left by an exception

# ``edge`` of an allocator sample.
TICK, BEGIN, END = 0, 1, 2

# ``action`` in the allocator's history. A block asked to be freed is free once other streams have done with it.
HISTORY_ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
)

# ``stream`` of a piece of output.
STREAMS = ("output", "stdout", "stderr")

_STEP_FIELDS = (
    Field("step", "i", "optimizer step in progress, counted from 0 as the engine's global_steps"),
    Field("micro_step", "i", "forward+backward within that step, counted from 0"),
)

SPANS = Table(
    "spans",
    "end_ns",
    (
        Field("begin_ns", "q", "when the phase began on the host"),
        Field("end_ns", "q", "when it ended"),
        Field("tokens", "q", "tokens in the micro-batch; -1 where inputs are not token ids or it is not a forward"),
        *_STEP_FIELDS,
        Field("rows", "i", "rows (samples) in the micro-batch; -1 where not a forward"),
        Field("sequence", "i", "sequence length of the micro-batch in tokens; -1 where unknown"),
        Field("phase", "H", "index into PHASES"),
        Field("flags", "H", "BOUNDARY | SKIPPED | EVAL | FAILED"),
        Field("depth", "B", "0 outermost; a span lies within the nearest one of lower depth"),
        Field("engine", "B", "which DeepSpeed engine of this process, in order of creation"),
        Field("pad", "H", "0"),
    ),
)

BEGINS = Table(
    "begins",
    "time_ns",
    (
        Field("time_ns", "q", "when the phase began: a span of this begin follows when it ends, if it ends"),
        *_STEP_FIELDS,
        Field("phase", "H", "index into PHASES"),
        Field("depth", "B", "as in spans"),
        Field("engine", "B", "as in spans"),
        Field("pad", "I", "0"),
    ),
)

# The header says what a peak is: with ``peaks`` "window", the highest since the last BEGIN or END of the same file; with
# "process", the highest since the process began or its user reset it.
ALLOCATOR = Table(
    "allocator",
    "time_ns",
    (
        Field("time_ns", "q", "when the allocator's counters were read"),
        Field("allocated_bytes", "q", "PyTorch: bytes in live tensors"),
        Field("allocated_peak_bytes", "q", "highest allocated in the window that ends here: see the header's peaks"),
        Field("reserved_bytes", "q", "PyTorch: bytes held from the driver"),
        Field("reserved_peak_bytes", "q", "highest reserved, likewise"),
        Field("requested_peak_bytes", "q", "highest sum of what live tensors asked for, before rounding, likewise"),
        Field("inactive_split_bytes", "q", "reserved bytes in the unused remainders of split blocks"),
        Field("retries", "i", "allocations that succeeded only after the cache was flushed, so far"),
        Field("ooms", "i", "out-of-memory errors so far"),
        *_STEP_FIELDS,
        Field("phase", "H", "the innermost phase at the time"),
        Field("edge", "B", "BEGIN or END of that phase, or TICK in between"),
        Field("device", "B", "the process's own device ordinal"),
        Field("segments", "i", "pieces of device memory that reserved consists of", since=1),
    ),
)

# Written in one go when a look through the microscope is over; the event of that name says which steps it was.
HISTORY = Table(
    "history",
    "time_ns",
    (
        Field("time_ns", "q", "when the allocator did it, to a microsecond"),
        Field("address", "q", "of the block or segment on the device"),
        Field("size_bytes", "q", "what was asked for; of a segment what it has"),
        Field("request", "i", "which look it belongs to"),
        Field("action", "H", "index into HISTORY_ACTIONS"),
        Field("device", "H", "the process's own device ordinal"),
    ),
)

# Steps that take less than 20 ms have them one time in four.
DEVICE_TIMES = Table(
    "device_times",
    "time_ns",
    (
        Field("time_ns", "q", "when it was learnt, some time after the phase"),
        Field("begin_ns", "q", "which span of this file's writer: its begin_ns"),
        Field("device_ns", "q", "from where the GPU came to the phase to where it was done with it, on the current stream"),
        *_STEP_FIELDS,
        Field("phase", "H", "index into PHASES"),
        Field("depth", "B", "as in spans"),
        Field("engine", "B", "as in spans"),
        Field("pad", "I", "0"),
    ),
)

# PCIe bytes never fall: they are made of counters of 32 bits, looked at every 50 to 500 ms. More than 4 GiB between two
# looks is counted short by whole multiples of 4 GiB.
GPUS = Table(
    "gpus",
    "time_ns",
    (
        Field("time_ns", "q", "the sampler's tick; all GPUs of a node share it"),
        Field("used_bytes", "q", "NVML: device memory in use by anyone"),
        Field("total_bytes", "q", "NVML: device memory"),
        Field("pcie_tx_bytes", "q", "bytes sent to the host so far, at least: see above; -1 unsupported"),
        Field("pcie_rx_bytes", "q", "bytes received from the host so far, likewise"),
        Field("throttle_reasons", "q", "NVML clocks-event-reasons bit mask; -1 unsupported"),
        Field("utilization_percent", "f", "share of the last 200 ms in which a kernel ran"),
        Field("memory_utilization_percent", "f", "share of the last 200 ms in which device memory was accessed"),
        Field("power_w", "f", "instant power where supported, else the driver's one-second average"),
        Field("temperature_c", "f", "GPU core temperature"),
        Field("sm_clock_mhz", "f", "streaming multiprocessor clock"),
        Field("gpu", "i", "NVML index on this node, or a number after those for an instance of MIG's; see the node event"),
    ),
)

GPU_PROCESSES = Table(
    "gpu_processes",
    "time_ns",
    (
        Field("time_ns", "q", "a tick after memory in use has changed, or a second after the last: rows of all GPUs"),
        Field("used_bytes", "q", "NVML: device memory used by this process, context included; -1 unknown"),
        Field("pid", "i", "as NVML says it: in a container this may not be a local pid"),
        Field("gpu", "i", "NVML index on this node"),
    ),
)

PROCESSES = Table(
    "processes",
    "time_ns",
    (
        Field("time_ns", "q", "the sampler's tick; all rank processes of a node share it"),
        Field("rss_bytes", "q", "host memory resident, VmRSS"),
        Field("shared_bytes", "q", "of which shared memory, RssShmem (pinned buffers often lie here)"),
        Field("pinned_bytes", "q", "VmPin"),
        Field("locked_bytes", "q", "VmLck"),
        Field("swap_bytes", "q", "VmSwap"),
        Field("cpu_ns", "q", "processor time used so far by all its threads, those that have ended included"),
        Field("cores_used", "f", "processor time per wall time since the sample before"),
        Field("waiting_cores", "f", "time threads were runnable but not running, per wall time: more threads than cores"),
        Field("thread_count", "i", "threads alive"),
        Field("busy_threads", "i", "threads that ran for at least half of the time since the sample before"),
        Field("pid", "i", "process id on this node"),
        Field("rank", "i", "global rank; -1 for a launcher"),
    ),
)

THREADS = Table(
    "threads",
    "time_ns",
    (
        Field("time_ns", "q", "the sampler's tick; only the busiest threads of each rank are recorded"),
        Field("cpu_ns", "q", "processor time of the thread so far"),
        Field("wait_ns", "q", "time runnable but not running so far"),
        Field("cores_used", "f", "processor time per wall time since it was looked at before"),
        Field("pid", "i", "process id on this node"),
        Field("tid", "i", "thread id on this node"),
        Field("processor", "i", "core it last ran on"),
        Field("name", "16s", "the kernel's name of the thread"),
    ),
)

HOSTS = Table(
    "hosts",
    "time_ns",
    (
        Field("time_ns", "q", "the sampler's tick"),
        Field("memory_total_bytes", "q", "host memory"),
        Field("memory_available_bytes", "q", "host memory that can be had without swapping"),
        Field("swap_used_bytes", "q", "swap in use on the host"),
        Field("cgroup_used_bytes", "q", "memory charged to the job's control group; -1 without one"),
        Field("cgroup_limit_bytes", "q", "its limit; -1 where there is none"),
        Field("cores_used", "f", "processor time of the whole host per wall time"),
        Field("load", "f", "one-minute load average"),
        Field("cores", "i", "cores this job may run on"),
        Field("cgroup_oom_kills", "i", "processes of the control group killed for memory so far; -1 without one"),
    ),
)

PROBE = Table(
    "probe",
    "time_ns",
    (
        Field("time_ns", "q", "the end of an optimizer step"),
        Field("cost_ns", "q", "time spent in the probe on the training thread so far, measured by itself"),
        Field("boundaries", "q", "phase boundaries recorded so far"),
        Field("lost", "i", "records that could not be written so far"),
        Field("errors", "i", "internal errors of the probe so far"),
    ),
)

OUTPUT = Table(
    "output",
    "time_ns",
    (
        Field("time_ns", "q", "when these bytes were seen"),
        Field("offset", "q", "where they begin in the output-*.log file of the same writer"),
        Field("length", "i", "how many bytes"),
        Field("stream", "H", "index into STREAMS"),
        Field("pad", "H", "0"),
    ),
)

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
        OUTPUT,
    )
}

"""What a screen shows at one moment: plain values, computed from (recording, cursor) and from nothing else.

Everything is frozen. Bytes and nanoseconds are integers, other times are seconds. None and NaN mean that nothing was
recorded, which is not zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.keys import GpuKey

Floats = NDArray[np.float64]


class State(Enum):
    """What the job is doing at the cursor."""

    STARTING = "starting"  # launched, no engine yet
    RUNNING = "running"
    ENDED = "ended"  # the sampler saw it end: see ``exit_code``
    LOST = "lost"  # nobody writes any more and nobody saw it end
    DETACHED = "detached"  # the recording was ended on purpose, and the job went on

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be recorded."""
        return self in (State.ENDED, State.LOST, State.DETACHED)


@dataclass(frozen=True, slots=True)
class Job:
    """The job and its engine. Engine facts are None until a rank has made its engine."""

    name: str
    command: tuple[str, ...]
    launcher: str
    state: State
    exit_code: int | None
    exit_text: str  # one sentence about how it ended, or what is being waited for
    model: str | None  # the model's class or the name its config gives
    parameters: int | None
    zero_stage: int | None
    offload_optimizer: str | None  # "none", "cpu", "nvme"
    offload_parameters: str | None
    dtype: str | None  # "fp32", "fp16", "bf16"
    micro_batch: int | None
    gradient_accumulation: int | None
    ranks: int | None  # world size
    notices: tuple[str, ...]  # sentences to say once: no NVIDIA driver, a silent rank, a stopped sampler
    prints_here: bool = True  # False where it ran already when it was attached to: what it prints goes elsewhere


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the job is. ``step`` is the last finished optimizer step of the slowest rank, counted from 0."""

    step: int | None
    total_steps: int | None
    skipped_steps: int
    iteration_s: float  # mean of the last ten iterations
    tokens_per_s: float  # over all ranks, the same window
    eta_s: float
    elapsed_s: float  # from launch to the cursor or to the job's end

    @property
    def finished_steps(self) -> int:
        """How many steps that is: of 24, the last one is step 23."""
        return 0 if self.step is None else self.step + 1


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``allocated`` and ``reserved`` are summed over the ranks on it that live; None where none has reported."""

    host: str
    index: int
    name: str
    total_bytes: int
    used_bytes: int
    allocated_bytes: int | None
    allocated_peak_bytes: int | None
    reserved_bytes: int | None
    reserved_peak_bytes: int | None
    process_bytes: int | None  # NVML's figure for the job's processes on it
    utilization_percent: float
    power_w: float
    temperature_c: float
    pcie_tx_bytes_per_s: float
    pcie_rx_bytes_per_s: float

    @property
    def other_bytes(self) -> int:
        """Used but not by PyTorch's allocator: contexts, NCCL, cuBLAS, other processes."""
        return max(0, self.used_bytes - (self.reserved_bytes or 0))


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank process on the host."""

    rank: int
    host: str
    pid: int
    alive: bool
    phase: str  # a name of PHASES, "" before the engine exists
    phase_s: float  # how long it has been in it
    step: int | None
    rss_bytes: int
    rss_peak_bytes: int  # highest sampled up to the cursor
    shared_bytes: int
    pinned_bytes: int
    cores_used: float
    waiting_cores: float
    thread_count: int
    busy_threads: int
    busiest: tuple[tuple[str, float], ...]  # (thread name, cores), busiest first


@dataclass(frozen=True, slots=True)
class Host:
    """One node. ``memory_limit_bytes`` is the control group's limit where it is lower than the host's memory."""

    name: str
    cores: int
    cores_used: float
    memory_limit_bytes: int
    memory_used_bytes: int
    swap_used_bytes: int


@dataclass(frozen=True, slots=True)
class Iterations:
    """The finished steps up to the cursor on the slowest rank of each step, oldest first; all arrays have shape (n,).

    ``phase_s`` holds seconds per phase, in drawing order; what they leave of ``iteration_s`` is "other".
    """

    step: NDArray[np.int64]
    begin_s: Floats  # unix time
    iteration_s: Floats
    phase_s: dict[str, Floats]  # data, forward, backward, step, other
    skipped: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class RankHistory:
    """One rank in each piece of a :class:`History`; all of shape (n,), NaN where nothing was recorded."""

    cores_used: Floats  # mean
    rss_bytes: Floats  # highest
    shared_bytes: Floats  # highest
    phase: tuple[str, ...]  # the innermost phase it was in for most of the piece; "" before its engine exists


@dataclass(frozen=True, slots=True, eq=False)
class GpuHistory:
    """One GPU in each piece of a :class:`History`; all of shape (n,), NaN where nothing was recorded."""

    utilization_percent: Floats  # mean
    used_bytes: Floats  # highest
    allocated_bytes: Floats  # highest sampled, summed over the ranks on it
    reserved_bytes: Floats  # likewise


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The last while before the cursor in pieces of ``piece_s`` seconds, oldest first; the one in progress is left out."""

    piece_s: float
    end_s: float  # unix time at which the last piece ends
    ranks: Mapping[int, RankHistory]  # by rank
    gpus: Mapping[GpuKey, GpuHistory]


NO_HISTORY = History(0.5, 0.0, {}, {})


@dataclass(frozen=True, slots=True)
class Cost:
    """What watching costs, measured by the probe and the reader on themselves."""

    probe_us_per_step: float  # mean over ranks
    probe_share: float  # of iteration time, 0 to 1
    lost_records: int
    errors: int
    records: int  # in the recording up to now
    records_per_s: float


@dataclass(frozen=True, slots=True)
class Inferred:
    """An iteration's time as far as it shows outside the job, where no probe tells it."""

    iteration_s: float
    confidence: float  # how like themselves the signals are one iteration later, 0 to 1
    signals: tuple[str, ...]  # of which it was told: "cpu", "pcie", "utilization", "power"
    window_s: float  # the time before the cursor that was looked at


@dataclass(frozen=True, slots=True)
class LiveView:
    """Everything the live screen shows at ``cursor_ns`` (unix nanoseconds)."""

    cursor_ns: int
    job: Job
    progress: Progress
    gpus: tuple[Gpu, ...]
    hosts: tuple[Host, ...]
    ranks: tuple[Rank, ...]
    iterations: Iterations
    cost: Cost
    output: tuple[str, ...]  # the last lines, carriage returns and escapes already resolved
    history: History = NO_HISTORY
    inferred: Inferred | None = None

"""The values that the live screen shows at one moment, computed from a recording and a cursor alone.

Everything is frozen. Bytes and nanoseconds are integers, other times are seconds. None and NaN mean not recorded, which is
not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.engine import EngineSummary
from zerotop.analysis.prices import HourlyPrice
from zerotop.recording.keys import GpuKey

Floats = NDArray[np.float64]


class JobState(Enum):
    """The state of the job at the cursor."""

    STARTING = "starting"  # launched, nothing trains yet
    RUNNING = "running"
    ENDED = "ended"  # its end was recorded: see ``exit_code``
    LOST = "lost"  # the recording stops without an end
    DETACHED = "detached"  # the recording was stopped, and the job went on

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be recorded."""
        return self in (JobState.ENDED, JobState.LOST, JobState.DETACHED)


@dataclass(frozen=True, slots=True)
class Job:
    """The job, and what trains in it."""

    name: str
    command: tuple[str, ...]
    launcher: str
    engine: EngineSummary  # the first engine or loop
    state: JobState
    exit_code: int | None
    exit_signal: str  # behind the end of its command; "" without one
    exit_text: str  # one sentence on how it ended, or what it waits for
    notices: tuple[str, ...]  # one sentence each: no NVIDIA driver, a silent rank, a stopped sampler
    prints_here: bool = True  # False after attaching: the output goes to the job's own terminal
    price: HourlyPrice | None = None
    rank_files: str = ""  # where ranks write their output to, if not to the job's


@dataclass(frozen=True, slots=True)
class Progress:
    step: int | None  # last finished optimizer step of the slowest rank, counted from 0
    total_steps: int | None
    skipped_steps: int
    # Mean of the last ten iterations, without the job's first; once the job is over, the median of all but skipped ones.
    iteration_s: float
    recent_iterations: int  # of which it is the mean while the job runs: up to ten
    tokens_per_s: float  # mean over the same iterations, of all ranks together
    eta_s: float
    elapsed_s: float  # from launch to the cursor or to the job's end

    @property
    def finished_steps(self) -> int:
        """Number of finished steps: step 23 is the 24th."""
        return 0 if self.step is None else self.step + 1


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Allocated and reserved bytes are summed over the live ranks on it; None where none has reported."""

    host: str
    index: int
    name: str
    total_bytes: int
    used_bytes: int
    allocated_bytes: int | None
    allocated_peak_bytes: int | None
    reserved_bytes: int | None
    reserved_peak_bytes: int | None
    process_bytes: int | None  # of the job's processes, from NVML
    pcie_tx_bytes_per_s: float
    pcie_rx_bytes_per_s: float
    sample: Mapping[str, float]
    """The last record of GPUS by column; NaN where the recording has no such column."""
    ranks: tuple[int, ...] = ()
    """Ranks with an allocator on it."""
    allowed_bytes: int | None = None
    """What PyTorch may reserve, where its one rank is limited to a fraction."""

    @property
    def utilization_percent(self) -> float:
        """Share of the last 200 ms during which a kernel ran."""
        return self.sample["utilization_percent"]

    @property
    def other_bytes(self) -> int:
        """Bytes used outside PyTorch's allocators: contexts, NCCL, cuBLAS, other processes."""
        return max(0, self.used_bytes - (self.reserved_bytes or 0))


class Activity(NamedTuple):
    """What a rank does at the cursor."""

    phase: str = ""  # a name of PHASES, "" before the engine exists
    phase_s: float = 0.0  # seconds in that phase so far
    busiest: tuple[tuple[str, float], ...] = ()  # (thread name, cores), busiest first


class LateActivity:
    """Is read when it is asked for: of a thousand ranks a screen shows a few."""

    def __init__(self, read: Callable[[], Activity]) -> None:
        self._read = read

    @cached_property
    def value(self) -> Activity:
        return self._read()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LateActivity) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank process on the host."""

    rank: int
    host: str
    pid: int
    alive: bool
    activity: LateActivity
    step: int | None
    rss_bytes: int
    rss_peak_bytes: int  # highest sampled up to the cursor
    shared_bytes: int
    pinned_bytes: int
    cores_used: float  # mean over the window of processes/recent_means.py
    waiting_cores: float  # threads that were ready to run but had no core, likewise
    thread_count: int

    @property
    def phase(self) -> str:
        """The innermost phase, a name of PHASES; "" before the engine exists."""
        return self.activity.value.phase

    @property
    def phase_s(self) -> float:
        """Seconds in that phase so far."""
        return self.activity.value.phase_s

    @property
    def busiest(self) -> tuple[tuple[str, float], ...]:
        """What its threads are and the cores that they use, busiest first."""
        return self.activity.value.busiest

    @property
    def runnable_threads(self) -> float:
        """Threads that ran or waited for a core, on average."""
        return self.cores_used + (self.waiting_cores if self.waiting_cores > 0 else 0.0)  # NaN is not greater


@dataclass(frozen=True, slots=True)
class Host:
    """One node. Memory is the control group's where that has a limit below the host's memory."""

    name: str
    cores: int
    cores_used: float
    memory_limit_bytes: int
    memory_used_bytes: int
    swap_used_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Iterations:
    """The finished steps up to the cursor, oldest first; all arrays have shape (n,).

    ``phase_s`` has the seconds of each phase, in drawing order; "other" is the rest of ``iteration_s``. In counted steps
    they are NaN and all of the time is "unknown", which is only there if there are such steps.
    """

    step: NDArray[np.int64]
    begin_s: Floats  # unix time
    iteration_s: Floats
    phase_s: dict[str, Floats]  # data, forward, backward, step, other, unknown
    skipped: NDArray[np.bool_]
    rank: int | None = None  # on which rank; None: on the slowest one of each step


@dataclass(frozen=True, slots=True, eq=False)
class RankHistory:
    """One rank in each piece of a :class:`History`; all of shape (n,), NaN where nothing was recorded."""

    cores_used: Floats  # mean
    rss_bytes: Floats  # highest
    shared_bytes: Floats  # highest
    phase: tuple[str, ...]  # innermost phase for most of the piece; "" before its engine exists


@dataclass(frozen=True, slots=True, eq=False)
class GpuHistory:
    """One GPU in each piece of a :class:`History`; all of shape (n,), NaN where nothing was recorded."""

    utilization_percent: Floats  # mean
    used_bytes: Floats  # highest
    allocated_bytes: Floats  # highest sampled, summed over the ranks on it
    reserved_bytes: Floats  # likewise


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The time before the cursor in pieces of ``piece_s`` seconds, oldest first, without the piece in progress."""

    piece_s: float
    end_s: float  # unix time at which the last piece ends
    ranks: Mapping[int, RankHistory]  # by rank
    gpus: Mapping[GpuKey, GpuHistory]
    length: int = 1 << 30  # pieces since the recording began, or a few more: charts show no time before it


NO_HISTORY = History(0.5, 0.0, {}, {})


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of recording, measured by the probe and the reader on themselves."""

    probe_share: float  # of the time, 0 to 1; mean over ranks
    one_time_s: float  # on the slowest rank, for facts that are recorded once; NaN where it is part of the share
    lost_records: int
    errors: int
    records: int  # in the recording so far


@dataclass(frozen=True, slots=True)
class Inferred:
    """Iteration time inferred from samples, for jobs without a probe."""

    iteration_s: float
    confidence: float  # autocorrelation of the signals one iteration later, 0 to 1
    signals: tuple[str, ...]  # that show it: "cpu", "pcie", "utilization", "power"
    window_s: float  # length of the window before the cursor


@dataclass(frozen=True, slots=True)
class LastLoss:
    """The loss that was logged last."""

    value: float  # may be NaN
    step: int | None
    trend: tuple[float, ...]  # mean loss in equal parts of the training so far, oldest first; NaN without a finite one


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
    loss: LastLoss | None = None
    is_last_step: bool = False  # of a job that has ended since then

    @property
    def job_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs on which the job's ranks allocate or, where no rank reports, its processes hold memory."""
        with_ranks = tuple(gpu for gpu in self.gpus if gpu.ranks)
        return with_ranks or tuple(gpu for gpu in self.gpus if gpu.process_bytes)

    @property
    def ranks_on_gpu(self) -> float:
        """The mean number of ranks that share a GPU; 1 where none is known."""
        counts = [len(gpu.ranks) for gpu in self.gpus if gpu.ranks]
        return sum(counts) / len(counts) if counts else 1.0

    @property
    def cost_text(self) -> str:
        """The cost of the job from its launch to the cursor, as ``$1.42``; "" without a price."""
        return self.job.price.format_cost(self.progress.elapsed_s) if self.job.price is not None else ""

    @property
    def cost_sentence(self) -> str:
        """The same as a sentence."""
        has_ended = "The job cost" if self.job.state.is_over else "The job has cost"
        return f"{has_ended} {self.cost_text} at {self.job.price.text}." if self.job.price is not None else ""

"""A source for tests of the screens: views as a pure function of the cursor, from stories of a few numbers.

Test material only. The stories have the shape of real runs, so that pictures of them look like real ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from zerotop.analysis.engine import EngineSummary, parse_engine
from zerotop.analysis.findings import Finding
from zerotop.analysis.live_view import (
    Cost,
    Gpu,
    GpuHistory,
    History,
    Host,
    Iterations,
    Job,
    JobState,
    LiveView,
    Progress,
    Rank,
    RankHistory,
)
from zerotop.analysis.views.finding_search import SearchResult
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Ints, Rows
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop.recording.steps.step_table import RankSteps
from zerotop_probe.recording.events import EngineFacts

GIB = 1024**3
BEGIN_NS = 1_790_000_000 * 10**9
PIECE_NS, PIECES = 500_000_000, 60
PHASES = ("data", "forward", "backward", "step", "other")


@dataclass(frozen=True)
class Story:
    """One job. Times in seconds since its launch; ``step_s`` has the seconds of each phase for every step."""

    job: Job
    engine_s: float  # when the engine is there
    step_s: tuple[tuple[float, ...], ...]
    skipped: int  # so many first steps
    tokens: int  # a step, over all ranks
    gpus: int
    ranks: int
    cores: int
    host_gib: float
    model_gib: float  # of GPU memory a rank, or of host memory without GPUs
    total_steps: int | None
    exit_code: int | None = None  # how it ends after the last step; None: it goes on
    exit_text: str = ""
    output: tuple[str, ...] = ()
    hosts: int = 1
    pinned_gib: float = 0.0
    ends: bool = field(default=False)
    findings: tuple[Finding, ...] = ()

    @property
    def ends_s(self) -> float:
        """The end of the last step, in seconds since the launch."""
        return self.engine_s + sum(sum(step) for step in self.step_s)


def make_job(name: str, command: str, **facts: object) -> Job:
    """A job whose engine is there, unless the facts say otherwise."""
    usual: dict[str, object] = {
        "launcher": "deepspeed",
        "state": JobState.RUNNING,
        "exit_code": None,
        "exit_text": "",
        "model": "llama-8b",
        "parameters": 8_030_000_000,
        "zero_stage": 2,
        "offload_optimizer": "cpu",
        "offload_parameters": "none",
        "dtype": "fp16",
        "micro_batch": 2,
        "gradient_accumulation": 1,
        "ranks": 8,
        "notices": (),
    }
    return Job(name=name, command=tuple(command.split()), **{**usual, **facts})  # type: ignore[arg-type]


_LLAMA_COMMAND = "deepspeed --num_gpus 8 finetune.py --model llama-8b --deepspeed zero2_optimizer_cpu_fp16.json"
_SKIPPED_STEP, _FIRST_STEP, _STEP = (
    (0.004, 0.05, 0.86, 0.03, 0.01),
    (0.004, 0.05, 0.9, 6.1, 0.02),
    (0.004, 0.05, 0.88, 1.8, 0.02),
)


def _vary_step(step: tuple[float, ...], number: int) -> tuple[float, ...]:
    return tuple(seconds * (1 + 0.03 * math.sin(number * 2.3 + place)) for place, seconds in enumerate(step))


def offload_story(**changes: object) -> Story:
    """8 H200, 8 B parameters, ZeRO-2, optimizer on the CPU, fp16: six skipped steps, then the CPU's Adam."""
    steps = [_SKIPPED_STEP] * 6 + [_FIRST_STEP] + [_STEP] * 600
    return replace(
        Story(
            job=make_job("brisk-otter", _LLAMA_COMMAND),
            engine_s=38.0,
            step_s=tuple(_vary_step(step, number) for number, step in enumerate(steps)),
            skipped=6,
            tokens=8192,
            gpus=8,
            ranks=8,
            cores=64,
            host_gib=1900,
            model_gib=41,
            total_steps=616,
            pinned_gib=24.1,
        ),
        **changes,  # type: ignore[arg-type]
    )


def cpu_story(**changes: object) -> Story:
    """Two ranks of a tiny model on the CPU, which ends by itself."""
    steps = [(0.002, 0.09, 0.17, 0.05, 0.01)] * 40
    facts = {"model": "tiny", "parameters": 3_420_000, "dtype": "fp32", "micro_batch": 4, "ranks": 2}
    notice = "No NVIDIA driver on this machine: host memory and CPU are shown instead of GPUs."
    return replace(
        Story(
            job=make_job("calm-finch", "deepspeed finetune.py --model tiny --steps 40", notices=(notice,), **facts),
            engine_s=9.0,
            step_s=tuple(_vary_step(step, number) for number, step in enumerate(steps)),
            skipped=0,
            tokens=1024,
            gpus=0,
            ranks=2,
            cores=2,
            host_gib=15.6,
            model_gib=0.7,
            total_steps=40,
            exit_code=0,
            ends=True,
            exit_text="The job ended well after 40 steps.",
        ),
        **changes,  # type: ignore[arg-type]
    )


def killed_story() -> Story:
    """The same two ranks, ended by the kernel for want of memory."""
    text = (
        "Rank 1 was killed by the kernel for want of host memory (SIGKILL, 1 OOM kill in the job's control "
        "group) in step of step 11: 14.9 of 15.6 GiB were in use. Offload less to the host, or give the job "
        "more memory."
    )
    story = cpu_story()
    return replace(story, step_s=story.step_s[:12], exit_code=137, exit_text=text, model_gib=6.4)


def failed_story() -> Story:
    """A script that fails in its imports: no engine ever."""
    text = "The job failed after 3 s with exit code 1, before any engine was made: No module named 'x'."
    return replace(cpu_story(), engine_s=3.0, step_s=(), exit_code=1, exit_text=text)


def many_story(ranks: int = 64) -> Story:
    """Many ranks on several hosts."""
    facts = {"ranks": ranks, "micro_batch": 1}
    return offload_story(job=make_job("wide-heron", _LLAMA_COMMAND, **facts), gpus=ranks, ranks=ranks, hosts=ranks // 8)


class FakeSource(RecordingSource):
    """The recording of a story. ``now_s`` gives the seconds since the launch while the job is live."""

    begin_ns = BEGIN_NS

    def __init__(self, story: Story, now_s: Callable[[], float] | None = None) -> None:
        self.story = story
        self.now_s = now_s
        # An empty recording: a story has no tables for the screens that read them.
        self.recording = Recording(
            Path(os.devnull), {"boot": "boot", "clock": {"unix_ns": self.begin_ns, "monotonic_ns": 0}}
        )
        self.views = 0
        starts = np.cumsum([0.0, *(sum(step) for step in story.step_s)]) + story.engine_s
        self._begins, self._finished = starts[:-1], starts[1:]
        self._seen = -1.0
        self._told: dict[int, Iterations] = {}
        self._history: tuple[int, History] | None = None
        self._moments: dict[int, Moment] = {}

    @property
    def rank_steps(self) -> list[RankSteps]:
        return []

    @property
    def is_live(self) -> bool:
        return self.now_s is not None and not (self.story.ends and self.now_s() >= self.story.ends_s)

    @property
    def end_ns(self) -> int:
        end_s = self.story.ends_s if self.now_s is None else self.now_s()
        if self.story.ends:
            end_s = min(end_s, self.story.ends_s)
        return self.begin_ns + int(end_s * 1e9) + 2

    @property
    def first_step_ns(self) -> int:
        return self.begin_ns

    @property
    def job_steps(self) -> Rows:
        return np.empty(0, STEP_DTYPE)

    @property
    def job_tokens(self) -> Ints:
        return np.empty(0, np.int64)

    @property
    def last_step(self) -> int | None:
        return self._find_last_step(self.end_ns)

    def refresh(self) -> bool:
        if self.now_s is None:
            return False
        seen, self._seen = self._seen, self.now_s()
        return self._seen > seen

    def search_findings(self) -> SearchResult:
        return SearchResult(False, False)

    def findings_at(self, cursor_ns: int | None) -> tuple[Finding, ...]:
        cursor = self.end_ns if cursor_ns is None else cursor_ns
        return tuple(finding for finding in self.story.findings if finding.known_ns <= cursor)

    def output_lines(self, cursor_ns: int, most: int) -> tuple[str, ...]:
        return self._tell_story(cursor_ns).make_output(most)

    def reopen(self) -> FakeSource:
        return self

    def close(self) -> None:
        pass

    def find_step_end(self, step: int) -> int | None:
        last = self.last_step
        if last is None or step > last:
            return None
        return self.begin_ns + int(self._finished[step] * 1e9) + 1

    def _find_last_step(self, cursor_ns: int) -> int | None:
        done = int(np.searchsorted(self._finished, (cursor_ns - self.begin_ns) / 1e9, side="right"))
        return done - 1 if done else None

    def view_at(self, cursor_ns: int | None) -> LiveView:
        self.views += 1
        cursor = self.end_ns if cursor_ns is None else cursor_ns
        return replace(self._tell_story(cursor).make_view(self._told), history=self._history_at(cursor // PIECE_NS))

    def iterations_on(self, rank: int, view: LiveView) -> Iterations:
        return view.iterations  # all ranks are alike

    def _tell_story(self, cursor: int) -> Telling:
        return Telling(self.story, (cursor - self.begin_ns) / 1e9, cursor, self._begins, self._finished)

    def _history_at(self, end: int) -> History:
        """The moments in the middle of each of the last pieces; the same object until the next piece is over."""
        if self._history is None or self._history[0] != end:
            middles = (piece * PIECE_NS + PIECE_NS // 2 for piece in range(end - PIECES, end))
            told = [self._read_moment(middle) for middle in middles if middle > self.begin_ns]
            self._history = (end, History(PIECE_NS / 1e9, end * PIECE_NS / 1e9, _group_ranks(told), _group_gpus(told)))
        return self._history[1]

    def _read_moment(self, at_ns: int) -> Moment:
        if at_ns not in self._moments:
            self._moments[at_ns] = self._tell_story(at_ns).make_moment()
        return self._moments[at_ns]


Moment = tuple[tuple[Rank, ...], tuple[Gpu, ...]]


def _make_column(items: Sequence[object], name: str) -> np.ndarray:
    values = [getattr(item, name) for item in items]
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _group_ranks(told: list[Moment]) -> dict[int, RankHistory]:
    by_rank: dict[int, list[Rank]] = {}
    for rank in (rank for ranks, _ in told for rank in ranks):
        by_rank.setdefault(rank.rank, []).append(rank)
    return {
        number: RankHistory(
            cores_used=_make_column(items, "cores_used"),
            rss_bytes=_make_column(items, "rss_bytes"),
            shared_bytes=_make_column(items, "shared_bytes"),
            phase=tuple(rank.phase for rank in items),
        )
        for number, items in sorted(by_rank.items())
    }


def _group_gpus(told: list[Moment]) -> dict[tuple[str, int], GpuHistory]:
    names = ("utilization_percent", "used_bytes", "allocated_bytes", "reserved_bytes")
    by_gpu: dict[tuple[str, int], list[Gpu]] = {}
    for gpu in (gpu for _, gpus in told for gpu in gpus):
        by_gpu.setdefault((gpu.host, gpu.index), []).append(gpu)
    return {key: GpuHistory(*(_make_column(items, name) for name in names)) for key, items in sorted(by_gpu.items())}


class Telling:
    """A story at one moment."""

    def __init__(self, story: Story, at_s: float, cursor: int, begins: np.ndarray, finished: np.ndarray) -> None:
        self.story, self.at, self.cursor = story, at_s, cursor
        self.begins, self.finished = begins, finished
        self.done = int(np.searchsorted(finished, at_s, side="right"))
        self.over = story.ends and at_s >= story.ends_s - 1e-6
        self.started = at_s >= story.engine_s and len(story.step_s) > 0

    def make_view(self, known: dict[int, Iterations]) -> LiveView:
        """The view; ``known`` keeps iterations by the number of finished steps, to hand them out again."""
        if self.done not in known:
            known[self.done] = self.make_iterations()
        return LiveView(
            cursor_ns=self.cursor,
            job=self.make_job(),
            progress=self.make_progress(),
            gpus=self.make_moment()[1],
            hosts=self.make_hosts(),
            ranks=self.make_moment()[0],
            iterations=known[self.done],
            cost=self.make_cost(),
            output=self.make_output(),
        )

    def make_moment(self) -> Moment:
        """The ranks and the GPUs."""
        ranks = tuple(self.make_rank(number) for number in range(self.story.ranks)) if self.at > 2 else ()
        return ranks, tuple(self.make_gpu(number) for number in range(self.story.gpus))

    def make_job(self) -> Job:
        job = self.story.job
        if not self.started:
            facts = asdict(EngineSummary(**parse_engine(EngineFacts({}))))
            job = replace(job, **facts, state=JobState.STARTING, exit_text="Waiting for the training to begin.")
        if self.over:
            job = replace(job, state=JobState.ENDED, exit_code=self.story.exit_code, exit_text=self.story.exit_text)
        return job

    def make_progress(self) -> Progress:
        recent = [sum(step) for step in self.story.step_s[max(0, self.done - 10) : self.done]]
        iteration = sum(recent) / len(recent) if recent else math.nan
        total = self.story.total_steps
        return Progress(
            step=self.done - 1 if self.done else None,
            total_steps=total if self.started else None,
            skipped_steps=min(self.done, self.story.skipped),
            iteration_s=iteration,
            tokens_per_s=self.story.tokens / iteration if recent else math.nan,
            eta_s=(total - self.done) * iteration if total and recent else math.nan,
            elapsed_s=self.at,
        )

    def find_phase(self) -> tuple[str, float, bool]:
        """(phase, since, whether the optimizer really works)."""
        if not self.started:
            return "", self.at, False
        if self.done >= len(self.begins):
            return "other", 0.0, False
        since = self.at - self.begins[self.done]
        for name, seconds in zip(PHASES, self.story.step_s[self.done], strict=True):
            if since < seconds:
                return name, since, name == "step" and self.done >= self.story.skipped
            since -= seconds
        return "other", since, False

    def compute_wave(self, number: int, width: float = 1.0) -> float:
        return width * math.sin(self.at * 1.7 + number * 1.3)

    def make_gpu(self, number: int) -> Gpu:
        phase, _, adam = self.find_phase()
        share = {"forward": 0.75, "backward": 0.92}.get(phase, 0.55) if self.started else 0.02
        allocated = int(GIB * (self.story.model_gib * share + self.compute_wave(number, 0.3) * self.started + 0.4))
        reserved = int(GIB * (self.story.model_gib * 1.12 + 0.5) * (1 if self.started else 0.05))
        working = phase in ("forward", "backward")
        other = 3.1 if number else 4.6
        return Gpu(
            host=f"node{number // 8 + 1}",
            index=number % 8,
            name="NVIDIA H200",
            total_bytes=int(139.8 * GIB),
            used_bytes=reserved + int(GIB * other),
            allocated_bytes=allocated if self.started else None,
            allocated_peak_bytes=int(GIB * (self.story.model_gib * 0.92 + 1.0)) if self.started else None,
            reserved_bytes=reserved if self.started else None,
            reserved_peak_bytes=reserved + int(GIB * 5.5) if self.started else None,
            process_bytes=reserved + int(GIB * (other - 0.6)),
            pcie_tx_bytes_per_s=(21e9 if adam else 4e8) * (1 + self.compute_wave(number, 0.1)),
            pcie_rx_bytes_per_s=(12e9 if adam else 2e8) * (1 + self.compute_wave(number, 0.1)),
            sample={
                "utilization_percent": max(0.0, min(100.0, (97 if working else 0) + self.compute_wave(number, 3.0))),
                "power_w": (560 if working else 128) + self.compute_wave(number, 20.0),
                "temperature_c": 52 + self.compute_wave(number, 4.0),
            },
        )

    def make_hosts(self) -> tuple[Host, ...]:
        used = sum(self.cores_of(number) for number in range(self.story.ranks)) / self.story.hosts
        return tuple(
            Host(
                name=f"node{number + 1}",
                cores=self.story.cores,
                cores_used=min(float(self.story.cores), used + 0.4),
                memory_limit_bytes=int(self.story.host_gib * GIB),
                memory_used_bytes=int(self.story.host_gib * GIB * 0.31 + self.story.model_gib * GIB * 0.1),
                swap_used_bytes=0,
            )
            for number in range(self.story.hosts)
        )

    def cores_of(self, number: int) -> float:
        _, _, adam = self.find_phase()
        fair = self.story.cores / self.story.ranks * self.story.hosts
        return max(0.0, fair * 0.985 if adam else min(1.0, fair) + self.compute_wave(number, 0.05))

    def make_rank(self, number: int) -> Rank:
        phase, since, adam = self.find_phase()
        used = 0.0 if self.over else self.cores_of(number)
        offloaded = self.story.gpus > 0
        resident = int(GIB * (61.2 if offloaded else self.story.model_gib + self.compute_wave(number, 0.02)))
        return Rank(
            rank=number,
            host=f"node{number // 8 + 1}",
            pid=4200 + number,
            alive=not self.over,
            phase="cpu_optimizer" if adam and since > 0.2 else phase,
            phase_s=since,
            step=self.done - 1 if self.done else None,
            rss_bytes=resident + number * GIB // 50,
            rss_peak_bytes=int(resident * 1.08),
            shared_bytes=int(resident * 0.3),
            pinned_bytes=int(GIB * self.story.pinned_gib),
            cores_used=used,
            waiting_cores=abs(self.compute_wave(number, 0.4)),
            thread_count=207 if offloaded else 41,
            busiest=(
                ("pt_main_thread", min(1.0, used)),
                ("omp_worker-3", min(1.0, used) * 0.97),
                ("nccl-watchdog", 0.02),
            ),
        )

    def make_iterations(self) -> Iterations:
        seconds = np.array(self.story.step_s[: self.done], dtype=np.float64).reshape(-1, len(PHASES))
        return Iterations(
            step=np.arange(self.done, dtype=np.int64),
            begin_s=self.begins[: self.done] + BEGIN_NS / 1e9,
            iteration_s=seconds.sum(axis=1),
            phase_s={name: seconds[:, place] for place, name in enumerate(PHASES)},
            skipped=np.arange(self.done) < self.story.skipped,
        )

    def make_cost(self) -> Cost:
        records = int(self.at * 30 * (self.story.ranks + self.story.gpus))
        return Cost(
            probe_share=61.4e-6 / sum(self.story.step_s[self.done - 1]) if self.done else math.nan,
            one_time_s=math.nan,
            lost_records=0,
            errors=0,
            records=records,
        )

    def make_output(self, most: int = 200) -> tuple[str, ...]:
        """The last lines."""
        if self.story.output:
            return self.story.output[-most:]
        lines = [
            "[INFO] [config.py:722] Using DeepSpeed ZeRO-2 with optimizer offload",
            "Loading checkpoint shards: 100%",
        ]
        if self.started:
            lines.append(f"***** Running training *****  Num batches each epoch = {self.story.total_steps}")
        lines += [
            f"{{'loss': {11.92 - 0.03 * step:.2f}, 'grad_norm': {3.1 + 0.1 * math.sin(step):.3f}, "
            f"'learning_rate': 1e-05, 'epoch': {step / 616:.2f}}}"
            for step in range(self.done)
        ]
        return tuple(lines[-most:])

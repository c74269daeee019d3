"""A recording summarized for a list entry: setup, result, pace and peak memory, computed from a small part of the files."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from zerotop.analysis.engine import EngineSummary, measure_batch, parse_engine, read_first_engine
from zerotop.analysis.live_view import Floats
from zerotop.analysis.steps.job_pace import measure_iteration
from zerotop.analysis.views.job_exit import is_left_running, read_ending
from zerotop.recording.events.event_files import E
from zerotop.recording.moments.devices import locate_allocators
from zerotop.recording.moments.process_exits import find_end_signal
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Rows
from zerotop.recording.steps.missing_steps import find_recorded
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop.recording.steps.step_table import StepTable
from zerotop_probe.recording import events

PIECES = 96
"""The maximum number of values in a sparkline."""

DETACHED = "detached"
_NUMBERS = ("seconds", "iteration_s", "worst_share", "lost_s", "gpu_s", "idle_gpu_s")  # NaN where unknown
_TUPLES = ("command", "iterations", "findings")
OUT_OF_GPU_MEMORY, OUT_OF_HOST_MEMORY = "OOM (GPU)", "OOM (host)"


@dataclass(frozen=True, slots=True)
class Overview(EngineSummary):
    """The summary of a recording and its engine. Times are seconds unless named ``_ns``; None and NaN: not recorded."""

    name: str
    command: tuple[str, ...] = ()
    working_directory: str = ""  # of the command
    begin_ns: int = 0
    seconds: float = math.nan  # from launch to the job's end, or to the last record
    over: bool = False  # the job's end was recorded
    exit_code: int | None = None
    end: str = ""  # a sentence about how the job ended
    why: str = ""  # the cause of a failure in a few words; DETACHED if the job outlived the recording
    problem: str = ""  # a sentence: why the recording cannot be read
    gpus: int = 0  # on which ranks allocated, on all nodes; 0 if that is unknown
    steps: int = 0  # finished optimizer steps, including those before an attach or a restart from a checkpoint
    total_steps: int | None = None
    iteration_s: float = math.nan  # median, without skipped steps
    iterations: tuple[float, ...] = ()  # seconds, oldest first; the longest of each of at most ``PIECES`` pieces
    peak_bytes: int | None = None  # the highest reserved memory of any rank, or without GPUs the highest RSS
    peak_on_host: bool = False
    lost_records: int = 0
    lost_output_bytes: int = 0
    worst: str | None = None  # headline of the finding that costs most; "" without one, None before it was searched
    worst_name: str = ""  # the name of that finding
    worst_share: float = math.nan  # of the training time that it costs; NaN where it costs none
    # As ``worst``, these are unknown before findings were searched.
    lost_s: float = math.nan  # training time that it costs; NaN as above
    findings: tuple[str, ...] = ()  # names of the errors and warnings, a name for each occurrence
    gpu_s: float = math.nan  # seconds of all GPUs on which ranks allocated, from launch to end
    idle_gpu_s: float = math.nan  # of them, without a kernel

    @property
    def end_ns(self) -> int:
        """When the recording ends or was last written."""
        return self.begin_ns + (0 if math.isnan(self.seconds) else round(self.seconds * 1e9))

    def as_json(self) -> dict[str, Any]:
        """Return plain values; NaN becomes None."""
        return {name: _to_plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Overview:
        """Rebuild an overview from :meth:`as_json`. Raises TypeError for other fields."""
        if set(values) != {field.name for field in fields(cls)}:
            raise TypeError("the fields differ")
        times = {name: math.nan if values[name] is None else float(values[name]) for name in _NUMBERS}
        tuples = {name: tuple(values[name]) for name in _TUPLES}
        return cls(**{**values, **times, **tuples})


def _to_plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else list(value) if isinstance(value, tuple) else value


def build_overview(recording: Recording) -> Overview:
    """Summarize a recording; the part that ``recording.quick_read`` opens is enough."""
    rows = _read_steps(recording)
    seconds = rows["iteration_s"][find_recorded(rows)]
    peak, on_host = _find_peak(recording)
    command = recording.info.get("command")
    end = read_ending(recording)
    engine, planned = read_first_engine(recording.at()), _find_last(recording, events.TotalSteps)
    return Overview(
        name=recording.name,
        command=tuple(map(str, command)) if isinstance(command, list) else (),
        working_directory=recording.info.get("working_directory") or "",
        begin_ns=recording.begin_ns,
        seconds=max(0, _find_end(recording) - recording.begin_ns) / 1e9,
        over=recording.is_over,
        exit_code=end.exit_code,
        end=end.text,
        why=_describe_failure(recording, end.exit_code),
        **parse_engine(engine) | measure_batch(engine, rows) | {"ranks": engine.world_size or _count_found_ranks(recording)},
        gpus=len(set(locate_allocators(recording.at()).values())),
        steps=int(rows["step"][np.lexsort((rows["step"], rows["end_unix_ns"]))[-1]]) + 1 if len(rows) else 0,
        total_steps=planned.steps if planned is not None else None,
        iteration_s=measure_iteration(rows),
        iterations=tuple(round(float(value), 6) for value in resample_longest(seconds, PIECES)),
        peak_bytes=peak,
        peak_on_host=on_host,
        lost_records=end.lost_records,
        lost_output_bytes=end.lost_output_bytes,
    )


def _read_steps(recording: Recording) -> Rows:
    """Return the steps of all processes of the lowest rank."""
    table = StepTable(recording, memory=False)
    table.update()
    lowest = min((process.source.rank for process in table.rank_steps), default=0)
    parts = [process.step_rows for process in table.rank_steps if process.source.rank == lowest]
    return np.concatenate([np.empty(0, STEP_DTYPE), *parts])


def resample_longest(values: Floats, pieces: int) -> Floats:
    """Return the maximum of each of at most ``pieces`` equal pieces, so that no spike is lost."""
    if len(values) <= pieces:
        return values
    begins = np.linspace(0, len(values), pieces, endpoint=False).astype(int)
    highest: Floats = np.maximum.reduceat(values, begins)
    return highest


def _find_peak(recording: Recording) -> tuple[int | None, bool]:
    """Return the highest memory of any rank (None: not recorded), and whether it is host memory."""
    tables = (*recording.sources["allocator"], *recording.sources["folded"])
    reserved = [int(source.array["reserved_peak_bytes"].max()) for source in tables if len(source.array)]
    recording.release_memory()
    if max(reserved, default=0) > 0:
        return max(reserved), False
    samples = [source.array for source in recording.sources["processes"]]
    resident = [int(rows["rss_bytes"][rows["rank"] >= 0].max(initial=0)) for rows in samples]
    return (max(resident), True) if max(resident, default=0) > 0 else (None, False)


def _count_found_ranks(recording: Recording) -> int | None:
    """Return how many ranks the sampler found, which is all that is known before there is an engine."""
    return len({event.rank for event in recording.events_of(events.RankFound)}) or None


def _find_end(recording: Recording) -> int:
    ended = recording.events_of(events.JobEnded)
    return ended[-1].unix_ns if ended else recording.last_written_ns


def _describe_failure(recording: Recording, exit_code: int | None) -> str:
    """Return the cause of a failure in two or three words, or DETACHED; "" after success."""
    end = _find_last(recording, events.JobEnded)
    if end is None:
        return DETACHED if is_left_running(recording.at()) else ""
    if exit_code == 0:
        return ""
    if recording.events_of(events.OutOfMemory):
        return OUT_OF_GPU_MEMORY
    if end.oom_kills:
        return OUT_OF_HOST_MEMORY
    if recording.events_of(events.StopSent):
        return "stopped"
    return find_end_signal(recording.at())


def _find_last(recording: Recording, kind: type[E]) -> E | None:
    matches = recording.events_of(kind)
    return matches[-1] if matches else None

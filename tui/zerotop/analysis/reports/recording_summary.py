"""A recording in one line: what was trained, how it ended, how fast it was, what it held. Computed from little of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from zerotop.analysis.live_view import Floats
from zerotop.analysis.steps.step_table import STEP_DTYPE, StepTable
from zerotop.analysis.views.job_exit import is_left_running, read_ending
from zerotop.session.reader import Session
from zerotop.session.samples import Rows
from zerotop_probe.recording import events

PIECES = 96
"""The most values of a sparkline."""

DETACHED = "detached"


@dataclass(frozen=True, slots=True)
class Overview:
    """One recording. Bytes and nanoseconds are integers, other times are seconds; None and NaN: not recorded.

    ``iterations`` are seconds of all iterations, oldest first, in at most ``PIECES`` pieces: of each piece the longest.
    """

    name: str
    command: tuple[str, ...] = ()
    begin_ns: int = 0
    seconds: float = math.nan  # from launch to the job's end, or to the last that was recorded
    over: bool = False  # the job's end was recorded
    exit_code: int | None = None
    end: str = ""  # a sentence about how it ended
    why: str = ""  # of a job that failed: a few words; DETACHED of one that went on
    problem: str = ""  # a sentence: why it cannot be read
    model: str = ""
    parameters: int | None = None
    zero_stage: int | None = None
    offload_optimizer: str = "none"
    offload_parameters: str = "none"
    dtype: str = ""
    ranks: int | None = None
    gpus: int = 0  # of all its nodes
    steps: int = 0  # that the job has finished, those before it was attached to, or started again from a checkpoint, too
    total_steps: int | None = None
    iteration_s: float = math.nan  # median
    iterations: tuple[float, ...] = ()
    peak_bytes: int | None = None  # the most that a rank's allocator held, or without GPUs a rank of host memory
    peak_on_host: bool = False
    lost_records: int = 0
    lost_output_bytes: int = 0

    @property
    def end_ns(self) -> int:
        """When it ends, or was last written."""
        return self.begin_ns + (0 if math.isnan(self.seconds) else round(self.seconds * 1e9))

    def as_json(self) -> dict[str, Any]:
        """Plain values; NaN is None."""
        return {name: _to_plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Overview:
        """What ``as_json`` gave. Raises TypeError where it is something else."""
        if set(values) != {field.name for field in fields(cls)}:
            raise TypeError("there are other columns")
        times = {name: math.nan if values[name] is None else float(values[name]) for name in ("seconds", "iteration_s")}
        tuples = {name: tuple(values[name]) for name in ("command", "iterations")}
        return cls(**{**values, **times, **tuples})


def _to_plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else list(value) if isinstance(value, tuple) else value


def build_overview(session: Session) -> Overview:
    """Of a session of which there need not be more than ``session.quick_read`` opens."""
    rows = _read_steps(session)
    peak, on_host = _find_peak(session)
    command = session.info.get("command")
    end = read_ending(session)
    return Overview(
        name=session.name,
        command=tuple(map(str, command)) if isinstance(command, list) else (),
        begin_ns=session.begin_ns,
        seconds=max(0, _find_end(session) - session.begin_ns) / 1e9,
        over=session.is_over,
        exit_code=end.exit_code,
        end=end.text,
        why=_describe_failure(session, end.exit_code),
        **_read_engine(session),
        gpus=_count_gpus(session),
        steps=int(rows["step"][np.argmax(rows["end_unix_ns"])]) + 1 if len(rows) else 0,
        total_steps=_to_int(_find_last(session, events.TOTAL_STEPS).get("steps")),
        iteration_s=float(np.median(rows["iteration_s"])) if len(rows) else math.nan,
        iterations=tuple(round(float(value), 6) for value in resample_longest(rows["iteration_s"], PIECES)),
        peak_bytes=peak,
        peak_on_host=on_host,
        lost_records=end.lost_records,
        lost_output_bytes=end.lost_output_bytes,
    )


def _read_steps(session: Session) -> Rows:
    """The steps of the lowest rank, of all its processes."""
    table = StepTable(session, memory=False)
    table.update()
    lowest = min((process.source.rank for process in table.rank_steps), default=0)
    found = [process.step_rows for process in table.rank_steps if process.source.rank == lowest]
    return np.concatenate([np.empty(0, STEP_DTYPE), *found])


def resample_longest(values: Floats, pieces: int) -> Floats:
    """The highest of each of at most so many pieces: no spike is lost."""
    if len(values) <= pieces:
        return values
    begins = np.linspace(0, len(values), pieces, endpoint=False).astype(int)
    highest: Floats = np.maximum.reduceat(values, begins)
    return highest


def _find_peak(session: Session) -> tuple[int | None, bool]:
    """(the most that any rank held, whether that is host memory); None where nothing was recorded."""
    held = [int(source.array["reserved_peak_bytes"].max()) for source in session.sources["allocator"] if len(source.array)]
    session.release_memory()
    if max(held, default=0) > 0:
        return max(held), False
    samples = [source.array for source in session.sources["processes"]]
    resident = [int(rows["rss_bytes"][rows["rank"] >= 0].max(initial=0)) for rows in samples]
    return (max(resident), True) if max(resident, default=0) > 0 else (None, False)


def _read_engine(session: Session) -> dict[str, Any]:
    """What the lowest rank's first engine is."""
    engines = [event for event in session.events_named(events.ENGINE) if not event.facts.get("engine")]
    facts = min(engines, key=lambda event: event.rank).facts if engines else {}
    texts = {name: str(facts.get(name) or "") for name in ("model", "dtype")}
    places = {name: str(facts.get(name) or "none") for name in ("offload_optimizer", "offload_parameters")}
    numbers = {name: _to_int(facts.get(name)) for name in ("parameters", "zero_stage")}
    return {**texts, **places, **numbers, "ranks": _count_ranks(session, facts)}


def _count_ranks(session: Session, engine: Mapping[str, Any]) -> int | None:
    """The world's size; before there is an engine, how many processes of ranks were found."""
    found = {event.facts.get("rank") for event in session.events_named(events.RANK_FOUND)}
    return _to_int(engine.get("world_size")) or len(found) or None


def _count_gpus(session: Session) -> int:
    """Of all nodes, those that are not the job's too."""
    by_host = {event.host: event.facts.get("gpus") or () for event in session.events_named(events.NODE)}
    return sum(map(len, by_host.values()))


def _find_end(session: Session) -> int:
    ended = session.events_named(events.JOB_ENDED)
    return ended[-1].unix_ns if ended else session.last_written_ns


def _describe_failure(session: Session, exit_code: int | None) -> str:
    """What ended a job that did not end well, in two or three words, or a recording before its job."""
    end = _find_last(session, events.JOB_ENDED)
    if not end:
        return DETACHED if is_left_running(session) else ""
    if exit_code == 0:
        return ""
    if session.events_named(events.OUT_OF_MEMORY):
        return "GPU memory"
    if end.get("oom_kills"):
        return "host memory"
    if session.events_named(events.STOP_SENT):
        return "stopped"
    return str(end.get("signal") or "")


def _find_last(session: Session, name: str) -> Mapping[str, Any]:
    found = session.events_named(name)
    return found[-1].facts if found else {}


def _to_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None

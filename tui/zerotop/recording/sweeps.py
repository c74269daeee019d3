"""A sweep's folder: one job for each combination of settings, and its measurements.

::

    SWEEP/sweep.json        the plan and the results so far, rewritten after each point
    SWEEP/results.csv       the results as a table, one row a point
    SWEEP/results.parquet   the same, with types
    SWEEP/points/0007       the recording of point 7; of repeated attempts 0007-2, 0007-3, ...
    SWEEP/configs/0007.json the DeepSpeed configuration of point 7

Columns of the table, in order: ``point`` (its number from 0), one for each setting of the plan (``stage``,
``seq_length``, ..., and the user's own), then the fields of :class:`Result`, then ``cost`` if the plan has a price. A
point that has not run yet has no row. Sizes are bytes, times seconds; missing measurements are empty.

:func:`read_sweep` reads a folder, :func:`write_sweep` writes one, :func:`build_table` returns the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotop.recording.atomic_write import write_atomically, write_text_file
from zerotop.recording.headers import RecordingError
from zerotop.recording.packed.packing import SUFFIX
from zerotop.recording.spreadsheet import escape_formula
from zerotop_probe.recording.directory import SESSION_FILE, find_default_root

if TYPE_CHECKING:
    import polars

SWEEP_FILE = "sweep.json"
RESULTS_STEM = "results"
POINTS_FOLDER = "points"
CONFIGS_FOLDER = "configs"

FORMAT = 1

OK, OUT_OF_MEMORY, HUNG, CRASHED, SKIPPED = "ok", "out_of_memory", "hung", "crashed", "skipped"
"""Outcomes. A point is skipped if its combination of settings is impossible."""

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one point. None: not measured."""

    outcome: str  # OK, OUT_OF_MEMORY, HUNG, CRASHED or SKIPPED
    reason: str = ""  # a sentence: why it failed or was skipped
    recording: str = ""  # of the last attempt, relative to the sweep's folder
    attempts: int = 0
    seconds: float | None = None  # of all attempts together, start and end of the job included
    machine_share: float = 1.0  # of the machine's GPUs, that it kept from other points
    steps: int | None = None  # measured optimizer steps, without the warm-up
    micro_batch_tokens: int | None = None  # of one rank
    allocated_peak_bytes: int | None = None  # of PyTorch's allocator, on the fullest GPU, in all steps
    reserved_peak_bytes: int | None = None
    nvml_peak_bytes: int | None = None  # of a rank's process, by NVML
    host_peak_bytes: int | None = None  # RSS of all ranks of a node together
    step_cores: float | None = None  # cores that all ranks of a node use in the optimizer's step()
    iterations_per_s: float | None = None
    tokens_per_s: float | None = None  # of all ranks together
    expected_allocated_bytes: int | None = None  # by the estimate that was kept at the launch
    expected_reserved_bytes: int | None = None
    needed_bytes: int | None = None  # allocated and requested on the GPU when memory ran out: the point needs more than that
    unusable_bytes: int | None = None  # reserved by PyTorch then, but in blocks too small for the request
    slowest_per_s: float | None = None  # iterations per second at the pace of the slowest measured one
    fastest_per_s: float | None = None  # likewise of the fastest one

    @property
    def machine_seconds(self) -> float:
        """Seconds of the whole machine, to which prices refer."""
        return (self.seconds or 0.0) * self.machine_share


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of settings. ``result`` is None until it has run."""

    number: int
    settings: Mapping[str, Value]
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class PointAttempt:
    """An attempt that runs now."""

    point: int
    number: int  # from 1
    recording: Path
    begun_s: float  # time.time()
    is_compiling: bool = False  # DeepSpeed's operators, before it trains


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings and command of a sweep; an interrupted sweep continues with it."""

    settings: Mapping[str, Sequence[Value]]  # all values of each setting, in the order of the table's columns
    command: Sequence[str] = ()  # of the user, with {placeholders}; empty for the demo's training script
    model: str = ""  # preset, folder or hub id; "" for a command
    config: Mapping[str, Any] = field(default_factory=dict)  # DeepSpeed's configuration, before the settings; may be empty
    dtype: str = "bf16"
    steps: int = 8  # optimizer steps of each point; a command takes them from {steps}
    warmup: int = 3  # steps at the begin that are not measured
    retries: int = 5  # further attempts after a crash
    hang_after_s: float = 300.0  # without a sign of life
    nvme_path: str = ""  # folder to offload to
    price_per_hour: float | None = None  # of the whole machine
    currency: Sequence[str] = ("", "")  # text before and after an amount
    working_directory: str = ""

    @property
    def varied(self) -> list[str]:
        """The settings with more than one value."""
        return [name for name, values in self.settings.items() if len(values) > 1]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep's plan and points, in order."""

    path: Path
    plan: Plan
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def finished(self) -> list[Point]:
        """The points with a result, skipped ones included."""
        return [point for point in self.points if point.result is not None]

    def with_result(self, number: int, result: Result) -> Sweep:
        """Return the sweep with a point's result."""
        points = (replace(point, result=result) if point.number == number else point for point in self.points)
        return replace(self, points=tuple(points))


RESULT_COLUMNS = tuple(one.name for one in fields(Result))
_RESERVED = ("point", *RESULT_COLUMNS, "cost")


def is_reserved(name: str) -> bool:
    """Return whether a setting cannot have this name, since a column of the results has it."""
    return name in _RESERVED


def find_default_folder() -> Path:
    """Return the folder of the user's sweeps."""
    return Path(find_default_root()).with_name("sweeps")


def is_sweep(path: Path) -> bool:
    """Return whether a folder holds a sweep."""
    return (path / SWEEP_FILE).is_file()


def list_sweeps(folder: Path) -> list[Sweep]:
    """Return the sweeps in a folder that can be read, the newest first."""
    read = []
    for path in sorted(filter(is_sweep, folder.glob("*")), reverse=True):
        with suppress(RecordingError):
            read.append(read_sweep(path))
    return read


def find_sweep(text: str) -> Path | None:
    """Return the sweep with this path or name; None if there is none."""
    return next((path for path in (Path(text), find_default_folder() / text) if text and is_sweep(path)), None)


def find_point_recording(folder: Path, result: Result | None) -> Path | None:
    """Return the recording of a result, as a folder or packed; None if it has none or it was deleted."""
    if result is None or not result.recording:
        return None
    path = folder / result.recording
    candidates = (path, path.with_name(f"{path.name}{SUFFIX}"))
    return next((one for one in candidates if (one / SESSION_FILE).is_file() or one.is_file()), None)


def read_sweep(path: Path) -> Sweep:
    """Read a sweep's folder. Raises RecordingError, with a sentence, if it holds none that can be read."""
    try:
        content = json.loads((path / SWEEP_FILE).read_text(encoding="utf-8"))
        if content["format"] > FORMAT:
            raise RecordingError(f"{path} was written by a newer zerotop: update zerotop to read it.")
        lists = {name: tuple(content["plan"][name]) for name in ("command", "currency") if name in content["plan"]}
        plan = Plan(**content["plan"] | lists)
        points = [
            Point(number, one["settings"], Result(**one["result"]) if one["result"] else None)
            for number, one in enumerate(content["points"])
        ]
    except OSError as error:
        raise RecordingError(f"{path} cannot be read as a sweep: {error.strerror}.") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RecordingError(f"{path / SWEEP_FILE} is damaged: {error}.") from error
    return Sweep(path, plan, tuple(points))


def write_sweep(sweep: Sweep) -> None:
    """Write plan, results and tables, each file completely or not at all. Raises OSError."""
    entries = [
        {"settings": dict(point.settings), "result": asdict(point.result) if point.result else None}
        for point in sweep.points
    ]
    content = {"format": FORMAT, "plan": asdict(sweep.plan), "points": entries}
    write_text_file(sweep.path / SWEEP_FILE, json.dumps(content, indent=1) + "\n")
    import polars  # slow to import

    table = build_table(sweep)
    with write_atomically(sweep.path / f"{RESULTS_STEM}.csv") as partial, partial.open("xb") as stream:
        texts = polars.col(polars.String).map_elements(escape_formula, return_dtype=polars.String)
        table.with_columns(texts).write_csv(stream)
    with write_atomically(sweep.path / f"{RESULTS_STEM}.parquet") as partial, partial.open("xb") as stream:
        table.write_parquet(stream)


def build_table(sweep: Sweep) -> polars.DataFrame:
    """Return the results as a table, see the module's docstring."""
    import polars  # slow to import

    rows = [(point, point.result) for point in sweep.points if point.result is not None]
    columns: dict[str, Any] = {"point": [point.number for point, _ in rows]}
    for name, values in sweep.plan.settings.items():
        column = [point.settings.get(name) for point, _ in rows]
        is_mixed = len({type(value) for value in values}) > 1
        columns[name] = [None if value is None else str(value) for value in column] if is_mixed else column
    columns |= {name: [getattr(result, name) for _, result in rows] for name in RESULT_COLUMNS}
    if sweep.plan.price_per_hour is not None:
        columns["cost"] = [result.machine_seconds / 3600 * sweep.plan.price_per_hour for _, result in rows]
    types = {int: polars.Int64, float: polars.Float64, str: polars.String}
    overrides = {one.name: types[_COLUMN_TYPES[str(one.type)]] for one in fields(Result)}
    return polars.DataFrame(columns, schema_overrides=overrides)


_COLUMN_TYPES = {"str": str, "int": int, "int | None": int, "float": float, "float | None": float}

"""Changes of pace that are simulated in real recordings: how many clean ones are warned of, and how many changes are found.

    python benchmarks/faults/simulated_pace.py [--bases FILE ...] [--draws 20] [--seed 1]

Time is stretched step by step: each step of a recording without a fault takes a drawn multiple of what it took, and the
records of all tables are moved with it. Clean series wander (AR(1), 1/f), jump between two levels, warm up, or have single
slow steps; faulty ones have a change of 5 to 100 % from a step on, or two steps that take 500 times as long. Each is drawn
for the launch-bound job as recorded, and for one that keeps its GPU busy: its steps are even, and so is the GPU's use.

Prints a table for each kind. A change is found if a finding about pace begins within ten steps of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop.recording.packed.packing import unpack_files
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_rank_steps

Floats = NDArray[np.float64]

RECORDINGS = Path(__file__).parents[2] / "tests" / "recordings"
_BASES = [RECORDINGS / f"{name}.zerotop" for name in ("hand-clean0", "hand-clean2")]
_SPARED_STEPS = 60  # after the begin and before the end
_NEAR_STEPS = 10
_BUSY_PERCENT = 99.0
# Findings about the pace of a job.
_PACE = ("iteration_shift", "iteration_drift", "long_pause", "repeated_pause", "time_lost_in_line", "time_between_phases")
_TIMES = ("time_ns", "begin_ns", "end_ns", "busy_ns")


def make_clean(kind: str, count: int, chance: np.random.Generator) -> Floats:
    """Return the factor of each step of a job without a fault."""
    noise = 1 + 0.02 * chance.standard_normal(count)
    if kind == "AR(1)":
        series = np.zeros(count)
        for step in range(1, count):
            series[step] = 0.97 * series[step - 1] + 0.03 * chance.standard_normal()
        return noise * np.exp(series)
    if kind == "1/f":
        spectrum = chance.standard_normal(count // 2 + 1) + 1j * chance.standard_normal(count // 2 + 1)
        spectrum[1:] /= np.sqrt(np.arange(1, len(spectrum)))
        series = np.fft.irfft(spectrum, count)
        return noise * np.exp(0.1 * series / series.std())
    if kind == "two levels":
        runs = np.repeat(chance.random(count) < 0.5, chance.integers(5, 60, count))[:count]
        return noise * np.where(runs, 1.3, 1.0)
    if kind == "warm-up":
        return noise * (1 + 2 * np.exp(-np.arange(count) / chance.uniform(5, 30)))
    if kind == "slow steps":
        return noise * np.where(chance.random(count) < 0.03, chance.uniform(2, 8, count), 1.0)
    return noise


CLEAN = ("as recorded", "noise", "AR(1)", "1/f", "two levels", "warm-up", "slow steps")
SHIFTS = (1.05, 1.1, 1.2, 1.5, 2.0)
FAULTS = (*(f"+{share - 1:.0%}" for share in SHIFTS), "500 times")


def plant_fault(kind: str, factors: Floats, begin: int) -> Floats:
    """Return the factors with a fault from a step on."""
    planted = factors.copy()
    if kind == "500 times":
        planted[begin : begin + 2] *= 500
    else:
        planted[begin:] *= SHIFTS[FAULTS.index(kind)]
    return planted


def stretch_recording(files: dict[str, bytes], ends: Floats, factors: Floats, folder: Path, *, is_busy: bool) -> Path:
    """Write a recording in which step ``i``, from ``ends[i]`` to ``ends[i + 1]``, takes ``factors[i]`` times as long.

    ``is_busy``: its GPUs are always used.
    """
    moved = np.concatenate([[0.0], np.cumsum(np.diff(ends) * factors)]) + ends[0]

    def move(times: Any) -> Any:
        late = np.maximum(0, np.asarray(times, np.float64) - ends[-1])
        early = np.minimum(0, np.asarray(times, np.float64) - ends[0])
        return np.rint(np.interp(times, ends, moved) + late + early).astype(np.int64)

    for name, content in files.items():
        if name.endswith(".rec"):
            content = _move_table(content, move, ends, factors, is_busy=is_busy)
        elif name.startswith("events"):
            content = b"\n".join(_move_event(line, move) for line in content.splitlines()) + b"\n"
        (folder / name).write_bytes(content)
    return folder


def _move_table(content: bytes, move: Callable[[Any], Any], ends: Floats, factors: Floats, *, is_busy: bool) -> bytes:
    header, _, records = content.partition(b"\n")
    dtype = [tuple(field) for field in json.loads(header)["dtype"]]
    rows = np.frombuffer(records, dtype).copy()
    if "device_ns" in rows.dtype.names:
        at = np.clip(np.searchsorted(ends, rows["begin_ns"], "right") - 1, 0, len(factors) - 1)
        rows["device_ns"] = rows["device_ns"] * factors[at]
    if is_busy and "utilization_percent" in rows.dtype.names:
        rows["utilization_percent"] = _BUSY_PERCENT
    for column in set(_TIMES) & set(rows.dtype.names):
        rows[column] = move(rows[column])
    return header + b"\n" + rows.tobytes()


def _move_event(line: bytes, move: Callable[[Any], Any]) -> bytes:
    event = json.loads(line)
    if "clock" in event or "event" not in event:
        return line
    for name in _TIMES:
        if isinstance(event.get(name), int):
            event[name] = int(move(event[name]))
    return json.dumps(event).encode()


def judge_series(files: dict[str, bytes], ends: Floats, factors: Floats, *, is_busy: bool) -> tuple[Finding, ...]:
    """Return the findings about the pace of a stretched recording."""
    if is_busy:
        lasted = np.diff(ends)
        factors = np.where(np.arange(len(lasted)) < 5, 1.0, np.median(lasted) / lasted) * factors
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording.open(stretch_recording(files, ends, factors, Path(folder), is_busy=is_busy))
        found = detect_findings(recording, recording.end_ns)
        recording.close()
    return tuple(one for one in found if one.name in _PACE)


def main() -> None:
    """Print a table of false warnings and of found changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", nargs="+", type=Path, default=_BASES, help="packed recordings without a fault")
    parser.add_argument("--draws", type=int, default=20, help="of each kind, spread over the recordings [20]")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = np.random.default_rng(options.seed)
    bases = []
    for path in options.bases:
        rows = read_rank_steps(Recording.open(path))[0]
        if len(rows) > 3 * _SPARED_STEPS:
            source = next(iter(Recording.open(path).sources["spans"]))
            ends = np.append(rows["begin_unix_ns"][:1], rows["end_unix_ns"]).astype(np.float64) - source.offset_ns
            bases.append((unpack_files(path), ends))
    warned: dict[tuple[str, bool], list[bool]] = defaultdict(list)
    found: dict[tuple[str, bool], list[bool]] = defaultdict(list)
    for number, is_busy in itertools.product(range(options.draws), (False, True)):
        files, ends = bases[number % len(bases)]
        count = len(ends) - 1
        for kind in CLEAN:
            factors = np.ones(count) if kind == "as recorded" else make_clean(kind, count, chance)
            told = judge_series(files, ends, factors, is_busy=is_busy)
            warned[kind, is_busy].append(any(one.severity is not Severity.INFO for one in told))
        for kind in FAULTS:
            begin = int(chance.integers(_SPARED_STEPS, count - _SPARED_STEPS))
            factors = plant_fault(kind, make_clean("noise", count, chance), begin)
            told = judge_series(files, ends, factors, is_busy=is_busy)
            is_near = [one.step is not None and abs(one.step - begin) <= _NEAR_STEPS for one in told]
            found[kind, is_busy].append(any(is_near))
    for title, kinds, results in (("clean: warned of", CLEAN, warned), ("planted: found", FAULTS, found)):
        print(f"\n| {title} | launch-bound | GPU busy |\n|---|---|---|")
        for kind in kinds:
            cells = (f"{sum(results[kind, is_busy])} of {len(results[kind, is_busy])}" for is_busy in (False, True))
            print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

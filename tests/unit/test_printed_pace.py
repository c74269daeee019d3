"""The pace of loops whose steps are not seen, from the numbers that they print."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from in_pieces import find_at_end
from memory_recording import PlantedRecording, record_two_steps
from small_recording import S, make_record
from zerotop.analysis.findings import Finding
from zerotop.analysis.findings.pace import printed_pace
from zerotop_probe.recording import events, tables


def _print(folder: Path, lines: list[tuple[float, str]], *, with_steps: bool = False) -> tuple[Finding, ...]:
    """Return the findings about lines that were printed at these seconds."""
    recording = record_two_steps(folder) if with_steps else PlantedRecording(folder)
    recording.write_event(recording.node, 0.5, events.JobStarted, pid=77, command=["python", "es.py"])
    texts = [f"{text}\n" for _, text in lines]
    recording.write_output(1, "".join(texts))
    for path in folder.glob("output-*.rec"):
        path.unlink()
    offsets = [0, *accumulate(map(len, texts))]
    rows = [
        make_record(tables.OUTPUT, time_ns=int(lines[at][0] * S), offset=offsets[at], length=len(text))
        for at, text in enumerate(texts)
    ]
    recording.write_records(tables.OUTPUT, recording.node, rows)
    return find_at_end(folder, [printed_pace.detect])


def _count(paces: list[float], word: str = "gen") -> list[tuple[float, str]]:
    return [(at, f"{word} {number} fitness 0.{number}") for number, at in enumerate(accumulate(paces, initial=2.0))]


def _wander(count: int, mean: float, share: float) -> list[float]:
    paces: list[float] = (mean * (1 + share * np.random.default_rng(3).standard_normal(count)).clip(0.1)).tolist()
    return paces


def test_a_slower_pace_of_printed_numbers(tmp_path: Path) -> None:
    unseen, slower = _print(tmp_path, _count(_wander(70, 0.2, 0.1) + _wander(40, 0.5, 0.1)))
    assert unseen.headline.startswith("No steps seen; the output prints 'gen N' every ")
    assert slower.headline.startswith("'gen N' is printed every 483 ms instead of 196 ms")
    assert slower.headline.endswith("from 71 on")
    assert slower.fix == "py-spy dump --subprocesses --pid 77"


@pytest.mark.parametrize(
    "lines",
    [
        _count(_wander(120, 0.2, 0.3)),  # wanders
        _count([0.5] * 60 + [0.2] * 60),  # faster
        _count([0.2] * 60 + [3.0] + [0.2] * 60),  # one pause
        [(at, text) for at, text in _count([0.2] * 60, "step")]
        + [(at + 12.5, text) for at, text in _count([0.21] * 60, "step")],
    ],
    ids=["wanders", "faster", "a pause", "begins again"],
)
def test_no_slower_pace(tmp_path: Path, lines: list[tuple[float, str]]) -> None:
    assert [one.name for one in _print(tmp_path, lines)] == ["steps_printed"]


@pytest.mark.parametrize(
    "lines",
    [
        _count([0.2] * 10),  # too few
        [(2.0 + number // 40, f"step {number}") for number in range(200)],  # held back in a buffer
        [(at, text.replace("gen", "file")) for at, text in _count([0.2] * 80)],  # no word of training
    ],
    ids=["few", "buffered", "other words"],
)
def test_lines_that_say_nothing(tmp_path: Path, lines: list[tuple[float, str]]) -> None:
    assert _print(tmp_path, lines) == ()


def test_a_job_with_steps_needs_no_printed_pace(tmp_path: Path) -> None:
    assert _print(tmp_path, _count([0.2] * 70 + [0.5] * 40), with_steps=True) == ()


def test_lines_of_two_ranks(tmp_path: Path) -> None:
    own = _count([0.2] * 70 + [0.5] * 40)
    both = sorted([*own, *((at + 0.01, text) for at, text in own)])
    assert [one.name for one in _print(tmp_path, both)] == ["steps_printed", "printed_pace"]

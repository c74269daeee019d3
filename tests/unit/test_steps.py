"""From spans to steps: exact columns, the same however the recording grew."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from small_recording import BEGIN_NS, S, make_identity, make_span, read_recording, write_table
from zerotop.recording.steps import step_table as steps_module
from zerotop.recording.steps.step_table import StepTable, read_steps
from zerotop_probe.recording import tables
from zerotop_probe.recording.tables import BOUNDARY, EVAL, INCOMPLETE, PHASE_CODE, SKIPPED, UNKNOWN

SPANS = (
    make_span(0, 5, "init"),
    make_span(5, 8, "checkpoint_load"),
    make_span(10, 11, "data"),
    make_span(11, 13, "forward", tokens=100),
    make_span(13, 16, "backward"),
    make_span(16, 17, "forward", tokens=50),
    make_span(17, 19, "backward"),
    make_span(19.5, 20, "optimizer", depth=1),
    make_span(19, 21, "step", flags=BOUNDARY),
    make_span(22, 23, "data", depth=1),
    make_span(23, 24, "forward", flags=EVAL, depth=1, tokens=999),
    make_span(22, 25, "eval"),
    make_span(25, 29, "checkpoint_save"),
    make_span(29, 30, "forward", 1, tokens=70),
    make_span(30, 31, "backward", 1),
    make_span(30.25, 30.5, "stage_wait", 1, depth=1),
    make_span(31, 31.5, "stage_wait", 1),
    make_span(31.5, 31.75, "stage_send", 1),
    make_span(31.75, 33, "step", 1, flags=BOUNDARY | SKIPPED),
    make_span(33, 34, "forward", 2, tokens=7),
)


def test_columns(tmp_path: Path) -> None:
    write_table(tmp_path, tables.SPANS, make_identity(3), *SPANS).close()
    rows = read_steps(read_recording(tmp_path))
    expected: dict[str, list[Any]] = {
        "rank": [3, 3],
        "step": [0, 1],
        "end_unix_ns": [1021 * S, 1033 * S],
        "iteration_s": [11, 5],
        "data_s": [1, 0],
        "forward_s": [3, 1],
        "backward_s": [5, 1],
        "step_s": [2, 1.25],
        "stages_s": [0, 0.75],
        "optimizer_s": [0.5, 0],
        "eval_s": [0, 3],
        "checkpoint_s": [3, 4],
        "micro_steps": [2, 1],
        "rows": [4, 2],
        "tokens": [150, 70],
        "skipped": [False, True],
    }
    assert {name: rows[name].tolist() for name in expected} == expected


def test_in_two_parts(tmp_path: Path) -> None:
    for cut in range(len(SPANS)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        writer = write_table(folder, tables.SPANS, make_identity(0), *SPANS[:cut])
        recording = read_recording(folder)
        table = StepTable(recording)
        table.update()
        for record in SPANS[cut:]:
            writer.write(*record)
        writer.close()
        recording.refresh()
        table.update()
        np.testing.assert_array_equal(table.rank_steps[0].step_rows, read_steps(read_recording(folder)))


INIT, LOAD = PHASE_CODE["init"], PHASE_CODE["checkpoint_load"]
OF_THE_FUTURE = len(tables.PHASES) + 3


class Span(NamedTuple):
    """A record of SPANS."""

    begin: int
    end: int
    tokens: int
    step: int
    micro_step: int
    rows: int
    sequence: int
    phase: int
    flags: int
    depth: int
    engine: int
    pad: int

    @property
    def ns(self) -> int:
        return self.end - self.begin


def sum_seconds(spans: list[Span]) -> float:
    return sum(each.ns for each in spans) / 1e9


def sum_of_known(sizes: list[int]) -> int:
    known = [size for size in sizes if size >= 0]
    return sum(known) if known else UNKNOWN


class Slow:
    """Steps as they are meant, a span at a time."""

    def __init__(self, spans: list[Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.mine: list[Any] = []
        self.end: int | None = None
        self.last_step = 0
        for record in spans:
            self.mine.append(Span(*record))
            if record[7] == PHASE_CODE["step"] and record[8] & BOUNDARY and record[10] == 0:
                self.add_step(self.mine[-1])
                self.mine, self.end, self.last_step = [], record[1], record[3]

    def add_step(self, closing: Span) -> None:
        """The step that ends here, and those that are missing before it."""
        row = self.make_row(closing)
        missing = max(0, closing.step - self.last_step - 1)
        flagged = closing.flags & INCOMPLETE != 0
        if row["checkpoint_s"] and not flagged:
            missing = 0
        if missing or flagged:
            row |= {name: math.nan for name in row if name.endswith("_s")}
            row |= dict.fromkeys(("micro_steps", "rows", "tokens"), UNKNOWN)
        for number in range(self.last_step + 1, self.last_step + 1 + missing):
            self.rows.append(row | {"step": number, "skipped": False})
        self.rows.append(row)

    def make_row(self, closing: Span) -> dict[str, Any]:
        forwards = self.select_training("forward")
        early = 0
        begin = self.end
        if begin is None:
            known = [each for each in self.mine if each.phase not in (INIT, LOAD)]
            begin = min(each.begin for each in known)
            own = [each for each in known if each.engine == 0]
            self.last_step = min(own, key=lambda each: each.begin).step - 1
            early = sum(each.ns for each in self.mine if each.phase == LOAD and each.depth == 0 and each.end <= begin)
        elsewhere = self.select_training("eval", "checkpoint_save", "checkpoint_load", outermost=True)
        return {
            "step": closing.step,
            "skipped": closing.flags & SKIPPED != 0,
            "begin_unix_ns": begin + BEGIN_NS,
            "end_unix_ns": closing.end + BEGIN_NS,
            "iteration_s": (closing.end - begin - sum(each.ns for each in elsewhere) + early) / 1e9,
            "data_s": sum_seconds(self.select_training("data", outermost=True)),
            "forward_s": sum_seconds(forwards),
            "backward_s": sum_seconds(self.select_training("backward")),
            "step_s": sum_seconds(self.select_training("step")),
            "optimizer_s": sum_seconds(self.select_training("optimizer", "cpu_optimizer")),
            "eval_s": sum_seconds(self.select_training("eval", outermost=True)),
            "checkpoint_s": sum_seconds(self.select_training("checkpoint_save", "checkpoint_load", outermost=True)),
            "micro_steps": len(self.select_training("backward")),
            "rows": sum_of_known([each.rows for each in forwards]),
            "tokens": sum_of_known([each.tokens for each in forwards]),
        }

    def select_training(self, *names: str, outermost: bool = False) -> list[Span]:
        codes = [PHASE_CODE[name] for name in names]
        spans = [each for each in self.mine if each.phase in codes and not each.flags & EVAL]
        return [each for each in spans if each.depth == 0 or not outermost]


@st.composite
def any_spans(draw: st.DrawFn) -> list[Any]:
    phases = st.sampled_from([*range(len(tables.PHASES)), OF_THE_FUTURE, *[PHASE_CODE["step"]] * 8])
    flags = st.sampled_from([0, 0, EVAL, SKIPPED, BOUNDARY, BOUNDARY, BOUNDARY | SKIPPED, BOUNDARY | INCOMPLETE])
    sizes = st.integers(-1, 100)
    spans, end = [], 10  # no time is negative
    for number in range(draw(st.integers(0, 60))):
        begin = end + draw(st.integers(-10, 10**9))
        end = max(end, begin) + draw(st.integers(0, 10**9))
        size = (draw(sizes), number // 7, 0, draw(sizes), -1)
        spans.append((begin, end, *size, draw(phases), draw(flags), draw(st.integers(0, 2)), draw(st.integers(0, 1)), 0))
    return spans


@given(any_spans(), st.integers(1, 20), st.integers(0, 60))
def test_steps_are_those_of_a_slow_reading(spans: list[Any], at_once: int, cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module, "_SPANS_AT_ONCE", at_once)
        writer = write_table(Path(folder), tables.SPANS, make_identity(0), *spans[:cut])
        table = StepTable(recording := read_recording(Path(folder)))
        table.update()
        for record in spans[cut:]:
            writer.write(*record)
        writer.close()
        recording.refresh()
        table.update()
        rows = table.rank_steps[0].step_rows
    assert_slow(rows, spans)


def assert_slow(rows: Any, spans: list[Any], offset_ns: int = 0) -> None:
    expected = Slow(spans).rows
    assert len(rows) == len(expected)
    for name in expected[0] if expected else ():
        more = offset_ns if name.endswith("unix_ns") else 0
        np.testing.assert_allclose(rows[name] - more, [row[name] for row in expected], rtol=1e-14, atol=1e-14, err_msg=name)


@given(
    st.lists(any_spans(), min_size=2, max_size=4), st.integers(1, 90), st.lists(st.integers(0, 60), min_size=4, max_size=4)
)
def test_ranks_that_are_read_together_have_each_its_own_steps(ranks: list[Any], at_once: int, cuts: list[int]) -> None:
    """However many spans of which of them there are at a look, and however their clocks stand."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module, "_SPANS_AT_ONCE", at_once)
        writers = [
            write_table(Path(folder), tables.SPANS, make_identity(rank), *spans[:cut], born=rank)
            for rank, (spans, cut) in enumerate(zip(ranks, cuts, strict=False))
        ]
        table = StepTable(recording := read_recording(Path(folder)))
        for source in recording.sources["spans"]:
            source.offset_ns += source.rank * S
        table.update()
        for writer, spans, cut in zip(writers, ranks, cuts, strict=False):
            for record in spans[cut:]:
                writer.write(*record)
            writer.close()
        recording.refresh()
        table.update()
    assert [process.source.rank for process in table.rank_steps] == list(range(len(ranks)))
    for rank, (process, spans) in enumerate(zip(table.rank_steps, ranks, strict=True)):
        assert set(process.step_rows["rank"]) <= {rank}
        assert_slow(process.step_rows, spans, rank * S)


def make_lossy_spans(numbers: list[int], *flags: int) -> list[Any]:
    """Steps of a second with these numbers, of which the others were lost."""
    ends = [
        make_span(number + 0.5, number + 1, "step", number, BOUNDARY | flag)
        for number, flag in zip(numbers, flags or [0] * len(numbers), strict=True)
    ]
    return [record for end in ends for record in (make_span(end[3] + 0.1, end[3] + 0.5, "forward", end[3], tokens=5), end)]


def test_lost_steps_are_no_long_iteration(tmp_path: Path) -> None:
    write_table(tmp_path, tables.SPANS, make_identity(0), *make_lossy_spans([0, 1, 5, 6, 7], 0, 0, 0, 0, INCOMPLETE)).close()
    table = StepTable(read_recording(tmp_path))
    table.update()
    (process,) = table.rank_steps
    rows = process.step_rows
    assert rows["step"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    nan = math.nan
    np.testing.assert_array_equal(rows["iteration_s"], [0.9, 1, nan, nan, nan, nan, 1, nan])
    np.testing.assert_array_equal(rows["forward_s"][2:], [nan, nan, nan, nan, 0.4, nan])
    assert rows["tokens"].tolist() == [5, 5, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, 5, UNKNOWN]
    assert ((rows["end_unix_ns"] - BEGIN_NS) / S).tolist() == [1, 2, 6, 6, 6, 6, 7, 8]
    assert ((rows["begin_unix_ns"][2:6] - BEGIN_NS) / S).tolist() == [2, 2, 2, 2]
    assert process.recorded_steps["step"].tolist() == [0, 1, 6]


def test_steps_that_are_lost_at_once_are_missing_too(tmp_path: Path) -> None:
    spans = [make_span(0.1, 0.5, "forward", 0), *make_lossy_spans([3, 4])]
    write_table(tmp_path, tables.SPANS, make_identity(0), *spans).close()
    rows = read_steps(read_recording(tmp_path))
    assert rows["step"].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(rows["iteration_s"], [math.nan] * 4 + [1])


def test_a_loaded_checkpoint_and_a_damaged_number_leave_no_gap(tmp_path: Path) -> None:
    jump = [
        *make_lossy_spans([0, 1]),
        make_span(2, 50, "checkpoint_load", 1),
        *make_lossy_spans([100, 101]),
        make_span(101.2, 102, "step", 2**31 - 2, BOUNDARY),
    ]
    write_table(tmp_path, tables.SPANS, make_identity(0), *jump).close()
    rows = read_steps(read_recording(tmp_path))
    assert rows["step"].tolist() == [0, 1, 100, 101]  # the number beyond is left out
    np.testing.assert_array_equal(np.isnan(rows["iteration_s"]), [False] * 4)


def test_damaged_numbers_do_not_fill_the_memory(tmp_path: Path) -> None:
    write_table(tmp_path, tables.SPANS, make_identity(0), *make_lossy_spans(list(range(0, 2**31, 60_000))[:1000])).close()
    assert 59_999 < len(read_steps(read_recording(tmp_path))) <= 1000 + 59_999

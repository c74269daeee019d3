"""Phases in progress: nesting, what exceptions leave behind, evaluations of the user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rank_recordings import Rank
from zerotop_probe.inside.allocator import Allocator
from zerotop_probe.inside.evaluation import Guess
from zerotop_probe.inside.part import Meter, now
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.recording.tables import BEGIN, END, FAILED, PHASES
from zerotop_probe.recording.writer import Identity

HERE = (0, 3, 1)
ME = Identity.of_this_process("rank", 0)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(str(tmp_path), ME, Meter())


def drawn(tmp_path: Path) -> list[tuple[str, int, int, int, int]]:
    """(phase, depth, begin, end, flags) of every span."""
    return [
        (PHASES[s["phase"]], int(s["depth"]), int(s["begin_ns"]), int(s["end_ns"]), int(s["flags"]))
        for s in Rank(tmp_path, 0).spans
    ]


def test_a_begin_is_on_disk_at_once_and_its_span_at_the_end(recorder: Recorder, tmp_path: Path) -> None:
    span = recorder.begin(10, "backward", HERE)
    rank = Rank(tmp_path, 0)
    assert rank.begins[["time_ns", "step", "micro_step", "depth"]].tolist() == [(10, 3, 1, 0)]
    assert not len(rank.spans)
    recorder.end(span, 30)
    assert drawn(tmp_path) == [("backward", 0, 10, 30, 0)]


def test_depth_follows_nesting(recorder: Recorder, tmp_path: Path) -> None:
    outer = recorder.begin(10, "step", HERE)
    recorder.end(recorder.begin(20, "optimizer", HERE), 30)
    recorder.end(recorder.begin(40, "allgather", HERE), 50)
    recorder.end(outer, 60)
    recorder.end(recorder.begin(70, "data", HERE), 80)
    assert [(phase, depth) for phase, depth, *_ in drawn(tmp_path)] == [
        ("step", 0),
        ("optimizer", 1),
        ("allgather", 1),
        ("data", 0),
    ]


def test_what_an_exception_leaves_open_ends_with_the_phase_around_it(
    recorder: Recorder, tmp_path: Path
) -> None:
    outer = recorder.begin(10, "step", HERE)
    recorder.begin(20, "cpu_optimizer", HERE, loose=True)
    recorder.end(outer, 30, FAILED)
    assert drawn(tmp_path) == [("step", 0, 10, 30, FAILED), ("cpu_optimizer", 1, 20, 30, FAILED)]
    assert recorder.stack == []


def test_an_abandoned_backward_is_settled_before_the_next_phase(recorder: Recorder, tmp_path: Path) -> None:
    recorder.begin(10, "backward", HERE, loose=True)
    recorder.settle(20)
    recorder.end(recorder.begin(20, "forward", HERE), 30)
    assert drawn(tmp_path) == [("backward", 0, 10, 20, FAILED), ("forward", 0, 20, 30, 0)]


def test_a_span_that_the_stack_has_forgotten_is_still_recorded(recorder: Recorder, tmp_path: Path) -> None:
    outer = recorder.begin(10, "step", HERE)
    recorder.stack.clear()
    recorder.end(recorder.begin(20, "data", HERE), 30)
    recorder.end(outer, 40)
    assert {phase for phase, *_ in drawn(tmp_path)} == {"step", "data"}
    assert recorder.stack == []


def test_a_closed_recorder_counts_what_it_loses(recorder: Recorder) -> None:
    recorder.close()
    recorder.end(recorder.begin(10, "forward", HERE), 20)
    assert recorder.lost == 2


@pytest.mark.parametrize("name", ["missing/session", "file"])
def test_a_session_that_cannot_be_written_is_silence(tmp_path: Path, name: str, capfd: Any) -> None:
    (tmp_path / "file").touch()
    recorder = Recorder(str(tmp_path / name), ME, Meter())
    recorder.end(recorder.begin(10, "forward", HERE), 20)
    recorder.event(30, "hello")
    assert recorder.lost >= 3
    assert capfd.readouterr() == ("", "")


class TestGuess:
    """Evaluations that nothing announces."""

    @pytest.fixture
    def guess(self, recorder: Recorder) -> Guess:
        return Guess(recorder)

    def forward(self, recorder: Recorder, guess: Guess, begin: int, end: int) -> None:
        guess.forward_begins(begin, HERE)
        span = recorder.begin(begin, "forward", HERE)
        recorder.end(span, end)
        guess.forward_ended(end)

    def data(self, recorder: Recorder, guess: Guess, begin: int, end: int) -> None:
        guess.hold(recorder.begin(begin, "data", HERE), end)

    def test_lasts_from_the_first_forward_to_the_last(
        self, recorder: Recorder, guess: Guess, tmp_path: Path
    ) -> None:
        self.forward(recorder, guess, 10, 20)
        self.forward(recorder, guess, 30, 40)
        guess.close()
        recorder.end(recorder.begin(90, "forward", HERE), 95)
        spans = [(phase, depth, begin, end) for phase, depth, begin, end, _ in drawn(tmp_path)]
        assert ("eval", 0, 10, 40) in spans
        assert [span for span in spans if span[0] == "forward"] == [
            ("forward", 1, 10, 20),
            ("forward", 1, 30, 40),
            ("forward", 0, 90, 95),
        ]

    def test_a_batch_belongs_to_it_only_if_a_forward_of_it_follows(
        self, recorder: Recorder, guess: Guess, tmp_path: Path
    ) -> None:
        self.forward(recorder, guess, 10, 20)
        self.data(recorder, guess, 22, 24)
        self.forward(recorder, guess, 30, 40)
        self.data(recorder, guess, 42, 44)
        guess.close()
        spans = [(phase, depth, begin) for phase, depth, begin, *_ in drawn(tmp_path)]
        assert ("data", 1, 22) in spans
        assert ("data", 0, 42) in spans

    def test_closing_twice_is_closing_once(self, recorder: Recorder, guess: Guess, tmp_path: Path) -> None:
        self.forward(recorder, guess, 10, 20)
        guess.close()
        guess.close()
        assert [phase for phase, *_ in drawn(tmp_path)].count("eval") == 1


# As torch._C._cuda_memoryStats gives it, cut down to what is read and a little more.
STATS: dict[str, Any] = {
    "allocated_bytes": {"all": {"current": 100, "peak": 300}, "large_pool": {"current": 90, "peak": 280}},
    "reserved_bytes": {"all": {"current": 400, "peak": 500}},
    "inactive_split_bytes": {"all": {"current": 7, "peak": 9}},
    "num_alloc_retries": 2,
    "num_ooms": 1,
}


class TestAllocator:
    """Its counters at the edges of phases, from one reading each."""

    def allocator(self, tmp_path: Path, recorder: Recorder, stats: dict[str, Any]) -> Meter:
        meter = Meter()
        recorder.allocator = Allocator(str(tmp_path), ME, 3, lambda device: stats, meter)
        return meter

    def test_edges_down_to_depth_one(self, tmp_path: Path, recorder: Recorder) -> None:
        self.allocator(tmp_path, recorder, STATS)
        spans = [recorder.begin(10, phase, HERE) for phase in ("backward", "reduce", "other")]
        for span in reversed(spans):
            recorder.end(span, 20)
        rows = recorder_table(tmp_path)
        assert [(PHASES[row["phase"]], int(row["edge"])) for row in rows] == [
            ("backward", BEGIN),
            ("reduce", BEGIN),
            ("reduce", END),
            ("backward", END),
        ]
        fields = ("allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "reserved_peak_bytes")
        more = ("inactive_split_bytes", "retries", "ooms", "device", "step", "micro_step")
        assert rows[0][[*fields, *more]].tolist() == (100, 300, 400, 500, 7, 2, 1, 3, 3, 1)

    def test_a_reading_serves_the_edges_right_after_it(self, tmp_path: Path, recorder: Recorder) -> None:
        taken = []

        def read(device: int) -> dict[str, Any]:
            taken.append(device)
            return {"allocated_bytes": {"all": {"current": len(taken)}}}

        recorder.allocator = Allocator(str(tmp_path), ME, 0, read, Meter())
        end = now() + 20_000_000
        while now() < end:
            recorder.end(recorder.begin(now(), "forward", HERE), now())
        rows = recorder_table(tmp_path)
        assert len(taken) < len(rows)
        assert rows["allocated_bytes"].tolist() == sorted(rows["allocated_bytes"].tolist())
        assert rows["allocated_bytes"].max() == len(taken) > 1
        assert len(set(rows["time_ns"].tolist())) == len(taken)

    def test_counters_that_this_torch_has_not_are_unknown(self, tmp_path: Path, recorder: Recorder) -> None:
        self.allocator(tmp_path, recorder, {"allocated_bytes": {"all": {"current": 1}}})
        recorder.end(recorder.begin(10, "forward", HERE), 20)
        row = recorder_table(tmp_path)[0]
        assert row[["allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "ooms"]].tolist() == (
            1,
            -1,
            -1,
            -1,
        )

    def test_a_reading_that_fails_ends_the_readings_and_nothing_else(
        self, tmp_path: Path, recorder: Recorder
    ) -> None:
        meter = Meter()
        recorder.allocator = Allocator(str(tmp_path), ME, 0, lambda device: {}["gone"], meter)
        recorder.end(recorder.begin(10, "forward", HERE), 20)
        assert meter.errors == 1
        assert drawn(tmp_path) == [("forward", 0, 10, 20, 0)]

    def test_the_ticker_samples_in_between_and_stops(self, tmp_path: Path, recorder: Recorder) -> None:
        self.allocator(tmp_path, recorder, STATS)
        assert recorder.allocator is not None
        recorder.begin(10, "forward", HERE)
        recorder.allocator.start_ticker(recorder.stack)
        for _ in range(100):
            if len(recorder_table(tmp_path)) >= 3:
                break
            recorder.allocator._stop.wait(0.05)
        recorder.allocator.stop_ticker()
        rows = recorder_table(tmp_path)
        assert rows["edge"].tolist()[:3] == [BEGIN, 0, 0]
        assert set(rows["phase"].tolist()) == {PHASES.index("forward")}


def recorder_table(tmp_path: Path) -> Any:
    from rank_recordings import table

    (path,) = tmp_path.glob("allocator-*.rec")
    assert json.loads(path.read_bytes().split(b"\n", 1)[0])["table"] == "allocator"
    return table(path)

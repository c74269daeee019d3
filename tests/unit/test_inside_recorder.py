"""Phases in progress: nesting, what exceptions leave behind, evaluations of the user's own."""

from __future__ import annotations

import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rank_recordings import Rank, read_table_file
from zerotop_probe.inside.device.allocator import AllocatorSampler, CounterReader
from zerotop_probe.inside.device.cuda_events import DeviceClock
from zerotop_probe.inside.device.gpu import RankDevice
from zerotop_probe.inside.device.microscope import StepMicroscope
from zerotop_probe.inside.evaluation_detector import EvaluationDetector
from zerotop_probe.inside.guard import CostMeter, now
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.span import Span
from zerotop_probe.inside.stacks.stack_sampler import StackSampler
from zerotop_probe.inside.ticker import Ticker
from zerotop_probe.recording.events import Hello
from zerotop_probe.recording.tables import BEGIN, BOUNDARY, END, FAILED, LIGHT, PHASES
from zerotop_probe.recording.writer import Identity

HERE = (0, 3, 1)
# Nanoseconds of the job's own after which the allocator is read anew.
FAR = 50_000_000
ME = Identity.for_this_process("rank", 0)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(str(tmp_path), ME, CostMeter())


def read_spans(tmp_path: Path) -> list[tuple[str, int, int, int, int]]:
    """(phase, depth, begin, end, flags) of every span."""
    return [
        (PHASES[s["phase"]], int(s["depth"]), int(s["begin_ns"]), int(s["end_ns"]), int(s["flags"]))
        for s in Rank(tmp_path, 0).spans
    ]


def test_a_begin_is_on_disk_at_once_and_its_span_at_the_end(recorder: Recorder, tmp_path: Path) -> None:
    span = recorder.begin_span(10, "backward", HERE)
    rank = Rank(tmp_path, 0)
    assert rank.begins[["time_ns", "step", "micro_step", "depth"]].tolist() == [(10, 3, 1, 0)]
    assert not len(rank.spans)
    recorder.end_span(span, 30)
    assert read_spans(tmp_path) == [("backward", 0, 10, 30, 0)]


def test_an_expected_phase_that_was_nothing_leaves_nothing(recorder: Recorder, tmp_path: Path) -> None:
    recorder.end_span(recorder.expect_span(10, "step", HERE), 20)
    assert not recorder.stack
    confirmed = recorder.expect_span(30, "step", HERE)
    recorder.confirm_span(confirmed, 35)
    recorder.confirm_span(confirmed, 36)
    assert Rank(tmp_path, 0).begins["time_ns"].tolist() == [30]
    recorder.end_span(confirmed, 40)
    recorder.end_span(recorder.expect_span(50, "step", HERE), 60, FAILED)
    assert read_spans(tmp_path) == [("step", 0, 30, 40, 0), ("step", 0, 50, 60, FAILED)]


def test_depth_follows_nesting(recorder: Recorder, tmp_path: Path) -> None:
    outer = recorder.begin_span(10, "step", HERE)
    recorder.end_span(recorder.begin_span(20, "optimizer", HERE), 30)
    recorder.end_span(recorder.begin_span(40, "allgather", HERE), 50)
    recorder.end_span(outer, 60)
    recorder.end_span(recorder.begin_span(70, "data", HERE), 80)
    assert [(phase, depth) for phase, depth, *_ in read_spans(tmp_path)] == [
        ("step", 0),
        ("optimizer", 1),
        ("allgather", 1),
        ("data", 0),
    ]


def test_spans_that_an_exception_leaves_open_end_with_the_phase_around_them(recorder: Recorder, tmp_path: Path) -> None:
    outer = recorder.begin_span(10, "step", HERE)
    recorder.begin_span(20, "cpu_optimizer", HERE, loose=True)
    recorder.end_span(outer, 30, FAILED)
    assert read_spans(tmp_path) == [("step", 0, 10, 30, FAILED), ("cpu_optimizer", 1, 20, 30, FAILED)]
    assert recorder.stack == []


def test_an_abandoned_backward_is_settled_before_the_next_phase(recorder: Recorder, tmp_path: Path) -> None:
    recorder.begin_span(10, "backward", HERE, loose=True)
    recorder.end_loose_spans(20)
    recorder.end_span(recorder.begin_span(20, "forward", HERE), 30)
    assert read_spans(tmp_path) == [("backward", 0, 10, 20, FAILED), ("forward", 0, 20, 30, 0)]


def test_a_span_that_the_stack_has_forgotten_is_still_recorded(recorder: Recorder, tmp_path: Path) -> None:
    outer = recorder.begin_span(10, "step", HERE)
    recorder.stack.clear()
    recorder.end_span(recorder.begin_span(20, "data", HERE), 30)
    recorder.end_span(outer, 40)
    assert {phase for phase, *_ in read_spans(tmp_path)} == {"step", "data"}
    assert recorder.stack == []


def test_a_closed_recorder_counts_what_it_loses(recorder: Recorder) -> None:
    recorder.close()
    recorder.end_span(recorder.begin_span(10, "forward", HERE), 20)
    assert recorder.lost_records == 2


@pytest.mark.parametrize("name", ["missing/recording", "file"])
def test_a_recording_that_cannot_be_written_is_silence(tmp_path: Path, name: str, capfd: Any) -> None:
    (tmp_path / "file").touch()
    recorder = Recorder(str(tmp_path / name), ME, CostMeter())
    recorder.end_span(recorder.begin_span(10, "forward", HERE), 20)
    recorder.write_event(30, Hello)
    assert recorder.lost_records >= 3
    assert capfd.readouterr() == ("", "")


class TestGuess:
    """Evaluations that nothing announces."""

    @pytest.fixture
    def guess(self, recorder: Recorder) -> EvaluationDetector:
        return EvaluationDetector(recorder)

    def run_forward(self, recorder: Recorder, guess: EvaluationDetector, begin: int, end: int) -> None:
        guess.begin_forward(begin, HERE)
        span = recorder.begin_span(begin, "forward", HERE)
        recorder.end_span(span, end)
        guess.end_forward(end)

    def fetch_data(self, recorder: Recorder, guess: EvaluationDetector, begin: int, end: int) -> None:
        guess.hold_fetch(recorder.begin_span(begin, "data", HERE), end)

    def test_lasts_from_the_first_forward_to_the_last(
        self, recorder: Recorder, guess: EvaluationDetector, tmp_path: Path
    ) -> None:
        self.run_forward(recorder, guess, 10, 20)
        self.run_forward(recorder, guess, 30, 40)
        guess.close()
        recorder.end_span(recorder.begin_span(90, "forward", HERE), 95)
        spans = [(phase, depth, begin, end) for phase, depth, begin, end, _ in read_spans(tmp_path)]
        assert ("eval", 0, 10, 40) in spans
        assert [span for span in spans if span[0] == "forward"] == [
            ("forward", 1, 10, 20),
            ("forward", 1, 30, 40),
            ("forward", 0, 90, 95),
        ]

    def test_a_batch_belongs_to_it_only_if_a_forward_of_it_follows(
        self, recorder: Recorder, guess: EvaluationDetector, tmp_path: Path
    ) -> None:
        self.run_forward(recorder, guess, 10, 20)
        self.fetch_data(recorder, guess, 22, 24)
        self.run_forward(recorder, guess, 30, 40)
        self.fetch_data(recorder, guess, 42, 44)
        guess.close()
        spans = [(phase, depth, begin) for phase, depth, begin, *_ in read_spans(tmp_path)]
        assert ("data", 1, 22) in spans
        assert ("data", 0, 42) in spans

    def test_closing_twice_is_closing_once(self, recorder: Recorder, guess: EvaluationDetector, tmp_path: Path) -> None:
        self.run_forward(recorder, guess, 10, 20)
        guess.close()
        guess.close()
        assert [phase for phase, *_ in read_spans(tmp_path)].count("eval") == 1


# As torch._C._cuda_memoryStats gives it, cut down to what is read and a little more.
STATS: dict[str, Any] = {
    "allocated_bytes": {"all": {"current": 100, "peak": 300}, "large_pool": {"current": 90, "peak": 280}},
    "reserved_bytes": {"all": {"current": 400, "peak": 500}},
    "requested_bytes": {"all": {"current": 95, "peak": 290}},
    "inactive_split_bytes": {"all": {"current": 7, "peak": 9}},
    "segment": {"all": {"current": 12, "peak": 13}},
    "num_alloc_retries": 2,
    "num_ooms": 1,
}


class Cuda:
    """As much of torch.cuda as a clock needs: a GPU that is always five milliseconds behind the host."""

    class Event:
        """Its time in milliseconds, once recorded."""

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.ms = 0.0

        def record(self) -> None:
            Cuda.ms += 5.0
            self.ms = Cuda.ms

        def query(self) -> bool:
            return self.ms <= Cuda.done_ms

        def elapsed_time(self, end: Cuda.Event) -> float:
            return end.ms - self.ms

    ms = 0.0
    done_ms = 0.0
    device = 3
    capturing = False

    def current_device(self) -> int:
        return self.device

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self) -> object:
        return "stream 7"


class Binding:
    """The functions of torch._C behind those of torch.cuda; an event is recorded into a stream that is given."""

    class _CudaEventBase:
        def record(self: Any, stream: object) -> None:
            assert stream == "stream 7"
            Binding.records += 1
            self.record()

    records = 0

    def _cuda_isCurrentStreamCapturing(self) -> bool:
        return Cuda.capturing

    def _cuda_getDevice(self) -> int:
        return Cuda.device

    def _cuda_getCurrentStream(self, device: int) -> tuple[int, int, int]:
        assert device == 3
        return 7, device, 1


class OtherBinding(Binding):
    """That of a torch whose events take something else."""

    def _cuda_getCurrentStream(self, device: int) -> tuple[int, int, int]:
        raise TypeError("no such argument")


@pytest.fixture(params=[None, Binding, OtherBinding])
def binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Binding, "records", 0)
    return request.param() if request.param is not None else None


class TestDeviceClock:
    """Spans timed by the device, once it has come past them."""

    def record_spans(self, recorder: Recorder, step: int = 0) -> list[int]:
        begun = []
        for phase in ("forward", "backward", "step"):
            begun.append(now())
            recorder.end_span(recorder.begin_span(begun[-1], phase, (0, step, 0)), now())
        recorder.end_step(recorder.begin_span(now(), "other", (0, step, 0)), now())
        return begun

    def read_times(self, tmp_path: Path) -> Any:
        (path,) = tmp_path.glob("device_times-*.rec")
        return read_table_file(path)

    def test_nothing_is_waited_for(self, tmp_path: Path, recorder: Recorder, binding: Any) -> None:
        TestAllocator().make_allocator(tmp_path, recorder, lambda: STATS, binding)
        Cuda.done_ms = Cuda.ms
        begun = self.record_spans(recorder)
        assert not len(self.read_times(tmp_path))
        Cuda.done_ms = Cuda.ms - 6
        self.record_spans(recorder, step=1)
        rows = self.read_times(tmp_path)
        assert rows["begin_ns"].tolist() == begun[:2]
        assert rows["device_ns"].tolist() == [5_000_000] * 2
        assert rows["time_ns"].tolist() > rows["begin_ns"].tolist()
        assert (Binding.records > 0) is (type(binding) is Binding)

    @pytest.mark.parametrize("change", [{"device": 2}, {"capturing": True}])
    def test_a_device_without_answers_is_not_asked(
        self, tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, binding: Any, change: dict[str, Any]
    ) -> None:
        for name, value in change.items():
            monkeypatch.setattr(Cuda, name, value)
        TestAllocator().make_allocator(tmp_path, recorder, lambda: STATS, binding)
        Cuda.done_ms = float("inf")
        self.record_spans(recorder)
        self.record_spans(recorder, step=1)
        assert not len(self.read_times(tmp_path))


class TestAllocator:
    """Its counters at the edges of phases, from one reading each."""

    def make_allocator(self, tmp_path: Path, recorder: Recorder, read: CounterReader, binding: Any = None) -> CostMeter:
        meter = CostMeter()
        allocator = AllocatorSampler(recorder.files, 3, (read, read), meter, windows=True)
        clock = DeviceClock(recorder.files, 3, Cuda(), meter, binding)
        microscope = StepMicroscope(str(tmp_path), ME, 3, None, recorder.write_event, meter)
        recorder.device = RankDevice(allocator, clock, microscope)
        return meter

    def test_edges_of_outermost_phases_and_of_a_steps_parts(self, tmp_path: Path, recorder: Recorder) -> None:
        self.make_allocator(tmp_path, recorder, lambda: STATS)
        time_ns = now()
        for outer, inner in (("data", None), ("backward", "reduce"), ("step", "optimizer")):
            span = recorder.begin_span(time_ns := time_ns + FAR, outer, HERE)
            if inner is not None:
                recorder.end_span(recorder.begin_span(time_ns := time_ns + FAR, inner, HERE), time_ns := time_ns + FAR)
            recorder.end_span(span, time_ns := time_ns + FAR)
        rows = recorder_table(tmp_path)
        assert [(PHASES[row["phase"]], int(row["edge"])) for row in rows] == [
            ("backward", BEGIN),
            ("backward", END),
            ("step", BEGIN),
            ("optimizer", BEGIN),
            ("optimizer", END),
            ("step", END),
        ]
        fields = ("allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "reserved_peak_bytes")
        more: tuple[str, ...] = ("requested_peak_bytes", "inactive_split_bytes", "retries", "ooms", "segments", "device")
        more = (*more, "step", "micro_step")
        assert rows[0][[*fields, *more]].tolist() == (100, 300, 400, 500, 290, 7, 2, 1, 12, 3, 3, 1)
        assert rows["time_ns"].tolist() == sorted(rows["time_ns"].tolist())

    def test_a_silent_rank_says_how_many_blocks_were_allocated_so_far(self, tmp_path: Path, recorder: Recorder) -> None:
        meter = self.make_allocator(tmp_path, recorder, lambda: STATS | {"allocation": {"all": {"allocated": 700}}})
        sampler = StackSampler(recorder, threading.get_ident, meter)
        assert recorder.device is not None
        assert recorder.device.allocations is None
        recorder.end_span(recorder.begin_span(now() - 12 * 10**9, "forward", HERE), now() - 11 * 10**9)
        sampler.look()
        (event,) = Rank(tmp_path, 0).find_events("stacks")
        assert (event["why"], event["allocations"]) == ("silent", 700)

    def test_an_expected_phase_is_looked_at_when_it_is_confirmed(self, tmp_path: Path, recorder: Recorder) -> None:
        self.make_allocator(tmp_path, recorder, lambda: STATS)
        time_ns = now() + FAR
        recorder.end_span(recorder.expect_span(time_ns, "step", HERE), time_ns + FAR)
        assert not len(recorder_table(tmp_path))
        span = recorder.expect_span(time_ns + 2 * FAR, "step", HERE)
        recorder.confirm_span(span, time_ns + 3 * FAR)
        recorder.end_span(span, time_ns + 4 * FAR)
        assert recorder_table(tmp_path)["time_ns"].tolist() == [time_ns + 3 * FAR, time_ns + 4 * FAR]

    def test_edges_right_after_a_reading_go_without_one(self, tmp_path: Path, recorder: Recorder) -> None:
        taken = []

        def read() -> dict[str, Any]:
            taken.append(now())
            return STATS

        self.make_allocator(tmp_path, recorder, read)
        end = now() + 20_000_000
        edges = 0
        while now() < end:
            recorder.end_span(recorder.begin_span(now(), "forward", HERE), now())
            edges += 2
        assert len(recorder_table(tmp_path)) == len(taken) <= edges
        assert edges == 2 or len(taken) < edges
        time_ns = now()
        recorder.begin_span(time_ns + FAR, "forward", HERE)
        assert recorder_table(tmp_path)["time_ns"][-1] == time_ns + FAR

    def test_in_light_detail_the_device_is_read_once_a_step(self, tmp_path: Path, recorder: Recorder) -> None:
        self.make_allocator(tmp_path, recorder, lambda: STATS)
        assert recorder.device is not None
        time_ns = now()
        for step in range(4):
            recorder.device.is_full = step % 2 == 0
            for phase in ("forward", "backward", "step"):
                span = recorder.begin_span(time_ns := time_ns + FAR, phase, (0, step, 0))
                flags = BOUNDARY if phase == "step" else 0
                recorder.end_span(span, time_ns := time_ns + FAR, flags)
        span = recorder.begin_span(time_ns := time_ns + FAR, "eval", (0, 4, 0))  # whatever the detail
        recorder.end_span(span, time_ns + FAR)
        rows = recorder_table(tmp_path)
        assert [np.count_nonzero(rows["step"] == step) for step in range(5)] == [6, 1, 6, 1, 2]
        (light,) = rows[rows["step"] == 1]
        assert (PHASES[light["phase"]], light["edge"]) == ("step", END)
        steps = [flags for phase, *_, flags in read_spans(tmp_path) if phase == "step"]
        assert steps == [BOUNDARY, BOUNDARY | LIGHT] * 2

    def test_counters_that_this_torch_has_not_are_unknown(self, tmp_path: Path, recorder: Recorder) -> None:
        self.make_allocator(tmp_path, recorder, lambda: {"allocated_bytes": {"all": {"current": 1}}})
        recorder.end_span(recorder.begin_span(now(), "forward", HERE), now())
        row = recorder_table(tmp_path)[0]
        assert row[["allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "ooms"]].tolist() == (
            1,
            -1,
            -1,
            -1,
        )

    def test_a_reading_that_fails_ends_the_readings_and_nothing_else(self, tmp_path: Path, recorder: Recorder) -> None:
        meter = self.make_allocator(tmp_path, recorder, lambda: dict[str, Any]()["gone"])
        recorder.end_span(recorder.begin_span(10, "forward", HERE), 20)
        assert meter.errors == 1
        assert read_spans(tmp_path) == [("forward", 0, 10, 20, 0)]

    def test_the_ticker_samples_in_between_and_stops(self, tmp_path: Path, recorder: Recorder) -> None:
        self.make_allocator(tmp_path, recorder, lambda: STATS)
        assert recorder.device is not None
        recorder.begin_span(now(), "forward", HERE)
        recorder.device.start_tickers(recorder.stack, CostMeter())
        for _ in range(100):
            if len(recorder_table(tmp_path)) >= 3:
                break
            time.sleep(0.05)
        recorder.device.stop_tickers()
        rows = recorder_table(tmp_path)
        assert rows["edge"].tolist()[:3] == [BEGIN, 0, 0]
        assert set(rows["phase"].tolist()) == {PHASES.index("forward")}

    def test_the_ticker_knows_no_step_between_phases(self, tmp_path: Path, recorder: Recorder) -> None:
        seen: list[tuple[int, int, int]] = []
        stack = [Span(10, PHASES.index("forward"), 0, (0, 7, 2), loose=False)]

        def note_place(step: int, micro_step: int, phase: int) -> float:
            seen.append((step, micro_step, phase))
            stack.clear()
            return 0.01

        ticker = Ticker(stack, "a ticker", note_place, CostMeter())
        ticker.start()
        for _ in range(100):
            if len(seen) >= 2:
                break
            time.sleep(0.05)
        ticker.stop()
        assert seen[:2] == [(7, 2, PHASES.index("forward")), (-1, -1, 0)]


def recorder_table(tmp_path: Path) -> Any:
    (path,) = tmp_path.glob("allocator-*.rec")
    assert json.loads(path.read_bytes().split(b"\n", 1)[0])["table"] == "allocator"
    return read_table_file(path)


def test_the_collectors_time_is_recorded(recorder: Recorder, tmp_path: Path) -> None:
    recorder.write_cost(now())
    gc.collect()  # not before the first step
    recorder.last_step = 0
    recorder.write_cost(now())
    begin_ns = now()
    junk = [[number] for number in range(400_000)]
    for _ in range(3):
        gc.collect()
    gc.collect(0)  # the youngest objects do not count
    spent_ns = now() - begin_ns
    recorder.write_cost(now())
    recorder.write_cost(now())
    recorder.close()
    assert len(junk) == 400_000
    (event,) = Rank(tmp_path, 0).find_events("garbage")
    assert begin_ns <= event["begin_ns"] < begin_ns + spent_ns
    assert 0.01 <= event["seconds"] <= spent_ns / 1e9
    assert event["collections"] >= 3
    assert not [callback for callback in gc.callbacks if "CollectionTimer" in repr(callback)]

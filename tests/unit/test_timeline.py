"""Windows of real recordings, held against what records say one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recordings import open_recording
from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.processes.phases import find_innermost
from zerotop.analysis.timeline.metrics import GpuColumns
from zerotop.analysis.timeline.range_summary import summarize_range
from zerotop.analysis.timeline.resample import TIME, SeriesColumns
from zerotop.analysis.timeline.timeline import LaneSubject, TimelineBuilder, Window
from zerotop.analysis.timeline.timeline_cache import ColumnCache
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.moments.process_exits import ProcessExits
from zerotop.recording.reader import Recording, Source
from zerotop.recording.steps.step_table import StepTable
from zerotop_probe.recording.tables import ALLOCATOR, BEGINS, BOUNDARY, GPUS, HOSTS, PHASE_CODE, PHASES, PROCESSES, SPANS

MS = 1_000_000


def make_builder(recording: Recording) -> TimelineBuilder:
    table = StepTable(recording, memory=False)
    table.update()
    return TimelineBuilder(recording, lambda: table.rank_steps)


def split_samples(source: Source, rows: Any, column: str, factor: float = 1.0) -> list[tuple[int, int, float]]:
    """(begin, end, value): each sample tells of the time since the one before, at most three seconds."""
    times = [int(time_ns) + source.offset_ns for time_ns in rows["time_ns"]]
    values = [float(value) * factor for value in rows[column]]
    return [(max(a, b - 3 * S), b, value) for a, b, value in zip(times[:-1], times[1:], values[1:], strict=True)]


def compute_naively(parts: list[tuple[int, int, float]], begin: int, end: int) -> tuple[float, float]:
    """(highest, mean over time) of a column."""
    inside = [(min(b, end) - max(a, begin), value) for a, b, value in parts if a < end and b > begin]
    inside = [(length, value) for length, value in inside if not math.isnan(value)]
    if not inside:
        return math.nan, math.nan
    values = [value for _, value in inside]
    mean = sum(length * value for length, value in inside) / sum(length for length, _ in inside)
    return max(values), mean


def compare_timeline(
    recording: Recording, name: str, parts: list[tuple[int, int, float]], window: Window, subject: LaneSubject
) -> None:
    values = make_builder(recording).build_timeline(window, subject, (), recording.end_ns).values[name]
    edges = [recording.begin_ns + (window.first + place) * window.column_ns for place in range(window.columns + 1)]
    expected = np.array([compute_naively(parts, begin, end) for begin, end in pairwise(edges)]).T
    beyond = np.array(edges[:-1]) > recording.end_ns
    expected[:, beyond] = math.nan
    assert np.isfinite(expected).any()
    for row, of in zip(expected, (values.highest, values.mean), strict=True):
        np.testing.assert_allclose(of, row, rtol=1e-6, atol=1e-6)


WINDOWS = [
    Window(0, 500 * MS, 160),
    Window(1760, 20 * MS, 90),
    Window(-4, 2 * S, 40),
    Window(0, 10 * S, 9),
    Window(0, 60 * S, 3),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(
    ("name", "column", "factor"),
    [("utilization", "utilization_percent", 0.01), ("power", "power_w", 1.0), ("device", "used_bytes", 1.0)],
)
def test_a_gpu_in_columns(name: str, column: str, factor: float, window: Window) -> None:
    recording = open_recording("story")
    (source,) = recording.sources["gpus"]
    rows = source.array[source.array["gpu"] == 2]
    subject = make_builder(recording).make_subject(2)
    assert subject.gpu is not None
    assert subject.gpu[1] == 2
    compare_timeline(recording, name, split_samples(source, rows, column, factor), window, subject)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_rank_and_all_ranks_in_columns(window: Window) -> None:
    recording = open_recording("cpu-clean")
    (source,) = recording.sources["processes"]
    subject = make_builder(recording).make_subject(1)
    assert subject.gpu is None
    rows = source.array[source.array["rank"] == 1]
    compare_timeline(recording, "cores", split_samples(source, rows, "cores_used"), window, subject)
    compare_timeline(recording, "rss", split_samples(source, rows, "rss_bytes"), window, subject)
    ranks = source.array[source.array["rank"] >= 0]
    ticks = np.unique(ranks["time_ns"])
    sums = np.zeros(len(ticks), source.array.dtype)
    sums["time_ns"] = ticks
    for row in ranks:
        sums["cores_used"][np.searchsorted(ticks, row["time_ns"])] += row["cores_used"]
    compare_timeline(recording, "all_cores", split_samples(source, sums, "cores_used"), window, subject)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_allocator_values_stay_until_the_next_record(window: Window) -> None:
    recording = open_recording("z2-offload")
    (source,) = recording.sources["allocator"]
    window = replace(window, first=2400) if window.column_ns == 20 * MS else window
    goodbye = next(event.unix_ns for event in recording.events if event.event_name in ("goodbye", "rank_gone", "job_ended"))
    times = [int(time_ns) + source.offset_ns for time_ns in source.array["time_ns"]]
    ends = [*times[1:], goodbye]
    for name, column in (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes")):
        parts = list(zip(times, ends, map(float, source.array[column]), strict=True))
        compare_timeline(recording, name, parts, window, make_builder(recording).make_subject(0))


def test_no_peak_between_two_samples_is_lost() -> None:
    recording = open_recording("story")
    source = recording.sources["allocator"][0]
    highest = int(source.array["allocated_peak_bytes"].max())
    assert highest > int(source.array["allocated_bytes"].max())
    for window in WINDOWS:
        timeline = make_builder(recording).build_timeline(
            Window(0, window.column_ns, 90 * S // window.column_ns), LaneSubject(0, "vm", ("vm", 0)), (), recording.end_ns
        )
        assert np.nanmax(timeline.values["peak"].highest) == highest


@pytest.mark.parametrize("name", ["story", "z2-offload", "cpu-clean", "cpu-dead", "cpu-hang"])
@pytest.mark.parametrize("column_ns", [1 * MS, 7 * MS, 100 * MS])
def test_the_innermost_phase_of_every_moment(name: str, column_ns: int) -> None:
    recording = open_recording(name)
    begins, spans = (recording.sources[table][0] for table in ("begins", "spans"))
    first = (int(spans.array["end_ns"][len(spans.array) // 2]) + spans.offset_ns - recording.begin_ns) // column_ns - 150
    timeline = make_builder(recording).build_timeline(
        Window(first, column_ns, 300), LaneSubject(begins.rank, begins.host, None), (begins.rank,), recording.end_ns
    )
    seconds = timeline.phases[begins.rank]
    # Looked at many times in every column, at the end of the recording, from where all is known.
    grain = column_ns // 50
    moments = recording.begin_ns + first * column_ns + np.arange(0, 300 * column_ns, grain) + grain // 2
    codes = find_innermost(begins, spans, moments, recording.end_ns)
    codes[moments > (ProcessExits(recording.events).find_exit(begins) or recording.end_ns)] = -1
    for row in spans.array[spans.array["phase"] == PHASE_CODE["eval"]]:
        own = moments - spans.offset_ns
        codes[(own >= row["begin_ns"]) & (own < row["end_ns"])] = PHASE_CODE["eval"]
    for code in range(len(PHASES)):
        looked = (codes.reshape(300, 50) == code).sum(axis=1) * grain / 1e9
        np.testing.assert_allclose(seconds[code], looked, atol=4 * grain / 1e9)


def many_steps(folder: Path, steps: int) -> Recording:
    spans, begins = [], []
    for step in range(steps):
        for begin, end, phase, flags in ((0.0, 0.2, "forward", 0), (0.2, 0.7, "backward", 0), (0.7, 0.95, "step", BOUNDARY)):
            spans.append(make_span(step + begin, step + end, phase, step, flags))
            begins.append(make_record(BEGINS, time_ns=int((step + begin) * S), step=step, phase=PHASE_CODE[phase]))
    write_table(folder, SPANS, make_identity(0), *spans).close()
    write_table(folder, BEGINS, make_identity(0), *begins).close()
    return read_recording(folder)


@pytest.mark.parametrize("column_ns", [300 * MS, 10 * S, 40 * S])
def test_phases_add_up_at_every_zoom(tmp_path: Path, column_ns: int) -> None:
    recording = many_steps(tmp_path, 100)
    timeline = make_builder(recording).build_timeline(
        Window(0, column_ns, -(-100 * S // column_ns)), LaneSubject(0, "node1", None), (0,), BEGIN_NS + 100 * S
    )
    sums = timeline.phases[0].sum(axis=1)
    assert sums[PHASE_CODE["forward"]] == pytest.approx(20.0)
    assert sums[PHASE_CODE["backward"]] == pytest.approx(50.0)
    assert sums[PHASE_CODE["step"]] == pytest.approx(25.0)
    assert timeline.phases[0].sum(axis=0)[0] == pytest.approx(column_ns / 1e9)


def test_iterations_and_their_numbers(tmp_path: Path) -> None:
    lines = make_builder(recording := many_steps(tmp_path, 10))
    timeline = lines.build_timeline(Window(0, S // 2, 30), lines.make_subject(0), (), BEGIN_NS + 20 * S)
    values = timeline.values["iteration"]
    assert values.mean[2] == pytest.approx(1.0, abs=0.06)
    assert np.isnan(values.mean[25])
    begins, numbers = lines.find_begun_steps(0, BEGIN_NS + 3 * S, BEGIN_NS + 100 * S)
    assert numbers.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert begins[0] == pytest.approx(BEGIN_NS + 3.95 * S)
    assert lines.find_step_at(0, BEGIN_NS - 1) is None
    assert lines.find_step_at(0, BEGIN_NS + 4 * S) == 4
    assert lines.find_step_at(0, BEGIN_NS + 100 * S) == 10
    assert recording.events == []


def test_a_spike_of_one_sample_is_seen_from_any_distance(tmp_path: Path) -> None:
    rows = [
        make_record(
            GPUS, time_ns=tick * S // 10, gpu=0, utilization_percent=100.0 if tick == 77_777 else 1.0, power_w=math.nan
        )
        for tick in range(100_000)
    ]
    write_table(tmp_path, GPUS, make_identity(-1), *rows).close()
    recording = read_recording(tmp_path)
    for column_ns in (100 * MS, S, 5 * S, 50 * S, 60 * S, 600 * S, 3600 * S):
        lines = make_builder(recording)
        count = 10_000 * S // column_ns + 1
        values = lines.build_timeline(
            Window(0, column_ns, count), lines.make_subject(-1), (), recording.last_written_ns
        ).values
        assert np.nanmax(values["utilization"].highest) == 1.0
        assert np.nanargmax(values["utilization"].highest) == (77_777 * S // 10 - 1) // column_ns
        assert "power" not in values


@pytest.mark.parametrize("column_ns", [360 * S, 900 * S, 1200 * S, 2400 * S, 3600 * S])
def test_long_columns_of_few_samples_are_made_of_long_columns(tmp_path: Path, column_ns: int) -> None:
    """The samples of two weeks were thinned out; the same columns are merged from fewer that are read."""
    days = 14
    rows = [make_record(GPUS, time_ns=tick * 600 * S, gpu=0, used_bytes=tick % 97) for tick in range(days * 144)]
    write_table(tmp_path, GPUS, make_identity(-1), *rows, period_ns=600 * S).close()
    recording = read_recording(tmp_path)
    source = GpuColumns(recording, *(recording.sources["gpus"][0].host, 0))
    edges = recording.begin_ns + column_ns * np.arange(days * 86_400 * S // column_ns + 1)
    base_ns = source.choose_base(column_ns)
    assert (edges[-1] - edges[0]) / base_ns <= 20_160
    cached = ColumnCache(source, recording.begin_ns).get_columns(
        column_ns, 0, len(edges) - 1, end_ns=recording.end_ns, until_s=math.inf
    )
    np.testing.assert_allclose(cached, source.read_columns(edges))
    assert cached[TIME, 2].sum() > 0.9 * days * 86_400


def test_pcie_counters_that_are_looked_at_seldom(tmp_path: Path) -> None:
    """Samples ten times a second; the counters move twice a second, and stand still for a while."""
    sent = [0, 0, 0, 0, 0, 500, 500, 500, 500, 500, *[1000] * 30, 2000, *[2000] * 4]
    rows = [make_record(GPUS, time_ns=tick * S // 10, gpu=0, pcie_tx_bytes=10**6 * moved) for tick, moved in enumerate(sent)]
    write_table(tmp_path, GPUS, make_identity(-1), *rows).close()
    lines = make_builder(read_recording(tmp_path))
    values = lines.build_timeline(Window(0, 100 * MS, 44), lines.make_subject(-1), (), BEGIN_NS + 4 * S + S // 2).values[
        "sent"
    ]
    np.testing.assert_allclose(values.mean[:10], 1e9)
    np.testing.assert_allclose(values.mean[10:34], 0.0)
    # Seen after three quiet seconds: moved since the last look, not evenly over those.
    assert values.mean[38] == pytest.approx(1e9 / 0.6, rel=0.01)
    # What passed since the last look nobody knows.
    assert np.isnan(values.mean[43])


def test_two_ranks_on_one_gpu_hold_what_both_hold(tmp_path: Path) -> None:
    for rank, times, size in ((0, (1, 2, 6), 10), (1, (4, 5), 100)):
        samples = [
            make_record(ALLOCATOR, time_ns=t * S, allocated_bytes=size + t, allocated_peak_bytes=size + t, device=0)
            for t in times
        ]
        write_table(tmp_path, ALLOCATOR, make_identity(rank), *samples, peaks="window").close()
    lines = make_builder(read_recording(tmp_path))
    told = lines.build_timeline(Window(0, S, 8), LaneSubject(0, "node1", ("node1", 0)), (), BEGIN_NS + 7 * S).values[
        "allocated"
    ]
    assert told.mean.tolist()[1:] == [11.0, 12.0, 12.0, 116.0, 117.0, 121.0, 121.0]
    assert math.isnan(told.mean[0])


def test_hosts_within_a_control_group(tmp_path: Path) -> None:
    rows = [
        make_record(
            HOSTS,
            time_ns=tick * S,
            cores_used=2.0,
            memory_total_bytes=100,
            memory_available_bytes=40,
            cgroup_used_bytes=7,
            cgroup_limit_bytes=50,
        )
        for tick in range(4)
    ]
    write_table(tmp_path, HOSTS, make_identity(-1), *rows).close()
    lines = make_builder(read_recording(tmp_path))
    values = lines.build_timeline(Window(0, S, 3), lines.make_subject(-1), (), BEGIN_NS + 3 * S).values
    assert values["host_memory"].mean.tolist() == [7.0, 7.0, 7.0]
    assert values["host_cores"].mean.tolist() == [2.0, 2.0, 2.0]


class Growing:
    """A recording to which samples and spans are added between looks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spans = write_table(folder, SPANS, make_identity(0))
        self.begins = write_table(folder, BEGINS, make_identity(0))
        self.processes = write_table(folder, PROCESSES, make_identity(-1))
        self.ticks = 0

    def go_on(self, ticks: int) -> None:
        for tick in range(self.ticks, self.ticks + ticks):
            self.processes.write(
                *make_record(PROCESSES, time_ns=tick * S // 10, rank=0, pid=100, cores_used=float(tick % 7), rss_bytes=tick)
            )
            if tick % 5 == 0:
                self.begins.write(*make_record(BEGINS, time_ns=tick * S // 10, phase=PHASE_CODE["step"], step=tick // 5))
            if tick % 5 == 3:
                self.spans.write(*make_span((tick - 3) / 10, tick / 10, "step", tick // 5, BOUNDARY))
        self.ticks += ticks

    def close(self) -> None:
        for writer in (self.spans, self.begins, self.processes):
            writer.close()


@pytest.mark.parametrize("column_ns", [50 * MS, S, 2 * S, 20 * S])
def test_a_recording_that_grows_gives_what_the_whole_one_gives(tmp_path: Path, column_ns: int) -> None:
    growing = Growing(tmp_path)
    growing.go_on(3)
    recording = read_recording(tmp_path)
    table = StepTable(recording, memory=False)
    lines = TimelineBuilder(recording, lambda: table.rank_steps)
    window = Window(0, column_ns, max(10, 80 * S // column_ns))
    for ticks in (1, 4, 40, 1, 300, 7, 200, 3):
        growing.go_on(ticks)
        recording.refresh()
        table.update()
        end_ns = BEGIN_NS + growing.ticks * S // 10
        timeline = lines.build_timeline(window, lines.make_subject(0), (0,), end_ns)
        afresh = make_builder(read_recording(tmp_path))
        expected = afresh.build_timeline(window, afresh.make_subject(0), (0,), end_ns)
        assert timeline.is_complete
        np.testing.assert_allclose(timeline.phases[0], expected.phases[0], atol=1e-9)
        for name in ("cores", "rss", "iteration"):
            if name in expected.values:
                for of in ("highest", "mean"):
                    np.testing.assert_allclose(
                        getattr(timeline.values[name], of), getattr(expected.values[name], of), rtol=1e-12
                    )
    growing.close()


def test_time_goes_on_while_nothing_is_recorded() -> None:
    """An allocator holds what it held last, also in columns that had not begun when its last record was read."""
    recording = open_recording("z2-offload")
    lines, window = make_builder(recording), Window(2400, 20 * MS, 90)
    middle_ns, end_ns = (recording.begin_ns + column * window.column_ns for column in (2430, 2500))
    subject = lines.make_subject(0)
    before = lines.build_timeline(window, subject, (0,), middle_ns)
    assert np.isnan(before.values["allocated"].highest[40:]).all()
    told, expected = (
        lines.build_timeline(window, subject, (0,), end_ns),
        make_builder(recording).build_timeline(window, subject, (0,), end_ns),
    )
    np.testing.assert_array_equal(told.values["allocated"].highest, expected.values["allocated"].highest)
    np.testing.assert_allclose(told.phases[0], expected.phases[0], atol=1e-12)
    assert np.isfinite(told.values["allocated"].highest[40:]).any()


def test_columns_not_read_in_time_are_read_later(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    growing.go_on(20_000)
    growing.close()
    lines = make_builder(recording := read_recording(tmp_path))
    window, subject = Window(0, 5 * S, 400), lines.make_subject(0)
    timeline = lines.build_timeline(window, subject, (0,), recording.last_written_ns, budget_s=0.0)
    assert not timeline.is_complete
    looks = 1
    while not timeline.is_complete:
        timeline = lines.build_timeline(window, subject, (0,), recording.last_written_ns, budget_s=0.001)
        looks += 1
    assert looks > 2
    expected = make_builder(recording).build_timeline(window, subject, (0,), recording.last_written_ns)
    np.testing.assert_array_equal(timeline.values["cores"].highest, expected.values["cores"].highest)
    assert lines.build_timeline(window, subject, (0,), recording.last_written_ns) is timeline


def test_a_range_of_a_real_recording() -> None:
    recording = open_recording("story")
    lines = make_builder(recording)
    begin_ns, end_ns = recording.begin_ns + 55 * S, recording.begin_ns + 64 * S
    summary = summarize_range(lines, lines.make_subject(0), begin_ns, end_ns)
    (gpus,) = recording.sources["gpus"]
    highest, mean = compute_naively(
        split_samples(gpus, gpus.array[gpus.array["gpu"] == 0], "utilization_percent", 0.01), begin_ns, end_ns
    )
    assert summary.highest["utilization"] == pytest.approx(highest)
    assert summary.mean["utilization"] == pytest.approx(mean)
    table = StepTable(recording, memory=False)
    table.update()
    rows = next(process.step_rows for process in table.rank_steps if process.source.rank == 0)
    within = rows[(rows["end_unix_ns"] > begin_ns) & (rows["end_unix_ns"] <= end_ns)]
    assert summary.steps == len(within) > 2
    assert summary.mean["iteration"] == pytest.approx(within["iteration_s"].mean())
    assert sum(summary.phase_s.values()) == pytest.approx(9.0)
    # The story: most of the time the optimizer runs on the CPU.
    assert max(summary.phase_s, key=lambda name: summary.phase_s[name]) == "cpu_optimizer"


def test_a_long_range_is_made_of_what_is_kept(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    growing.go_on(4000)
    growing.close()
    lines = make_builder(recording := read_recording(tmp_path))
    begin_ns, end_ns = BEGIN_NS + int(3.3 * S), BEGIN_NS + int(388.8 * S)
    summary = summarize_range(lines, lines.make_subject(0), begin_ns, end_ns)
    (source,) = recording.sources["processes"]
    highest, mean = compute_naively(split_samples(source, source.array, "cores_used"), begin_ns, end_ns)
    assert summary.mean["cores"] == pytest.approx(mean)
    assert summary.highest["cores"] == highest
    assert summary.highest["rss"] == 3888


def test_nothing_recorded(tmp_path: Path) -> None:
    lines = make_builder(read_recording(tmp_path))
    subject = lines.make_subject(-1)
    assert lines.find_rank_hosts() == {}
    assert subject == LaneSubject(-1, "", None)
    timeline = lines.build_timeline(Window(-10, S, 20), subject, (), BEGIN_NS + 5 * S)
    assert timeline.values == {}
    assert timeline.phases == {}
    assert summarize_range(lines, subject, BEGIN_NS, BEGIN_NS + 5 * S).mean == {}


@pytest.mark.parametrize("name", ["story", "z2", "x4-z3", "cpu-checkpoint", "cpu-dead"])
def test_any_window_of_any_recording(name: str) -> None:
    recording = open_recording(name)
    lines = make_builder(recording)
    for rank in lines.find_rank_hosts():
        for window in (Window(-300, MS, 280), Window(0, 10**9, 400), Window(5, 86400 * S, 10), Window(10**9, 1000, 60)):
            timeline = lines.build_timeline(
                window, lines.make_subject(rank), tuple(lines.find_rank_hosts()), recording.end_ns
            )
            for values in timeline.values.values():
                assert values.mean.shape == (window.columns,)
                known = ~np.isnan(values.mean)
                slack = 1e-6 * np.abs(values.highest[known]) + 1e-9
                assert (values.mean[known] <= values.highest[known] + slack).all()
            for seconds in timeline.phases.values():
                assert seconds.shape == (len(PHASES), window.columns)
                assert (seconds.sum(axis=0) <= window.column_ns / 1e9 + 1e-6).all()


def test_the_values_at_a_moment_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of the same moment takes those of the frame before."""
    recording = open_recording("z2")
    builder = make_builder(recording)
    lanes = builder.get_lanes(builder.make_subject(0))
    values = lanes.read_moment(recording.end_ns)
    assert np.isfinite(values["loss"].mean).any()
    monkeypatch.setattr(SeriesColumns, "read_columns", None)
    assert lanes.read_moment(recording.end_ns) is values


@pytest.mark.parametrize("name", ["story", "cpu-clean", "z2-offload", "gpu-linear"])
def test_amounts_at_a_moment_are_those_of_other_screens(name: str) -> None:
    """A sample counts from its own time on; in a column it stands for the time before it."""
    recording = open_recording(name)
    source, builder = RecordingSource(recording), make_builder(recording)
    subject = builder.make_subject(0)
    for share in (0.4, 0.55, 0.7, 0.85):
        moment = recording.begin_ns + int(share * (recording.end_ns - recording.begin_ns))
        view, values = source.view_at(moment), builder.get_lanes(subject).read_moment(moment)
        expected = [("host_memory", host.memory_used_bytes) for host in view.hosts if host.name == subject.host]
        expected += [("device", gpu.used_bytes) for gpu in view.gpus if (gpu.host, gpu.index) == subject.gpu]
        expected += [("rss", rank.rss_bytes) for rank in view.ranks if rank.rank == 0 and rank.rss_bytes > 0]
        assert expected
        assert [(key, values[key].mean[-1]) for key, _ in expected] == expected

"""The allocator's health: flushes, what they cost, fragmentation at the peak, and which configuration counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recordings
from memory_recording import PlantedRecording, gib_to_bytes, make_reading, record_two_steps
from small_recording import make_identity, make_span, second_to_unix_ns
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.memory.allocator_health import read_allocator_health
from zerotop.analysis.memory.allocator_settings import choose_variable, parse_settings, parse_version
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.tables import BOUNDARY

OLD, HIP, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


def with_flushes(folder: Path) -> PlantedRecording:
    """Steps of 2 s, the third of 5 s with two flushes in its backward and one in its update."""
    recording, who = PlantedRecording(folder), make_identity(0)
    ends = (2, 4, 9, 11, 13)
    recording.write_records(tables.SPANS, who, [make_span(end - 1, end, "step", n, BOUNDARY) for n, end in enumerate(ends)])
    readings = [
        make_reading(1, 40, 60, retries=0),
        make_reading(3, 40, 70, step=1, phase="backward", retries=0),
        make_reading(6, 40, 45, step=2, phase="backward", retries=2, inactive_split_bytes=gib_to_bytes(1)),
        make_reading(8, 50, 50, step=2, phase="step", retries=3),
        make_reading(12, 50, 50, step=4, retries=3, ooms=1, inactive_split_bytes=gib_to_bytes(2)),
    ]
    recording.write_records(tables.ALLOCATOR, who, readings, peaks="window")
    return recording


@pytest.mark.parametrize(
    ("readings", "told"),
    [
        ([("forward", "begin", 3), ("forward", "end", 3)], "This happened in forward. "),
        ([("backward", "end", 3), ("other", "tick", 3)], "This happened outside forward, backward and step. "),
        ([("step", "end", 2), ("step", "end", 3)], ""),  # of steps in light detail only the ends are read
        ([("backward", "end", 3), ("step", "begin", 3)], ""),
    ],
)
def test_where_a_retry_happened_is_told_if_it_is_known(readings: list[Any], told: str, tmp_path: Path) -> None:
    recording, who = PlantedRecording(tmp_path), make_identity(0)
    recording.write_records(tables.SPANS, who, [make_span(at, at + 0.9, "step", at, BOUNDARY) for at in range(6)], born=1)
    rows = [
        make_reading(3.1 + place / 10, 40, 60, phase=phase, edge=edge, step=step, retries=place)
        for place, (phase, edge, step) in enumerate(readings)
    ]
    recording.write_records(tables.ALLOCATOR, who, rows, born=1, peaks="window")
    found = detect_findings(recording.open_recording(), second_to_unix_ns(10))
    (details,) = (one.details for one in found if one.name == "allocator_retries")
    assert details == f"{told}Expandable segments are off."


def test_flushes_have_the_time_that_they_cost(tmp_path: Path) -> None:
    recording = with_flushes(tmp_path).open_recording()
    (health,) = read_allocator_health(recording.at(second_to_unix_ns(14)), read_steps(recording))
    assert (health.rank, health.pid, health.retries, health.ooms) == (0, make_identity(0).pid, 3, 1)
    assert health.inactive_split_bytes == gib_to_bytes(2)
    assert [(f.step, f.phase, f.retries, f.freed_bytes) for f in health.flushes] == [
        (2, "backward", 2, gib_to_bytes(25)),
        (2, "step", 1, 0),
    ]
    assert [flush.unix_ns for flush in health.flushes] == [second_to_unix_ns(6), second_to_unix_ns(8)]
    assert {flush.extra_s for flush in health.flushes} == {3.0}
    assert health.extra_s == 3.0  # of one step, however many flushes it has


def test_a_failure_in_which_more_is_reserved_than_before(tmp_path: Path) -> None:
    """The table on the same screen is of the failure, whose window has no peaks."""
    recording = with_flushes(tmp_path)
    sizes = {"allocated_bytes": gib_to_bytes(79), "reserved_bytes": gib_to_bytes(80), "step": 5}
    recording.write_event(make_identity(0), 13, events.OutOfMemory, **sizes)
    opened = recording.open_recording()
    (before,) = read_allocator_health(opened.at(second_to_unix_ns(12.5)))
    (health,) = read_allocator_health(opened.at(second_to_unix_ns(14)))
    assert before.at_peak is not None
    assert before.at_peak.title.startswith("highest reserved ")
    assert health.at_peak is not None
    assert (health.at_peak.title, health.at_peak.unallocated_bytes) == ("reserved at the failure", gib_to_bytes(1))


def test_segments_of_a_recording_that_counts_them_and_of_one_that_is_older(tmp_path: Path) -> None:
    planted = PlantedRecording(tmp_path)
    planted.write_records(tables.ALLOCATOR, make_identity(0), [make_reading(1, 40, 60, segments=12)], peaks="window")
    planted.write_records(tables.ALLOCATOR, make_identity(1), [make_reading(1, 40, 60, segments=-1)], peaks="window")
    assert [found.segments for found in read_allocator_health(planted.open_recording().at(second_to_unix_ns(2)))] == [
        12,
        None,
    ]
    recording = recordings.open_recording("z2")
    assert "segments" not in (recording.sources["allocator"][0].array.dtype.names or ())
    assert [found.segments for found in read_allocator_health(recording.at(recording.last_written_ns))] == [None]


def test_allocator_health_is_as_known_at_the_moment(tmp_path: Path) -> None:
    recording = with_flushes(tmp_path).open_recording()
    (health,) = read_allocator_health(recording.at(second_to_unix_ns(5)))
    assert (health.retries, health.flushes, health.extra_s) == (0, (), None)
    assert read_allocator_health(recording.at(second_to_unix_ns(0.5))) == ()
    (untimed,) = read_allocator_health(recording.at(second_to_unix_ns(14)))
    assert [flush.extra_s for flush in untimed.flushes] == [None, None]


def test_flushes_from_before_the_first_reading(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    recording.write_records(tables.ALLOCATOR, make_identity(0), [make_reading(1, 40, 60, retries=2)], peaks="window")
    (health,) = read_allocator_health(recording.open_recording().at(second_to_unix_ns(5)))
    assert [(flush.retries, flush.freed_bytes) for flush in health.flushes] == [(2, 0)]


def test_fragmentation_at_the_peak(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    peak = {
        "allocated_peak_bytes": gib_to_bytes(50),
        "reserved_peak_bytes": gib_to_bytes(70),
        "requested_peak_bytes": gib_to_bytes(49),
    }
    readings = [
        make_reading(1, 40, 60, phase="forward", edge="begin"),
        make_reading(2, 40, 65, phase="forward", edge="end", inactive_split_bytes=gib_to_bytes(3), **peak),
        make_reading(3, 55, 60, phase="backward", edge="end"),
    ]
    recording.write_records(tables.SPANS, make_identity(0), [make_span(1, 2, "forward"), make_span(2, 3, "backward")])
    recording.write_records(tables.ALLOCATOR, make_identity(0), readings, peaks="window")
    (health,) = read_allocator_health(recording.open_recording().at(second_to_unix_ns(5)))
    assert health.at_peak is not None
    assert (health.at_peak.phase, health.at_peak.reserved_bytes, health.at_peak.unallocated_bytes) == (
        "forward",
        gib_to_bytes(70),
        gib_to_bytes(20),
    )
    assert (health.at_peak.requested_bytes, health.at_peak.inactive_split_bytes) == (gib_to_bytes(49), gib_to_bytes(3))
    assert health.at_peak.unallocated_share == pytest.approx(2 / 7)


def test_ranks_are_read_apart(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_records(tables.ALLOCATOR, make_identity(1), [make_reading(2, 1, 2, retries=-1)], peaks="window")
    environment = {NEW: "expandable_segments:True,max_split_size_mb:128"}
    recording.write_event(make_identity(1), 1, events.Hello, torch="2.11.0+cu130", environment=environment)
    first, second = read_allocator_health(recording.open_recording().at(second_to_unix_ns(20)))
    assert (first.rank, first.settings.variable, first.settings.has_expandable_segments) == (0, "", False)
    assert (second.rank, second.retries, second.settings.has_expandable_segments) == (1, 0, True)
    assert second.settings.values == {"expandable_segments": "True", "max_split_size_mb": "128"}


@pytest.mark.parametrize(
    ("torch", "environment", "counts", "notes"),
    [
        ("2.8.0", {OLD: "a:1", NEW: "a:2"}, OLD, 1),
        ("2.8.0", {NEW: "expandable_segments:True"}, "", 1),
        ("2.5.1+rocm6", {HIP: "a:1"}, HIP, 0),
        ("2.9.1", {NEW: "max_split_size_mb:64"}, NEW, 0),
        ("2.10.0", {NEW: "a:1"}, NEW, 0),
        ("2.13.0+cu130", {NEW: "a:1", OLD: "a:2", HIP: "a:3"}, OLD, 2),
        ("2.10.0", {NEW: "a:1", HIP: "a:3"}, HIP, 1),
        ("", {NEW: "a:1"}, NEW, 0),
        ("2.11.0", {}, "", 0),
    ],
)
def test_settings_come_from_the_variable_that_pytorch_reads(
    torch: str, environment: dict[str, str], counts: str, notes: int
) -> None:
    settings = parse_settings(environment, torch)
    assert (settings.variable, len(settings.notes)) == (counts, notes)
    assert settings.text == environment.get(counts, "")
    assert settings.values == ({} if not counts else dict([environment[counts].split(":")]))


def test_torch_2_9_takes_expandable_segments_from_the_old_name_only() -> None:
    settings = parse_settings({NEW: "expandable_segments:True,max_split_size_mb:64"}, "2.9.1")
    assert (settings.has_expandable_segments, settings.values) == (False, {"max_split_size_mb": "64"})
    assert "ignores it in PYTORCH_ALLOC_CONF" in settings.notes[0]
    assert parse_settings({OLD: "expandable_segments:True"}, "2.9.1").has_expandable_segments


def test_allocator_settings_are_read_from_the_environment() -> None:
    text = "backend:cudaMallocAsync, roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8"
    settings = parse_settings({OLD: text}, "2.8")
    assert settings.values == {
        "backend": "cudaMallocAsync",
        "roundup_power2_divisions": "[256:1,512:2,>:4]",
        "garbage_collection_threshold": "0.8",
    }
    assert (settings.values["backend"], settings.caching) == ("cudaMallocAsync", True)
    assert parse_settings({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "2.8").caching is False
    assert parse_settings({"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}, "2.8").caching is True


@pytest.mark.parametrize(
    ("torch", "expected", "name"), [("2.11.0a0+git1", (2, 11), NEW), ("2.9.1", (2, 9), OLD), ("nightly", (0, 0), OLD)]
)
def test_pytorch_version_chooses_the_variable(torch: str, expected: tuple[int, int], name: str) -> None:
    assert (parse_version(torch), choose_variable(torch)) == (expected, name)


@given(st.text(), st.text(max_size=8))
def test_any_text_is_read(text: str, torch: str) -> None:
    settings: Any = parse_settings({OLD: text, NEW: text}, torch)
    assert settings.variable == OLD
    assert isinstance(settings.has_expandable_segments, bool)

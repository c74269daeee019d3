"""The drawings of the memory screen as strings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import recordings
from memory_recording import GIB, PlantedRecording, gib_to_bytes, record_two_steps
from microscope_recording import record_trace
from small_recording import BEGIN_NS, S, make_identity
from zerotop.analysis.failures.end_causes import OTHER_SIZE
from zerotop.analysis.memory.memory_table import SUM_ALLOCATED, SUM_DEVICE, MemoryLine
from zerotop.analysis.memory.phase_peaks import MIXED
from zerotop.analysis.processes.phases import find_phase_name
from zerotop.analysis.views.memory_view import MemoryView, read_memory_view
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.base.post_mortem import count_post_mortem_rows, draw_post_mortem, find_fix
from zerotop.ui.drawing.formatting import choose_size_unit
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES, Glyphs
from zerotop.ui.drawing.rows import Row, row_text, row_width
from zerotop.ui.drawing.theme import STYLES
from zerotop.ui.memory.ledger_bars import draw_gpu_bars, draw_host_bars, find_rank
from zerotop.ui.memory.ledger_curve import REQUEST_HINT, draw_curve, resample_curve
from zerotop.ui.memory.ledger_estimates import draw_estimates
from zerotop.ui.memory.ledger_peaks import draw_health, draw_peaks
from zerotop.ui.memory.ledger_table import draw_gpu_ledger, draw_host_ledger
from zerotop.ui.memory.row_selection import choose_lines
from zerotop_probe.recording import events

SIZES = [(12, 1), (30, 4), (40, 12), (66, 18), (120, 30), (300, 60)]


def view_of(recording: PlantedRecording, second: float, rank: int | None = None) -> MemoryView:
    return read_memory_view(recording.open_recording().at(BEGIN_NS + int(second * S)), rank)


def rows_text(rows: list[Row]) -> str:
    return "\n".join(row_text(row).rstrip() for row in rows)


def check_rows(rows: list[Row], width: int, height: int, glyphs: Glyphs) -> None:
    assert len(rows) == height
    for row in rows:
        assert row_width(row) == width, row
        for span, style in row:
            assert all(part in STYLES for part in style.split("/")), style
            assert glyphs is not ASCII or span.isascii(), span


@pytest.mark.parametrize("name", ["z2", "z2-oom", "x4-z3", "cpu-dead", "z3-offload-all"])
@pytest.mark.parametrize("glyphs", [BLOCKS, TEXTURES, ASCII], ids=lambda glyphs: glyphs.name)
def test_every_drawing_fills_its_box(name: str, glyphs: Glyphs) -> None:
    recording = recordings.open_recording(name)
    begin = recording.begin_ns
    length = recording.last_written_ns - begin
    for share in (0.0, 0.4, 0.7, 1.0):
        view = read_memory_view(recording.at(begin + int(length * share)))
        for width, height in SIZES:
            for draw in (draw_gpu_bars, draw_host_bars, draw_gpu_ledger, draw_host_ledger, draw_peaks):
                check_rows(draw(view, width, height, glyphs), width, height, glyphs)
            check_rows(draw_curve(view.trace, REQUEST_HINT, width, height, glyphs), width, height, glyphs)
            check_rows([draw_health(view, width, glyphs)], width, 1, glyphs)
            if view.failure is not None:
                check_rows(draw_post_mortem(view.failure, view.cursor_ns, width, height, glyphs), width, height, glyphs)


def test_the_parts_of_host_memory_have_the_names_of_its_table() -> None:
    recording = recordings.open_recording("z3-offload-all")
    view = read_memory_view(recording.at(recording.last_written_ns))
    bars, table = rows_text(draw_host_bars(view, 60, 30, BLOCKS)), rows_text(draw_host_ledger(view, 100, 30, BLOCKS))
    assert "outside PyTorch" not in bars
    assert "Python, batches, other" in bars
    assert "Python, batches, other" in table


def test_the_table(tmp_path: Path) -> None:
    lines = rows_text(draw_gpu_ledger(view_of(record_two_steps(tmp_path), 29.5), 80, 22, BLOCKS)).splitlines()
    assert lines[0].split("─")[0] == "GPU 0, rank 0, GiB +based on "
    assert lines[0].split()[-6:-1] == ["now", "at", "peak", "expected", "difference"]
    rows = {line[:28].strip(" ■"): line[28:].split() for line in lines[1:]}
    assert rows["parameters"] == ["2.00", "2.00", "2.00", "0.00"]
    assert rows["gradients"] == ["0.00", "0.00", "2.00", "freed"]
    assert rows["allocated"] == ["14.75", "19.50"]
    assert rows["activations, still alive"] == ["0.12", "4.88"]  # after the step
    assert rows["total"] == ["80.00", "80.00"]
    assert rows["DeepSpeed's estimate"] == ["14.00", "20.00", "-6.00"]
    assert rows["rule of thumb"] == ["19.50", "18.50", "+1.00"]
    assert lines[-2:] == ["", "Peak: backward, 19.50 GiB in step 1"]


@pytest.mark.parametrize(("steps", "is_told"), [((5, 9), False), ((0, 9), True)])
def test_no_rule_of_a_step_stands_beside_the_peak_of_other_steps(
    steps: tuple[int, int], is_told: bool, tmp_path: Path
) -> None:
    view = view_of(record_two_steps(tmp_path), 29.5)
    assert view.peaks is not None
    peak = view.peaks.owning_peak
    size = 2 * peak.allocated_bytes
    mixed = replace(peak, phase=MIXED, allocated_bytes=size, step=steps[0], last_step=steps[1])
    changed = replace(view, peaks=replace(view.peaks, phases=(mixed, *view.peaks.phases)))
    assert ("rule of thumb, backward" in rows_text(draw_gpu_ledger(changed, 80, 22, BLOCKS))) is is_told


def test_the_last_addend_is_underlined_and_sums_stand_out(tmp_path: Path) -> None:
    rows = draw_gpu_ledger(view_of(record_two_steps(tmp_path), 29.5), 80, 22, BLOCKS)
    styles = {row_text(row)[:28].strip(" ■"): [style for _, style in row] for row in rows}
    assert "last-addend" in styles["unexplained"]
    assert "sum" in styles["allocated"]
    assert "last-addend" not in styles["parameters"]


def test_rows_without_room_are_merged_so_that_the_ledger_adds_up(tmp_path: Path) -> None:
    view = view_of(record_two_steps(tmp_path), 29.5)
    for height in (7, 9, 12, 15):
        lines = rows_text(draw_gpu_ledger(view, 80, height, BLOCKS)).splitlines()
        rows = [line for line in lines[1:] if line.startswith(("■", "  "))]
        now = sum(float(line[28:].split()[0].replace("<", "")) for line in rows)
        assert now == pytest.approx(80, abs=0.05), lines
        assert any(line.startswith("total") for line in lines)


def test_host_memory(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    host = {"master_weights": 4, "optimizer_state": 1, "gradients": 0.25}
    recording.write_inventory(19, "after_update", {"parameters": 2}, host=host, host_pinned={"master_weights": 4})
    lines = rows_text(draw_host_ledger(view_of(recording, 19.5), 90, 14, BLOCKS)).splitlines()
    rows = {line[:28].strip(" ■"): line[28:].split() for line in lines[1:]}
    assert rows["master weights"][:2] == ["4.00", "4.00"]
    assert rows["master weights"][-1] == "4.00"  # bytes for each parameter
    assert rows["Python, batches, other"] == ["0.75"]
    assert rows["resident"] == ["6.00", "4.00"]


def test_empty_states_say_what_is_missing(tmp_path: Path) -> None:
    view = view_of(PlantedRecording(tmp_path), 3)
    assert "No GPU found" in rows_text(draw_gpu_ledger(view, 80, 6, BLOCKS))
    assert "No host memory of a rank was sampled up to this time" in rows_text(draw_host_ledger(view, 80, 6, BLOCKS))
    assert "x traces the next step" in rows_text(draw_curve(None, REQUEST_HINT, 80, 6, BLOCKS))
    assert draw_estimates(view, 80, 6, BLOCKS) == []


def test_ranks_that_have_exited(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 29.2, events.Goodbye)
    view = view_of(recording, 40)
    assert "State when the first rank exited, 11 s ago." in rows_text(draw_gpu_ledger(view, 80, 26, BLOCKS))


def test_the_peak_of_a_rank_that_shares_its_gpu_is_called_so(tmp_path: Path) -> None:
    """The ledger of a GPU holds the memory of all its ranks, which is no sign of a higher peak of one."""
    view = view_of(record_two_steps(tmp_path), 29)
    assert view.gpu is not None
    assert "Peak: backward" in rows_text(draw_gpu_ledger(view, 80, 26, BLOCKS))
    rows = tuple(replace(row, bytes=4 * row.bytes) for row in view.gpu.rows)
    shared = replace(view, gpu=replace(view.gpu, ranks=(0, 1), rows=rows))
    assert "Peak of rank 0: backward" in rows_text(draw_gpu_ledger(shared, 80, 26, BLOCKS))


def test_bars_stack_in_the_ledgers_order(tmp_path: Path) -> None:
    rows = draw_gpu_bars(view_of(record_two_steps(tmp_path), 29.5), 16, 30, TEXTURES)
    column = "".join(row_text(row)[6] for row in reversed(rows[1:-1]))
    order = "".join(dict.fromkeys(column))
    # Parameters, master weights, state, unallocated, other processes and the driver, free.
    assert order.rstrip() == "PMS▓o·"
    assert column.count("S") > column.count("M") >= column.count("P") > 0


def test_bars_of_the_chosen_gpus_job_have_names(tmp_path: Path) -> None:
    drawn = rows_text(draw_gpu_bars(view_of(record_two_steps(tmp_path), 29.5), 70, 24, BLOCKS))
    assert "GPU 0, this job" in drawn
    assert "now" in drawn
    assert "peak" in drawn
    lines = [line.split() for line in drawn.splitlines()]
    named = [(words[-2], float(words[-1])) for words in lines if words and words[-1].replace(".", "").isdigit()]
    order = [("PyTorch", 1.0), ("unallocated", 2.5), ("activations", 4.88)]  # from the top
    order += [("state", 8.0), ("weights", 4.0), ("parameters", 2.0)]
    assert [one for one in named if one in order] == order


def test_peaks_by_phase(tmp_path: Path) -> None:
    lines = rows_text(draw_peaks(view_of(record_two_steps(tmp_path), 29.5), 60, 8, BLOCKS)).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["backward", "step", "forward"]
    assert "19.50" in lines[1]
    assert lines[1].split()[-1] == "1"


def test_a_peak_within_many_steps_names_the_first_and_the_last(tmp_path: Path) -> None:
    view = view_of(record_two_steps(tmp_path), 29.5)
    assert view.peaks is not None
    late = replace(view.peaks, phases=tuple(replace(one, step=1180, last_step=1189) for one in view.peaks.phases))
    lines = rows_text(draw_peaks(replace(view, peaks=late), 60, 8, BLOCKS)).splitlines()
    assert lines[1].split()[-1] == "1180-1189"


def test_a_peak_of_several_phases_has_a_step_but_no_micro_step(tmp_path: Path) -> None:
    view = view_of(record_two_steps(tmp_path), 29.5)
    assert view.peaks is not None
    unknown = replace(view.peaks, phases=tuple(replace(one, micro_step=-1) for one in view.peaks.phases))
    lines = rows_text(draw_peaks(replace(view, peaks=unknown, micro_steps=2), 60, 8, BLOCKS)).splitlines()
    assert "step/micro" in lines[0]
    assert lines[1].split()[-1] == "1"


def test_health() -> None:
    recording = recordings.open_recording("z2-oom")
    view = read_memory_view(recording.at(recording.last_written_ns))
    drawn = row_text(draw_health(view, 160, BLOCKS))
    assert "3 cache flushes" in drawn
    assert "1 out of memory" in drawn
    # The peak of 128.89 GiB is allocated in step 1, with 6.80 GiB unused there.
    assert "highest reserved in backward of step 0: 137.37 GiB, 12.19 unused" in drawn
    assert "PyTorch's default settings" in drawn
    assert view.health is not None
    counted = replace(view, health=replace(view.health, segments=12))
    assert "12 segments" in row_text(draw_health(counted, 190, BLOCKS))
    expandable = recordings.open_recording("z2-expandable")
    expandable_view = read_memory_view(expandable.at(expandable.last_written_ns))
    assert "highest reserved" in row_text(draw_health(expandable_view, 80, BLOCKS))
    assert row_text(draw_health(expandable_view, 50, BLOCKS)).split() == ["allocator", "0", "cache", "flushes"]
    drawn = row_text(draw_health(expandable_view, 160, BLOCKS))
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in drawn


def test_estimates_mark_the_options_of_the_job(tmp_path: Path) -> None:
    rows = draw_estimates(view_of(record_two_steps(tmp_path), 29.5), 70, 6, BLOCKS)
    assert rows_text(rows).splitlines()[1].split()[-2:] == ["2.00", "24.00"]
    assert row_text(rows[2]).rstrip().endswith("this job")


# --- the microscope ------------------------------------------------------------------------------------------------------


def test_the_curve_and_the_blocks_alive_at_its_peak(tmp_path: Path) -> None:
    view = view_of(record_trace(tmp_path), 29.5)
    assert view.trace is not None
    assert (view.trace.peak_bytes, view.trace.peak_phase) == (gib_to_bytes(14.5 + 3 + 1.5 + 0.25), "backward")
    rows = draw_curve(view.trace, "", 110, 16, BLOCKS)
    drawn = rows_text(rows)
    assert drawn.startswith("Microscope, step 1 of rank 0, GiB")
    assert "19.25 GiB in backward" in drawn
    assert "after 3.25 s, 98 events" in drawn
    assert "1536.0 MiB ■ forward, 350 ms" in drawn
    assert "14.50 GiB   allocated before" in drawn
    styles = {style for row in rows for _, style in row}
    assert {"phase-forward", "phase-backward"} <= {part for style in styles for part in style.split("/")}


def test_no_column_hides_the_peak(tmp_path: Path) -> None:
    trace = view_of(record_trace(tmp_path), 29.5).trace
    assert trace is not None
    for count in (1, 7, 60, 500):
        highest, phases = resample_curve(trace, count)
        assert highest.max() == trace.peak_bytes
        assert len(highest) == len(phases) == count
    # The curve is flat between two allocations.
    highest, _ = resample_curve(trace, 900)
    assert highest[100 * 255 // 100] == pytest.approx(gib_to_bytes(14.5 + 24 * 0.125))
    assert np.isclose(highest[-1], gib_to_bytes(14.5))


def test_a_column_without_events_has_the_phase_at_its_middle(tmp_path: Path) -> None:
    trace = view_of(record_trace(tmp_path), 29.5).trace
    assert trace is not None
    _, phases = resample_curve(trace, 90)  # a tenth of a second each, from second 20 on
    assert [find_phase_name(code) for code in phases[[10, 28, 40, 68, 75, 89]].tolist()] == [
        *("forward", "forward", "backward", "backward", "step", "step")
    ]


# --- the post-mortem -----------------------------------------------------------------------------------------------------


def test_the_post_mortem() -> None:
    recording = recordings.open_recording("z2-oom")
    view = read_memory_view(recording.at(recording.last_written_ns))
    assert view.failure is not None
    for width, height in ((80, 8), (120, 14), (200, 20)):
        drawn = " ".join(rows_text(draw_post_mortem(view.failure, view.cursor_ns, width, height, BLOCKS)).split())
        assert "Rank 0 ran out of GPU memory" in drawn
        assert "per_device_eval_batch_size to 40" in drawn
    assert "requested 92.73 GiB" in drawn
    assert "of which activations 46.64 GiB" in drawn
    assert "eval 0.82 s × ■ forward 0.74 s ×" in drawn
    assert "Tried to allocate 92.73 GiB" in drawn
    assert count_post_mortem_rows(view.failure, view.cursor_ns, 80, 8, BLOCKS) == 8
    assert count_post_mortem_rows(view.failure, view.cursor_ns, 200, 60, BLOCKS) < 20


def test_the_setting_stands_out() -> None:
    recording = recordings.open_recording("z2-oom")
    view = read_memory_view(recording.at(recording.last_written_ns))
    assert view.failure is not None
    rows = draw_post_mortem(view.failure, view.cursor_ns, 120, 14, BLOCKS)
    assert ("per_device_eval_batch_size", "accent") in [span for row in rows for span in row]


def test_the_variable_of_the_advice_is_shown_with_it_and_is_what_is_copied() -> None:
    recording = recordings.open_recording("z2-oom")
    failure = read_memory_view(recording.at(recording.last_written_ns)).failure
    assert failure is not None
    crash = replace(failure, memory=None, cause=OTHER_SIZE, advice=OTHER_SIZE.advice, setting="")
    for width, height in ((80, 8), (120, 14)):
        drawn = [row_text(row).strip() for row in draw_post_mortem(crash, failure.unix_ns, width, height, BLOCKS)]
        assert any("TORCH_DISTRIBUTED_DEBUG=DETAIL" in row for row in drawn)
    assert find_fix(crash) == "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    assert find_fix(failure) == failure.memory.fix if failure.memory is not None else ""
    at_line = replace(crash, cause=OTHER_SIZE._replace(fix="train.py:10"))
    assert find_fix(at_line) == ""  # a place is no fix


def test_a_hang_before_the_end_stays_told_beside_it() -> None:
    frame = Viewer(recordings.open_searched("x2-hang-collectives"), None, lambda: 0.0).make_frame()
    assert frame.failure is not None
    assert frame.headline is not None
    assert frame.headline.name == "hung_ranks"
    for width, height in ((78, 8), (118, 14)):
        drawn = draw_post_mortem(frame.failure, frame.view.cursor_ns, width, height, BLOCKS, frame.headline)
        assert "Before, in step 27: No progress for 34 s: rank 1 called barrier where rank 0 called all_reduce." in " ".join(
            rows_text(drawn).split()
        )
        assert "was killed by SIGTERM" in rows_text(drawn)
    assert any("No progress" in notice.sentence for notice in frame.list_notices(24))


def test_an_end_is_not_told_twice() -> None:
    frame = Viewer(recordings.open_searched("cpu-dead"), None, lambda: 0.0).make_frame()
    assert frame.failure is not None
    assert frame.headline is not None
    assert frame.headline.name == "dead_rank"
    drawn = rows_text(draw_post_mortem(frame.failure, frame.view.cursor_ns, 118, 14, BLOCKS, frame.headline))
    assert "Before" not in drawn
    assert sum("SIGKILL" in notice.sentence for notice in frame.list_notices(24)) == 1


def test_units() -> None:
    gibs, mibs = choose_size_unit(3 * GIB), choose_size_unit(GIB)
    assert (gibs.format_bytes(gib_to_bytes(1.5)).strip(), gibs.format_bytes(0).strip(), gibs.format_bytes(1).strip()) == (
        "1.50",
        "0.00",
        "<0.01",
    )
    assert (
        gibs.format_bytes(None).strip(),
        gibs.format_signed(0).strip(),
        gibs.format_signed(-gib_to_bytes(1)).strip(),
    ) == (
        "–",
        "0.00",
        "-1.00",
    )
    assert (mibs.name, mibs.format_bytes(1 << 20).strip()) == ("MiB", "1.0")


def test_bars_get_narrow_before_some_are_left_out_but_never_the_chosen_one(tmp_path: Path) -> None:
    view = view_of(record_two_steps(tmp_path), 29.5)
    gpu = view.gpus[0]
    several = tuple(replace(gpu, index=index, ranks=(index,)) for index in range(8))
    four = replace(view, gpus=several[:4], gpu=several[0])
    names = row_text(draw_gpu_bars(four, 12, 12, BLOCKS)[-1])
    assert names.split() == ["└0", "1", "2", "3"]
    eight = replace(view, gpus=several, gpu=several[6])
    rows = draw_gpu_bars(eight, 12, 12, BLOCKS)
    assert row_text(rows[-1]).split() == ["└4", "5", "6", "7"]
    assert all(row_width(row) == 12 and "…" not in row_text(row) for row in rows)
    assert [find_rank(x, eight, 12, host=False) for x in (5, 7, 9, 11)] == [4, 5, 6, 7]
    assert "4 more" in row_text(draw_gpu_bars(eight, 12, 12, BLOCKS)[0])


def test_dropped_lines_stand_where_their_sum_holds_them() -> None:
    def line(key: str, size: int, *, is_sum: bool = False) -> MemoryLine:
        return MemoryLine(key, key, size, size, is_sum=is_sum)

    lines = [
        *(line("parameters", 1000), line("cublas", 2), line("unexplained", 1)),
        *(line(SUM_ALLOCATED, 1003, is_sum=True), line("driver", 3), line("free", 9000)),
        line(SUM_DEVICE, 10006, is_sum=True),
    ]
    assert [(one.label, one.now_bytes) for one in choose_lines(lines, 6)] == [
        *(("parameters", 1000), ("2 others", 3), (SUM_ALLOCATED, 1003)),
        *(("driver", 3), ("free", 9000), (SUM_DEVICE, 10006)),
    ]
    # Of parts on both sides of a sum, only the last one holds all.
    assert [one.label for one in choose_lines(lines, 5)][-2:] == ["3 others", SUM_DEVICE]


def test_a_sentence_below_the_table_is_seen_to_be_cut() -> None:
    recording = recordings.open_recording("z2-oom")
    view = read_memory_view(recording.at(recording.last_written_ns))
    assert view.gpu is not None
    note = f"Begin {'of a sentence with many words ' * 4}end"
    view = replace(view, gpu=replace(view.gpu, notes=(note,)))
    texts = [rows_text(draw_gpu_ledger(view, 60, height, BLOCKS)).rstrip() for height in range(10, 40)]
    begun = [text for text in texts if "Begin of a sentence" in text]
    assert sum(not text.endswith(" end") for text in begun) == 2
    assert all(text.endswith((" end", "…")) for text in begun)

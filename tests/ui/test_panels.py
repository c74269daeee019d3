"""Panels as the strings they draw."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from changed_recordings import open_with_nodes
from drawn_rows import read_texts
from played_source import PlayedSource
from recordings import open_recording
from zerotop.analysis.failures.end import End
from zerotop.analysis.findings import Severity
from zerotop.analysis.live_view import Activity, Inferred, JobState, LateActivity, LiveView
from zerotop.analysis.views.finding_search import list_findings
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.base.bars.footer import CursorState, Tab, draw_badge, draw_keys, draw_status, draw_tabs, draw_transport
from zerotop.ui.base.bars.footer_keys import collect_keys
from zerotop.ui.base.bars.header import build_notices, count_notice_rows, draw_header, draw_notices
from zerotop.ui.base.frame import Pane
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, Glyphs
from zerotop.ui.drawing.labels import describe_no_output, format_ending
from zerotop.ui.drawing.rows import Row, row_text, row_width
from zerotop.ui.drawing.theme import STYLES
from zerotop.ui.live.cpu import draw_cpu
from zerotop.ui.live.gpu import draw_gpu
from zerotop.ui.live.iteration import draw_iteration
from zerotop.ui.live.memory import draw_memory
from zerotop.ui.live.output import count_visible_lines, draw_output
from zerotop.ui.live.panels import Iteration
from zerotop.ui.live.screen import LiveScreen
from zerotop.ui.ranks.rank_list import draw_ranks


@cache
def view_at(name: str, seconds: float) -> LiveView:
    """Return what was known of a recorded job after so many seconds."""
    return PlayedSource(name, lambda: seconds).view_at(None)


@pytest.fixture(scope="module")
def many_ranks(tmp_path_factory: pytest.TempPathFactory) -> LiveView:
    """64 ranks on 16 nodes."""
    recording = open_with_nodes("x4-z3", 16, tmp_path_factory.mktemp("nodes"))
    return PlayedSource(recording, lambda: 62.0).view_at(None)


BADGE: Row = ((" LIVE ", "badge-live"),)


def test_header() -> None:
    view = view_at("story", 64.0)
    assert read_texts(draw_header(view, BADGE, 80, 2, BLOCKS)) == [
        " story  LlamaForCausalLM 8.03B  ZeRO-2  optimizer→CPU  fp16  mb2 ga1 ×4   LIVE  ",
        " 13/14 steps  1.64 s/it  2.49k tok/s  ETA 2 s  elapsed 1:04  10 skipped         ",
    ]
    assert read_texts(draw_header(view, BADGE, 40, 1, BLOCKS)) == [" 13/14 steps  1.64 s/it  ETA 2 s  LIVE  "]


def test_a_long_model_is_shortened_before_the_batch_is_left_out() -> None:
    view = view_at("story", 64.0)
    paused: Row = ((" ▮▮ PAUSED ", "badge-past"),)
    assert read_texts(draw_header(view, paused, 80, 2, BLOCKS))[0] == (
        " story  LlamaForCau… 8.03B  ZeRO-2  optimizer→CPU  fp16  mb2 ga1 ×4  ▮▮ PAUSED  "
    )
    parts = replace(view.job.engine, model="Embedding + LayerNorm + Attention + Experts", offload_optimizer="none")
    view = replace(view, job=replace(view.job, engine=parts))
    assert read_texts(draw_header(view, BADGE, 80, 2, BLOCKS))[0] == (
        " story  Embedding + LayerNorm +… 8.03B  ZeRO-2  fp16  mb2 ga1 ×4          LIVE  "
    )


def test_low_panels_keep_the_step_of_their_figures_and_a_chart() -> None:
    view = view_at("story", 64.0)
    legend = [row[-19:] for row in read_texts(draw_iteration(view, 50, 5, BLOCKS))[1:]]
    assert legend[0].split() == ["step", "12", "2.67"]
    assert [row.split()[1] for row in legend[1:3]] == ["step", "backward"]  # the longest ones
    memory = read_texts(draw_memory(view, 50, 1 + len(view.gpus) + len(view.hosts) + 3, BLOCKS))
    assert [row.strip()[:1] for row in memory[-3:]] == ["5", "│", "└"], memory


def test_the_share_of_the_peak_is_seen_where_there_is_room() -> None:
    view = view_at("story", 64.0)
    assert "MFU 3.0 %" in read_texts(draw_header(view, BADGE, 160, 2, BLOCKS))[1].replace("   ", " ")
    # Of groups of ranks that share a replica the recording has parts of the parameters.
    in_groups = replace(view, job=replace(view.job, engine=replace(view.job.engine, replicas=2)))
    assert "MFU" not in read_texts(draw_header(in_groups, BADGE, 160, 2, BLOCKS))[1]


def test_progress_is_seen_without_colours_too() -> None:
    view = view_at("x4-z3", 55.0)
    assert read_texts(draw_header(view, BADGE, 80, 2, ASCII))[1] == (
        "  6/16 steps  ###......  819 ms/it  10.0k tok/s  ETA 8 s  elapsed 0:55          "
    )


def test_header_before_there_is_an_engine() -> None:
    assert read_texts(draw_header(view_at("story", 20.0), BADGE, 80, 2, BLOCKS)) == [
        " zerotop  story   python3 -m deepspeed.launcher.runner --num_gpus 4…      LIVE  ",
        " no step yet  elapsed 0:20                                                      ",
    ]


def test_a_time_that_is_inferred_is_marked_as_such() -> None:
    view = replace(view_at("story", 20.0), inferred=Inferred(2.7512, 0.874, ("cpu", "pcie"), 24.0))
    assert read_texts(draw_header(view, BADGE, 80, 2, BLOCKS))[1] == (
        " no step yet  about 2.75 s/it inferred, 87 % sure  elapsed 0:20                 "
    )


def test_gpu_memory() -> None:
    view = view_at("story", 64.0)
    rows = read_texts(draw_memory(view, 56, 10, BLOCKS))
    assert rows[:2] == [
        "GPU memory GiB ──────── ■allocated ■reserved ■used total",
        "GPU 0 ▇▇▇▕▕▇▇▇▇▇▇▇▇▇▇▇▇       16.0      38.2  40.9 140.4",
    ]
    assert rows[5] == " host ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇                   155.1 of 503.8"
    assert read_texts(draw_memory(view, 39, 3, ASCII)) == [
        "GPU GiB ---- #allocated =reserved -used",
        "0 #=|.......       16.0      38.2  40.9",
        ".. 3 more, 37.0 to 40.4 GiB used       ",
    ]


def test_gpus_of_which_no_rank_reported() -> None:
    view = view_at("story", 20.0)
    assert read_texts(draw_memory(view, 39, 2, ASCII))[1] == ".. 4 more, 17.6 GiB used               "
    assert "    –" in read_texts(draw_memory(view, 56, 10, BLOCKS))[1]


def test_host_memory_without_gpus() -> None:
    assert read_texts(draw_memory(view_at("cpu-clean", 35.05), 56, 4, BLOCKS)) == [
        "Host memory GiB ────────────── ■RSS ▕peak ■shared pinned",
        "  host ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇               20.2 of 23.5",
        "rank 0 ▕▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇  0.41  0.41    0.00   0.00",
        "rank 1 ▕▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇  0.41  0.41    0.00   0.00",
    ]


def test_room_under_the_bars_shows_the_last_while() -> None:
    rows = read_texts(draw_memory(view_at("story", 64.0), 56, 16, ASCII))[6:]
    assert rows[0].startswith("  60+ ")
    assert rows[6] == "  20+----/--=########################======###===##===##"
    assert rows[-1] == "    + 26 s ago --------------- GPU 0 --------------- now"


def test_the_ranks_on_the_host_are_shown_together() -> None:
    rows = read_texts(draw_memory(view_at("cpu-clean", 35.05), 56, 11, ASCII))[4:]
    assert rows == [
        " 1.0+                                                   ",
        "    |                                                  #",
        "    |                                              #####",
        " 0.5+###################################################",
        "    |###################################################",
        "    |###################################################",
        "    + 26 s ago ------------- all ranks ------------- now",
    ]


def test_used_swap_is_shown() -> None:
    view = view_at("cpu-clean", 35.05)
    host = replace(view.hosts[0], swap_used_bytes=3 * 1024**3)
    row = draw_memory(replace(view, hosts=(host,)), 56, 4, BLOCKS)[1]
    assert ("swap 3.0  ", "warn") in row


def test_iterations() -> None:
    assert read_texts(draw_iteration(view_at("story", 64.0), 50, 10, BLOCKS)) == [
        "Iteration s ─── ▁▁▁▁▁▁▁▁▁▁▄█ loss 18.57 at step 12",
        "    │                            step 12      2.67",
        "    │                            ■ outside    0.01",
        "   6┤▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔  ■ step       1.84",
        "    │          ▄                 ■ backward   0.79",
        "   4┤×▔▔▔▔▔▔▔▔▔█▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔  ■ forward    0.03",
        "    │▂  ×      █▆▅               ■ data       0.00",
        "   2┤█××▁××××××███▔▔▔▔▔▔▔▔▔▔▔▔▔  × 10 skipped     ",
        "    │▅▇▇██▇▇▇▇▇▇▇▇                                ",
        "    └0────5────10──────────────                   ",
    ]


def test_iterations_in_milliseconds_and_ascii() -> None:
    assert read_texts(draw_iteration(view_at("cpu-clean", 35.05), 60, 8, ASCII)) == [
        "Iteration ms -----------------------------------------------",
        "  60+^S                                    step 13      31.6",
        "    |SS    SS                              . outside     0.2",
        "  40+bbSSSSSSSSSS      SSSS                S step        7.2",
        "    |bbbbbbbbbbbbbbbbSSbbbbSSSSSS          b backward   18.7",
        "  20+ffbbbbbbbbbbbbbbbbbbbbbbbbbb          f forward     5.5",
        "    |ffffffffffffffffffffffffffff          : data        0.1",
        "    +0---------5---------10--------------                   ",
    ]


def test_the_end_of_the_steps_is_shown_at_once() -> None:
    panel = Iteration(BLOCKS, id="iteration")
    frame = Viewer(PlayedSource("story", lambda: 20.0), None, lambda: 0.0).make_frame()
    first = panel.draw_cached(frame, 60, 5)
    assert "no step finished yet" in "".join(read_texts(first))
    assert panel.draw_cached(replace(frame), 60, 5) is first
    over = replace(frame, view=replace(frame.view, job=replace(frame.view.job, state=JobState.LOST)))
    assert "no step was recorded" in "".join(read_texts(panel.draw_cached(over, 60, 5)))


def test_a_short_run_gets_wide_columns_from_its_first_step_on() -> None:
    view = view_at("z2-oom", 18.5)
    assert read_texts(draw_iteration(view, 60, 5, BLOCKS))[-1].rstrip() == "    └0" + "─" * 35
    assert read_texts(draw_iteration(view, 60, 5, BLOCKS))[-2].startswith("   1┤▄▄▔▄▄▔")


def test_phases_nobody_recorded_are_not_drawn() -> None:
    view = view_at("story", 64.0)
    unknown = np.full(len(view.iterations.step), np.nan)
    phases = {"forward": unknown, "backward": unknown, "step": unknown}
    rows = draw_iteration(replace(view, iterations=replace(view.iterations, phase_s=phases)), 50, 10, BLOCKS)
    assert read_texts(rows)[2].endswith("■ outside    2.67")
    assert read_texts(rows)[3].endswith("■ step          –")
    styles = {style for row in rows for _, style in row}
    assert "phase-other" in styles  # the whole iteration is what the phases leave


def test_a_step_far_shorter_than_the_longest_keeps_its_figures() -> None:
    """Pauses of half a second, and steps of 5 ms between them."""
    view = view_at("story", 64.0)
    count = len(view.iterations.step)
    phases = {name: np.full(count, 0.0013) for name in ("forward", "backward", "step")}
    iteration_s = np.where(np.arange(count) % 3 == 1, 0.5, 0.0054)
    short = replace(view.iterations, iteration_s=iteration_s, phase_s=phases)
    texts = read_texts(draw_iteration(replace(view, iterations=short), 50, 10, BLOCKS))
    assert any(text.endswith("■ step     0.0013") for text in texts)


def test_waiting_for_other_pipeline_stages_has_a_bar() -> None:
    view = view_at("story", 64.0)
    phases = {**view.iterations.phase_s, "stages": np.full(len(view.iterations.step), 0.5)}
    del phases["other"]
    waiting = replace(view, iterations=replace(view.iterations, phase_s=phases))
    assert any(row.endswith("■ stages     0.50") for row in read_texts(draw_iteration(waiting, 50, 10, BLOCKS)))
    assert any(
        "■ between stages  " in row and row.endswith("0.50") for row in read_texts(draw_iteration(waiting, 100, 10, BLOCKS))
    )
    assert "phase-communication" in {style for row in draw_iteration(waiting, 50, 10, BLOCKS) for _, style in row}


def test_cpu() -> None:
    assert read_texts(draw_cpu(view_at("story", 64.0), 72, 4, BLOCKS)) == [
        "CPU 24.8 of 64 cores ────── last 4 s cores runnable threads ─ RSS pinned",
        "rank 0 ■ grads→cpu    0.1 s ▇▁▁▇▇▇▃▁   6.1     21.0     210  38.1    0.0",
        "rank 1 ■ grads→cpu    0.1 s ▇▁▁▇▇▇▂▁   6.4     21.2     207  38.0    0.0",
        "… 2 more ranks, 5.9 to 6.4 cores each                                   ",
    ]


def test_before_a_second_sample_no_figure_of_the_processors_is_known(many_ranks: LiveView) -> None:
    view = many_ranks
    unknown = replace(
        view,
        hosts=tuple(replace(host, cores_used=math.nan) for host in view.hosts),
        ranks=tuple(replace(rank, cores_used=math.nan) for rank in view.ranks),
        gpus=tuple(replace(gpu, sample={**gpu.sample, "utilization_percent": math.nan}) for gpu in view.gpus),
    )
    rows = [*read_texts(draw_cpu(unknown, 76, 5, BLOCKS)), *read_texts(draw_gpu(unknown, 76, 5, BLOCKS))]
    assert not any("nan" in row for row in rows)
    assert rows[0].startswith("CPU – of 1024 cores ──")
    assert rows[4].strip() == "… 61 more ranks, – cores each"
    assert read_texts(draw_ranks(unknown, 0, {}, 76, 3, BLOCKS))[0].startswith("Ranks 1-2 of 64  now ─")


def test_the_past_has_the_colours_of_its_phases() -> None:
    row = draw_cpu(view_at("story", 64.0), 72, 4, BLOCKS)[1]
    strip = [(text[0], style) for text, style in row if set(text) <= set("▁▇")]
    assert {style for text, style in strip if text == "▇"} == {"phase-step/strip", "phase-transfer/strip"}
    assert {style for text, style in strip if text == "▁"} == {"phase-backward/strip"}


def test_few_ranks_with_room_show_their_threads_and_have_tall_strips() -> None:
    assert read_texts(draw_cpu(view_at("cpu-clean", 35.05), 38, 9, BLOCKS))[:5] == [
        "CPU 1.7 of 2 ── cores runnable threads",
        "0 ■ forward       0.8      0.9       8",
        "     main thread 0.8  gloo 0.0        ",
        "                                 ▃▆▄▅▄",
        "     ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▄█████",
    ]
    assert "main thread 0.8  gloo 0.0" in read_texts(draw_cpu(view_at("cpu-clean", 35.05), 90, 7, BLOCKS))[1]


def test_a_rank_that_ended_well_is_muted() -> None:
    view = view_at("cpu-clean", 200.0)
    assert ("ended".ljust(12), "muted") in draw_cpu(view, 60, 3, BLOCKS)[1]
    failed = replace(view, job=replace(view.job, exit_code=1))
    assert ("exited".ljust(12), "alert") in draw_cpu(failed, 60, 3, BLOCKS)[1]
    silent = replace(failed, ranks=tuple(replace(rank, activity=LateActivity(Activity)) for rank in failed.ranks))
    assert ("exited".ljust(12), "alert") in draw_cpu(silent, 60, 3, BLOCKS)[1]


def test_a_process_that_is_gone_holds_no_memory() -> None:
    view = view_at("story", 64.0)
    gone = replace(view, ranks=(replace(view.ranks[0], alive=False), *view.ranks[1:]))
    first, second = read_texts(draw_cpu(gone, 76, 10, BLOCKS))[1:3]
    assert first.split()[-2:] == ["–", "–"]
    assert second.split()[-2:] != ["–", "–"]
    view = view_at("cpu-clean", 35.05)
    gone = replace(view, ranks=(replace(view.ranks[0], alive=False), *view.ranks[1:]))
    first, second = read_texts(draw_memory(gone, 76, 10, BLOCKS))[2:4]
    assert first.split()[-4:] == ["–", "0.41", "–", "–"]  # its peak stays
    assert second.split()[-4:] == ["0.41", "0.41", "0.00", "0.00"]


def test_dead_and_late_ranks_come_first(many_ranks: LiveView) -> None:
    view = many_ranks
    ranks = list(view.ranks)
    ranks[40] = replace(ranks[40], alive=False)
    ranks[50] = replace(ranks[50], step=11)
    ranks[60] = replace(ranks[60], rss_peak_bytes=ranks[60].rss_peak_bytes * 2)
    rows = read_texts(draw_cpu(replace(view, ranks=tuple(ranks)), 80, 6, BLOCKS))
    assert [row.split()[1] for row in rows[1:5]] == ["40", "50", "60", "0"]
    assert rows[1].split()[3] == "exited"
    assert rows[5].startswith("… 60 more ranks")


def test_the_gpu_panel_in_a_few_lines() -> None:
    assert read_texts(draw_gpu(view_at("story", 64.0), 60, 3, BLOCKS)) == [
        "GPU ─ last 12 s ─────────────── % ── W  °C D2H GB/s H2D GB/s",
        "GPU 0 ▅▃▇▇      ▁▇▅   ▆▇▁  ▃▇  90  177  40      1.6      0.1",
        "… 3 more, 99 to 100 %                                       ",
    ]


def test_one_gpu_with_room_has_a_tall_strip_and_its_name() -> None:
    assert read_texts(draw_gpu(view_at("gpu-gpt2", 40.0), 60, 4, BLOCKS)) == [
        "GPU ─────────────────────────── % ── W  °C D2H GB/s H2D GB/s",
        "GPU 0 NVIDIA H200               5  116  32      3.0      1.5",
        "                                                            ",
        "        ▁▁ ▁         ▁▁  ▅▅▆▄▄▆▄▆▅▅▆▄▆▅▅▅▅▅▅▅▅▄▅▅▅▄▆▅▅▅▅▅▅▅▆",
    ]


def test_output_is_literal_and_scrolls() -> None:
    lines = (*tuple(f"line {number}" for number in range(20)), "[red]\x1b[31mloss[/red]")
    assert read_texts(draw_output(Pane(lines), 24, 3, BLOCKS)) == [
        "Output ─────────────────",
        "line 19                 ",
        "[red]�[31mloss[/red]    ",
    ]
    assert read_texts(draw_output(Pane(lines, 5), 40, 3, BLOCKS))[:2] == [
        "Output 5 newer below ───────────────────",
        "line 14                                 ",
    ]
    title = read_texts(draw_output(Pane(lines, 19, has_newer=True), 60, 3, BLOCKS))[0]
    assert title.startswith("Output more than 19 newer below, this is the beginning ──")
    assert read_texts(draw_output(Pane(lines), 12, 1, ASCII)) == ["> [red]?[31."[:10] + ".."]
    assert [count_visible_lines(Pane(lines), 80, height) for height in (1, 2, 3, 10)] == [1, 2, 2, 9]
    assert read_texts(draw_output(Pane(()), 24, 3, BLOCKS, empty_text="No output yet"))[1].strip() == "No output yet"


def test_short_lines_of_output_take_two_columns_of_a_wide_screen() -> None:
    lines = tuple(f"step {number} loss 2.5" for number in range(9))
    rows = read_texts(draw_output(Pane(lines), 160, 4, BLOCKS))
    assert [row.split() for row in rows[1:]] == [
        ["step", str(left), "loss", "2.5", "│", "step", str(left + 3), "loss", "2.5"] for left in (3, 4, 5)
    ]
    back = read_texts(draw_output(Pane(lines, 3), 160, 4, BLOCKS))
    assert "3 newer below, this is the beginning" in back[0]
    assert [row.split()[1] for row in back[1:]] == ["0", "1", "2"]
    few = read_texts(draw_output(Pane(lines[:5]), 160, 7, BLOCKS))
    assert [row.strip() for row in few[1:]] == [*lines[:5], ""]
    odd = read_texts(draw_output(Pane(lines[:5]), 160, 4, BLOCKS))
    assert [row.split("│")[0].split()[1] for row in odd[1:]] == ["0", "1", "2"]
    for others in (
        Pane((*lines[:5], "x" * 90, *lines)),
        Pane((*lines, "x" * 90), 1),
        Pane(("\t" * 11, *lines)),
    ):  # as wide as they are
        assert not any("│" in row for row in read_texts(draw_output(others, 160, 4, BLOCKS)))
    assert not any("│" in row for row in read_texts(draw_output(Pane(lines), 120, 4, BLOCKS)))


def test_an_alert_is_shown_in_full() -> None:
    sentences = build_notices(view_at("host-killed", 200.0))
    rows = draw_notices(sentences, 80, 4, BLOCKS)
    assert " ".join(row_text(row)[3:].strip() for row in rows[:2]) == sentences[0][1]
    assert {style for row in rows[:2] for text, style in row if text.strip()} == {"alert"}
    assert row_text(draw_notices(sentences, 80, 2, BLOCKS)[-1]).endswith("+1 more: i ")


def test_after_the_end_a_hang_keeps_to_few_rows_of_a_low_terminal() -> None:
    found = next(one for one in list_findings(open_recording("cpu-hang")) if one.name == "hung_ranks")
    hung = replace(found, severity=Severity.ERROR)
    end = End(kind="signal", ranks=(0,), unix_ns=hung.known_ns + 1, what="It ended.", where="", why="", advice="")
    view = view_at("cpu-clean", 200.0)
    low, high = (build_notices(view, finding=hung, failure=end, roomy=roomy) for roomy in (False, True))
    assert low[1].sentence == hung.headline
    assert high[1].sentence.startswith(f"{hung.headline}. {hung.details[:20]}")
    assert count_notice_rows(low[1:3], 80, 12, BLOCKS) == 2 < count_notice_rows(high[1:3], 80, 12, BLOCKS)


def test_calm_sentences_are_not_loud() -> None:
    assert [notice.style for notice in build_notices(view_at("cpu-clean", 20.0))] == ["text", "muted"]
    assert [notice.style for notice in build_notices(view_at("cpu-clean", 200.0))] == ["good", "muted"]
    assert [notice.style for notice in build_notices(view_at("host-killed", 200.0))] == ["alert", "muted"]
    assert [notice.style for notice in build_notices(view_at("story", 64.0), ("dead sampler",))] == ["warn"]


@pytest.mark.parametrize(
    ("moment", "seconds", "badge", "style"),
    [
        (CursorState(75, 75, True, True, False, 1.0), 75, " ● LIVE ", "badge-live"),
        (CursorState(33, 75, True, False, False, 1.0), 33, " ▮▮ PAUSED −0:42 ", "badge-past"),
        (CursorState(33, 75, True, False, True, 4.0), 33, " ▶ −0:42 4× ", "badge-past"),
        (CursorState(33, 75, False, False, True, 0.25), 33, " ▶ REPLAY 0.25× ", "badge-past"),
        (CursorState(33, 75, False, False, False, 1.0), 33, " ▮▮ PAUSED ", "badge-past"),
        (CursorState(75, 75, False, True, False, 1.0), 75, " END ", "badge-past"),
    ],
)
def test_badge(moment: CursorState, seconds: float, badge: str, style: str) -> None:
    assert draw_badge(view_at("story", seconds), moment, BLOCKS) == ((badge, style),)


def test_badge_of_an_ended_job() -> None:
    end = CursorState(60, 60, False, True, False, 1.0)
    assert draw_badge(view_at("cpu-clean", 200.0), end, BLOCKS) == ((" EXIT 0 ", "badge-good"),)
    assert draw_badge(view_at("cpu-dead", 200.0), end, BLOCKS) == ((" KILLED (SIGKILL) ", "badge-bad"),)


def test_transport() -> None:
    playing = CursorState(30, 60, False, False, True, 4.0)
    assert row_text(draw_transport(playing, 45, BLOCKS)) == " ▶     4×  0:30  ━━━━━━━━━━●──────────  1:00 "
    assert row_text(draw_transport(playing, 18, ASCII)) == " >     4x  0:30  / 1:00"[:18]


def test_status_is_loud_about_losses_only() -> None:
    cost = view_at("story", 64.0).cost
    text = "watching costs 0.26 % "
    assert row_text(draw_status(cost, 80)) == text
    once = row_text(draw_status(replace(cost, one_time_s=1.25), 80))
    assert once == "watching costs 0.26 %   1.2 s once "
    lossy = draw_status(replace(cost, lost_records=1234, errors=1), 100)
    assert [text for text, style in lossy if style == "alert"] == ["1 234 records lost", "1 probe error"]


def test_tabs_are_where_they_say_and_leave_room_for_what_watching_costs() -> None:
    cost = view_at("story", 64.0).cost
    tabs = [Tab("live", "Live"), Tab("memory", "Memory")]
    row, places = draw_tabs(tabs, "memory", cost, 60, BLOCKS)
    assert [(row_text(row)[begin:end], action) for begin, end, action in places] == [
        ("1 Live", "app.switch('live')"),
        ("2 Memory", "app.switch('memory')"),
    ]
    assert row_text(row).endswith("watching costs 0.26 % ")
    narrow, _ = draw_tabs(tabs, "memory", cost, 16, BLOCKS)
    assert row_text(narrow) == " 1  2 Memory    "


def test_keys_fit_and_are_where_they_say() -> None:
    shown = ("app.leave", "time.play", "time.step.back", "time.seconds.back", "app.help", "app.theme")
    keys = [key for key in collect_keys(LiveScreen, ZerotopApp) if key.id in shown]
    row, places = draw_keys(keys, 40, BLOCKS)
    assert row_text(row) == " q leave  space pause  ←→ step  ? help  "
    assert [(row_text(row)[begin:end], action) for begin, end, action in places] == [
        ("q leave", "app.leave"),
        ("space pause", "app.toggle_play"),
        ("←", "app.steps(-1)"),
        ("→", "app.steps(1)"),
        (" step", "app.steps(-1)"),
        ("? help", "app.help"),
    ]
    row, places = draw_keys(keys, 60, ASCII)
    assert row_text(row).isascii()
    assert {"<-", "->", " step"} < {row_text(row)[begin:end] for begin, end, _ in places}


@pytest.fixture(scope="module")
def story_views(many_ranks: LiveView) -> list[LiveView]:
    told = (("story", 64.0), ("cpu-clean", 1.0), ("host-killed", 200.0))
    return [*(view_at(name, seconds) for name, seconds in told), many_ranks]


@pytest.mark.parametrize("width", [1, 7, 12, 20, 39, 58, 77, 118, 148, 298])
@pytest.mark.parametrize("height", [1, 2, 3, 5, 9, 14, 40])
@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII])
def test_every_panel_fills_its_box(story_views: list[LiveView], width: int, height: int, glyphs: Glyphs) -> None:
    for view in story_views:
        pictures = [draw(view, width, height, glyphs) for draw in (draw_memory, draw_iteration, draw_cpu, draw_gpu)]
        for rows in (*pictures, draw_output(Pane(view.output), width, height, glyphs)):
            assert [row_width(row) for row in rows] == [width] * height
            assert glyphs is BLOCKS or all(ASCII.to_plain(row_text(row)).isascii() for row in rows)
            assert {part for row in rows for _, style in row for part in style.split("/")} <= set(STYLES)


def test_a_process_that_nobody_numbered_is_the_job() -> None:
    view = view_at("cpu-clean", 35.05)
    view = replace(view, ranks=(replace(view.ranks[0], rank=-1),))
    for draw in (draw_memory, draw_cpu):
        text = "\n".join(read_texts(draw(view, 80, 8, BLOCKS)))
        assert " job " in text or "\njob " in text
        assert "-1" not in text


def test_ranks_watched_from_outside_have_no_phase() -> None:
    view = view_at("story", 64.0)
    unseen = [replace(rank, activity=LateActivity(Activity)) for rank in view.ranks]
    outside = replace(view, ranks=tuple(unseen), job=replace(view.job, prints_here=False))
    rows = read_texts(draw_cpu(outside, 120, 12, BLOCKS))
    assert not any("starting" in row or " now " in row for row in rows)
    listed = read_texts(draw_ranks(outside, None, {}, 80, 4, BLOCKS))
    assert [row.split()[:2] for row in listed[1:]] == [["0", "–"], ["1", "–"], ["2", "–"]]
    mixed = replace(view, ranks=(*unseen[:1], *view.ranks[1:]))
    (first, _, second) = read_texts(draw_cpu(mixed, 120, 12, BLOCKS))[1:4]
    assert first.split()[:3] == ["rank", "0", "–"]
    assert "■" in second
    assert describe_no_output(outside.job) == "Not captured; see the job's own terminal"
    waiting = replace(outside, job=replace(outside.job, state=JobState.STARTING))
    assert "starting" in read_texts(draw_cpu(waiting, 120, 12, BLOCKS))[1]


@pytest.mark.parametrize(
    ("state", "code", "name", "badge", "style", "mark"),
    [
        (JobState.ENDED, 0, "", ("EXIT 0", "badge-good"), "good", ""),
        (JobState.ENDED, 3, "", ("EXIT 3", "badge-bad"), "alert", "!"),
        (
            JobState.ENDED,
            247,
            "SIGKILL",
            ("KILLED (SIGKILL)", "badge-bad"),
            "alert",
            "!",
        ),  # DeepSpeed's launcher for signal 9
        (JobState.ENDED, 137, "", ("EXIT 137", "badge-bad"), "alert", "!"),  # its own exit code
        (JobState.ENDED, None, "", ("ENDED", "badge-past"), "warn", "!"),  # another started it: who knows its exit code
        (JobState.DETACHED, None, "", ("DETACHED", "badge-past"), "text", ""),
        (JobState.LOST, None, "", ("LOST", "badge-bad"), "alert", "!"),
    ],
)
def test_an_ending_is_red_only_if_it_is_known_to_be_bad(
    state: JobState, code: int | None, name: str, badge: tuple[str, str], style: str, mark: str
) -> None:
    view = view_at("story", 64.0)
    job = replace(view.job, state=state, exit_code=code, exit_signal=name, exit_text="It is over.")
    assert format_ending(job) == badge
    (told, *_) = build_notices(replace(view, job=job))
    assert (told.style, told.mark) == (style, mark)


def test_the_legend_of_a_step_has_every_figure_whole() -> None:
    """The job is a loop, whose time outside has a long name: ``between the phases``."""
    view = view_at("hand-clean2", 20.0)
    for width in (40, 50, 75, 76, 98, 118):
        rows = [row.rstrip() for row in read_texts(draw_iteration(view, width, 12, BLOCKS))]
        named = [row for row in rows if any(word in row for word in ("■ outside", "■ between the phases"))]
        assert named, width
        assert all(row[-1].isdecimal() for row in named), named
        assert ("between the phases" in named[0]) == (width >= 76)


def test_a_column_that_is_too_tall_keeps_the_shares_of_its_phases() -> None:
    """Forward is 75 % of it, data 1 %."""
    rows = read_texts(draw_iteration(view_at("hand-threads", 99.0), 60, 12, ASCII))[1:-1]
    assert "".join(row[40] for row in rows).split() == ["^bffffff"]

"""Whatever a recording says, the screen draws it: no value makes a panel fail or leave its box."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from zerotop.analysis import live_view
from zerotop.analysis.engine import EngineSummary
from zerotop.ui.base.bars.footer import draw_tabs
from zerotop.ui.base.bars.header import build_notices, count_notice_rows, draw_header, draw_notices
from zerotop.ui.base.frame import Pane
from zerotop.ui.base.tabs import TABS
from zerotop.ui.dialogs.text_pages import build_job_page
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES, Glyphs
from zerotop.ui.drawing.rows import Row, row_text
from zerotop.ui.live.cpu import draw_cpu
from zerotop.ui.live.gpu import draw_gpu
from zerotop.ui.live.iteration import draw_iteration
from zerotop.ui.live.memory import draw_memory
from zerotop.ui.live.output import draw_output
from zerotop.ui.memory.memory_history import describe_history, draw_history

sizes = st.integers(0, 2**50)
numbers = st.one_of(st.floats(min_value=0, max_value=1e12), st.just(float("nan")), st.just(float("inf")))
few = st.integers(0, 300)
words = st.text(max_size=12)
maybe_sizes = st.one_of(st.none(), sizes)
maybe_few = st.one_of(st.none(), few)

engines = st.builds(
    EngineSummary,
    model=words,
    parameters=maybe_sizes,
    zero_stage=st.one_of(st.none(), st.integers(0, 3)),
    offload_optimizer=words,
    offload_parameters=words,
    dtype=words,
    micro_batch=maybe_few,
    gradient_accumulation=maybe_few,
    ranks=maybe_few,
)
jobs = st.builds(
    live_view.Job,
    name=words,
    command=st.lists(words, max_size=4).map(tuple),
    launcher=words,
    state=st.sampled_from(live_view.JobState),
    exit_code=st.one_of(st.none(), st.integers(-1, 255)),
    exit_text=st.text(max_size=200),
    engine=engines,
    notices=st.lists(st.text(max_size=120), max_size=3).map(tuple),
)
progresses = st.builds(
    live_view.Progress,
    step=maybe_few,
    total_steps=maybe_few,
    skipped_steps=few,
    iteration_s=numbers,
    tokens_per_s=numbers,
    eta_s=numbers,
    elapsed_s=numbers,
)
gpus = st.builds(
    live_view.Gpu,
    host=words,
    index=few,
    name=words,
    total_bytes=sizes,
    used_bytes=sizes,
    allocated_bytes=maybe_sizes,
    allocated_peak_bytes=maybe_sizes,
    reserved_bytes=maybe_sizes,
    reserved_peak_bytes=maybe_sizes,
    process_bytes=maybe_sizes,
    sample=st.fixed_dictionaries({"utilization_percent": numbers, "power_w": numbers, "temperature_c": numbers}),
    pcie_tx_bytes_per_s=numbers,
    pcie_rx_bytes_per_s=numbers,
)
activities = st.builds(
    live_view.Activity,
    phase=st.sampled_from(("", "forward", "cpu_optimizer", "checkpoint_save", "a phase of a newer format")),
    phase_s=numbers,
    busiest=st.lists(st.tuples(words, numbers), max_size=3).map(tuple),
)
ranks = st.builds(
    live_view.Rank,
    rank=st.integers(-1, 300),
    host=words,
    pid=few,
    alive=st.booleans(),
    activity=activities.map(lambda activity: live_view.LateActivity(lambda: activity)),
    step=maybe_few,
    rss_bytes=sizes,
    rss_peak_bytes=sizes,
    shared_bytes=sizes,
    pinned_bytes=sizes,
    cores_used=numbers,
    waiting_cores=numbers,
    thread_count=few,
)
hosts = st.builds(
    live_view.Host,
    name=words,
    cores=few,
    cores_used=numbers,
    memory_limit_bytes=sizes,
    memory_used_bytes=sizes,
    swap_used_bytes=sizes,
)


@st.composite
def draw_iterations(draw: st.DrawFn) -> live_view.Iterations:
    rows = draw(st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), max_size=40))
    phases = draw(st.sampled_from((("forward", "step"), ("step", "other"), ())))
    columns = {name: np.array([row[place + 1] for row in rows], dtype=np.float64) for place, name in enumerate(phases)}
    return live_view.Iterations(
        step=np.arange(len(rows), dtype=np.int64) + draw(few),
        begin_s=np.arange(len(rows), dtype=np.float64),
        iteration_s=np.array([row[0] for row in rows], dtype=np.float64),
        phase_s=columns,
        skipped=np.array([row[3] for row in rows], dtype=np.bool_),
    )


def make_columns(count: int, *, of: int) -> st.SearchStrategy[Any]:
    column = st.lists(numbers, min_size=count, max_size=count).map(np.array)
    return st.lists(column, min_size=of, max_size=of)


@st.composite
def make_history(draw: st.DrawFn) -> live_view.History:
    count = draw(st.integers(0, 20))
    column = st.lists(numbers, min_size=count, max_size=count).map(np.array)
    phase = st.lists(st.sampled_from(("", "step", "a newer one")), min_size=count, max_size=count).map(tuple)
    ranks, gpus = draw(st.sets(few, max_size=3)), draw(st.sets(few, max_size=2))
    return live_view.History(
        piece_s=0.5,
        end_s=1e9,
        ranks={rank: draw(st.builds(live_view.RankHistory, column, column, column, phase)) for rank in ranks},
        gpus={("", gpu): live_view.GpuHistory(*draw(make_columns(count, of=4))) for gpu in gpus},
    )


views = st.builds(
    live_view.LiveView,
    cursor_ns=sizes,
    job=jobs,
    progress=progresses,
    gpus=st.lists(gpus, max_size=4).map(tuple),
    hosts=st.lists(hosts, max_size=2).map(tuple),
    ranks=st.lists(ranks, max_size=4).map(tuple),
    iterations=draw_iterations(),
    cost=st.builds(
        live_view.Cost,
        probe_share=numbers,
        one_time_s=numbers,
        lost_records=few,
        errors=few,
        records=sizes,
    ),
    output=st.lists(st.text(max_size=40), max_size=5).map(tuple),
    history=make_history(),
)


@settings(deadline=None, max_examples=150)
@given(views, st.integers(1, 130), st.integers(1, 14), st.sampled_from((BLOCKS, TEXTURES, ASCII)))
def test_any_view_is_drawn(whole: live_view.LiveView, width: int, height: int, glyphs: Glyphs) -> None:
    badge: Row = ((" LIVE ", "badge-live"),)
    sentences = build_notices(whole)
    pictures = {
        "header": draw_header(whole, badge, width, min(height, 2), glyphs),
        "notices": draw_notices(sentences, width, count_notice_rows(sentences, width, 5, glyphs), glyphs),
        "tabs": [draw_tabs(TABS, "live", whole.cost, width, glyphs)[0]],
        "output": draw_output(Pane(whole.output), width, height, glyphs),
    }
    for draw in (draw_memory, draw_iteration, draw_cpu, draw_gpu):
        pictures[draw.__name__] = draw(whole, width, height, glyphs)
        assert len(pictures[draw.__name__]) == height
    for gpu in (None, *whole.gpus[:1]):
        pictures[f"history of {gpu}"] = draw_history(whole, "it", gpu, width, height, glyphs)
        for x in range(0, width, 7):
            describe_history(whole, gpu, width, x)
    for name, rows in pictures.items():
        assert {cell_len(row_text(row)) for row in rows} <= {width}, name
    build_job_page(whole, glyphs)


@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII])
def test_output_of_wide_and_combining_characters_keeps_its_cells(glyphs: Glyphs) -> None:
    rows = draw_output(Pane(("损失" * 30, "e\u0301" * 50, "👩\u200d🔬" * 20)), 31, 4, glyphs)
    assert [cell_len(row_text(row)) for row in rows] == [31] * 4

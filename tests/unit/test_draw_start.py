"""The start screen's rows about one recording or job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.analysis.reports.recording_summary import Overview
from zerotop.recording.quick_read import Stamp
from zerotop.ui.app.start_app import StartApp
from zerotop.ui.base.bars.footer_keys import collect_keys
from zerotop.ui.base.start_interfaces import LibraryItem, RunningJob
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.drawing.rows import row_text
from zerotop.ui.start.drawing import draw_detail
from zerotop.ui.start.model import StartModel
from zerotop.ui.start.panel import label_keys
from zerotop.ui.start.screen import StartScreen

JOB = RunningJob(123, "torchrun", 1, ("0",), 300.0, None, "train.py")
KNOWN = Overview("one", zero_stage=2, model="Tiny", ranks=1, steps=1, iterations=(2.5,), iteration_s=2.5)


def read_detail(item: LibraryItem) -> str:
    return " ".join(row_text(row).strip() for row in draw_detail(item, 120, BLOCKS))


def make_recording(known: Overview) -> ListedRecording:
    return ListedRecording(Path("/recordings/one"), Stamp(1, 1, 1), False, known)


@pytest.mark.parametrize(("ranks", "said"), [(1, ": 1 rank on GPU 0."), (2, ": 2 ranks on GPU 0.")])
def test_how_many_ranks_a_running_job_has(ranks: int, said: str) -> None:
    assert said in read_detail(replace(JOB, ranks=ranks))


def test_details_fit_one_step_and_an_unknown_number_of_ranks() -> None:
    assert "Tiny, ZeRO-2, 1 rank, 1 step, median 2.50 s, longest 2.50 s" in read_detail(make_recording(KNOWN))
    assert "median 27.8 ms, longest 2.50 s" in read_detail(make_recording(replace(KNOWN, iteration_s=0.0278)))
    assert "Tiny, ZeRO-2, 4 ranks, 30 steps, median" in read_detail(make_recording(replace(KNOWN, ranks=4, steps=30)))
    assert "Tiny, ZeRO-2, 1 step, median" in read_detail(make_recording(replace(KNOWN, ranks=None)))
    assert "1 record could not be written." in read_detail(make_recording(replace(KNOWN, lost_records=1)))


def test_the_share_of_the_end_is_of_both() -> None:
    judged = replace(KNOWN, worst="The job ends late", worst_name="long_end", worst_share=0.4)
    assert "40 % of the training time and the end: The job ends late" in read_detail(make_recording(judged))
    assert "40 % of the training time: " in read_detail(make_recording(replace(judged, worst_name="data_stall")))


def test_keys_are_called_as_on_all_screens() -> None:
    keys = {text for key in collect_keys(StartScreen, StartApp) if key.id.startswith("start.") for text in key.keys}
    assert "enter" in keys
    assert "".join(keys).isascii()


def test_keys_that_need_a_row_or_a_recording_are_left_out_without_one() -> None:
    model = StartModel()
    assert label_keys(model).keys() >= {"start.open", "start.mark", "start.export"}
    model.update_items((make_recording(KNOWN),), ())
    assert label_keys(model) == {"app.leave": "quit"}

"""Lines that save checkpoints, as the probe notes them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.stacks.saving_lines import SavingLines


def test_saves_are_counted_by_line_and_written_ever_more_seldom() -> None:
    written: list[dict[str, Any]] = []
    lines = SavingLines(CostMeter())
    lines.note_save(1)  # before the recording: nothing to write
    lines.begin_recording(lambda time_ns, event, **facts: written.append(facts), names_lines=True)
    for time_ns in range(5):
        lines.note_save(time_ns)
    first = sys._getframe().f_lineno - 1
    lines.note_save(9)
    assert [(one["line"], one["saves"]) for one in written] == [(first, 1), (first, 2), (first, 4), (first + 2, 1)]
    assert {one["function"] for one in written} == {"test_saves_are_counted_by_line_and_written_ever_more_seldom"}


def test_no_line_is_noted_where_stacks_are_not_recorded() -> None:
    written: list[dict[str, Any]] = []
    lines = SavingLines(CostMeter())
    lines.begin_recording(lambda time_ns, event, **facts: written.append(facts), names_lines=False)
    lines.note_save(1)
    assert not written


def test_an_error_is_reported_once_and_never_reaches_the_save() -> None:
    meter, reported, calls = CostMeter(), list[str](), list[int]()
    meter.report_error = lambda where, error: reported.append(where)

    def fail(time_ns: int, event: Any, **facts: Any) -> None:
        calls.append(time_ns)
        raise OSError("disk full")

    lines = SavingLines(meter)
    lines.begin_recording(fail, names_lines=True)
    for time_ns in range(3):
        lines.note_save(time_ns)
    assert (reported, calls) == (["lines that save"], [0])


def test_an_interruption_of_the_job_goes_on_to_it() -> None:
    def interrupt(time_ns: int, event: Any, **facts: Any) -> None:
        raise KeyboardInterrupt

    lines = SavingLines(CostMeter())
    lines.begin_recording(interrupt, names_lines=True)
    with pytest.raises(KeyboardInterrupt):
        lines.note_save(1)

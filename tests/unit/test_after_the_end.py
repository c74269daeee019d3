"""After a job's end nothing is announced any more: each text of an empty panel, in each state of a job."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from played_source import PlayedSource
from zerotop.analysis.live_view import JobState, LiveView
from zerotop.ui.drawing.labels import describe_no_output, describe_no_ranks
from zerotop.ui.iteration.panels import _describe_missing

ANNOUNCED = re.compile(r"\b(waiting|yet|soon|appear|will)\b", re.IGNORECASE)


def list_texts(view: LiveView, state: JobState, *, has_steps: bool) -> list[str]:
    view = replace(view, job=replace(view.job, state=state, prints_here=True), ranks=())
    folding = SimpleNamespace(is_busy=False, waveforms=SimpleNamespace(has_steps=lambda cursor_ns: has_steps))
    missing = _describe_missing(cast(Any, folding), cast(Any, SimpleNamespace(view=view)))
    return [describe_no_ranks(view), describe_no_output(view.job), *(text for text, _ in missing)]


@pytest.mark.parametrize("has_steps", [False, True])
@pytest.mark.parametrize("state", list(JobState))
def test_texts_of_empty_panels(state: JobState, has_steps: bool) -> None:
    texts = list_texts(PlayedSource("story", lambda: 65.0).view_at(None), state, has_steps=has_steps)
    announced = [text for text in texts if ANNOUNCED.search(text)]
    assert bool(announced) is not state.is_over, texts

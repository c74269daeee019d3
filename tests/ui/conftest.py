"""What tests of the screens share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from recordings import open_searched
from waiting import wait_for_idle_loop
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app import monitor


@pytest.fixture(autouse=True)
def wait_for_settled_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and pauses end when there is nothing left to do, which takes as long as that takes."""
    monkeypatch.setattr("textual.app.wait_for_idle", wait_for_idle_loop)
    monkeypatch.setattr("textual.pilot.wait_for_idle", wait_for_idle_loop)


@pytest.fixture(autouse=True, scope="session")
def parsed_once() -> Iterator[None]:
    """The style sheets are the same in every app: parsing them is a fifth of what it takes to start one."""
    parse, known = Stylesheet._parse_rules, dict[tuple[Any, ...], list[RuleSet]]()

    def parse_once(sheet: Stylesheet, css: str, **how: Any) -> list[RuleSet]:
        key = (css, *how.items(), *sheet._variables.items())
        if key not in known:
            known[key] = parse(sheet, css, **how)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def painted_at_once() -> Iterator[None]:
    """Paint a millisecond after a change, not a sixtieth of a second: a third of the time of these tests was that wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("textual.screen.UPDATE_PERIOD", 0.001)
        yield


@pytest.fixture(autouse=True, scope="session")
def frozen_once() -> Iterator[None]:
    """Freeze garbage for all apps: each would go through all objects of all tests."""
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "freeze_garbage", lambda: None)
        yield


@pytest.fixture(scope="module")
def story_source() -> RecordingSource:
    """The recording that is shipped with the demo, read to its end."""
    return open_searched("story")

"""What tests of the screens share."""

from __future__ import annotations

import pytest

from settling import until_settled


@pytest.fixture(autouse=True)
def settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and pauses end when there is nothing left to do, which takes as long as that takes."""
    monkeypatch.setattr("textual.app.wait_for_idle", until_settled)
    monkeypatch.setattr("textual.pilot.wait_for_idle", until_settled)

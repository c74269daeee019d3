"""A recording read up to its end, with the facts that reports compare and show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from zerotop.analysis.engine import read_first_engine
from zerotop.analysis.findings import Finding
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.views.finding_search import list_findings
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.events.event_files import E
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events


class RecordedRun:
    """One recording, read up to its end."""

    def __init__(self, recording: Recording, *, memory: bool = True, price: HourlyPrice | None = None) -> None:
        """``memory``: read the steps' columns of memory too. ``price``: [the recording's]."""
        self.recording = recording
        self.source = RecordingSource(recording, memory=memory, price=price)
        self.view: LiveView = self.source.view_at(None)
        self.hello = read_lowest_rank(recording, events.Hello)
        self.engine = read_first_engine(recording.at())

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The findings, in the order in which they became known."""
        return list_findings(self.recording)

    @property
    def flat_config(self) -> dict[str, str]:
        """DeepSpeed's effective configuration, one entry per leaf."""
        config = self.engine.config
        return dict(_iter_leaves(config or {}))

    @property
    def options(self) -> dict[str, str]:
        """The script's own options and their values, "yes" for a flag; a positional argument is named after its position."""
        options: dict[str, str] = {}
        last = ""
        for position, word in enumerate(self.hello.arguments or () if self.hello is not None else ()):
            if word.startswith("-"):
                name, _, value = word.partition("=")
                options[name], last = value or "yes", "" if value else name
            elif last:
                options[last], last = word, ""
            else:
                options[f"argument {position}" if position else "script"] = word
        return options


def read_lowest_rank(recording: Recording, kind: type[E]) -> E | None:
    """Return the lowest rank's first event of that kind."""
    return min(recording.events_of(kind), key=lambda event: event.writer.rank, default=None)


def _iter_leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _iter_leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + str(key), str(value)

"""Read the files of a rank with NumPy alone, so that tests of the probe do not depend on the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from declared_events import check_event
from zerotop_probe.recording.segments import parse_name
from zerotop_probe.recording.tables import PHASES


def read_table_file(path: Path) -> Any:
    """Return the records of one file."""
    with open(path, "rb") as file:
        header = json.loads(file.readline())
        dtype = np.dtype([tuple(field) for field in header["dtype"]])
        return np.frombuffer(file.read(), dtype)


def read_event_file(path: Path) -> list[dict[str, Any]]:
    """Return the events of one file, without its header."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


class Rank:
    """The files of one rank in a recording."""

    def __init__(self, recording: Path, rank: int) -> None:
        """Fail unless the rank has exactly one table of a kind and only events that match their declarations."""
        self.recording = recording
        self.rank = rank
        self.spans = np.sort(self.read_table("spans"), order="begin_ns", kind="stable")
        self.begins = self.read_table("begins")
        self.probe = self.read_table("probe")
        (path,) = recording.glob(f"events-rank{rank}-*.jsonl")
        self.events = read_event_file(path)
        for event in self.events:
            check_event(event)

    def read_table(self, name: str) -> Any:
        """Return the records of a table, of all its segments."""
        segments = {parse_name(path.name): path for path in self.recording.glob(f"{name}-rank{self.rank}-*.rec")}
        ordered = sorted((named, path) for named, path in segments.items() if named is not None)
        (_,) = {stem for (stem, _), _ in ordered}
        return np.concatenate([read_table_file(path) for _, path in ordered])

    def select_phases(self, *names: str) -> Any:
        """Return the spans of these phases, by time."""
        return self.spans[np.isin(self.spans["phase"], [PHASES.index(name) for name in names])]

    def find_events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of that name."""
        return [event for event in self.events if event["event"] == name]

    def list_phases_inside(self, outer: Any) -> list[str]:
        """Return the names of the phases inside a span, in order."""
        spans = self.spans
        within = (spans["begin_ns"] >= outer["begin_ns"]) & (spans["end_ns"] <= outer["end_ns"])
        return [PHASES[span["phase"]] for span in spans[within & (spans["depth"] > outer["depth"])]]

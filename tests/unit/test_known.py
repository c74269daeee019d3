"""What follows from what is known at a cursor is computed once for as long as that stays the same."""

from __future__ import annotations

from pathlib import Path

from memory_recording import record_two_steps
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.recording.moments.at import At
from zerotop.recording.moments.moment import at_event
from zerotop.recording.moments.process_exits import find_alive_processes
from zerotop_probe.recording import events, tables


def test_once_for_as_long_as_nothing_comes_to_be_known(tmp_path: Path) -> None:
    planted = record_two_steps(tmp_path)
    recording, asked = planted.open_recording(), list[float]()

    @at_event()
    def read_second(at: At) -> float:
        asked.append((at.cursor_ns - BEGIN_NS) / S)
        return asked[-1]

    def value_at(second: float) -> float:
        return read_second(recording.at(BEGIN_NS + int(second * S)))

    assert [value_at(19), value_at(19.5), value_at(29)] == [19, 19, 19]
    assert value_at(17.5) == 17.5  # before the inventory of 18.5
    assert value_at(0.5) == 0.5  # before the table was made
    planted.write_event(make_identity(0), 19.2, events.Goodbye)
    recording.refresh()
    assert [value_at(19), value_at(19.1), value_at(19.3)] == [19, 19, 19.3]
    planted.write_records(tables.SPANS, make_identity(1), [make_span(1, 2, "forward")], born=19.2)
    recording.refresh()
    assert value_at(19.3) == 19.3
    assert asked == [19, 17.5, 0.5, 19, 19.3, 19.3]


def test_ranks_come_and_go_as_they_do_without_it(tmp_path: Path) -> None:
    planted = record_two_steps(tmp_path)
    planted.write_event(make_identity(0), 29.2, events.Goodbye)
    recording = planted.open_recording()
    counts = [len(find_alive_processes(recording.at(BEGIN_NS + int(second * S)))) for second in (0.5, 5, 29, 29.3, 5, 0.5)]
    assert counts == [0, 1, 1, 0, 1, 0]

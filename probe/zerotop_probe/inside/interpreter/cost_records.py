"""Records of the probe's cost, and of other work in the process: garbage collections and compilations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.interpreter.collector_clock import CollectorClock
from zerotop_probe.inside.interpreter.compiled_graphs import CompilationCounter
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.rings.ring_files import RankFiles

_EVERY_NS = 200_000_000


class CostRecords:
    """Writes the table PROBE, and the events about collections and compilations."""

    def __init__(self, files: RankFiles, meter: CostMeter) -> None:
        self._writer = files.open_table(tables.PROBE)
        self._events = files.events
        self._meter = meter
        self._last_ns = -_EVERY_NS
        self._collector = CollectorClock()
        self.compilations = CompilationCounter()
        self._cost_ns = 0  # in the last record
        self.write_more: Callable[[int, int], None] = lambda time_ns, step: None
        """Records what else there is, by the time and the last finished step."""

    def are_due(self, time_ns: int) -> bool:
        """Whether the last records are old enough for the next."""
        return time_ns - self._last_ns >= _EVERY_NS

    def write(self, time_ns: int, lost_records: int, last_step: int | None) -> None:
        """Record the costs so far. ``lost_records``: of the whole process. ``last_step``: the last finished one, if any."""
        self._last_ns = time_ns
        meter = self._meter
        # Within a hook its one-time work is subtracted already, and its own time not yet added.
        self._cost_ns = max(self._cost_ns, meter.total_ns)
        self._writer.write(time_ns, self._cost_ns, meter.boundaries, lost_records, meter.errors, meter.one_time_ns)
        if last_step is not None:
            self._write_collections(time_ns, last_step)
            self._write_compiled(time_ns, last_step)
            self.write_more(time_ns, last_step)

    def _write_collections(self, time_ns: int, step: int) -> None:
        # Not before the first step: objects loaded before it are collected once.
        self._collector.start()
        if (done := self._collector.take_collections(time_ns)) is not None:
            facts = {"seconds": done.spent_ns / 1e9, "collections": done.collections}
            self._events.write(time_ns, events.Garbage, step=step, begin_ns=done.begin_ns, **facts)

    def _write_compiled(self, time_ns: int, step: int) -> None:
        if (done := self.compilations.take_graphs(time_ns)) is not None:
            facts: dict[str, Any] = {"begin_ns": done.begin_ns, "graphs": done.graphs, "seconds": done.seconds}
            facts |= {"failed": done.failed} if done.failed else {}
            self._events.write(time_ns, events.Compiled, step=step, **facts)

    def stop(self) -> None:
        """Look at no more collections."""
        self._collector.stop()

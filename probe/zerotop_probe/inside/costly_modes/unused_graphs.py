"""Note forwards whose graphs are freed before any backward: an evaluation without ``torch.no_grad()``.

An object in the metadata of the graph's first node lives as long as that node, and so as long as anything that a backward
could start from. Nothing of the graph is kept alive, and no hook is added to it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from zerotop_probe.inside.guard import CostMeter, Guard
from zerotop_probe.inside.span import Span
from zerotop_probe.inside.stacks.own_lines import OwnLines, OwnPlace
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import EVAL

_KEY = "zerotop"
_LEAF = "torch::autograd::AccumulateGrad"
# Forwards of a series whose graphs are watched, the results of each, and the nodes on the way to the first one of each.
_MOST_WATCHED, _MOST_RESULTS, _MOST_NODES = 2, 8, 1000
# Where so many series in a row are all followed by a backward, no more are watched: a loss may sum up several forwards.
_MOST_MISSED = 8
_MOST_LINES = 16
# Forwards before a backward whose lines are read, and the most lines that are known to train.
_MOST_TRAINED, _MOST_TRAINED_LINES = 3, 64


class GraphWatch:
    """Counts series of forwards without a backward by line. A line's event is written with its first, second, fourth one."""

    def __init__(self, meter: CostMeter) -> None:
        self._guard = Guard("unused graphs", meter)
        self._write_event: Callable[..., None] | None = None
        self._names_lines = False
        self._own_lines = OwnLines()
        self._series: _Series | None = None
        self._lines: dict[OwnPlace | None, _Line] = {}
        self._missed = 0
        self._trained: set[OwnPlace] = set()  # lines through which forwards with a backward ran
        self._last_trained: tuple[OwnPlace, ...] = ()  # those of the last one, before its backward
        self._unread = 0

    def begin_recording(self, write_event: Callable[..., None], *, names_lines: bool) -> None:
        """Count for another recording from now on; ``names_lines``: by lines of the job's code."""
        self._write_event, self._names_lines = write_event, names_lines
        self._series, self._lines, self._missed = None, {}, 0
        self._trained, self._last_trained, self._unread = set(), (), _MOST_TRAINED * names_lines

    @property
    def wants_trained(self) -> bool:
        """Whether to call :meth:`note_trained`."""
        return self._unread > 0

    def note_trained(self) -> None:
        """Note the lines of a training's first forward: those that it shares with an evaluation are not to be changed.

        Never raises.
        """
        self._guard.run(self._read_trained)

    def note_forward(self, result: Any, span: Span, end_ns: int) -> None:
        """Watch the graph of a forward that may be one without a backward, if it has one. Never raises."""
        if self._write_event is not None and self._missed < _MOST_MISSED:
            self._guard.run(self._watch, result, span, end_ns)

    def end_series(self, time_ns: int) -> None:
        """Before a backward, or at the end: graphs that are gone by now were unused, others may be used. Never raises."""
        if self._series is not None or self._last_trained:
            self._guard.run(self._judge_series, time_ns)

    def describe_evaluation(self, begin_ns: int) -> dict[str, Any] | None:
        """Return the forwards with graphs of an evaluation that began then, and the first one's line; None without any."""
        series = self._series
        if series is None or series.training or series.begin_ns < begin_ns:
            return None
        place = self._choose_place(series)
        return {"forwards": series.forwards, **(place._asdict() if place is not None else {})}

    def _watch(self, result: Any, span: Span, end_ns: int) -> None:
        nodes = list(_find_nodes(result))
        if not nodes:
            return
        if self._series is None:
            self._series = _Series(self._list_places() if self._names_lines else (), span)
        series = self._series
        series.end_ns = end_ns
        series.forwards += 1
        series.spent_ns += end_ns - span.begin_ns
        if series.forwards <= _MOST_WATCHED:
            firsts = [_find_first(node) for node in nodes]
            if None not in firsts:
                series.graphs.append([_watch_node(node) for node in firsts])

    def _read_trained(self) -> None:
        self._unread -= 1
        self._last_trained = self._list_places()

    def _list_places(self) -> tuple[OwnPlace, ...]:
        return tuple(self._own_lines.list_places(sys._getframe()))

    def _judge_series(self, time_ns: int) -> None:
        series, self._series = self._series, None
        if series is None or not series.training:
            self._note_lines(self._last_trained)
        self._last_trained = ()
        if series is None or not series.graphs:
            return
        if not any(all(node() is None for node in graph) for graph in series.graphs):
            self._missed += 1
            if series.training:
                self._note_lines(series.places)
            return
        self._missed = 0
        place = self._choose_place(series)
        line = self._lines.get(place)
        if line is None:
            if len(self._lines) == _MOST_LINES:
                return
            line = self._lines[place] = _Line()
        line.add(series)
        if line.series & (line.series - 1) == 0 and self._write_event is not None:
            named = place._asdict() if place is not None else {}
            last = {"step": series.step, "begin_ns": series.begin_ns, "end_ns": series.end_ns, "training": series.training}
            counts = {"series": line.series, "forwards": line.forwards, "seconds": line.spent_ns / 1e9}
            self._write_event(time_ns, events.UnusedGraphs, **last, **counts, **named)

    def _choose_place(self, series: _Series) -> OwnPlace | None:
        """Return the innermost line that is no training's: a function that computes the loss may be called by both."""
        return next((one for one in series.places if one not in self._trained), next(iter(series.places), None))

    def _note_lines(self, places: Iterable[OwnPlace]) -> None:
        if len(self._trained) < _MOST_TRAINED_LINES:
            self._trained.update(places)


class _Series:
    """Forwards since the last backward. Times are nanoseconds."""

    def __init__(self, places: tuple[OwnPlace, ...], span: Span) -> None:
        self.places, self.step, self.training = places, span.step, not span.flags & EVAL
        self.begin_ns = self.end_ns = span.begin_ns
        self.forwards = self.spent_ns = 0
        self.graphs: list[list[weakref.ref[_Mark]]] = []  # the first nodes of each watched forward


class _Line:
    """The series of forwards that began at a line."""

    def __init__(self) -> None:
        self.series = self.forwards = self.spent_ns = 0

    def add(self, series: _Series) -> None:
        self.series += 1
        self.forwards += series.forwards
        self.spent_ns += series.spent_ns


class _Mark:
    """Lives as long as the node in whose metadata it is."""

    __slots__ = ("__weakref__",)


def _find_nodes(result: Any) -> Iterator[Any]:
    """Yield the nodes of the graphs of a forward's tensors: of the first ones, in a tuple, a dictionary or a data class."""
    waiting, count = [(result, 0)], 0
    while waiting and count < _MOST_RESULTS:
        item, depth = waiting.pop()
        if isinstance(item, sys.modules["torch"].Tensor):
            count += 1
            if item.grad_fn is not None:
                yield item.grad_fn
        elif depth < 2 and (children := _list_children(item)):
            waiting += [(child, depth + 1) for child in children[:_MOST_RESULTS]]


def _list_children(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(dict.values(item))
    if isinstance(item, (tuple, list)):
        return list(item[:_MOST_RESULTS])
    return list(vars(item).values()) if hasattr(item, "__dataclass_fields__") else []


def _find_first(node: Any) -> Any:
    """Return the first node of a graph on the way from its last one; None if that way is too long."""
    for _ in range(_MOST_NODES):
        inner = next((one for one, _ in node.next_functions if one is not None and one.name() != _LEAF), None)
        if inner is None:
            return node
        node = inner
    return None


def _watch_node(node: Any) -> weakref.ref[_Mark]:
    return weakref.ref(node.metadata.setdefault(_KEY, _Mark()))

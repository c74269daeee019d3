"""Forwards with gradients that no backward follows: what the probe notes of them, and the finding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from in_pieces import find_in_pieces
from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, write_table
from zerotop.analysis.findings.memory import unused_graphs
from zerotop_probe.inside.costly_modes.unused_graphs import GraphWatch
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.span import Span
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import ALLOCATOR, BEGIN, BOUNDARY, END, EVAL, PHASE_CODE, SPANS
from zerotop_probe.recording.writer import EventWriter


class Watched:
    """A model whose forwards in evaluation mode are noted, and what was written about them."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        self.written: list[dict[str, Any]] = []
        self.graphs = GraphWatch(CostMeter())
        self.graphs.begin_recording(lambda time_ns, event, **facts: self.written.append(facts), names_lines=True)

    def call(self, shape: Callable[[torch.Tensor], Any] = lambda output: output, *, trains: bool = False) -> Any:
        span = Span(100, PHASE_CODE["forward"], 0, (0, 7, 0), False)
        span.flags = EVAL
        output = shape(self.model(torch.randn(3, 4)))
        self.graphs.note_trained() if trains else self.graphs.note_forward(output, span, 300)
        return output

    def end(self) -> list[dict[str, Any]]:
        self.graphs.end_series(1000)
        return self.written


def test_forwards_whose_graphs_are_freed_before_a_backward_are_counted() -> None:
    watched = Watched()
    for _ in range(5):
        for _ in range(3):
            watched.call()
        watched.end()
    assert [(one["series"], one["forwards"]) for one in watched.written] == [(1, 3), (2, 6), (4, 12)]
    first = watched.written[0]
    assert (first["step"], first["begin_ns"], first["end_ns"], first["training"]) == (7, 100, 300, False)
    assert first["file"].endswith("test_unused_graphs.py")


@pytest.mark.parametrize("shape", [lambda one: {"logits": one}, lambda one: (None, [one])])
def test_tensors_within_a_result_are_found(shape: Callable[[Any], Any]) -> None:
    watched = Watched()
    watched.call(shape)
    assert watched.end()


def test_a_graph_that_a_backward_may_use_is_not_counted() -> None:
    watched = Watched()
    loss = watched.call().sum()  # which keeps the graph, though the output is gone
    assert not watched.end()
    loss.backward()
    feature: list[Any] = []
    handle = watched.model[0].register_forward_hook(lambda module, inputs, output: feature.append(output))
    watched.call()
    assert not watched.end()  # the graph of a feature begins where that of the output does
    handle.remove()
    with torch.no_grad():
        watched.call()
    assert not watched.end()


def test_the_graphs_of_an_evaluation_in_progress() -> None:
    watched = Watched()
    assert watched.graphs.describe_evaluation(0) is None
    kept = [watched.call() for _ in range(3)]
    facts = watched.graphs.describe_evaluation(100)
    assert facts is not None
    assert (facts["forwards"], len(kept)) == (3, 3)
    assert facts["file"].endswith("test_unused_graphs.py")
    assert watched.graphs.describe_evaluation(101) is None  # of one before
    watched.end()
    with torch.no_grad():
        watched.call()
    assert watched.graphs.describe_evaluation(0) is None


def test_it_stops_where_a_backward_follows_again_and_again() -> None:
    watched = Watched()
    for _ in range(8):
        output = watched.call()
        watched.end()
    del output
    watched.call()
    assert not watched.end()


def compute(watched: Watched, *, trains: bool = False) -> Any:
    return watched.call(trains=trains)


def validate(watched: Watched) -> None:
    compute(watched)


def test_the_line_is_none_that_training_shares() -> None:
    """A forward's lines are those of training once a backward has followed it."""
    watched = Watched()
    assert watched.graphs.wants_trained
    validate(watched)
    compute(watched, trains=True)
    (found,) = watched.end()
    assert (found["line"], found["function"]) == (validate.__code__.co_firstlineno + 1, "validate")
    for _ in range(2):
        compute(watched, trains=True)
    assert not watched.graphs.wants_trained


def write_job(
    folder: Path, *found: dict[str, Any], step_s: float = 1.0, held_bytes: int = 0, peak_bytes: int | None = None
) -> None:
    """Write 40 steps, the events of rank 0 at the ends of some, and what the last series of forwards kept."""
    spans = [
        make_span(step * step_s + begin, step * step_s + begin + 0.1, phase, step, BOUNDARY if phase == "step" else 0)
        for step in range(40)
        for begin, phase in ((0.1, "forward"), (0.3, "backward"), (0.5, "step"))
    ]
    write_table(folder, SPANS, make_identity(0), *spans).close()
    edges = [(8.05, BEGIN, 10**9), (8.1, END, 10**9 + held_bytes), (8.15, BEGIN, 10**9), (8.2, END, 10**9 + held_bytes)]
    forward, evaluation, backward = (PHASE_CODE[name] for name in ("forward", "eval", "backward"))
    phase = forward if peak_bytes is None else evaluation
    records = [
        make_record(ALLOCATOR, time_ns=int(second * S), phase=phase, edge=edge, allocated_bytes=size)
        for second, edge, size in edges
    ]
    peak = make_record(ALLOCATOR, time_ns=int(1.4 * S), phase=backward, edge=END, allocated_peak_bytes=peak_bytes or -1)
    write_table(folder, ALLOCATOR, make_identity(0), peak, *records, peaks="window").close()
    writer = EventWriter(str(folder), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    for facts in found:
        place = {"file": "train.py", "line": 33, "function": "validate", "training": False}
        writer.write(facts["end_ns"] + S // 10, events.UnusedGraphs, **{"step": facts["end_ns"] // S, **place, **facts})
    writer.close()


def make_facts(second: float, series: int, forwards: int, seconds: float, **more: Any) -> dict[str, Any]:
    times = {"begin_ns": int(second * S), "end_ns": int((second + 0.5) * S)}
    return {**times, "series": series, "forwards": forwards, "seconds": seconds, **more}


def test_an_evaluation_with_gradients_is_told_and_told_again(tmp_path: Path) -> None:
    write_job(tmp_path, make_facts(8, 1, 20, 0.5), make_facts(16, 2, 40, 1.0), held_bytes=2 << 30)
    first, last = find_in_pieces(tmp_path, unused_graphs.detect, (16384, 7))
    assert first.event == last.event
    assert last.headline == "Forwards have gradients enabled, but no backward follows: train.py:33"
    assert first.details == (
        "500 ms were spent in 20 forwards, the first at train.py:33 in validate. Each kept what a backward needs until it"
        " was freed unused; of the last ones up to 2.00 GiB were kept."
    )
    assert last.details.startswith("1.00 s were spent in 40 forwards")
    assert (last.fix, last.severity.value) == ("with torch.no_grad():", "warning")


def test_a_model_in_training_mode_is_mentioned(tmp_path: Path) -> None:
    write_job(tmp_path, make_facts(8, 1, 15, 0.5, training=True))
    (finding,) = find_in_pieces(tmp_path, unused_graphs.detect, (16384,))
    assert "in at least 15 forwards" in finding.details
    assert finding.details.endswith("unused. The model was in training mode.")


def test_what_costs_little_is_no_warning_and_a_single_forward_no_finding(tmp_path: Path) -> None:
    write_job(tmp_path, make_facts(8, 1, 1, 0.01), make_facts(20, 2, 2, 0.02))
    (finding,) = find_in_pieces(tmp_path, unused_graphs.detect, (16384,))
    assert (finding.evidence["forwards"], finding.severity.value) == (2.0, "info")


@pytest.mark.parametrize(("peak_bytes", "severity"), [(4 * 10**9, "info"), (2 * 10**9, "warning")])
def test_an_evaluation_that_needs_far_more_than_training_is_a_warning(
    tmp_path: Path, peak_bytes: int, severity: str
) -> None:
    """Its allocator is read where it begins, and at the end of each forward."""
    write_job(tmp_path, make_facts(8, 1, 2, 0.01), held_bytes=3 * 10**9, peak_bytes=peak_bytes)
    (finding,) = find_in_pieces(tmp_path, unused_graphs.detect, (16384,))
    assert (finding.evidence["held_bytes"], finding.severity.value) == (3e9, severity)
    assert ("3.73 GiB were allocated; training needs 1.86 GiB." in finding.details) is (severity == "warning")

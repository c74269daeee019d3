"""Figures that the job prints under any name, and that became NaN or infinite."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest

from in_pieces import find_at_end
from memory_recording import record_two_steps
from small_recording import BEGIN_NS, S, make_record
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.findings.loops import figures_not_finite, loss_jumps
from zerotop_probe.recording import events, tables


def _find(folder: Path, lines: list[str], piece: int = 3, *, with_loss: bool = False) -> list[Finding]:
    """Write a line each half second from second 31 on."""
    recording = record_two_steps(folder)
    recording.write_output(31, "".join(f"{line}\n" for line in lines))
    for path in recording.folder.glob("output-*.rec"):
        path.unlink()
    offsets = [0, *accumulate(len(line) + 1 for line in lines)]
    rows = [
        make_record(tables.OUTPUT, time_ns=31 * S + number * S // 2, offset=offsets[number], length=len(line) + 1)
        for number, line in enumerate(lines)
    ]
    recording.write_records(tables.OUTPUT, recording.node, rows)
    if with_loss:
        recording.write_event(recording.node, 80, events.JobEnded, exit_code=0)
        return list(detect_findings(recording.open_recording(), BEGIN_NS + 90 * S))
    return list(find_at_end(folder, [figures_not_finite.detect, loss_jumps.detect], piece))


def _print(figures: str, values: list[float | str], begin: int = 0) -> list[str]:
    return [f"iter {50 * (begin + at)} reward 0.06 {figures % value}" for at, value in enumerate(values)]


@pytest.mark.parametrize("piece", [1, 10000])
def test_a_figure_that_became_nan_is_named(tmp_path: Path, piece: int) -> None:
    (found,) = _find(tmp_path, _print("entropy %s", [2.76] * 6 + ["nan"] * 9), piece)
    assert found.headline == "'entropy' became NaN between iter 250 and iter 300: 5 lines in a row"
    assert found.details == "The job prints this. 6 lines before had finite values, the last 2.76 (iter 250)."
    assert found.known_ns == BEGIN_NS + 31 * S + 10 * S // 2
    assert found.fix == "torch.autograd.set_detect_anomaly(True)"


def test_several_that_go_together_need_fewer_lines(tmp_path: Path) -> None:
    lines = [f'{{"epoch": {at}, "kl": {kl}, "q/mean": {q}}}' for at, (kl, q) in enumerate([(0.1, 2)] * 5)]
    lines += [f'{{"epoch": {at}, "kl": NaN, "q/mean": -inf}}' for at in (5, 6, 7)]
    (found,) = _find(tmp_path, lines)
    assert found.headline == "'kl' and 'q/mean' became NaN or infinite: 3 lines in a row"


@pytest.mark.parametrize(
    "values",
    [
        ["nan"] * 30,  # of one class
        ["nan", *[0.7] * 8, *["nan"] * 8],
        [0.7, 0.8, *["nan"] * 8],
        [*[0.7] * 9, *["nan"] * 4],
        [*[0.7] * 9, *["nan", 0.7] * 8],
    ],
)
def test_figures_that_are_nan_now_and_then_are_not_told(tmp_path: Path, values: list[float | str]) -> None:
    assert not _find(tmp_path, _print("auc %s", values))


def test_what_is_infinite_by_nature_is_not_told(tmp_path: Path) -> None:
    assert not _find(tmp_path, _print("eta: %s", [8.0] * 9 + ["inf"] * 9))
    (folder := tmp_path / "text").mkdir()
    assert not _find(folder, [f"step {at}: reading data, nan rows are left out" for at in range(20)])


def test_a_loss_that_is_not_finite_is_told_once(tmp_path: Path) -> None:
    lines = [f"iter {at} loss {loss} kl {kl}" for at, (loss, kl) in enumerate([(2.0, 0.1)] * 8 + [("nan", "nan")] * 9)]
    found = [one.name for one in _find(tmp_path, lines, with_loss=True) if "not_finite" in one.name]
    assert found == ["loss_not_finite"]

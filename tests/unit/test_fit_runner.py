"""``zerotop fit`` on a model of 0.5 B parameters in ZeRO-3, with runs that end as they did on an H100."""

from __future__ import annotations

from pathlib import Path

import pytest

from recordings import FOLDER
from zerotop.analysis.sweeps.baseline import read_baseline
from zerotop.analysis.sweeps.search import LargestResult
from zerotop.cli import main
from zerotop.commands.common.model_config import find_shape
from zerotop.commands.sweeping import fit_runner
from zerotop.commands.sweeping.fit_start import Knowledge
from zerotop.recording.reader import Recording
from zerotop.recording.sweeps import OK, OUT_OF_MEMORY, Plan, Point, Result, Sweep

GIB = 1 << 30
GPU_BYTES = 81559 << 20  # by NVML
ROOM = int(77.95 * GIB)  # that PyTorch had
SLOPE = 4 * 3_207_400
BASES = {"none": 7.45 * GIB, "optimizer": 1.09 * GIB}
FRAGMENTED = {"none": 13.24 * GIB / 4864, "optimizer": 0.0}  # bytes for each token of a row


def measure(point: Point) -> Result:
    """Return what a run would measure: fragmentation takes its share where the optimizer is on the GPU."""
    length, offload = int(point.settings["seq_length"]), str(point.settings["offload"])
    needed, unusable = int(SLOPE * length + BASES[offload]), int(FRAGMENTED[offload] * length)
    if needed + unusable <= ROOM:
        nvml = needed + int(1.29 * GIB)
        return Result(OK, attempts=1, allocated_peak_bytes=needed, reserved_peak_bytes=needed, nvml_peak_bytes=nvml)
    while needed + unusable - 4 * 4 * 151936 * length > ROOM:
        needed -= 4 * 4 * 151936 * length  # an earlier request of the loss failed
    return Result(OUT_OF_MEMORY, "Rank 0 ran out.", attempts=1, needed_bytes=needed, unusable_bytes=unusable)


FORMULAS = Knowledge(find_shape("qwen-0.5b"), None)


def search(
    monkeypatch: pytest.MonkeyPatch, folder: Path, offloads: list[str], known: Knowledge = FORMULAS
) -> tuple[list[int], list[LargestResult]]:
    """Return the lengths that are tried, and the results."""
    monkeypatch.setattr(fit_runner, "run_point", lambda folder, plan, point, **_: measure(point))
    lengths = list(range(256, 16385, 256))
    plan = Plan({"stage": [3], "offload": offloads, "micro_batch": [4], "seq_length": lengths}, model="qwen-0.5b")
    series = [Point(number, {"stage": 3, "offload": one, "micro_batch": 4}) for number, one in enumerate(offloads)]
    runner = fit_runner.FitRunner(
        Sweep(folder, plan, ()),
        series,
        "seq_length",
        most_runs=10,
        gpu_bytes=GPU_BYTES,
        known=known,
    )
    runner.run()
    assert not runner.problem
    return [int(point.settings["seq_length"]) for point in runner.sweep.points], list(runner.results)


def test_five_runs_find_what_took_nine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the formulas alone, in runs that keep no recording."""
    tried, (none, offloaded) = search(monkeypatch, tmp_path, ["none", "optimizer"])
    assert tried == [4864, 4608, 6144, 6400, 6656]
    assert (none.largest, none.failing, none.is_final) == (4608, 4864, True)
    assert (offloaded.largest, offloaded.failing, offloaded.is_final) == (6400, 6656, True)
    assert none.predicted == pytest.approx(4945, abs=20)
    assert none.expected == pytest.approx(4830, abs=50)
    assert none.limit_bytes is not None
    assert none.line is not None
    assert none.line.predict(4608) == pytest.approx(SLOPE * 4608 + BASES["none"])


@pytest.mark.parametrize(
    ("name", "lengths"), [("z2", [4864, 4608, 6400, 6656]), ("z2-offload", [4608, 4864, 6144, 6400, 6656])]
)
def test_four_runs_from_a_recording(name: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From a recording of 4 x 512 tokens in stage 2 on another type of GPU: no search can prove two values in fewer."""
    base = read_baseline(Recording.open(FOLDER / f"{name}.zerotop"))
    tried, (none, offloaded) = search(monkeypatch, tmp_path, ["none", "optimizer"], Knowledge(None, base))
    assert tried == lengths
    assert (none.largest, offloaded.largest) == (4608, 6400)


def test_a_run_of_the_search_predicts_the_next_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A command whose model is not known is searched by halves, until its first run has a recording."""
    packed = FOLDER / "z2.zerotop"
    monkeypatch.setattr(fit_runner, "find_point_recording", lambda folder, result: packed if result.outcome == OK else None)
    tried, (none, offloaded) = search(monkeypatch, tmp_path, ["none", "optimizer"], Knowledge(None, None))
    assert (none.largest, offloaded.largest) == (4608, 6400)
    assert tried[-2:] == [6400, 6656]


@pytest.mark.parametrize(
    ("model", "recording", "sentence"),
    [
        ("qwen-0.5b", "cpu-clean", "as on a CPU"),
        ("tiny", "z2", "so it tells nothing of this model"),
        ("qwen-0.5b", "nowhere", "nowhere"),
    ],
)
def test_a_recording_that_tells_nothing_is_refused(
    model: str, recording: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FOLDER / f"{recording}.zerotop"
    asked = ["--model", model, "--from", str(path), "--micro-batch", "1:8", "--headless", "-o", str(tmp_path / "fit")]
    assert main(["fit", *asked]) != 0
    assert sentence in capsys.readouterr().err


def test_only_fragmentation_is_reported_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, (none, offloaded) = search(monkeypatch, tmp_path, ["none", "optimizer"])
    assert none.fragmented_bytes == pytest.approx(13.24 * GIB, rel=0.01)
    assert offloaded.fragmented_bytes is None

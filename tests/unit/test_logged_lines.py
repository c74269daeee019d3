"""The loss, gradient norm and learning rate in lines of a job's output."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from printing import Printing
from small_recording import make_identity, make_record, write_table
from zerotop.analysis.steps.logged_values import parse_line, read_logged
from zerotop.recording.reader import Recording
from zerotop_probe.recording.logged_names import find_column
from zerotop_probe.recording.tables import ENGINE_LOSS, LOGGED, LOGGED_BITS


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("{'loss': '1.234', 'grad_norm': '0.5', 'learning_rate': '1e-05', 'epoch': '0.1'}", (1.234, 0.5, 1e-5)),
        ("{'loss': 2.5, 'grad_norm': inf, 'epoch': 0.1, 'train_runtime': 3.2}", (2.5, math.inf, None)),
        ('{"step": 3, "loss": NaN, "lr": 1e-4}', (math.nan, None, 1e-4)),
        ("step 12: loss 0.5 lr 1e-4", (0.5, None, 1e-4)),
        ("Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.300039", (2.300039, None, None)),
        ("iter 100: loss 1.2345, time 52.10ms, mfu 12%", (1.2345, None, None)),
        ("step 250: train loss 1.9, val loss 2.0", (1.9, None, None)),
        (
            "iteration 10/ 100 | learning rate: 1.0E-05 | lm loss: 1.04E+01 | loss scale: 4.0 | grad norm: 2.1 |",
            (10.4, 2.1, 1e-5),
        ),
        ("Epoch 0:  10%|█  | 1/10 [00:00<00:00, 10.2it/s, v_num=0, train_loss_step=0.500]", (0.5, None, None)),
        ("loss tensor(-0.51, grad_fn=<MeanBackward0>)", (-0.51, None, None)),
        ("[epoch 003] train: CE=0.0008 | acc 0.991 (1.5s)", (0.0008, None, None)),
        ("ep 3 avg_loss 0.25 acc 0.9", (0.25, None, None)),
        ("step 3 ce_loss=0.1 mse_loss=0.4 loss=0.5", (0.5, None, None)),
        ("epoch 1 step 550 mse 0.7371", (0.7371, None, None)),
        ("step 3 mse 0.4 loss 0.5 lr 0.1", (0.5, None, 0.1)),
    ],
)
def test_common_forms_are_read(line: str, values: tuple[float | None, ...]) -> None:
    parsed = parse_line(line)
    assert parsed is not None
    names = ("loss", "grad_norm", "learning_rate")
    expected = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    assert parsed[1] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "line",
    [
        "{'eval_loss': 1.2, 'eval_runtime': 0.1}",
        "{'train_runtime': 3.2, 'train_loss': 0.4}",
        "eval: {'loss': 0.4}",
        '{"loss": 1.0, "split": "val"}',
        "val loss: 0.6",
        "test mse 0.6",
        "Test set: Average loss: 4.8",
        "[validation] step 3 loss 0.4",
        "final loss 0.43 after 20 steps",
        "d_loss: 0.5 g_loss: 1.2",
        "policy loss 0.5",
        "loss scale: 4096",
        "loss: 1.2.3",
        "no loss of 5 packets",
        "the loss is infinite",
        "[rank1]: loss 0.5",
    ],
)
def test_lines_without_values_are_skipped(line: str) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("loss", "loss"),
        ("train/loss", "loss"),
        ("train_loss_step", "loss"),
        ("Train/Samples/lr", "learning_rate"),
        ("lr-AdamW", "learning_rate"),
        ("grad_norm", "grad_norm"),
        ("val/loss", None),
        ("eval_loss", None),
        ("train_loss_epoch", None),
        ("loss_scale", None),
        ("nll", "loss"),
        ("Total loss", "loss"),
        ("val_ce", None),
        ("mse", None),
    ],
)
def test_names_in_lines_become_columns(name: str, column: str | None) -> None:
    assert find_column(name) == column


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("step 12: loss 0.5", 12),
        ('{"step": 3, "loss": 1.0}', 3),
        ("[Iteration 30/300] loss=0.5", 30),
        (" iteration       10/     100 | lm loss: 1.04E+01", 10),
        ("loss 0.5 at global_step=7", 7),
        ("loss 0.5, step time 30 ms", -1),
        ("loss 0.5, step 30ms", -1),
        ("loss 0.5, step: 0.31", -1),
        ("loss 0.5 steps/s: 3", -1),
        ("timestep 5 loss 0.5", -1),
    ],
)
def test_step_numbers_are_read_from_lines(tmp_path: Path, line: str, number: int) -> None:
    job = Printing(tmp_path)
    job.write_output(line.encode() + b"\n")
    assert read_logged(Recording.open(job.path))["loss"].numbers.tolist() == [number]


def test_an_output_that_grows_is_read_on(tmp_path: Path) -> None:
    """Parts of lines are joined, and only one kind of line counts."""
    job = Printing(tmp_path)
    recording = Recording.open(job.path)
    job.write_output(b"epoch 1 begins\nstep 0 loss 3.0\nstep 1 lo")
    recording.refresh()
    assert read_logged(recording)["loss"].values.tolist() == [3.0]
    job.write_output(b"ss 2.5\nepoch 1 loss 2.75\n 10%|# | 3/9 [00:01]\r 20%|## | 4/9 [00:01]\rstep 2 loss nan\n")
    job.write_output(b"epoch 2 loss 9\nstep 3 loss 2.0\n")
    recording.refresh()
    series = read_logged(recording)["loss"]
    assert np.array_equal(series.values, [3.0, 2.5, math.nan, 2.0], equal_nan=True)
    assert (np.diff(series.times) > 0).all()
    assert series.numbers.tolist() == [0, 1, 2, 3]
    assert series.times[-1] == recording.last_written_ns
    assert "grad_norm" not in read_logged(recording)


def test_each_update_of_a_progress_bar_counts(tmp_path: Path) -> None:
    """As Lightning and tqdm write them: the line is never finished, or once in an epoch."""
    job = Printing(tmp_path)
    recording = Recording.open(job.path)
    for step in range(4):
        job.write_output(
            f"\rEpoch 0: {step:3d}%|##  | {step}/4 [00:03<00:00, 30.1it/s, v_num=0, train_loss={4 - step}.5]".encode()
        )
    recording.refresh()
    series = read_logged(recording)["loss"]
    assert series.values.tolist() == [4.5, 3.5, 2.5]
    job.write_output(b"\n")
    recording.refresh()
    series = read_logged(recording)["loss"]
    assert series.values.tolist() == [4.5, 3.5, 2.5, 1.5]
    assert len(set(series.times.tolist())) == 4


@pytest.mark.parametrize(
    "bar",
    [
        "",
        "\r  0%|          | 0/120 [00:00<?, ?it/s]",
        "\r 40%|####      | 48/120 [1:00:02<00:03, 1.25s/it]",
        "\rvalid points: 40%|####      | 48/120 [00:02<00:03, 40.2it/s]",
        "\r 40%|####      | 48.0k/120k [00:02<00:03, 40.2kB/s, test_acc=0.5]\x1b[A",
        "\r48it [00:02, 40.2it/s]\x1b[A\x1b[A",
        "\r                        \r ",
    ],
)
def test_lines_printed_behind_a_bar_count(tmp_path: Path, bar: str) -> None:
    """Whatever the bar looks like and however often it is drawn, the lines are those without it."""
    job = Printing(tmp_path)
    for step, begin in enumerate(["", bar, "", bar, bar]):
        job.write_output(f"{begin}loss={4 - step}.5 points={step}\n{bar}".encode())
    job.write_output(b"\n")
    assert read_logged(Recording.open(job.path))["loss"].values.tolist() == [4.5, 3.5, 2.5, 1.5, 0.5]


def test_lines_go_on_where_a_number_is_known_later(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    for step in range(8):
        job.write_output(f"step {step}/{None if step < 4 else 8} loss {step}.5\n".encode())
    assert read_logged(Recording.open(job.path))["loss"].numbers.tolist() == list(range(8))


@pytest.mark.parametrize(("engine", "library", "expected"), [(5, 0, "engine"), (2, 0, "printed"), (5, 1, "library")])
def test_a_loss_that_an_engine_was_given_counts_if_fewer_are_printed(
    tmp_path: Path, engine: int, library: int, expected: str
) -> None:
    """A library's counts before both: it is the one that people see."""
    job = Printing(tmp_path)
    job.write_output(b"loss 1.0\nloss 1.0\nloss 1.0\n")
    kinds = [(2.0, ENGINE_LOSS)] * engine + [(3.0, 0)] * library
    records = [
        make_record(LOGGED, time_ns=second, loss=loss, known=LOGGED_BITS["loss"] | mark)
        for second, (loss, mark) in enumerate(kinds)
    ]
    write_table(job.path, LOGGED, make_identity(0), *records).close()
    values = read_logged(Recording.open(job.path))["loss"].values.tolist()
    assert values == {"engine": [2.0] * engine, "printed": [1.0] * 3, "library": [3.0] * library}[expected]

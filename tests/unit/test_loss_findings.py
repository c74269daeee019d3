"""A loss that is NaN or suddenly higher, what came before it, and noisy losses that are neither."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from small_recording import make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings import Finding
from zerotop.analysis.findings.loops import loss_jumps
from zerotop.analysis.findings.support.detection import Detection
from zerotop.analysis.reports.export_tables import build_frames
from zerotop.analysis.steps.logged_values import LoggedSeries, find_steps
from zerotop.recording.samples import Floats, Ints, Rows
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop.ui.base.findings import describe_step
from zerotop_probe.recording.tables import BOUNDARY, LOGGED, LOGGED_BITS, OPTIMIZER_RATE, SKIPPED, SPANS

STEP_S = 0.5


def find_loss(
    folder: Path,
    losses: Sequence[float],
    *,
    every: int = 1,
    tokens: Sequence[int] = (),
    skipped: Sequence[int] = (),
    rates: Sequence[float] | Mapping[int, float] = (),
    norms: Sequence[float] = (),
) -> tuple[Finding, ...]:
    """Return the findings about losses that were logged after every so many steps, of 512 tokens each or of others.

    ``rates``: as a library logs them; or as the optimizer has them, by step, where the library always logs 1e-4.
    """
    spans, logged = [], []
    for step in range(every * len(losses) + 1):
        size = tokens[step] if tokens and step < len(tokens) else 512
        at = step * STEP_S
        flags = BOUNDARY | (SKIPPED if step in skipped else 0)
        spans.append(make_span(at, at + 0.2, "forward", step, tokens=size))
        spans.append(make_span(at + 0.2, at + 0.4, "backward", step))
        spans.append(make_span(at + 0.4, at + 0.45, "step", step, flags))
        if step % every == every - 1 and step // every < len(losses):
            values = {"loss": losses[step // every]}
            if rates:
                values["learning_rate"] = 1e-4 if isinstance(rates, Mapping) else rates[step // every]
            if norms:
                values["grad_norm"] = norms[step // every]
            known = sum(LOGGED_BITS[name] for name in values)
            logged.append(make_record(LOGGED, time_ns=int((at + 0.46) * 1e9), known=known, **values))
    for step, rate in rates.items() if isinstance(rates, Mapping) else ():
        known, time_ns = LOGGED_BITS["learning_rate"] | OPTIMIZER_RATE, int((step * STEP_S + 0.47) * 1e9)
        logged.append(make_record(LOGGED, time_ns=time_ns, known=known, learning_rate=rate))
    logged.sort()
    write_table(folder, SPANS, make_identity(0), *spans).close()
    write_table(folder, LOGGED, make_identity(0), *logged).close()
    recording = read_recording(folder)
    detection = Detection(recording, [loss_jumps.detect])
    detection.update()
    return detection.findings_at(recording.last_written_ns)


def make_decay(count: int) -> list[float]:
    """Return a loss that falls from 3 to 1, with noise."""
    dice = np.random.default_rng(5)
    return [float(value) for value in 1 + 2 * np.exp(-np.arange(count) / 30) + dice.normal(0, 0.1, count)]


def test_a_nan_after_a_skipped_step(tmp_path: Path) -> None:
    losses = make_decay(60)
    losses[40:] = [math.nan] * 20
    (found,) = find_loss(tmp_path, losses, skipped=[39])
    assert (found.name, found.step, found.severity.value) == ("loss_not_finite", 40, "error")
    assert found.headline == "The loss is NaN from step 40 on: 20 values in a row"
    assert f"Before it was {losses[39]:.4g} in step 39; step 39 was skipped because gradients overflowed." in found.details


def test_a_loss_that_is_logged_now_and_then_became_nan_between_two_values(tmp_path: Path) -> None:
    (found,) = find_loss(tmp_path, [*make_decay(2), *[math.nan] * 4], every=50)
    assert (found.step, found.headline) == (149, "The loss became NaN between steps 99 and 149: 4 values in a row")
    assert describe_step(found) == ""


def test_a_loss_that_is_logged_now_and_then_rose_between_two_values(tmp_path: Path) -> None:
    losses = [loss * (4 if number >= 50 else 1) for number, loss in enumerate(make_decay(60))]
    (found,) = find_loss(tmp_path, losses, every=10)
    assert (found.name, found.headline.partition(" between ")[2]) == ("loss_jumped", "steps 499 and 509")


def test_a_loss_that_was_never_logged_before_has_no_step_before(tmp_path: Path) -> None:
    (found,) = find_loss(tmp_path, [math.nan] * 4, every=50)
    assert found.headline == "The loss is NaN from step 49 on: 4 values in a row"


def test_a_loss_that_stays_nan_is_reported_after_many_single_ones(tmp_path: Path) -> None:
    losses = make_decay(120)
    losses[20:90:2] = [math.nan] * 35
    losses[100:] = [math.nan] * 20
    found = find_loss(tmp_path, losses)
    assert (found[-1].step, found[-1].severity.value) == (100, "error")
    assert 20 < len(found) < 25  # a constant repetition is no news


def test_one_infinite_value_is_reported_at_the_step_that_logs_it(tmp_path: Path) -> None:
    losses = make_decay(30)
    losses[20] = math.inf
    (found,) = find_loss(tmp_path, losses, every=10)
    assert (found.step, found.severity.value) == (209, "warning")
    assert found.headline == "The loss logged at step 209 is infinite"


def test_a_gradient_norm_that_stays_nan_behind_a_loss_that_is_filtered(tmp_path: Path) -> None:
    losses, norms = [*make_decay(40), *[0.0] * 20], [*[1.0] * 40, *[math.nan] * 20]
    (found,) = find_loss(tmp_path, losses, every=5, norms=norms)
    assert (found.name, found.step, found.severity.value) == ("loss_not_finite", 204, "error")
    assert found.headline == "The gradient norm became NaN between steps 199 and 204: 20 values in a row"
    assert found.details == "Before it was 1 in step 199. The logged loss stays finite: 0 in step 299."


@pytest.mark.parametrize(
    ("norms", "skipped"),
    [
        ([*[math.inf] * 6, *[1.0] * 54], range(6)),  # the search for a loss scale
        ([*[1.0] * 30, *[math.inf] * 4, *[1.0] * 26], range(30, 34)),
        ([*[1.0] * 30, math.inf, math.inf, *[1.0] * 28], ()),
        ([math.nan] * 60, ()),  # a library that logs no norm
    ],
)
def test_gradient_norms_that_cost_nothing(tmp_path: Path, norms: list[float], skipped: Sequence[int]) -> None:
    assert find_loss(tmp_path, make_decay(60), norms=norms, skipped=skipped) == ()


def test_a_loss_that_is_nan_is_reported_without_its_gradient_norm(tmp_path: Path) -> None:
    losses = [*make_decay(40), *[math.nan] * 20]
    (found,) = find_loss(tmp_path, losses, norms=[*[1.0] * 41, *[math.nan] * 19])
    assert found.headline.startswith("The loss is NaN from step 40 on")


def test_a_loss_without_a_value_at_first_is_no_finding(tmp_path: Path) -> None:
    assert find_loss(tmp_path, [math.nan, math.nan, *make_decay(40)]) == ()


def test_a_jump_with_larger_batches_and_learning_rate(tmp_path: Path) -> None:
    losses = [loss * (3.5 if step >= 50 else 1) for step, loss in enumerate(make_decay(80))]
    rates = [1e-4 if step < 50 else 1e-3 for step in range(80)]
    (found,) = find_loss(tmp_path, losses, tokens=[512] * 50 + [2048] * 40, rates=rates)
    assert (found.name, found.step) == ("loss_jumped", 50)
    assert "step 50 had 2,048 tokens instead of 512 and the learning rate rose from 0.0001 to 0.001" in found.details
    assert found.evidence["loss_after"] >= 2.8 * found.evidence["loss_before"]


def add_spikes(dice: np.random.Generator) -> Floats:
    return np.where(dice.random(400) < 0.1, 8.0, 1.0) * np.exp(dice.normal(0, 0.3, 400))


NOISY: dict[str, Callable[[np.random.Generator], Floats]] = {
    "batches of one row": lambda dice: np.exp(dice.normal(0, 0.8, 400)),
    "spikes": add_spikes,
    "an oscillating loss": lambda dice: 1 + 0.9 * np.sin(np.arange(400) / 20) + dice.normal(0, 0.05, 400),
    "around zero": lambda dice: dice.normal(0, 0.01, 400),
    "negative": lambda dice: -1 - 3 * (np.arange(400) > 200) + dice.normal(0, 0.3, 400),
    "from a high loss": lambda dice: 2 + 9 * np.exp(-np.arange(400) / 20) + dice.normal(0, 0.1, 400),
    "rising gradually": lambda dice: np.exp(np.arange(400) / 60) * np.exp(dice.normal(0, 0.05, 400)),
    "a wandering loss": lambda dice: np.exp(np.cumsum(dice.normal(0, 0.05, 400))),
    "few values": lambda dice: np.exp(dice.normal(0, 0.3, 9)),
}


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_finding(tmp_path: Path, name: str, seed: int) -> None:
    assert find_loss(tmp_path, NOISY[name](np.random.default_rng(seed)).tolist()) == ()


def test_values_that_are_logged_apart_have_the_same_step(tmp_path: Path) -> None:
    """As by Lightning, whose callback logs the rate before the step."""
    find_loss(tmp_path, [1.0, 1.1, 1.2, 1.3])
    rows = [
        make_record(LOGGED, time_ns=int((step + 0.98) * STEP_S * 1e9), known=LOGGED_BITS["learning_rate"], learning_rate=0.1)
        for step in range(4)
    ]
    write_table(tmp_path, LOGGED, make_identity(1), *rows).close()
    (frame,) = build_frames(read_recording(tmp_path), "loss", str)
    assert frame.filter(frame["loss"].is_not_null())["step"].to_list() == [0, 1, 2, 3]
    assert frame.filter(frame["learning_rate"].is_not_null())["step"].to_list() == [0, 1, 2, 3]


def test_steps_of_a_rate_that_two_libraries_log_are_those_of_the_training() -> None:
    """DeepSpeed's engine and its monitor both give the rate of some short steps."""
    rows = make_rows(10, 4)
    times = np.sort(np.concatenate([rows["end_unix_ns"][:2] + 1000, rows["end_unix_ns"] + 2000]))
    assert find_steps(rows, make_series(times)).tolist() == [0, 0, 1, 1, *range(2, 10)]


def make_rows(count: int, step_ms: int) -> Rows:
    """Return equally long steps."""
    rows = np.zeros(count, STEP_DTYPE)
    rows["step"], rows["iteration_s"] = np.arange(count), step_ms / 1000
    rows["end_unix_ns"] = step_ms * 1_000_000 * np.arange(1, count + 1)
    return rows


def make_series(times: Ints, numbers: Sequence[int] = ()) -> LoggedSeries:
    """Return values of these times, whose lines have these numbers of steps."""
    return LoggedSeries(times, np.ones(len(times)), np.array(numbers or [-1] * len(times)), np.zeros(len(times), bool))


@pytest.mark.parametrize(
    ("numbers", "steps"),
    [
        ([30, 60, 90, 120], [30, 60, 90, 120]),  # as read: nothing says from where the script counts
        ([0, 30, 60, 90], [0, 30, 60, 90]),
        ([29, 59, 89, 119], [29, 59, 89, 119]),
        ([1, 31, 61, 91], [0, 30, 60, 90]),
        ([5000, 5030, 5060, 5090], [30, 60, 90, 120]),  # after a checkpoint
        ([0, 15, 17, 120], [0, 15, 17, 120]),  # printed now and then
    ],
)
def test_lines_that_are_read_late_have_the_steps_that_they_say(numbers: list[int], steps: list[int]) -> None:
    """Of steps of a millisecond: each line is read after one to nine more."""
    rows = make_rows(130, 1)
    times = rows["end_unix_ns"][steps] + 1_000_000 * np.array([3, 9, 0, 5]) + 100_000
    assert find_steps(rows, make_series(times, numbers)).tolist() == steps


@pytest.mark.parametrize("numbers", [range(10, 710, 10), range(100, 800, 10)])
def test_lines_that_are_all_read_late_keep_their_numbers(numbers: range) -> None:
    """Each is read five to nine steps of 10 ms after its own, and one of them, on a busy node, much later."""
    rows = make_rows(900, 10)
    late = 10_000_000 * (5 + np.arange(len(numbers)) % 5)
    late[30] = 95_000_000 * 4
    times = np.maximum.accumulate(rows["end_unix_ns"][list(numbers)] + late)
    assert find_steps(rows, make_series(times, list(numbers))).tolist() == list(numbers)


def test_a_number_that_is_read_within_its_own_step_counts_the_finished_steps() -> None:
    """Steps of 70 ms, and lines read up to 50 ms after the end of the step before the one that they name."""
    rows = make_rows(130, 70)
    steps = [15, 27, 41, 55]
    times = rows["end_unix_ns"][steps] + 1_000_000 * np.array([3, 49, 20, 11])
    assert find_steps(rows, make_series(times, [step + 1 for step in steps])).tolist() == steps


def test_the_last_of_many_values_has_the_same_step_alone() -> None:
    """Lines that count the finished steps, of which only the first ones are read within the step that they name."""
    rows = make_rows(900, 10)
    steps = 4 + 7 * np.arange(100)
    late = np.where(np.arange(100) < 10, 2_000_000, 20_000_000 + 10_000_000 * (np.arange(100) % 4))
    series = make_series(rows["end_unix_ns"][steps] + late, (steps + 1).tolist())
    assert find_steps(rows, series).tolist() == steps.tolist()
    assert find_steps(rows, series, are_last=True)[-1] == steps[-1]


def test_rates_that_are_logged_before_a_step_are_of_that_step() -> None:
    """As by Lightning's callback: at the start of the training, of an epoch, and of a step that has not ended."""
    rows = make_rows(130, 1)
    series = make_series(np.concatenate([rows["begin_unix_ns"][:1], rows["end_unix_ns"][[29, 59, 129]] + 100_000]))
    assert find_steps(rows, series._replace(are_next=np.ones(4, bool))).tolist() == [0, 30, 60, 130]


@pytest.mark.parametrize("numbers", [[0, 1, 2, 0], [0, 60, 120, 180], [3, 3, 3, 3]])
def test_numbers_that_do_not_count_the_steps_are_ignored(numbers: list[int]) -> None:
    """They begin again with each epoch, count parts of a step, or are all the same."""
    rows = make_rows(130, 1)
    times = rows["end_unix_ns"][[0, 30, 60, 90]] + 100_000
    assert find_steps(rows, make_series(times, numbers)).tolist() == [0, 30, 60, 90]


def test_export_has_unknown_and_nan(tmp_path: Path) -> None:
    find_loss(tmp_path, [1.0, math.nan, 2.0], every=2)
    (frame,) = build_frames(read_recording(tmp_path), "loss", str)
    assert frame["step"].to_list() == [1, 3, 5]
    assert frame["loss"].null_count() == 0
    assert frame["loss"].is_nan().to_list() == [False, True, False]
    assert frame["learning_rate"].null_count() == 3


def test_a_learning_rate_that_took_some_steps_to_make_the_loss_infinite(tmp_path: Path) -> None:
    losses = make_decay(60)
    losses[41:43] = [1e20, 1e34]
    losses[43:] = [math.nan] * 17
    found = find_loss(tmp_path, losses, rates=[0.05 if step < 40 else 1e9 for step in range(60)])
    (broken,) = (one for one in found if one.name == "loss_not_finite")
    assert "the learning rate rose from 0.05 to 1e+09" in broken.details


def test_a_jump_of_a_loss_that_falls_fast(tmp_path: Path) -> None:
    """It fell from 60 to 7 in sixty steps: that is its way, no wandering."""
    dice = np.random.default_rng(2)
    losses = (60 * np.exp(-np.arange(80) / 28) * np.exp(dice.normal(0, 0.08, 80))).tolist()
    losses[60:] = [50.0] * 20
    (found,) = find_loss(tmp_path, losses)
    assert (found.name, found.step) == ("loss_jumped", 60)


@pytest.mark.parametrize(("level", "told"), [(2.2, True), (0.15, False)])
def test_a_loss_that_goes_back_to_where_it_began(tmp_path: Path, level: float, told: bool) -> None:
    """It is far above its last values, though not above its first ones; a smaller rise is no finding."""
    losses = [*(2.3 * np.exp(-np.arange(25) / 5)).tolist(), *[level] * 10]
    found = find_loss(tmp_path, losses)
    assert [(one.name, one.step) for one in found] == ([("loss_jumped", 25)] if told else [])
    assert all("The first ones were about as high, 2.3." in one.details for one in found)
    assert not any(one.fix for one in found)


@pytest.mark.parametrize(("level", "told"), [(0.5, True), (0.1, False)])
def test_a_loss_that_goes_back_soon(tmp_path: Path, level: float, told: bool) -> None:
    """Its first value is among the last ten; it is many times the highest of the last six."""
    losses = [0.51, 0.057, 0.03, 0.024, 0.021, 0.019, 0.017, 0.016, 0.015, 0.014, *[level] * 10]
    found = find_loss(tmp_path, losses, every=3)
    assert [one.headline for one in found] == [f"The loss rose to {level} from 0.0165 between steps 29 and 32"] * told


@pytest.mark.parametrize(
    ("fell", "back", "told"),
    [
        ((2.5, 1.77, 0.94, 0.73), (2.9, *(2.5, 2.45) * 6), True),
        ((2.5, 1.77, 0.94, 0.73), (2.9, *(2.5, 2.45) * 4), False),  # it may fall again
        ((2.5, 1.77, 0.94, 0.73), (1.2, 2.0, *(2.5, 2.45) * 6), False),  # it rises gradually, from what was noise
        ((2.5, 2.3, 2.2, 1.9), (2.9, *(2.5, 2.45) * 6), False),  # it had hardly fallen
    ],
)
def test_a_loss_that_goes_back_after_few_values_and_stays(
    tmp_path: Path, fell: Sequence[float], back: Sequence[float], told: bool
) -> None:
    found = find_loss(tmp_path, [*fell, *back], every=50)
    assert [one.headline for one in found] == ["The loss rose to 2.9 from 0.94 between steps 199 and 249"] * told


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([4.7, 4.6, 4.6, 1e5, 5e5, 1e6], 3),
        ([-181, -217, -205, 6e28, 6e26, 8e25, 9e26], 3),  # of a critic
        ([4.7, 4.6, 4.6, 1e5, 5e5, 5.0], None),  # a spike
        ([0.0002, -0.0001, 0.0003, 0.4, 0.5, 0.6], None),  # around zero
        ([4.7, 4.6, 4.6, 46, 50, 60], None),  # of so few values that may be their noise
    ],
)
def test_a_few_values_suffice_for_a_loss_that_explodes(losses: list[float], step: int | None, tmp_path: Path) -> None:
    found = find_loss(tmp_path, losses)
    assert [(one.name, one.step) for one in found] == ([] if step is None else [("loss_jumped", step)])


def test_a_rate_that_the_script_sets_in_the_optimizer_is_told_where_a_library_logs_another(tmp_path: Path) -> None:
    """It is seen a little later than the loss that it makes infinite."""
    losses = [*make_decay(40), *[math.nan] * 20]
    found = find_loss(tmp_path, losses, rates={0: 1e-4, 30: 1e-4, 41: 2.0})
    broken = next(one for one in found if one.severity.value == "error")
    assert "the learning rate rose from 0.0001 to 2" in broken.details
    assert broken.advice.startswith("Lower the learning rate")


def test_a_rate_that_falls_is_no_cause(tmp_path: Path) -> None:
    losses = [*make_decay(40), *[math.nan] * 20]
    found = find_loss(tmp_path, losses, rates={0: 1e-3, 20: 1e-4, 41: 1e-5})
    assert all("learning rate rose" not in one.details for one in found)

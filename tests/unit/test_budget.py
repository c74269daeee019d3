"""How much of each step is recorded: long steps in full, of short ones as many as the budget pays for."""

from __future__ import annotations

import pytest

from zerotop_probe.inside.budget import COUNTED, FULL, LIGHT, DetailBudget, read_budget

US, MS = 1_000, 1_000_000


class Training:
    """A training whose steps cost as much as their detail says."""

    def __init__(self, share: float = 0.003, *, full_us: int = 500, light_us: int = 100) -> None:
        self.budget = DetailBudget(share)
        self.costs = {True: full_us * US, False: light_us * US}
        self.time_ns = self.cost_ns = 0
        self.details: list[bool] = []

    def run_steps(self, steps: int, step_ms: float) -> float:
        """Make steps; return the share of their time that watching took."""
        begin_ns, cost_before = self.time_ns, self.cost_ns
        for _ in range(steps):
            self.details.append(self.budget.is_full)
            self.cost_ns += self.costs[self.budget.is_full]
            self.time_ns += int(step_ms * MS)
            self.budget.end_step(self.time_ns, self.cost_ns)
        return (self.cost_ns - cost_before) / (self.time_ns - begin_ns)


def test_long_steps_are_always_recorded_in_full() -> None:
    training = Training()
    training.run_steps(500, 200)
    assert all(training.details)


def test_of_short_steps_as_many_as_the_budget_pays_for() -> None:
    training = Training()
    training.run_steps(50, 60)
    share = training.run_steps(2000, 60)
    assert 0.0028 < share <= 0.003
    full = sum(training.details[50:]) / 2000
    assert full == pytest.approx((0.003 * 60_000 - 100) / 400, rel=0.1)


def test_the_first_steps_are_full_and_later_ones_pay_for_them() -> None:
    training = Training(full_us=400)
    training.run_steps(200, 40)
    assert all(training.details[:20])
    assert any(training.details[20:200])
    training.run_steps(1000, 40)
    assert training.cost_ns / training.time_ns <= 0.0031


def test_of_first_steps_that_cost_much_few_are_full() -> None:
    """With a GPU a full step of a real loop costs 1.5 ms at first."""
    dear, dearest = ShortSteps(full_us=1500, light_us=700), ShortSteps(full_us=10_000, light_us=700)
    for training in (dear, dearest):
        training.run_steps(20, 40)
    assert training.details[:5] == [FULL] * 5
    assert (dear.details.count(FULL), dearest.details.count(FULL)) == (8, 5)


@pytest.mark.parametrize("step_ms", [40, 100, 400])
def test_the_budget_is_kept_in_the_first_half_minute(step_ms: int) -> None:
    training = ShortSteps(full_us=1500, light_us=700)
    assert training.run_steps(30_000 // step_ms, step_ms) <= 0.0031
    assert training.details.count(FULL) >= 12


def test_where_light_detail_exceeds_the_budget_little_else_is_recorded() -> None:
    training = Training()
    training.run_steps(50, 5)
    training.run_steps(2000, 5)
    assert 4 <= sum(training.details[50:]) <= 6  # once in two seconds


def test_a_compiling_first_step_does_not_pass_for_the_usual() -> None:
    training = Training()
    training.run_steps(1, 30_000)
    training.run_steps(100, 5)
    assert sum(training.details) <= 40


def test_steps_after_a_pause_and_unlike_steps_come_first() -> None:
    training = Training()
    training.run_steps(300, 50)
    while training.budget.is_full or training.budget._credit_ns < 100 * US:
        training.run_steps(1, 50)
    training.budget.request_full_detail()
    training.run_steps(1, 50)
    assert training.budget.is_full
    training.run_steps(5, 50)
    while training.budget.is_full or training.budget._credit_ns < 100 * US:
        training.run_steps(1, 50)
    training.run_steps(1, 90)
    assert training.budget.is_full


def test_an_interrupted_process_is_no_cost_of_detail() -> None:
    training = Training()
    training.run_steps(200, 60)
    before = sum(training.details[-100:])
    training.cost_ns += 50 * MS
    training.run_steps(100, 60)
    training.run_steps(100, 60)
    assert sum(training.details[-100:]) == pytest.approx(before, abs=3)


class ShortSteps:
    """A training whose steps may be counted.

    Like the recorder it asks the budget only at the ends of counted runs, and after steps unlike the others.
    """

    def __init__(self, *, full_us: int = 350, light_us: int = 300, counted_us: int = 25, threads_us: int = 0) -> None:
        self.budget = DetailBudget(0.003)
        self.threads_us = threads_us  # of each step
        self.costs = {FULL: full_us * US, LIGHT: light_us * US, COUNTED: counted_us * US}
        self.time_ns = self.cost_ns = self.step = 0
        self.run = 0  # steps since the budget was asked
        self.details: list[int] = []

    def run_steps(self, steps: int, step_ms: float) -> float:
        begin_ns, cost_before = self.time_ns, self.cost_ns
        for _ in range(steps):
            detail = self.budget.detail
            self.details.append(detail)
            self.cost_ns += self.costs[detail]
            self.time_ns += int(step_ms * MS)
            self.step += 1
            self.run += 1
            shortest_ns, longest_ns = self.budget.like_ns
            is_unlike = not shortest_ns <= step_ms * MS <= longest_ns
            if detail != COUNTED or is_unlike or self.step == self.budget.find_uncounted(self.step):
                last_ns = int(step_ms * MS) if self.run > 1 else 0
                threads_ns = self.step * self.threads_us * US
                self.budget.end_step(
                    self.time_ns, self.cost_ns, threads_ns=threads_ns, next_step=self.step, steps=self.run, last_ns=last_ns
                )
                self.run = 0
        return (self.cost_ns - cost_before) / (self.time_ns - begin_ns)

    def list_uncounted(self) -> list[int]:
        return [step for step, detail in enumerate(self.details) if detail != COUNTED]


@pytest.mark.parametrize(("step_ms", "most"), [(60, 0.003), (20, 0.0031), (15, 0.0031), (10, 0.0031)])
def test_where_light_detail_is_dear_most_steps_are_counted(step_ms: float, most: float) -> None:
    training = ShortSteps()
    training.run_steps(100, step_ms)
    assert training.run_steps(3200, step_ms) <= most
    assert training.details[:20] == [FULL] * 20
    assert COUNTED in training.details[20:30]


@pytest.mark.parametrize(("step_ms", "interval"), [(2, 256), (9, 128), (40, 32), (100, 16)])
def test_two_seconds_or_sixteen_steps_have_one_with_phases_whatever_that_costs(step_ms: float, interval: int) -> None:
    training = ShortSteps(light_us=10_000)
    training.run_steps(21_000, step_ms)
    uncounted = [step for step in training.list_uncounted() if 512 <= step < 20_992]
    assert len(uncounted) == pytest.approx(20_480 / interval, rel=0.15)
    assert len({step % 16 for step in uncounted}) == 16  # whatever the job does in every 16th step is seen


def test_overspent_time_is_saved_again() -> None:
    """Steps that became longer have phases though nothing was saved for them."""
    training = ShortSteps(light_us=600, full_us=1500, counted_us=6)
    training.run_steps(1000, 10)
    begin_ns = training.cost_ns
    for _ in range(20):
        training.run_steps(1, 17)
        training.run_steps(199, 10)
    total_ns = training.cost_ns - begin_ns
    assert total_ns / (20 * (17 + 1990) * MS) <= 0.0031


def test_interruptions_of_counted_steps_are_no_cost_that_must_be_saved_again() -> None:
    usual, interrupted = ShortSteps(counted_us=6, light_us=600), ShortSteps(counted_us=6, light_us=600)
    for training in (usual, interrupted):
        training.run_steps(500, 20)
    for _ in range(40):
        for training in (usual, interrupted):
            training.run_steps(100, 20)
        interrupted.cost_ns += 5 * MS
    steps, interrupted_steps = (len(training.list_uncounted()) for training in (usual, interrupted))
    assert interrupted_steps > 0.7 * steps


def test_ranks_with_different_costs_look_at_the_same_steps() -> None:
    dear, cheap = ShortSteps(light_us=700), ShortSteps(light_us=150)
    for training in (dear, cheap):
        training.run_steps(1000, 20)
    dear_steps, cheap_steps = (set(training.list_uncounted()[100:]) for training in (dear, cheap))
    assert len(dear.list_uncounted()) < len(cheap.list_uncounted())
    assert {step for step in dear_steps if step > min(cheap_steps)} <= cheap_steps


def test_steps_after_a_pause_have_phases_even_without_credit() -> None:
    training = ShortSteps(light_us=1000)
    training.run_steps(400, 5)
    training.run_steps(1, 5)
    while training.budget.detail != COUNTED:
        training.run_steps(1, 5)
    training.budget.request_full_detail()
    while training.step != training.budget.find_uncounted(training.step):
        training.run_steps(1, 5)
    begin = len(training.details)
    training.run_steps(4, 5)
    assert training.details[begin : begin + 2].count(COUNTED) == 0


def test_steps_that_become_longer_have_phases_at_once() -> None:
    """What takes longer is seen in them, although nothing was saved for it."""
    training = ShortSteps(light_us=1000, full_us=1500)
    training.run_steps(60, 20)
    while training.step % 16 or training.budget.detail != COUNTED:
        training.run_steps(1, 20)
    begin = training.step
    training.run_steps(16, 150)
    training.run_steps(16, 150)
    assert training.details[begin + 1 : begin + 16].count(COUNTED) <= 12


@pytest.mark.parametrize("detail", [LIGHT, FULL])
@pytest.mark.parametrize("added_ms", [20, 0])
def test_moving_a_cost_to_the_one_time_costs_leaves_none_below_zero(*, detail: int, added_ms: int) -> None:
    """A look takes 20 ms, which are taken away within one step and added within the next, or not at all."""
    training = ShortSteps()
    training.run_steps(100, 8)
    while training.budget.detail != detail:
        training.run_steps(1, 8)
    training.cost_ns -= 20 * MS
    training.run_steps(1, 8)
    training.cost_ns += added_ms * MS
    training.run_steps(1000, 8)
    assert training.details[-800:].count(COUNTED) > 700


def test_a_thread_of_the_probe_is_no_cost_of_detail() -> None:
    """While the sampler of stacks is busy, hooks still have half of the budget."""
    idle, busy = ShortSteps(light_us=700), ShortSteps(light_us=700, threads_us=1000)
    for training in (idle, busy):
        training.run_steps(500, 150)
    idle_steps, busy_steps = (len([one for one in training.list_uncounted() if one >= 100]) for training in (idle, busy))
    assert 80 <= busy_steps < idle_steps


def test_threads_take_less_while_the_probe_has_overspent() -> None:
    training = ShortSteps(full_us=1500, light_us=700)
    assert training.budget.threads_part == 1
    training.run_steps(10, 40)
    early = training.budget.threads_part
    training.run_steps(750, 40)
    assert 0.75 <= early < 0.8 < training.budget.threads_part
    hopeless = ShortSteps(counted_us=100)
    hopeless.run_steps(2000, 10)
    assert hopeless.budget.threads_part == 0.75


def test_an_unlimited_budget_counts_no_step() -> None:
    budget = DetailBudget(1.0)
    for step in range(1, 200):
        budget.end_step(step * 5 * MS, step * 2 * MS, next_step=step)
        assert budget.detail == FULL


@pytest.mark.parametrize(("text", "share"), [("0.3", 0.003), ("5", 0.05), ("-1", 0.0), ("much", 0.003), (None, 0.003)])
def test_the_budget_is_a_percentage(text: str | None, share: float) -> None:
    environment = {} if text is None else {"PYTHONZEROTOP_BUDGET": text}
    assert read_budget(environment) == pytest.approx(share)

"""Which steps of several optimizers end an iteration."""

from __future__ import annotations

from zerotop_probe.inside.hooks.loops.iteration_rule import IterationRule


def follow_rule(steps: str, optimizers: int = 2) -> str:
    """Step the optimizers named by letters, each after a backward; a dot is a step that ends no iteration."""
    rule = IterationRule()
    for number in range(optimizers):
        rule.add(number)
    ends = [rule.finish_step(ord(letter) - ord("a"), index + 1) for index, letter in enumerate(steps)]
    return "".join(letter if end else "." for letter, end in zip(steps, ends, strict=True))


def test_one_optimizer_ends_an_iteration_with_every_step() -> None:
    assert follow_rule("aaa", 1) == "aaa"


def test_a_step_without_a_backward_is_part_of_the_one_before_unless_a_graph_was_replayed() -> None:
    rule = IterationRule()
    rule.add(0)
    assert [rule.finish_step(0, 1), rule.finish_step(0, 1)] == [True, False]
    rule.expect_update(0)  # a replayed graph may hold the backward
    assert [rule.finish_step(0, 1), rule.finish_step(0, 1)] == [True, False]


def test_turns_end_with_the_last_optimizer() -> None:
    assert follow_rule("ababab") == ".b.b.b"
    assert follow_rule("aaaaabaaaaab") == ".....b.....b"
    assert follow_rule("abcabc", 3) == "..c..c"


def test_an_optimizer_that_never_steps_is_not_waited_for_for_ever() -> None:
    assert follow_rule("a" * 15) == "." * 7 + "a" * 8


def test_the_first_iterations_are_found_without_one_that_never_steps() -> None:
    rule = IterationRule()
    for number in range(3):
        rule.add(number)
    ends = [rule.finish_step(number, backward) for backward, number in enumerate((0, 1) * 6, 1)]
    assert rule.early_ends == [2, 4, 6, 8]
    assert ends == [False] * 7 + [True, False, True, False, True]


def test_steps_after_some_of_the_backwards_of_another_optimizer_are_no_turns() -> None:
    rule = IterationRule()
    rule.add(0)
    rule.add(1)
    ends = [rule.finish_step(number, backward) for number, backward in ((0, 1), (0, 2), (0, 3), (1, 3), (0, 4))]
    assert (ends, rule.early_ends) == ([False, False, False, True, True], [1, 2, 3])


def test_optimizers_that_stepped_make_the_iterations_of_a_process_that_ends() -> None:
    rule = IterationRule()
    rule.add(0)
    rule.add(1)
    assert not rule.finish_step(0, 1)
    assert not rule.finish_step(0, 2)
    rule.end_early()
    assert (rule.early_ends, rule.counting) == ([1, 2], {0})


def test_rare_steps_count_once_the_others_stop() -> None:
    phases = follow_rule("a" * 14 + "b" * 14)
    assert phases[:14] == "." * 7 + "a" * 7
    assert phases[-2:] == "bb"


def test_steps_without_a_backward_are_one_update() -> None:
    rule = IterationRule()
    rule.add(0)
    rule.add(1)
    # Muon and AdamW step one after the other; then one of them twice.
    assert [rule.finish_step(number, 1) for number in (0, 1)] == [False, True]
    assert [rule.finish_step(number, 2) for number in (0, 0, 1, 1)] == [False, False, True, False]


def test_an_optimizer_that_is_gone_is_forgotten() -> None:
    rule = IterationRule()
    rule.add(0)
    rule.add(1)
    assert not rule.finish_step(0, 1)
    rule.remove(1)
    assert rule.finish_step(0, 2)
    assert rule.step_counts == {0: 2}


def test_an_optimizer_of_a_loop_that_has_ended_is_not_waited_for() -> None:
    rule = IterationRule()
    rule.add(0)
    assert [rule.finish_step(0, backward) for backward in (1, 2)] == [True, True]
    rule.add(1)
    assert [rule.finish_step(1, backward) for backward in (3, 4)] == [True, True]


def test_an_older_optimizer_counts_again_once_it_steps() -> None:
    """As where a critic joins a generator that was trained alone."""
    rule = IterationRule()
    rule.add(0)
    assert rule.finish_step(0, 1)
    rule.add(1)
    order = (1, 1, 0, 1, 1, 0, 1, 1, 0)
    ends = [rule.finish_step(number, backward) for backward, number in enumerate(order, 2)]
    assert ends == [True, True, False, True, False, True, False, False, True]

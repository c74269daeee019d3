"""Links between findings, where one explains another: a rank delays the others because it waits for its data.

A finding is linked to another only if their ranks agree, and their steps or numbers.
"""

from __future__ import annotations

import re
import signal
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from zerotop.analysis.findings.support.finding import Finding, Severity
from zerotop.analysis.findings.support.finding import Kinds as Kinds
from zerotop.analysis.findings.support.thresholds import MOST_UNIT_TIMES, NEAR_STEPS
from zerotop.analysis.formatting import Text
from zerotop.analysis.hardware.gpu_faults import FOLLOWS_NS, SEEN_LATE_NS

# Changes that begin within this many steps of each other are one change.
_SAME_CHANGE_STEPS = 3
# Within this time, the end of a rank makes the others fail.
_TOGETHER_NS = 60 * 10**9
# The end of a rank is known at most so long, and so many iterations, after the last sign of life of those that wait for it.
_HELD_UP_NS, _HELD_UP_ITERATIONS = 3 * 10**9, 2
# Signals of errors in compiled code, which no timeout sends.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
# Exceptions of threads that have waited for a queue, a process or the network with a limit.
_TIMEOUTS = ("Timeout", "Empty", "Full")
# Python prints what has ended a thread at most so long after the step in which it did.
_PRINTED_LATE_NS = 3 * 10**9
# The part of the reserved memory that a leak has kept when it is to blame for a flush of the cache.
_NOTABLY_LEAKED = 0.1
# The part of what iterations became longer by that a line takes if it is all there is to tell.
# Growth by more than so many times what the collector has freed is not freed.
_SAME_GROWTH = 1.5
_NEARLY_ALL = 0.8
# A change of pace includes a near one if it begins at about the same level: they differ by at most this share of the change.
_SKIPPED_SHARE = 0.25
# A cause with less confidence may be a coincidence.
_CERTAIN = 0.8
_SIZES = ("rows", "tokens")
# A number of a headline, with its unit. The number of a line is none: it follows a colon.
_NUMBER = re.compile(r"(?<![:\d])\d[\d.,]*(?: (?:%|ms|s|[KMGT]i?B)(?!\w))?")


class LinkedFinding(NamedTuple):
    """A finding, the finding that explains it, and the number of explanations above it."""

    finding: Finding
    cause: Finding | None = None
    depth: int = 0


def drop_repeats(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings, in order, without those that repeat an earlier one about the same steps."""
    by_name = _index_by_name(findings)
    return tuple(
        effect
        for effect in findings
        if not any(
            findings[at].known_ns <= effect.known_ns
            for at in _select_agreeing(effect, effect.kind.repeats if effect.kind else (), findings, by_name)
        )
    )


def settle_attempts(findings: Sequence[Finding], attempt_begins: Sequence[int]) -> tuple[Finding, ...]:
    """Return the findings without those that only repeat, for another attempt of the job, what is said already.

    Once a job was started again, its restarts tell how the attempts before failed; errors in these are no longer the job's.

    Args:
        findings: known at a moment, in order.
        attempt_begins: when the processes of each attempt began to train (unix nanoseconds), in order.
    """
    restarts = [finding for finding in findings if finding.name == "restarted"]
    begin_ns = restarts[-1].begin_ns if restarts else 0
    settled: list[Finding] = []
    seen: dict[tuple[str, tuple[int, ...], str], int] = {}  # the attempt of a finding, by what it says without its numbers
    for finding in findings:
        attempt = bisect_right(attempt_begins, finding.begin_ns)
        subject = finding.name, finding.ranks, _NUMBER.sub("", str(finding.headline))
        is_over = finding.begin_ns < begin_ns
        is_older = finding.name == "restarted" and finding is not restarts[-1]
        if is_older or (is_over and finding.name == "dead_rank"):
            continue
        if finding.severity is Severity.ERROR:
            settled.append(replace(finding, severity=Severity.WARNING) if is_over else finding)
        elif seen.setdefault(subject, attempt) == attempt:
            settled.append(finding)
    return tuple(settled)


def drop_superseded(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings, in order, without those of which another one says more."""
    by_name = _index_by_name(findings)
    return tuple(
        one
        for one in findings
        if not any(True for _ in _select_agreeing(one, one.kind.superseded_by if one.kind else (), findings, by_name))
    )


def find_causes(findings: Sequence[Finding]) -> dict[int, int]:
    """Map the index of each explained finding to the index of its explanation, the latest of several."""
    by_name, causes = _index_by_name(findings), {}
    for index, effect in enumerate(findings):
        if (cause := next(_select_agreeing(effect, _list_links(effect), findings, by_name), None)) is not None:
            causes[index] = cause
    return causes


def name_relation(effect: Finding, cause: Finding) -> str:
    """Return how sure it is that one finding explains another: ``Because of`` where their amounts agree, too."""
    if effect.kind is not None and effect.kind.measured_cause == cause.name == "memory_step":
        return "Together with"  # one change does both: memory does not make a GPU work longer
    links = [link for link in _list_links(effect) if cause.name in link.names and link.agrees(effect, cause)]
    is_measured = effect.kind is not None and effect.kind.measured_cause == cause.name
    grown = effect.evidence.get("after_s", 0.0) - effect.evidence.get("before_s", 0.0)
    has_amount = 0 < grown <= 2 * cause.evidence.get("added_s", 0.0)
    is_sure = is_measured or has_amount or any(link.agrees not in _OF_TIMES for link in links)
    return "Because of" if is_sure else "Likely because of"


def _index_by_name(findings: Sequence[Finding]) -> dict[str, list[int]]:
    by_name: dict[str, list[int]] = {}
    for index, finding in enumerate(findings):
        by_name.setdefault(finding.name, []).append(index)
    return by_name


def link_findings(findings: Sequence[Finding]) -> tuple[LinkedFinding, ...]:
    """Return the findings, in order, each with the finding that explains it."""
    causes = find_causes(findings)

    def find_path(index: int) -> list[int]:
        return [index, *find_path(causes[index])] if index in causes else [index]

    return tuple(
        LinkedFinding(finding, findings[causes[index]] if index in causes else None, len(find_path(index)) - 1)
        for index, finding in enumerate(findings)
    )


def order_by_cause(findings: Sequence[Finding]) -> tuple[LinkedFinding, ...]:
    """Return the findings with each one after its explanation, otherwise in their order."""
    causes, linked = find_causes(findings), link_findings(findings)
    effects: dict[int, list[int]] = {}
    for effect, cause in causes.items():
        effects.setdefault(cause, []).append(effect)

    def list_from(index: int) -> list[int]:
        return [index, *(below for effect in effects.get(index, ()) for below in list_from(effect))]

    # Findings that explain each other are placed where the first of them would be.
    groups = sorted((list_from(index) for index in range(len(findings)) if index not in causes), key=min)
    return tuple(linked[index] for group in groups for index in group)


def _list_links(effect: Finding) -> tuple[Kinds, ...]:
    if effect.kind is None:
        return ()
    measured = effect.kind.measured_cause
    return (*((Kinds(is_simultaneous, measured),) if measured else ()), *effect.kind.explained_by)


def _select_agreeing(
    effect: Finding, links: Iterable[Kinds], findings: Sequence[Finding], by_name: dict[str, list[int]]
) -> Iterator[int]:
    for link in links:
        for index in (at for cause in link.names for at in reversed(by_name.get(cause, ()))):
            cause = findings[index]
            if bool(set(cause.ranks) & set(effect.ranks)) is link.shares_ranks and link.agrees(effect, cause):
                yield index


def is_same_wait(pause: Finding, stall: Finding) -> bool:
    """Whether the pauses are waits for data, of which the other finding says what the loader's workers do."""
    is_wait = pause.kind is not None and pause.kind.measured_cause == stall.name and "pauses" in stall.evidence
    return is_wait and is_simultaneous(pause, stall)


def is_simultaneous(effect: Finding, cause: Finding) -> bool:
    """Whether both findings hold at the same time."""
    lasts = cause.kind is not None and cause.kind.lasts
    return cause.begin_ns <= effect.end_ns and (effect.begin_ns <= cause.end_ns or lasts)


def is_one_of_pauses(effect: Finding, cause: Finding) -> bool:
    """Whether another finding already counts this pause."""
    most = 2 * cause.evidence.get("pause_s", 0.0)
    return is_simultaneous(effect, cause) and effect.evidence.get("pause_s", 0.0) <= most


def pauses_as_often(effect: Finding, cause: Finding) -> bool:
    """Whether iterations pause with each of the checkpoints that another finding counts."""
    apart = abs(effect.evidence["period"] - cause.evidence.get("period", float("inf")))
    return apart < 0.5 and is_simultaneous(effect, cause)


def is_told_again(effect: Finding, cause: Finding) -> bool:
    return cause.begin_ns == effect.begin_ns and cause.known_ns > effect.known_ns


def was_the_end(effect: Finding, cause: Finding) -> bool:
    """Whether ranks stood still after the last phase of a job that then ended normally."""
    return cause.begin_ns <= effect.known_ns <= cause.end_ns


def was_interrupted(effect: Finding, cause: Finding) -> bool:
    """Whether a job was interrupted while it waited for what the other finding tells."""
    return "interrupted" in effect.evidence and was_the_end(cause, effect)


def ended_by_itself(effect: Finding, cause: Finding) -> bool:
    """Whether a job ended normally although its end had seemed to wait in vain."""
    return "interrupted" not in cause.evidence and was_the_end(effect, cause)


def ended_at_last(effect: Finding, cause: Finding) -> bool:
    """Whether a rank that went on after its exception ended later."""
    return effect.begin_ns <= cause.end_ns


def begins_before(effect: Finding, cause: Finding) -> bool:
    return cause.begin_ns <= effect.begin_ns and (cause.step is None or effect.step is None or cause.step <= effect.step)


def is_counted(effect: Finding, cause: Finding) -> bool:
    """Whether another finding counts these checkpoints, and what else is done with them."""
    is_often = effect.severity is Severity.WARNING
    return is_often and is_simultaneous(effect, cause) and "checkpoint_s" in cause.evidence


def counts_less(effect: Finding, cause: Finding) -> bool:
    """Whether the checkpoints explain why some iterations take longer."""
    return is_simultaneous(effect, cause) and not (cause.severity is Severity.WARNING and is_counted(cause, effect))


def begins_together(effect: Finding, cause: Finding) -> bool:
    if effect.step is None or cause.step is None:
        return False
    apart = max(finding.evidence.get("steps_apart", 1.0) for finding in (effect, cause))
    return abs(effect.step - cause.step) < _SAME_CHANGE_STEPS + apart


def is_part_of(effect: Finding, cause: Finding) -> bool:
    """Whether a change of pace was told again, together with a near one, as a change from another step on."""
    if effect.step is None or cause.step is None or cause.known_ns <= effect.known_ns or "until_step" in effect.evidence:
        return False
    added = [one.evidence["after_s"] - one.evidence["before_s"] for one in (effect, cause)]
    if not 0 < abs(cause.step - effect.step) <= NEAR_STEPS or added[0] * added[1] <= 0:
        return False
    # Where the earlier level is that of the effect's new one, it is the next change.
    skipped = cause.evidence["before_s"] - effect.evidence["before_s"]
    return skipped * added[0] <= _SKIPPED_SHARE * added[0] ** 2


def begins_with_change(effect: Finding, cause: Finding) -> bool:
    """Whether pauses begin with a slowdown whose cause is known: a line waits where that cause holds it up."""
    is_known = cause.severity is not Severity.INFO and cause.confidence >= _CERTAIN
    if effect.step is None or cause.step is None or not is_known or not is_simultaneous(effect, cause):
        return False
    return -_SAME_CHANGE_STEPS < effect.step - cause.step <= _SAME_CHANGE_STEPS + effect.evidence["period"]


def skips_backwards(effect: Finding, cause: Finding) -> bool:
    """Whether no backward follows these forwards because the script skips every backward."""
    return "forwards" in cause.evidence and begins_before(effect, cause)


def begins_with_skips(effect: Finding, cause: Finding) -> bool:
    """Whether the script has skipped every backward since about the same step."""
    return "forwards" in effect.evidence and begins_together(effect, cause)


def slowed_by_threads(effect: Finding, cause: Finding) -> bool:
    """Whether iterations became longer, for no known reason, while threads piled up that cost time."""
    is_slower = effect.evidence["after_s"] > effect.evidence["before_s"]
    return is_slower and effect.confidence < _CERTAIN and cause.cost > 0 and begins_before(effect, cause)


def slowed_by_saves(effect: Finding, cause: Finding) -> bool:
    """Whether iterations became longer, for no reason that is known, when frequent checkpoints began."""
    is_often = cause.severity is Severity.WARNING and effect.confidence < _CERTAIN
    return is_often and explains_shift(effect, cause)


def grows_in_turn(effect: Finding, cause: Finding) -> bool:
    """Whether host memory grows, in a known container, in those iterations that take longer."""
    is_kept = isinstance(cause.headline, Text) and cause.headline.values.get("kept_in") is not None
    return is_kept and "grown_bytes" in effect.evidence and is_simultaneous(effect, cause)


def waits_for_data(effect: Finding, cause: Finding) -> bool:
    """Whether a straggler is late because it waits for its data."""
    is_data = effect.evidence.get("data_s", 0.0) >= effect.evidence["late_s"] / 2
    return is_data and set(effect.ranks) <= set(cause.ranks) and begins_together(effect, cause)


def explains_shift(effect: Finding, cause: Finding) -> bool:
    """Whether a finding about the same steps explains why iterations became slower."""
    is_slower = effect.evidence["after_s"] > effect.evidence["before_s"]
    return is_slower and effect.severity is not Severity.INFO and begins_together(effect, cause)


def is_that_wait(effect: Finding, cause: Finding) -> bool:
    """Whether most of what iterations became longer by is the wait for data, which began about then or before."""
    grown, waited = effect.evidence["after_s"] - effect.evidence["before_s"], effect.evidence.get("data_change_s", 0.0)
    if effect.step is None or cause.step is None or effect.step < cause.step - NEAR_STEPS:
        return False
    return is_simultaneous(effect, cause) and 0 < grown / 2 <= waited <= 2 * cause.evidence["data_s"]


def grew_in_a_jump(effect: Finding, cause: Finding) -> bool:
    """Whether half of a slow rise, or of that in its phase, came in one step within it, about which there is a finding.

    A rise of unknown cause is a part of a change within it whose cause is known, and whose levels are as far apart.
    """
    grown, told = effect.evidence["after_s"] - effect.evidence["before_s"], cause.evidence
    if "data_s" in told:
        jump, grown = told["data_s"], max(effect.evidence.get("data_change_s", 0.0), grown / 2)
    else:
        of_levels = told.get("after_s", 0.0) - told.get("before_s", 0.0)
        jump = told.get("added_s", told.get("jump_of_first_steps_s", of_levels))
        jump = max(jump, of_levels) if effect.confidence < _CERTAIN <= cause.confidence else jump
    return effect.begin_ns < cause.begin_ns <= effect.end_ns and jump >= grown / 2


def goes_on(effect: Finding, cause: Finding) -> bool:
    """Whether a slow rise of unknown cause is in the phase of a change just before it, whose cause is known and grows."""
    if effect.step is None or cause.step is None or "until_step" in cause.evidence:
        return False
    parts = [_find_largest_part(one) for one in (effect, cause)]
    is_just_before = 0 <= effect.step - cause.step <= effect.evidence.get("steps", 0.0)
    return is_just_before and effect.confidence < _CERTAIN <= cause.confidence and parts[0] == parts[1] != ""


def is_by_growth(effect: Finding, cause: Finding) -> bool:
    """Whether iterations became longer while batches grew by a plan, for that reason, or for none that is known."""
    if effect.step is None or cause.step is None or effect.evidence["after_s"] <= effect.evidence["before_s"]:
        return False
    middle = effect.step + effect.evidence.get("steps", 0.0) / 2  # of a slow rise
    is_meanwhile = cause.step - _SAME_CHANGE_STEPS <= middle and effect.step <= cause.evidence["grown_step"]
    measured = effect.kind.measured_cause if effect.kind is not None else ""
    is_told = cause.evidence["unit_times"] <= MOST_UNIT_TIMES or "allocs_per_step" in cause.evidence
    is_unknown = effect.confidence < _CERTAIN and is_told
    return is_meanwhile and (measured == cause.name or is_unknown)


def took_more_for_growth(effect: Finding, cause: Finding) -> bool:
    """Whether steps need more memory since batches, which grow by a plan, became larger: at most as their square."""
    if effect.step is None or cause.step is None or not cause.step <= effect.step <= cause.evidence["grown_step"]:
        return False
    sizes = [effect.evidence.get(f"{name}_after", 0.0) / effect.evidence.get(f"{name}_before", 1.0) for name in _SIZES]
    return 1 < effect.evidence["after_bytes"] / effect.evidence["before_bytes"] <= max(sizes) ** 2


def flushed_for_growth(effect: Finding, cause: Finding) -> bool:
    """Whether the allocator flushed its cache, or reserved more, while batches grew: blocks did not fit into old ones."""
    if effect.step is None or cause.step is None or "allocs_per_step" not in cause.evidence:
        return False
    return cause.step <= effect.step <= cause.evidence["grown_step"]


def _find_largest_part(finding: Finding) -> str:
    changes = {name: value for name, value in finding.evidence.items() if name.endswith("_change_s")}
    return max(changes, key=lambda name: changes[name], default="")


def waits_as_long(effect: Finding, cause: Finding) -> bool:
    """Whether iterations became longer by about what the others wait for a rank, which is measured rarely."""
    grown = effect.evidence["after_s"] - effect.evidence["before_s"]
    return cause.begin_ns >= effect.begin_ns and 0.5 * grown <= cause.evidence["wait_s"] <= 2 * grown


def names_same_line(effect: Finding, cause: Finding) -> bool:
    """Whether iterations became longer at a line of which another finding tells as much, since then or before."""
    if not _share_line(effect, cause):
        return False
    added = effect.evidence["after_s"] - effect.evidence["before_s"]
    lost = cause.evidence.get("added_s", 0.0)
    is_part = begins_before(effect, cause) and 0 < added <= lost
    return is_part or (_begins_near(effect, cause) and 0 < added <= 2 * lost) or explains_shift(effect, cause)


def _begins_near(effect: Finding, cause: Finding) -> bool:
    """Whether both began within so few steps that samples, or a pace that wanders, may have dated one of them wrongly."""
    return effect.step is not None and cause.step is not None and abs(effect.step - cause.step) <= NEAR_STEPS


def is_lost_in_same_line(effect: Finding, cause: Finding) -> bool:
    """Whether a finding about the same time names the same line."""
    return is_simultaneous(effect, cause) and _share_line(effect, cause)


def _share_line(effect: Finding, cause: Finding) -> bool:
    lines = [one.headline.values.get("place") for one in (effect, cause) if isinstance(one.headline, Text)]
    return len(lines) == 2 and lines[0] is not None and lines[0] == lines[1]


def is_told_of_mode(effect: Finding, cause: Finding) -> bool:
    """Whether a costly mode explains a change of pace: both begin together, or a later change names the mode's line."""
    return explains_shift(effect, cause) or (_share_line(effect, cause) and begins_before(effect, cause))


def is_in_change(effect: Finding, cause: Finding) -> bool:
    """Whether time lost at a line, sampled since a change of pace at that line, is no more than twice that change.

    The change is told with the levels of the moment, and with its end.
    """
    is_within = cause.begin_ns <= effect.begin_ns <= cause.end_ns
    if not _share_line(effect, cause) or not (is_within or _begins_near(effect, cause)):
        return False
    return cause.evidence["after_s"] - cause.evidence["before_s"] >= effect.evidence["added_s"] / 2


def is_lost_there(effect: Finding, cause: Finding) -> bool:
    """Whether nearly all of what iterations became longer by is lost at a line, and the effect names none."""
    grown = effect.evidence["after_s"] - effect.evidence["before_s"]
    is_named = isinstance(effect.headline, Text) and effect.headline.values.get("place") is not None
    return not is_named and explains_shift(effect, cause) and cause.evidence.get("added_s", 0.0) >= _NEARLY_ALL * grown


def grew_with_leak(effect: Finding, cause: Finding) -> bool:
    """Whether the peak of steps grew by the memory that a leak had kept since it began, or since just before."""
    if effect.step is None or cause.step is None or effect.step < cause.step - _SAME_CHANGE_STEPS:
        return False
    grown, told = effect.evidence["after_bytes"] - effect.evidence["before_bytes"], cause.evidence
    steps = max(0, effect.step - cause.step)
    if "bytes_per_pause" in told:
        return told["bytes_per_pause"] * (steps // told["steps_per_pause"] + 1) >= grown / 2
    return told.get("bytes_per_step", 0.0) * (steps + 1) >= grown / 2


def grew_beside(effect: Finding, cause: Finding) -> bool:
    """Whether a finding about a leak tells of the unused reserve that grows with it, too."""
    return "unused_bytes" in cause.evidence


def freed_by_collector(effect: Finding, cause: Finding) -> bool:
    """Whether growth that looks steady is what Python's collector has freed before: as fast, and no more of it."""
    told, grown = cause.evidence, effect.evidence
    if "steps_per_collection" not in told or "grown_bytes" not in grown or cause.begin_ns > effect.end_ns:
        return False
    is_alike = told["bytes_per_step"] / 2 <= grown["bytes_per_step"] <= told["bytes_per_step"] * 2
    return is_alike and grown["grown_bytes"] <= _SAME_GROWTH * told["freed_bytes"]


def grew_at_pauses(effect: Finding, cause: Finding) -> bool:
    """Whether growth that looks steady is mostly what stays after each evaluation or checkpoint."""
    per_pause, distance = (cause.evidence.get(name, 0.0) for name in ("bytes_per_pause", "steps_per_pause"))
    grown = effect.evidence.get("bytes_per_step", float("inf")) * distance
    return is_simultaneous(effect, cause) and per_pause >= grown / 2 > 0


def grew_until_cleared(effect: Finding, cause: Finding) -> bool:
    """Whether growth is that of a variable which is cleared again and again."""
    most, grown = cause.evidence.get("most_bytes", 0.0), effect.evidence.get("grown_bytes", float("inf"))
    return is_simultaneous(effect, cause) and grown <= most


def grew_by_missing(effect: Finding, cause: Finding) -> bool:
    """Whether growing memory took as many bytes as were missing when the device was full."""
    if effect.step is None or cause.step is None or not begins_before(effect, cause):
        return False
    return cause.evidence.get("bytes_per_step", 0.0) * (effect.step - cause.step) >= _measure_missing(effect)


def step_took_missing(effect: Finding, cause: Finding) -> bool:
    grown = cause.evidence["after_bytes"] - cause.evidence["before_bytes"]
    return begins_before(effect, cause) and grown >= _measure_missing(effect)


def left_by_evaluation(effect: Finding, cause: Finding) -> bool:
    """Whether the peak of steps grew by tensors of an evaluation that stay allocated."""
    grown = effect.evidence["after_bytes"] - effect.evidence["before_bytes"]
    return begins_together(effect, cause) and cause.evidence.get("outlived_bytes", 0.0) >= grown / 2


def others_took_missing(effect: Finding, cause: Finding) -> bool:
    return begins_before(effect, cause) and cause.evidence.get("used_bytes", 0.0) >= _measure_missing(effect)


def _measure_missing(effect: Finding) -> float:
    """Return the bytes that were missing for a failed allocation; infinite if that was not recorded."""
    requested, free = (effect.evidence.get(name) for name in ("requested_bytes", "free_bytes"))
    return requested - free if requested is not None and free is not None and requested > free else float("inf")


def took_half_of_room(effect: Finding, cause: Finding) -> bool:
    """Whether host memory that grew is at least half of what became less."""
    grown, fallen = cause.evidence.get("grown_bytes", 0.0), effect.evidence.get("fallen_bytes", float("inf"))
    return is_simultaneous(effect, cause) and grown >= fallen / 2


def was_killed_for_memory(effect: Finding, cause: Finding) -> bool:
    return "oom_kills" in effect.evidence and begins_before(effect, cause)


def flushed_before_it(effect: Finding, cause: Finding) -> bool:
    """Whether the allocator flushed its cache for the first time in the step that then failed: the last thing it tries."""
    return effect.step == cause.step and effect.begin_ns <= cause.begin_ns


def filled_by_leak(effect: Finding, cause: Finding) -> bool:
    """Whether the allocator had to flush its cache because of what a leak had kept, or made it reserve, by then."""
    if effect.step is None or cause.step is None:
        return False
    per_step = max(cause.evidence.get(name, 0.0) for name in ("bytes_per_step", "reserved_per_step"))
    leaked = per_step * (effect.step - cause.step)
    return leaked >= _NOTABLY_LEAKED * effect.evidence["reserved_peak_bytes"]


def took_down(effect: Finding, cause: Finding) -> bool:
    """Whether a rank ended in the same step as another rank's out-of-memory error, soon after it."""
    return effect.step == cause.step and 0 <= effect.begin_ns - cause.begin_ns <= _TOGETHER_NS


def is_held_up(effect: Finding, cause: Finding) -> bool:
    """Whether ranks stand still because another one has failed: before they did, or at most a long iteration after."""
    usual_ns = int(effect.evidence.get("iteration_s", 0.0) * _HELD_UP_ITERATIONS * 1e9)
    return -_TOGETHER_NS <= _find_onset(cause) - effect.begin_ns <= max(_HELD_UP_NS, usual_ns)


def ended_standing_still(effect: Finding, cause: Finding) -> bool:
    """Whether a rank ended after its stacks, and those of all others, had shown that they stand still.

    A timeout does that, of a collective, or of a watchdog in the job or its launcher. A crash may be a coincidence.
    """
    is_seen = cause.severity is Severity.ERROR and "behind_s" not in cause.evidence
    is_other = effect.evidence.get("signal_number") in _CRASHES or "oom_kills" in effect.evidence
    is_later = cause.detected_ns <= effect.begin_ns and _find_onset(effect) <= cause.end_ns + _TOGETHER_NS
    return is_seen and not is_other and is_later and not is_held_up(cause, effect)


def _find_onset(end: Finding) -> int:
    """Return when a rank failed: it may end later than it has printed its exception."""
    return end.begin_ns - int(end.evidence.get("exit_ns", 0.0))


def nvml_is_silent(effect: Finding, cause: Finding) -> bool:
    """Whether ranks stand still while NVML does not answer for their GPU."""
    return effect.begin_ns - _TOGETHER_NS <= cause.begin_ns <= effect.known_ns


def broke_with_loss(effect: Finding, cause: Finding) -> bool:
    """Whether the loss is known to be not finite by the time at which it is known of other figures, or later."""
    return cause.end_ns >= effect.begin_ns


def awaits_dead_thread(effect: Finding, cause: Finding) -> bool:
    """Whether ranks wait for a queue or a lock after a thread has ended, and no other thread is left, see hung_ranks.

    A thread may work on for long while its rank waits, but one that has waited in vain itself ended because of the hang.
    """
    error = str(cause.headline.values.get("error", "")) if isinstance(cause.headline, Text) else ""
    has_waited = any(name in error for name in _TIMEOUTS) and cause.begin_ns > effect.begin_ns + _PRINTED_LATE_NS
    is_soon = cause.begin_ns <= effect.begin_ns + _TOGETHER_NS
    return is_soon and not has_waited and bool(effect.evidence.get("dead_threads"))


def lacks_dead_thread(effect: Finding, cause: Finding) -> bool:
    """Whether iterations became longer, soon after a thread has ended, at a line that waits for another thread."""
    is_soon = -_PRINTED_LATE_NS <= effect.begin_ns - cause.begin_ns <= _TOGETHER_NS
    return is_soon and isinstance(effect.headline, Text) and bool(effect.headline.values.get("awaits_thread"))


def broke_before(effect: Finding, cause: Finding) -> bool:
    """Whether ranks ended or stood still soon after a fault of a GPU, or just before it was reported."""
    return cause.severity is Severity.ERROR and -FOLLOWS_NS <= cause.begin_ns - effect.begin_ns <= SEEN_LATE_NS


def tells_fault(effect: Finding, cause: Finding) -> bool:
    """Whether the end of a rank names the fault of its GPU that came just before."""
    return 0 <= cause.begin_ns - effect.begin_ns <= FOLLOWS_NS and effect.evidence.get("apart_s") is not None


# Links to faults of GPUs: of the ranks' own ones, and of those of others that took them down.
TO_GPU_FAULTS = tuple(
    Kinds(broke_before, "gpu_xid", "gpu_lost", "gpu_memory_faults", "gpu_event", shares_ranks=shares_ranks)
    for shares_ranks in (True, False)
)
# Links to threads that have ended, of findings with a line.
TO_DEAD_THREADS = (Kinds(lacks_dead_thread, "thread_died"),)
# Links to ranks that stood still before, of ends and errors: any of them may be the first that a timeout ends.
TO_HANGS = tuple(Kinds(ended_standing_still, "hung_ranks", shares_ranks=shares_ranks) for shares_ranks in (True, False))
# Links of which only the times, steps and ranks agree.
_OF_TIMES = (
    *(is_simultaneous, explains_shift, begins_before, broke_before, is_held_up, took_down, lacks_dead_thread),
    *(begins_with_change, slowed_by_saves, ended_standing_still, nvml_is_silent),
)

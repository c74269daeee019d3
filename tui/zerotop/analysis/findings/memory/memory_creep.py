"""Allocated device memory grows from step to step, because something keeps tensors alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.evidence import Ints
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline, find_known_end
from zerotop.analysis.findings.support.links import Kinds, freed_by_collector, grew_at_pauses, grew_until_cleared
from zerotop.analysis.findings.support.memory import growing_readings, optimizer_growth
from zerotop.analysis.findings.support.memory.block_shapes import LOGITS, find_first_backward, recognize_block
from zerotop.analysis.findings.support.memory.looks import await_look
from zerotop.analysis.findings.support.steps.onsets import find_growth_onset
from zerotop.analysis.findings.support.thresholds import SHOWN_SHARE
from zerotop.analysis.formatting import Text
from zerotop.analysis.memory import leak_holders
from zerotop.analysis.memory.block_lines import Look
from zerotop.analysis.memory.tensor_inventory import HeldTensors
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import STACKS_SETTING
from zerotop_probe.recording.event_values import CREEP

_KIND = FindingKind(
    name="memory_creep",
    confidence=0.9,
    gpu_bytes="grown_bytes",
    headline="GPU memory {grows} {bytes_per_step:bytes} a step on {concerned:ranks}{until}",
    details=(
        "{steps:.0f} steps added {grown_bytes:bytes} in all[, {mean_bytes_per_step:bytes} each]: {held_bytes:bytes} after"
        " step {held_step:.0f}.{reserve}"
    ),
    repeats=(Kinds(grew_at_pauses, "memory_creep"),),
    superseded_by=(
        Kinds(grew_at_pauses, "memory_creep"),
        Kinds(freed_by_collector, "memory_creep"),
        Kinds(grew_until_cleared, "kept_results"),
    ),
)
_LINE_KIND = _KIND.with_changes(
    confidence=0.95,
    headline="{place} {leaks} {bytes_per_step:bytes} a step on {concerned:ranks}{until}",
    details=f"{_KIND.details} The leaked memory was allocated at {{line}}.",
    advice=leak_holders.advise_on_line("{place}").text,
)
_NO_LINE_KIND = _KIND.with_changes(details=f"{_KIND.details} The leaked memory was allocated by {{where}}.")
_HELD_KIND = _KIND.with_changes(
    confidence=0.95,
    headline="{holder} {keeps} {bytes_per_step:bytes} more a step on {concerned:ranks}{until}",
    details=f"{_KIND.details} {{held_by}}[ It was allocated at {{line}}.]",
    advice="{letting_go}",
    fix="{clearing}",
)
_STATE_KIND = _KIND.with_changes(
    confidence=0.95,
    headline="The state of {optimizer} {keeps} {bytes_per_step:bytes} more a step on {concerned:ranks}{until}",
    details=(
        f"{_KIND.details} It began with step {{onset}}. The optimizer's state had {{before:bytes}} after step {{since}},"
        " {after:bytes} after step {counted}[; it was allocated at {line}]."
    ),
    advice="Keep no tensors of past steps in the optimizer's state: limit their number, or keep numbers.",
    fix="history = collections.deque(maxlen=10)",
)
_LOGITS_KIND = _KIND.with_changes(
    details=f"{_KIND.details} Each step adds as much as its logits, {{logits}}: a slice of them keeps them whole.",
    advice="Look for where the model's outputs are collected; .detach().clone() of a part lets the rest go.",
)
_RESERVE = (
    " PyTorch reserves {reserved_bytes:bytes}, {reserved_per_step:bytes} a step more: {unused_bytes:bytes} are unused even"
    " at the peak, as new blocks find no room in them."
)
_VERBS = {"grows": "grew", "leaks": "leaked", "keeps": "kept"}
_LINE_SHARE = 0.5  # the part of the leaked memory that a line must have allocated
_SAME_PACE = 0.5  # of the growth a step, at least, before a stretch that begins late
# How long a finding waits for its line (ns), and at most which part of the time that is left.
_LOOK_NS = 30_000_000_000
_PATIENCE_SHARE = 0.1
# It is told again with newer numbers when it has grown by this factor, and when its process ends; its end, after so many
# steps without a new maximum, or so many times its longest level part; and after as many as it had, in which it grew by less
# than this share of its pace.
_TOLD_AGAIN, _END_STEPS, _END_LEVELS, _END_SHARE = 1.5, 2 * growing_readings.CREEP_STEPS, 3, 0.1
# What has grown by less than this share of the device costs nothing yet: a cache that is being filled looks the same.
_LITTLE_SHARE = 0.002


class _Found(NamedTuple):
    """A look at the leaked blocks, what holds them, and when that is known (unix nanoseconds)."""

    look: Look | None
    known_ns: int
    holder: HeldTensors | None
    state: optimizer_growth.StateGrowth | None = None  # if it is the optimizer's


class _Creep(NamedTuple):
    """Ranks whose memory creeps alike, and the steps of one of them, of which the first is ``onset``.

    ``next``: the index of the first stretch that was not looked at before.
    """

    stretch: growing_readings.GrowthStretch
    ranks: list[int]
    onset: int
    next: int
    ended_ns: int | None = None  # when it was known to have ended
    faster: growing_readings.GrowthStretch | None = None  # as which it goes on after that
    exit_ns: int | None = None  # when its process ended, if it is told as of then
    counted_ns: int | None = None  # when its holder was counted, if it is told for that

    @property
    def known_ns(self) -> int:
        return self.ended_ns or self.exit_ns or self.counted_ns or self.stretch.end_ns

    @property
    def patience_ns(self) -> int:
        """How long to wait for its line and its holder."""
        return int(min(_LOOK_NS, _PATIENCE_SHARE * self.stretch.left_ns))

    @property
    def deadline_ns(self) -> int:
        return find_deadline(self.stretch.process, self.known_ns, self.patience_ns)


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each stretch of growth that has reached CREEP_STEPS steps and CREEP_BYTES, once for ranks that grow alike.

    The finding is told again as it grows further, and when it or the process has ended.
    """
    found = [one for process in window.subject.processes for one in growing_readings.read_stretches(window, process)]
    found.sort(key=lambda one: (one.end_ns, one.process.rank))
    stretches = window.gather(found)  # a later one may tell a creep again, or its end
    creeps = window.extend(partial(_find_next, window, stretches), 0)
    known_ns = -1
    for creep, look in window.results(window.await_each(creeps, partial(_await_look, window.subject)), None):
        # What was found while a look was awaited is known with it: newer numbers come later.
        known_ns = max(look.known_ns, known_ns + 1)
        look = look._replace(known_ns=known_ns)
        if look.holder is None and look.state is None:
            look = look._replace(holder=_find_holder(creep.stretch, known_ns)[0])
        if look.state is None or not _trains_more(creep.stretch, known_ns):
            yield _build_finding(creep, look)


def _trains_more(stretch: growing_readings.GrowthStretch, known_ns: int) -> bool:
    """Whether more parameters are trained since some step of a stretch: they have a state, too."""
    made = stretch.process.find_changes(stretch.begin_ns, stretch.end_ns, known_ns)
    return any(one.name == "trained_parameters" and one.effect > 0 for one in made)


def _find_next(
    window: SearchWindow[Group], stretches: Sequence[growing_readings.GrowthStretch], last: _Creep | None
) -> _Creep | None:
    """Return the last creep once it has grown much further or has ended, otherwise the next one."""
    if last is not None and last.faster is not None:
        return _begin_creep(window, last.faster, last.next)
    for index in range(last.next if last is not None else 0, len(stretches)):
        stretch = stretches[index]
        if last is not None and last.ended_ns is None:
            news, end_ns = _follow(last, stretch.end_ns)
            if news is not None:
                return news._replace(next=index)
            if stretch.process.rank in last.ranks and stretch.begin_ns <= end_ns:
                continue
        return _begin_creep(window, stretch, index + 1)
    if last is None or last.ended_ns is not None:
        return None
    news, _ = _follow(last, window.recording.cursor_ns)
    news = news or _follow_to_exit(last)
    return news._replace(next=len(stretches)) if news is not None else None


def _begin_creep(window: SearchWindow[Group], stretch: growing_readings.GrowthStretch, next_index: int) -> _Creep:
    stretch = _extend_back(stretch)
    ranks = [process.rank for process in window.subject.processes if _grows_alike(process, stretch)]
    return _Creep(stretch, ranks, find_growth_onset(stretch.steps, stretch.held, stretch.slope), next_index)


def _extend_back(stretch: growing_readings.GrowthStretch) -> growing_readings.GrowthStretch:
    """Return a stretch with the readings before it that had grown about as fast: slight falls interrupt it."""
    readings, slope = growing_readings.MemoryReadings.read(stretch.process), stretch.slope
    steps, _, held = readings.select_times(0)
    steps, held = steps[: stretch.first + 1], held[: stretch.first + 1]
    # It may begin just before a rise, or just after one.
    reached = held[-1] + np.diff(stretch.held).max()
    grows = reached - held >= _SAME_PACE * slope * (steps[-1] - steps)
    begin = int(np.flatnonzero(~grows)[-1]) + 1 if not grows.all() else 0
    if begin >= stretch.first:
        return stretch
    onset = find_growth_onset(steps[begin:], held[begin:], slope)
    begin = max(begin, int(np.searchsorted(steps, onset)) - 1)
    if held[-1] - held[begin] < _SAME_PACE * slope * max(1, int(steps[-1] - steps[begin])):
        return stretch
    return readings.select_stretch(begin, stretch.first + len(stretch.held))


def _follow(last: _Creep, until_ns: int) -> tuple[_Creep | None, int]:
    """Return a creep with its next news, and when its memory had its last new maximum.

    News are that it has grown much further, that it has ended, and that its holder was counted after it was told.
    """
    news, end_ns = _follow_growth(last, until_ns)
    counted_ns = _find_later_count(last, until_ns if news is None else news.known_ns)
    if counted_ns is None:
        return news, end_ns
    stretch = last.stretch
    readings = growing_readings.MemoryReadings.read(stretch.process)
    _, ends_ns, held = readings.select_times(stretch.first)
    count = int(np.searchsorted(ends_ns, counted_ns, "right"))
    highest = max(len(stretch.held), int(np.argmax(held[:count])) + 1)
    return last._replace(
        stretch=readings.select_stretch(stretch.first, stretch.first + highest), counted_ns=counted_ns
    ), end_ns


def _find_later_count(last: _Creep, until_ns: int) -> int | None:
    """Return when the holder of a creep that was told without one was counted."""
    deadline_ns = last.deadline_ns
    if optimizer_growth.find_state_growth(last.stretch, deadline_ns) is not None:
        return None
    holder, counted_ns = _find_holder(last.stretch, until_ns)
    return counted_ns if holder is not None and counted_ns > deadline_ns else None


def _follow_growth(last: _Creep, until_ns: int) -> tuple[_Creep | None, int]:
    """Return a creep when it has grown much further, or once it has ended, and when its memory had its last new maximum."""
    stretch = last.stretch
    readings, told = growing_readings.MemoryReadings.read(stretch.process), len(stretch.held)
    steps, ends_ns, held = readings.select_times(stretch.first)
    count = int(np.searchsorted(ends_ns, until_ns, "right"))
    if count <= told:
        return None, stretch.end_ns
    steps, held, indices = steps[:count], held[:count], np.arange(count)
    is_new = np.concatenate([[True], held[1:] > np.maximum.accumulate(held)[:-1]])
    highest = np.maximum.accumulate(np.where(is_new, indices, 0))
    end_ns = int(ends_ns[highest[-1]])
    has_ended = steps - steps[highest] >= max(_END_STEPS, _END_LEVELS * stretch.longest_level)
    has_ended &= indices - highest >= growing_readings.SPARSE_RECORDS
    slowed_since = _find_slowed(stretch, steps, np.maximum.accumulate(held))
    is_slower, has_ended = ~has_ended & (slowed_since >= told - 1), has_ended | (slowed_since >= told - 1)
    has_grown = (held - held[0] >= _TOLD_AGAIN * (stretch.held[-1] - held[0])) & is_new
    index = next(iter(np.flatnonzero((has_ended | has_grown) & (indices >= told)).tolist()), None)
    if index is None:
        return None, end_ns
    ended_ns = int(ends_ns[index]) if has_ended[index] else None
    last_index = int(slowed_since[index] if is_slower[index] else highest[index])
    grown = readings.select_stretch(stretch.first, stretch.first + last_index + 1)
    faster = readings.select_stretch(stretch.first + grown.find_faster(), stretch.first + last_index + 1)
    if faster.first > stretch.first and faster.is_creep:
        slower = readings.select_stretch(stretch.first, faster.first + 1)
        if slower.is_creep:
            return last._replace(stretch=slower, ended_ns=int(ends_ns[index]), faster=faster), end_ns
    return last._replace(stretch=grown, ended_ns=ended_ns, counted_ns=None), end_ns


def _follow_to_exit(last: _Creep) -> _Creep | None:
    """Return a creep with its last new maximum, once its process has ended."""
    exit_ns, stretch = find_known_end(last.stretch.process), last.stretch
    readings = growing_readings.MemoryReadings.read(stretch.process)
    _, _, held = readings.select_times(stretch.first)
    highest = int(np.argmax(held))
    if exit_ns is None or highest < len(stretch.held):
        return None
    return last._replace(stretch=readings.select_stretch(stretch.first, stretch.first + highest + 1), exit_ns=exit_ns)


def _find_slowed(stretch: growing_readings.GrowthStretch, steps: Ints, highest: Ints) -> Ints:
    """Return, for each reading, the one since when memory has hardly grown, for as many steps as it had; -1 if it has."""
    length = max(_END_STEPS, _END_LEVELS * stretch.longest_level, int(stretch.steps[-1]) - stretch.before_step)
    since = np.searchsorted(steps, steps - length, "right") - 1
    allowed = _END_SHARE * stretch.slope * (steps - steps[since])
    is_slow = (since >= 0) & (highest - highest[since] < allowed)
    return np.where(is_slow & (np.arange(len(steps)) - since >= growing_readings.SPARSE_RECORDS), since, -1)


def _await_look(group: Group, creep: _Creep) -> _Found | None:
    """Return the look at the leaked blocks from the first rank that has one; None while it or the holder may still come."""
    stretch, known_ns, patience_ns = creep.stretch, creep.known_ns, creep.patience_ns
    found = [
        await_look(process, CREEP, lambda look: look.end_ns > stretch.begin_ns, known_ns, patience_ns)
        for process in group.processes
        if process.rank in creep.ranks
    ]
    known = [one for one in found if one is not None and one.look is not None]
    if not known and None in found:
        return None
    look = min(known or [one for one in found if one is not None], key=lambda one: one.known_ns)
    deadline_ns = creep.deadline_ns
    state = optimizer_growth.find_state_growth(stretch, deadline_ns)
    if state is not None:
        return _Found(look.look, max(known_ns, look.known_ns, state.known_ns), None, state)
    holder, holder_ns = _find_holder(stretch, deadline_ns)
    if holder is None and stretch.process.at.cursor_ns < deadline_ns and _counts_again(stretch.process):
        return None
    return _Found(look.look, max(known_ns, look.known_ns, holder_ns), holder)


def _counts_again(process: Process) -> bool:
    """Whether the probe may name the variable that holds the memory."""
    has_stacks = process.at.recording.info.get(STACKS_SETTING) is True
    return has_stacks and any(event.pools for event in process.events_of(events.Tensors))


def _find_holder(stretch: growing_readings.GrowthStretch, deadline_ns: int) -> tuple[HeldTensors | None, int]:
    """Return the variable that holds most of what has been left, and when that was known.

    It is that of the last search up to the last step, or else of the first one up to the deadline.
    """
    found: tuple[HeldTensors | None, int] = None, 0
    before: events.Tensors | None = None
    unleaked: events.Tensors | None = None
    for event in stretch.process.events_of(events.Tensors):
        if event.unix_ns > deadline_ns or (found[0] is not None and (event.step or 0) > int(stretch.rows["step"][-1])):
            break
        if event.held is None or event.allocated_bytes is None:
            continue
        if event.unix_ns < stretch.begin_ns:
            unleaked = event
        elif event.held:
            left = _measure_left(stretch, event)
            holder = leak_holders.choose_holder(event, left, before, unleaked) if left > 0 else None
            found, before = (holder, event.unix_ns) if holder is not None else found, event
    return found


def _measure_left(stretch: growing_readings.GrowthStretch, event: events.Tensors) -> int:
    """Return at most how many bytes had been left when tensors were counted, by the end of the step after that.

    The next reading may be many steps later. While tensors are counted, a step may have more allocated than it leaves, and
    where the growth began, it may have taken more once, for a variable that is replaced since.
    """
    step = (event.step or 0) + 1
    index = int(np.searchsorted(stretch.steps, step))
    left = [stretch.slope * (step - stretch.before_step), (event.allocated_bytes or 0) - float(stretch.held[0])]
    if index < len(stretch.held):
        left.append(float(stretch.held[index] - stretch.held[0]))
    return int(min(left))


def _grows_alike(process: Process, stretch: growing_readings.GrowthStretch) -> bool:
    """Whether a rank's memory grew by about as much a step in the same steps, as far as it has finished them."""
    if process is stretch.process:
        return True
    rows, held = growing_readings.MemoryReadings.read(process).select(0)
    inside = (rows["end_unix_ns"] <= stretch.end_ns) & (rows["step"] >= stretch.rows["step"][0])
    if inside.sum() < len(stretch.rows) - 1:
        return False
    return stretch.slope / 2 < growing_readings.measure_slope(rows["step"][inside], held[inside]) < stretch.slope * 2


def _build_finding(creep: _Creep, found: _Found) -> Finding:
    (process, _, _, rows, held), has_ended = creep.stretch, creep.ended_ns is not None
    last_step, held_step = creep.stretch.last_step, int(rows["step"][-1])
    begin, end = np.searchsorted(process.steps["step"], [creep.onset, held_step])
    grown, count = held[-1] - held[0], held_step - creep.onset + 1
    mean, slope = grown / count, creep.stretch.slope
    evidence = {
        "bytes_per_step": slope,
        # Where the usual step adds less or more than the mean one, the sum needs the mean.
        "mean_bytes_per_step": mean if abs(mean - slope) > SHOWN_SHARE * mean else None,
        "grown_bytes": grown,
        "steps": count,
        "held_bytes": held[-1],
        "held_step": held_step,
        "last_step": None if has_ended else last_step,
        "until_step": held_step if has_ended else None,
    }
    kind, texts = _choose_kind(found.look)
    logits = _find_logits(process, slope) if kind is _KIND else ""
    if logits:
        kind, texts = _LOGITS_KIND, {"logits": logits}
    if found.holder is not None:
        advice = leak_holders.advise_on_holder(found.holder)
        kind, texts = (
            _HELD_KIND,
            texts | {"holder": found.holder.name, "held_by": leak_holders.describe_holder(found.holder)},
        )
        texts |= {"letting_go": advice.text, "clearing": advice.fix}
    values: dict[str, Any] = dict(texts)
    if (state := found.state) is not None:
        kind = _STATE_KIND
        values |= {"optimizer": state.optimizer or "the optimizer", "onset": creep.onset, "before": state.before_bytes}
        values |= {"since": state.since_step, "after": state.after_bytes, "counted": state.until_step}
    reserve = creep.stretch.reserve_growth if not has_ended else None
    if reserve is not None:
        evidence |= {"reserved_bytes": reserve.reserved_bytes, "reserved_per_step": reserve.per_step}
        evidence |= {"unused_bytes": reserve.unused_bytes, "reserve_grown_bytes": reserve.grown_bytes + held[-1] - held[0]}
        kind = kind.with_changes(gpu_bytes="reserve_grown_bytes")
    values["reserve"] = Text(_RESERVE, evidence) if reserve is not None else ""
    values |= {present: past if has_ended else present for present, past in _VERBS.items()}
    if has_ended:
        kind = kind.with_changes(severity=Severity.INFO, advice="", fix="")
    is_little = evidence.get("reserve_grown_bytes", held[-1] - held[0]) < _LITTLE_SHARE * (process.device_bytes or 0)
    if is_little:
        kind = kind.with_changes(severity=Severity.INFO)
    until = f" to step {held_step}" if has_ended else "" if last_step is None else f"; full near step {last_step}"
    # A full device ends the job, and the training since the last checkpoint is lost.
    values |= {"cost": 0.0 if has_ended or is_little else 1.0, "concerned": creep.ranks, "until": until}
    steps = process.steps[begin : end + 1]
    return kind.at_steps(process, steps, evidence, known_ns=found.known_ns, ranks=creep.ranks, **values)


def _find_logits(process: Process, slope: float) -> str:
    """Return the shape of the logits if memory grows by as much in each step; empty if it does not."""
    blocks = recognize_block(process.engine, find_first_backward(process), round(slope))
    if blocks.width != LOGITS:
        return ""
    return f"{' x '.join(f'{size:,}' for size in blocks.shape)} elements of {blocks.item_bytes} bytes"


def _choose_kind(look: Look | None) -> tuple[FindingKind, dict[str, str]]:
    """Return the kind of finding, and the values of its templates that are not evidence."""
    blocks = look.blocks[0] if look is not None and look.blocks else None
    if look is None or blocks is None or blocks.total_bytes < _LINE_SHARE * look.whole_bytes:
        return _KIND, {}
    if blocks.line is not None:
        return _LINE_KIND, {"place": blocks.line.place, "line": blocks.line.text}
    return _NO_LINE_KIND, {"where": blocks.text}

"""Sentences about a job that stands still."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from zerotop.analysis.formatting import format_ranks
from zerotop.analysis.hangs.stacks import ThreadStack
from zerotop.analysis.hangs.standstill import Absence, StackGroup, Standstill
from zerotop.analysis.hangs.waits import A_THREAD, THREADS, WaitKind, find_wait

ALL_STACKS = "While it stands still, the Ranks screen shows all stacks."
"""Where more than one sentence on a standstill is to be found."""
# A rank, ranks or a thread, and the verb that says what they do now.
_STATES = re.compile(
    r"((?:ranks? (?:\d[\d, andto]*?|\{\w+\})|all ranks|the ranks|Thread[- ]\S+) )(waits?|is|are|has|have|reads?)\b", re.I
)
_PAST = {"wait": "waited", "waits": "waited", "is": "was", "are": "were", "has": "had", "have": "had", "reads": "read"}
# Activities that are things to wait for, such as "a queue", and no functions.
_AWAITED = ("a ", "another ", "the ", "thread ")
_BY_THREADS = (
    "Threads wait for each other: let none wait for a queue while it holds a lock, and take locks in the same order."
)
_SKIPS = "Look for a condition that skips each batch: no other rank goes on until this one trains."
_LEFT = "Look for a break, or a number of batches, that differs between ranks: all must train the same number of steps."
_SHAPES = "All ranks must pass tensors of the same shape: look at what decides their size."
_COLLECTIVES = "All ranks must call the same collectives in the same order: look for a condition that differs between ranks."
_ONE_NODE = "All ranks are in it: compare the tensors that they pass, and see dmesg for errors of GPUs."


def describe_group(group: StackGroup) -> str:
    """Return ``Ranks 0 and 2 wait in all_reduce at train.py:90``."""
    who, one = format_ranks(group.ranks).capitalize(), len(group.ranks) == 1
    return f"{who} {_describe_state(group, group.place, is_one=one)}"


def put_in_past(text: str) -> str:
    """Return what sentences of this module say of ranks as of a time that is over."""
    return _STATES.sub(lambda found: found[1] + _PAST.get(found[2], found[2]), text).replace("does not run", "did not run")


def describe_odd(standstill: Standstill, width: int) -> str:
    """Describe the odd group briefly, as ``rank 1 is in time.sleep at train.py:71 in build_batch``.

    The text has at most ``width`` characters: if it is too long, the function is left out, and then the line.
    """
    group, difference = standstill.odd, standstill.difference
    if difference is not None:
        (first, call), (_, other), *_ = difference.calls
        others = "the others" if group is not None else format_ranks(difference.calls[1][0].ranks)
        text = f"{format_ranks(first.ranks)} called {call.name} where {others} called {other.name}"
        if difference.is_of_shapes:
            shapes = [each.name.partition(" of ")[2] for each in (call, other)]
            brief = f"{call.name} on {format_ranks(first.ranks)}, {shapes[1]} on {others}"
            briefest = f"{format_ranks(first.ranks)} passed {shapes[0]}, {others} {shapes[1]}"
            return _choose_first([text, brief, briefest, "ranks have passed tensors of different shapes"], width)
        return _choose_first([text, "ranks have called different collectives"], width)
    if group is None and standstill.is_mismatch:
        waits = ["waits" if len(one.ranks) == 1 else "wait" for one in standstill.groups]
        texts = [
            ", ".join(
                f"{format_ranks(one.ranks)} {f'{verb} ' if verb else ''}in {one.activity}"
                for one, verb in zip(standstill.groups, verbs, strict=True)
            )
            for verbs in (waits, [waits[0], *("" for _ in waits[1:])])
        ]
        return _choose_first([*texts, f"ranks wait in {len(waits)} different collectives"], width)
    if group is None and len(standstill.groups) > 1:
        return f"the ranks are stuck at {len(standstill.groups)} places"
    shown = group or standstill.groups[0]
    is_one = len(shown.ranks) == 1
    if (departure := standstill.departure) is not None:
        left = f"{format_ranks(shown.ranks)} {'has' if is_one else 'have'} left the training loop"
        return _choose_first([f"{left} at {departure.place.partition(' in ')[0]}", left], width)
    who = "all ranks" if group is None and not is_one else format_ranks(shown.ranks)
    places = (shown.place, shown.place.partition(" in ")[0], "")
    return _choose_first([f"{who} {_describe_state(shown, place, is_one=is_one)}" for place in places], width)


def _choose_first(texts: Sequence[str], width: int) -> str:
    """Return the first text that fits, else the last one."""
    return next((text for text in texts if len(text) <= width), texts[-1])


def describe_collectives(standstill: Standstill) -> str:
    """Return in sentences how the ranks' collectives differ, as PyTorch's flight recorder says; "" if they do not."""
    if standstill.difference is not None:
        calls = [
            f"{call.name}{f' at {call.place}' if call.place else ''} on {format_ranks(group.ranks)}"
            for group, call in standstill.difference.calls
        ]
        return f"Collective {standstill.difference.number} is {', '.join(calls)}."
    if launched := _list_launched(standstill):
        return f"NCCL has launched {', '.join(launched)}."
    if len({group.awaited.group for group in standstill.groups if group.awaited is not None}) > 1:
        return " ".join(map(_describe_absence, standstill.list_absences()))
    known = [(group, group.collectives) for group in standstill.groups if group.collectives is not None]
    if len({called.called for _, called in known}) > 1:
        first, *others = (
            f"{format_ranks(group.ranks)} {'has' if len(group.ranks) == 1 else 'have'} called {called.called}"
            for group, called in known
        )
        return ", ".join([f"{first.capitalize()} collectives", *others]) + "."
    if standstill.is_mismatch and len({called.name for _, called in known}) > 1:
        names = ", ".join(f"{called.name} on {format_ranks(group.ranks)}" for group, called in known)
        return f"Collective {known[0][1].called} is {names}."
    return ""


def _describe_absence(absence: Absence) -> str:
    waiting, absent = absence.waiting.ranks, absence.absent
    verbs = "waits" if len(waiting) == 1 else "wait", "has" if len(absent) == 1 else "have"
    who = format_ranks(waiting).capitalize()
    return f"{who} {verbs[0]} for {absence.name}, which {format_ranks(absent)} {verbs[1]} not called."


def describe_reads(standstill: Standstill, step: int | None) -> str:
    """Return how many batches the odd ranks have read without training in a step; "" if they do something else."""
    odd = standstill.odd
    if odd is None or not odd.reads:
        return ""
    least = "has" if len(odd.ranks) == 1 else "have each, at least,"
    since = f" since the begin of step {step:,}" if step is not None else ""
    return f"{format_ranks(odd.ranks).capitalize()} {least} read {odd.reads:,} batches{since} and trained with none of them."


def describe_departure(standstill: Standstill, steps: int | None) -> str:
    """Return from where the odd ranks left the training loop, and after how many steps; "" if they did not."""
    odd, departure = standstill.odd, standstill.departure
    if odd is None or departure is None:
        return ""
    who, has = format_ranks(odd.ranks).capitalize(), "has" if len(odd.ranks) == 1 else "have"
    after = f" after {steps:,} steps" if steps is not None else ""
    called = f", called from {departure.place}" if departure.place != odd.place else ""
    return f"{who} {has} left the training loop{after}, and {_describe_state(odd, odd.place, is_one=has == 'has')}{called}."


def describe_threads(standstill: Standstill) -> str:
    """Return where the other threads stand of the rank that waits for one of them, if that is known; else ""."""
    return " ".join(
        f"{name_thread(thread.thread)} {_describe_state(group, group.place, is_one=True)}."
        for thread, group in _list_threads(standstill)
    )


def list_thread_places(standstill: Standstill) -> list[str]:
    """Return the lines, as ``train.py:71``, at which the threads of :func:`describe_threads` stand."""
    return [group.place.partition(" in ")[0] for _, group in _list_threads(standstill)]


def name_thread(name: str) -> str:
    """Return ``Thread-1``, or ``Thread loader``."""
    return name if name.startswith("Thread") else f"Thread {name}"


def _list_threads(standstill: Standstill) -> list[tuple[ThreadStack, StackGroup]]:
    """Return the threads in the job's own code beside a training thread that waits for a lock, a queue or a thread."""
    shown = standstill.odd or standstill.groups[0]
    if shown.wait is None or shown.wait.kind not in (WaitKind.LOCK, WaitKind.EXIT):
        return []
    others = (one for one in shown.stacks[0].threads if one.thread and any(frame.own for frame in one.frames))
    return [(one, replace(shown, wait=find_wait(one), frame=one.own_frame)) for one in others]


def _list_launched(standstill: Standstill) -> list[str]:
    """Describe how many operations NCCL has launched for ranks whose Python does not run, and for the others."""
    ranks = {process.pid: process.rank for group in standstill.groups for process in group.processes}
    found = next((stacks.launched for group in standstill.groups for stacks in group.stacks if stacks.launched), ())
    counts: dict[tuple[str, int], list[int]] = {}
    for one in found:
        if one.pid in ranks:
            counts.setdefault((one.operation, one.operations), []).append(ranks[one.pid])
    return [f"{count} {operation} operations on {format_ranks(sorted(on))}" for (operation, count), on in counts.items()]


def write_advice(standstill: Standstill) -> str:
    """Return one sentence of advice on where to look."""
    odd = standstill.odd
    if all(group.activity == "init_process_group" for group in standstill.groups):
        return "A rank has not arrived: check that all nodes have started, with the same address."
    if standstill.departure is not None:
        return _LEFT
    if standstill.is_mismatch:
        return _SHAPES if standstill.difference is not None and standstill.difference.is_of_shapes else _COLLECTIVES
    threads = [group.wait for _, group in _list_threads(standstill)]
    if threads and all(wait is not None and wait.kind is WaitKind.LOCK for wait in threads):
        return _BY_THREADS
    if (odd or standstill.groups[0]).awaits_device:
        return "A kernel on the GPU does not finish: check what was launched before that line."
    if odd is None:
        if not standstill.groups[0].awaits_others:
            return "Look at that line."
        hosts = {process.host for group in standstill.groups for process in group.processes}
        return "Look at the network between the nodes." if len(hosts) > 1 else _ONE_NODE
    if odd.end is not None:
        return "No rank goes on without the one that has ended: find out why it ended."
    if odd.wait is None and not odd.reads:
        return "It runs C code that holds Python's lock. py-spy could not read its stack."
    return _SKIPS if odd.reads else "Look at that line: no other rank goes on until this one arrives."


def _name_activity(group: StackGroup) -> str:
    """Return what a group does or waits for: the thread that a rank waits for by its name, if it has no other one."""
    if group.wait is None or group.wait.name not in (A_THREAD, THREADS) or len(group.stacks) != 1:
        return group.activity
    others = [one.thread for one in group.stacks[0].threads if one.thread]
    is_known = len(others) == 1 and others[0] != "MainThread"
    return f"thread {others[0].removeprefix('Thread-')}" if is_known else group.activity


def _describe_state(group: StackGroup, where: str, *, is_one: bool) -> str:
    is_exit = group.wait is not None and group.wait.kind is WaitKind.EXIT
    be, place = "is" if is_one else "are", f" at {where}" if where and not is_exit else ""
    if group.end is not None:
        number = group.end.signal_number
        return f"{'has' if is_one else 'have'} ended" + (f" by signal {number}" if number else place)
    if group.reads:
        return f"{'reads' if is_one else 'read'} batches without training{place}"
    if group.wait is None:
        return f"{be} silent in C code: {'its' if is_one else 'their'} Python does not run"
    if group.awaits_device:
        return f"{'waits for its GPU' if is_one else 'wait for their GPUs'} in {group.activity}{place}"
    if group.awaits_others or (group.wait.kind is WaitKind.COLLECTIVE and group.has_left):
        return f"{'waits' if is_one else 'wait'} in {group.activity}{place}"
    activity = _name_activity(group)
    if activity.startswith(_AWAITED):
        return f"{'waits' if is_one else 'wait'} for {activity}{place}"
    return f"{be} in {activity}{place}" if activity else f"{be}{place}"

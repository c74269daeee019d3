"""Notices about a recording: which parts are missing, and why.

The files that running ranks write their output to, as far as that is not the job's recorded output.

Describe the startup of a job without an engine: compilation, an abandoned build lock, or no training yet.

Notices about what trains, or does not: which optimizers make an iteration, and jobs without any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from zerotop.analysis.engine import LOOP, read_first_engine
from zerotop.analysis.formatting import format_bytes, format_count, format_long_time, format_ranks, join_words, pluralize
from zerotop.analysis.processes.missing_probe import describe_missing_probes, find_missing_probes
from zerotop.analysis.processes.thinned import is_thinned_at, mask_thinned
from zerotop.analysis.steps.gaps import describe_gaps
from zerotop.analysis.views.job_exit import Losses, count_losses
from zerotop.recording.events.event_index import get_event_time
from zerotop.recording.moments.at import At
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import RankSteps, StepTable
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import MAX_BYTES
from zerotop_probe.recording.events import (
    Attached,
    Entered,
    Node,
    NotEntered,
    NotReached,
    ProbeError,
    RankSilent,
    Reached,
    RecordsLate,
    SamplerError,
)
from zerotop_probe.recording.tables import PHASE_CODE

# More optimizers than these are not named.
_MOST_NAMED = 4
_TRAINED_NOTHING = (
    "No training was recorded: no process with the probe created a DeepSpeed engine, or called backward() and stepped a"
    " PyTorch optimizer."
)
# An optimizer that has not stepped after this many backwards is worth a notice; accumulation over more is rare. These are
# searched in the first records.
_MANY_BACKWARDS, _FIRST_SPANS = 100, 2000
_BACKWARD, _STEP = PHASE_CODE["backward"], PHASE_CODE["step"]
_NO_OPTIMIZER = "This loop has no optimizer of PyTorch: its forwards and backwards are shown, but no steps."


def describe_training(at: At) -> list[str]:
    """Return the sentences that hold at a moment in unix time."""
    engine = read_first_engine(at)
    if not engine:
        is_known = _has_ended_untrained(at) and not at.events_of(events.ProbeMissing)
        return [_TRAINED_NOTHING] if is_known else []
    if engine.kind != LOOP:
        return []
    if not engine.optimizer:
        return [_NO_OPTIMIZER]
    if (backwards := _count_backwards_without_step(at)) >= _MANY_BACKWARDS:
        return [
            f"None of {backwards:,} backwards was followed by a step of {engine.optimizer} so far:"
            " without steps there are no iterations."
        ]
    reported = at.events_of(events.Optimizers)
    return _describe_rule(min(reversed(reported), key=lambda event: event.writer.rank).optimizers) if reported else []


def _count_backwards_without_step(at: At) -> int:
    """Return the backwards of the loop's first rank until a moment, or among its first records; 0 with a step."""
    if not at.sources["spans"]:
        return 0
    source = at.sources["spans"][0]
    spans = source.array[:_FIRST_SPANS]
    phases = spans["phase"][spans["end_ns"] + source.offset_ns <= at.cursor_ns]
    return 0 if np.any(phases == _STEP) else int(np.count_nonzero(phases == _BACKWARD))


def _has_ended_untrained(at: At) -> bool:
    """Return whether a job that zerotop started has ended without a report of any rank."""
    if not at.events_of(events.JobStarted) or at.events_of(events.Hello):
        return False
    return bool(at.events_of(events.JobEnded))


def _describe_rule(optimizers: Sequence[events.SteppedOptimizer]) -> list[str]:
    counting = [optimizer for optimizer in optimizers if optimizer.counts]
    # One without parameters never counts, and changes nothing.
    rare = [optimizer for optimizer in optimizers if not optimizer.counts and optimizer.parameters != 0]
    sentences = []
    if len(counting) > 1:
        sentences.append(f"An iteration ends when {_list_optimizers(counting)} have each stepped since the last one.")
    elif rare and counting:
        sentences.append(f"An iteration is a step of {_list_optimizers(counting)}.")
    if rare:
        verb = "does" if len(rare) == 1 else "do"
        sentences.append(f"{_list_optimizers(rare)} {verb} not count: the others have stepped many times meanwhile.")
    return [" ".join(sentences)] if sentences else []


def _list_optimizers(optimizers: Sequence[events.SteppedOptimizer]) -> str:
    if len(optimizers) > _MOST_NAMED:
        return f"{len(optimizers)} optimizers"
    names = [f"{optimizer.class_} ({_format_count(optimizer.parameters or 0)})" for optimizer in optimizers]
    return join_words(names)


def _format_count(parameters: int) -> str:
    return f"{parameters:,} {pluralize(parameters, 'parameter')}"


_ENGINE = "Waiting for the training to begin."
_ENTER = " E, or zerotop attach {pid} --enter, loads it while they run."
# Of a job that may only infer: nothing says that it will train.
_UNTRAINED = "No rank has reported a step in the first {duration}. A program that only infers has no steps."
_UNTRAINED_S = 60.0
_COMPILERS = "Compiling {what} for {duration}: 1 to 2 minutes, on the first run only."
_OPERATORS = "DeepSpeed's operators"
# Deleting the lock of a running job is no fix: its ranks would load a library that was never built.
_LOCK = (
    "The ranks sleep, nothing compiles, and no process on their node holds {locks}: they may wait forever for a build of"
    " DeepSpeed's operators that was killed. Unless another job builds there, stop this one, delete {it} and start it again."
)


def describe_wait(at: At) -> str:
    """Return a sentence, by the latest event."""
    if missing := find_missing_probes(at):
        pid = missing[0].events[0].pid
        return " ".join(f"{one.sentence}." for one in missing) + _ENTER.format(pid=pid)
    compiling, locked = at.events_of(events.Compiling), at.events_of(events.BuildLocked)
    if locked and (not compiling or compiling[-1].unix_ns < locked[-1].unix_ns):
        paths = list(dict.fromkeys(event.path for event in locked))
        return _LOCK.format(locks=" and ".join(paths), it="it" if len(paths) == 1 else "them")
    if not compiling:
        passed_s = (at.cursor_ns - at.recording.begin_ns) / 1e9
        return _ENGINE if passed_s < _UNTRAINED_S else _UNTRAINED.format(duration=format_long_time(passed_s))
    duration = format_long_time((at.cursor_ns - compiling[0].unix_ns) / 1e9)
    return _COMPILERS.format(what=compiling[-1].extension or _OPERATORS, duration=duration)


def describe_rank_files(recording: Recording, cursor_ns: int) -> str:
    """Return ``rank 0 writes to /logs/0/stdout.log, 3 other ranks to theirs``; "" if all print where the job does."""
    paths = {event.rank: event.stdout or event.stderr for event in recording.events_of(events.OutputFiles, cursor_ns)}
    named = sorted((rank, path) for rank, path in paths.items() if path)
    if not named:
        return ""
    rank, path = named[0]
    others = f", {format_count(len(named) - 1, 'other rank')} to theirs" if len(named) > 1 else ""
    return f"rank {rank} writes to {path}{others}"


MUCH_HELD_BYTES = MAX_BYTES // 10
"""Deleted detail that an open screen may keep on the disk: a tenth of a recording's usual largest size."""


def describe_notices(at: At, losses: Losses, processes: Iterable[RankSteps]) -> tuple[str, ...]:
    """Return the notices at a moment in unix time, one sentence each."""
    notices = [event.gpu_notice for event in at.events_of(Node) if event.gpu_notice]
    notices += _describe_hidden_faults(at)
    notices += [f"Rank {event.rank}: {event.why}" for event in at.events_of(RankSilent)]
    notices += describe_missing_probes(at)
    notices += [str(event.text) for event in at.events_of(Attached)]
    notices += _describe_not_reached(at)
    notices += _describe_not_entered(at)
    notices += describe_training(at)
    notices += _describe_uncounted(at)
    notices += _describe_unknown_sharding(at)
    notices += filter(None, [losses.loss_sentence, describe_gaps(at, processes)])
    notices += _describe_late(at)
    notices += describe_thinning(at)
    if at.recording.held_bytes > MUCH_HELD_BYTES:
        held = format_bytes(at.recording.held_bytes)
        notices.append(
            f"This screen keeps {held} of deleted detail on the disk. Go to the end of the recording, and it is freed soon."
        )
    for event in (*at.events_of(ProbeError), *at.events_of(SamplerError)):
        notices.append(f"Recording is partial: {event.where}: {event.error}")
    return tuple(dict.fromkeys([*notices, *describe_damage(at.recording)]))


def _describe_hidden_faults(at: At) -> list[str]:
    """Return a sentence for each reason why the Xids of GPUs are not visible."""
    gpus: dict[str, set[int]] = {}
    for event in at.events_of(events.GpuFaultsHidden):
        if event.gpu is not None and (why := (event.hidden or {}).get("xid")):
            gpus.setdefault(why, set()).add(event.gpu)
    return [
        f"Xids of GPU {', '.join(map(str, sorted(which)))} are not visible here ({why}): see the kernel's log, dmesg."
        for why, which in gpus.items()
    ]


def _describe_uncounted(at: At) -> list[str]:
    """Return a sentence if ranks hold pinned memory that their version of PyTorch does not count."""
    counted = at.events_of(events.Tensors)
    pins = any(event.host_pinned and event.facts.get("pinned_allocator", {}) is None for event in counted)
    versions = {str(event.torch) for event in at.events_of(events.Hello)}
    if not pins or len(versions) != 1:
        return []
    return [f"PyTorch {versions.pop()} does not count pinned memory: what it holds beyond tensors is not shown."]


def _describe_unknown_sharding(at: At) -> list[str]:
    """Return a sentence if the probe does not know how the ranks' version of PyTorch keeps FSDP's shards."""
    if not any("sharding" in (event.unread or {}) for event in at.events_of(events.Engine)):
        return []
    versions = {str(event.torch) for event in at.events_of(events.Hello)}
    which = f"PyTorch {versions.pop()}" if len(versions) == 1 else "This version of PyTorch"
    return [f"{which} keeps FSDP's parameters in a way that zerotop does not know: gathered ones count as activations."]


def describe_thinning(at: At) -> list[str]:
    """Return a sentence for each way in which the records of old steps are incomplete, judged by one rank."""
    tables = [source for source in at.sources["folded"] if source.count_until(at.cursor_ns)]
    folded = min(tables, key=lambda source: (source.rank, -source.created_ns), default=None)
    spans = at.find_sibling("spans", folded) if folded is not None else None
    if folded is None or spans is None:
        return []
    rows = folded.until(at.cursor_ns)
    gone = np.flatnonzero(mask_thinned(folded, spans)[: len(rows)])
    if not len(gone):
        return []
    sentences = []
    if is_thinned_at(at, spans):
        sentences.append("Here only the times, peaks and counts of steps are known: older detail was thinned out.")
    steps = int(rows["steps"][gone].sum())
    first, last = int(rows["step"][gone[0]] - rows["steps"][gone[0]]) + 1, int(rows["step"][gone[-1]])
    sentences.append(
        f"Steps {first:,} to {last:,}: the detail of {steps:,} of them was thinned out; times, peaks and counts remain."
    )
    block = int(rows["steps"].max())
    if block > 1:
        last = int(rows["step"][np.flatnonzero(rows["steps"] > 1)[-1]])
        sentences.append(f"Steps up to {last:,} are merged into blocks of up to {block:,}: means, and the highest peaks.")
    return sentences


def describe_damage(recording: Recording) -> list[str]:
    """Return a sentence for each kind of damage in a recording."""
    counts = (
        (recording.damaged_files, "damaged file", "skipped"),
        (recording.damaged_lines, "damaged event line", "skipped or read in part"),
        (recording.damaged_records, "damaged record", "skipped"),
        (recording.cut_files, "file", "cut short: the records of some time are missing"),
        (recording.replaced_files, "file", "replaced by a shorter one meanwhile: open the recording again"),
    )
    return [
        f"{count} {noun} was {effect}." if count == 1 else f"{count} {noun}s were {effect}."
        for count, noun, effect in counts
        if count
    ]


def describe_missing_steps(recording: Recording) -> str:
    """Return a sentence about steps that are missing from a recording; "" without any."""
    if not count_losses(recording.at()).records:
        return ""
    table = StepTable(recording, memory=False)
    table.update()
    return describe_gaps(recording.at(recording.last_written_ns), table.rank_steps)


def _describe_late(at: At) -> list[str]:
    """Describe the longest time for which records of ranks could not be written; none of them was lost by that."""
    late = [event for event in at.events_of(RecordsLate) if event.seconds]
    if not late:
        return []
    seconds, why = max(((event.seconds or 0.0, event.why) for event in late), key=lambda one: one[0])
    ranks = sorted({event.rank for event in late if event.rank is not None})
    whose = format_ranks(ranks) if ranks else "a rank"
    return [f"Records of {whose} were written up to {seconds:.0f} s late, but none were lost: {why}."]


def _describe_not_reached(at: At) -> list[str]:
    """Describe the nodes whose latest event reports that they could not be reached."""
    reports: list[NotReached | Reached] = [*at.events_of(NotReached), *at.events_of(Reached)]
    last = {event.name: event for event in sorted(reports, key=get_event_time)}
    return [f"{name} takes no part: {event.why}." for name, event in last.items() if isinstance(event, NotReached)]


def _describe_not_entered(at: At) -> list[str]:
    """Describe the processes that the probe could not enter, then or later."""
    last = {event.process_key: event for event in at.events_of(NotEntered)}
    for entered in at.events_of(Entered):
        last.pop(entered.process_key, None)
    sentences = []
    for (_, pid), event in last.items():
        who = f"Process {pid}" if event.rank is None else f"Rank {event.rank}"
        sentences.append(f"{who} is not entered: {event.why}")
    return sentences

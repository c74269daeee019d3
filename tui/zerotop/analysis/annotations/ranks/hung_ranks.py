"""Nothing begins or ends on any rank for far longer than an iteration takes: one hangs, and the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Ints, Samples
from zerotop.analysis.annotations.support.thresholds import HANG_ITERATIONS, HANG_SECONDS
from zerotop.analysis.formatting import format_count, format_seconds
from zerotop.session.reader import Source
from zerotop_probe.recording.tables import PHASE_CODE, PHASES

# Phases in which nothing is heard for as long as they take.
_SILENT_PHASES = ("init", "checkpoint_save", "checkpoint_load")
# What a rank says when it ends, and when its probe is taken out.
_LAST_EVENTS = ("goodbye", "left")
# A phase that is in progress began no longer before the last sign of life.
_LOOK_BACK_NS = 3600 * 10**9


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """One finding for each silence of an attempt, when it has lasted long enough, whether or not it ends."""
    for group in facts.groups:
        if len(group.lead.steps):
            yield from _check_group(facts, group)


@dataclass
class _State:
    """How far the phases of all ranks were read, and when anything began or ended last."""

    begin_counts: dict[Source, int] = field(default_factory=dict)
    end_counts: dict[Source, int] = field(default_factory=dict)
    last_heard_ns: int = 0


def _check_group(facts: Evidence, group: Group) -> Iterator[Annotation | None]:
    seen = group.get_state(_State)
    seen.last_heard_ns = seen.last_heard_ns or int(group.lead.steps["end_unix_ns"][0])
    times = []
    for process in group.processes:
        yield PAUSE
        times += [process.begins.read_new(seen.begin_counts).times, process.spans.read_new(seen.end_counts).times]
    fresh = np.sort(np.concatenate(times))
    heard = np.concatenate([[seen.last_heard_ns], fresh[fresh >= seen.last_heard_ns]])
    seen.last_heard_ns = int(heard[-1])
    silences = np.append(heard[1:], facts.cursor_ns) - heard
    for place in np.flatnonzero(silences >= HANG_SECONDS * 1e9).tolist():
        since = int(heard[place])
        before = group.lead.steps_until(since)["iteration_s"][-20:]
        longest = max(HANG_SECONDS, HANG_ITERATIONS * float(before.max()))
        known_ns = since + int(longest * 1e9)
        if silences[place] >= longest * 1e9 and known_ns <= min(_find_end(facts, group), facts.cursor_ns):
            last = [process.begins.read_window(since - _LOOK_BACK_NS, since) for process in group.processes]
            if not _is_silent(last):
                yield _build_finding(group, last, since, known_ns, float(np.median(before)))


def _find_end(facts: Evidence, group: Group) -> int:
    """When the first of the ranks, or the job, is known to have ended, or to tell nothing more."""
    pids = {(process.source.host, process.source.pid) for process in group.processes}
    gone = [event.unix_ns for event in facts.events_named("rank_gone") if (event.host, event.facts.get("pid")) in pids]
    told = [(process, event) for process in group.processes for name in _LAST_EVENTS for event in process.events_named(name)]
    byes = [event.unix_ns for process, event in told if event.unix_ns > process.source.created_ns]
    ends = [event.unix_ns for event in facts.events_named("job_ended") if event.unix_ns > group.lead.source.created_ns]
    return min([*gone, *byes, *ends], default=np.iinfo(np.int64).max)


def _is_silent(last: list[Samples]) -> bool:
    codes = [PHASE_CODE[name] for name in _SILENT_PHASES]
    return any(len(part) > 0 and int(part.rows["phase"][-1]) in codes for part in last)


def _build_finding(group: Group, last: list[Samples], since: int, known_ns: int, usual_s: float) -> Annotation:
    reached: NDArray[np.int64] | Ints = np.array([part.times[-1] if len(part) else 0 for part in last])
    slowest = int(np.argmin(reached))
    apart = float(np.median(reached) - reached[slowest]) / 1e9
    process, waited = group.processes[slowest], (known_ns - since) / 1e9
    alone = len(reached) > 1 and apart > 0
    phases = {_name_phase(part) for place, part in enumerate(last) if place != slowest}
    text = f"For {format_seconds(waited)} nothing has begun or ended on {format_count(len(last), 'rank')}, whose iterations take"
    text += f" {format_seconds(usual_s)}"
    if alone:
        text += f": rank {process.rank} came no further than {_name_phase(last[slowest])}"
        text += f", the others are in {' and '.join(sorted(phases))}" if phases else ""
    return Annotation(
        name="hung_ranks",
        begin_ns=since,
        end_ns=known_ns,
        known_ns=known_ns,
        step=group.lead.step_at(since),
        ranks=(process.rank,) if alone else group.ranks_at(known_ns),
        severity=Severity.ERROR,
        confidence=0.8 if alone else 0.6,
        sentence=text + ".",
        advice="Run py-spy dump on the rank that is behind; TORCH_NCCL_ASYNC_ERROR_HANDLING=1 and a shorter ddp_timeout in"
        " Trainer's arguments end such a job.",
        evidence={"silent_s": waited, "iteration_s": usual_s, "behind_s": apart},
    )


def _name_phase(part: Samples) -> str:
    code = int(part.rows["phase"][-1]) if len(part) else 0
    return PHASES[code] if code < len(PHASES) else "a phase"

"""A rank's host memory grows steadily while it trains, and when it will run out.

Read from the memory that samplers saw in each step. Pages of files do not count: the kernel drops them when memory is short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.host.growing_containers import FoundContainer, await_container
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.host_load import count_workers, read_memory
from zerotop.analysis.findings.support.lines.stack_lines import find_known_end
from zerotop.analysis.findings.support.steps.fp16_warmup import count_skipped_first
from zerotop.analysis.findings.support.steps.growing_batches import follow_steps, get_batch_sizes
from zerotop.analysis.findings.support.thresholds import HOST_GROWTH_BYTES, WARM_UP_STEPS
from zerotop.analysis.formatting import MIB
from zerotop.analysis.script_terms import SNAPSHOTS
from zerotop.analysis.stats.change_points import SETTLED_STEPS, Values
from zerotop.analysis.stats.trend import Rise, TrendFinder, measure_rise
from zerotop.recording.samples import Rows, read_column

_KIND = FindingKind(
    name="host_growth",
    confidence=0.8,
    host_bytes="grown_bytes",
    headline=(
        "Host memory grows {bytes_per_step:bytes} a step[ in '{kept_in}'] on {concerned:ranks}"
        "[; full near step {last_step:.0f}]"
    ),
    details=(
        "Rank {rank}'s memory[ without pages of {left_out}] grew by {grown_bytes:bytes} to {resident_bytes:bytes}"
        " in {steps:.0f} steps[;"
        " {free_bytes:bytes} are left on the node[, for {node_ranks} ranks]].[ {shared_bytes:bytes} of the growth are shared"
        " memory.]"
    ),
    advice="See what Python allocates between two steps: nothing that holds it was found.",
    fix=SNAPSHOTS,
    lasts=True,
)
# Most of the growth is shared memory: tensors of share_memory_() and from DataLoader workers, files on /dev/shm.
_SHARED = _KIND.with_changes(
    advice="Keep less shared memory: files on /dev/shm, pinned or shared tensors[, batches of {workers}].",
    fix="ls -lS /dev/shm",
)
_ENDED = _KIND.with_changes(
    severity=Severity.INFO,
    headline="Host memory grew {bytes_per_step:bytes} a step[ in '{kept_in}'] on {concerned:ranks} to step {until_step:.0f}",
    details="Rank {rank}'s memory[ without pages of {left_out}] grew by {grown_bytes:bytes} to {resident_bytes:bytes},"
    " and not since.",
    advice="",
    fix="",
)
# A rise by at least this share of the memory before it.
HOST_GROWTH_SHARE = 0.02
# Memory hardly varies, so four blocks are enough. A cache that fills up grows more and more slowly.
HOST_GROWTH_BLOCKS = 4
HOST_GROWTH_EVENNESS = 0.8
# A smaller rise counts once the first steps are over, in which caches fill up; one that is smaller still, or less even, if
# the probe has seen a container that grows with it.
_STEADY_BYTES = 96 * MIB
_NAMED_BYTES, _NAMED_EVENNESS = 48 * MIB, 0.5
# A growth without a name is steady if so many jumps of a step carry at most this part of it: loaded kernels are a few jumps.
_FEW_JUMPS, _JUMPS_SHARE = 3, 0.8
# If so few jumps carry this part of it, it may be over at any time: the script may keep only the last few of something.
_MORE_JUMPS, _MORE_SHARE, _JUMP_PARTS = 5, 0.9, 64
# So many times its steps until memory is full are too many to foresee, while this part of the limit is free.
_FAR_TIMES, _MOST_FREE = 100, 0.75
# One without a name counts if it would fill the node's memory within this time (ns).
_SOON_NS = 86_400_000_000_000
# It has ended if in at least so many steps, and as many as it had, memory grew by less than this share of the pace.
_END_STEPS, _END_SHARE = 64, 0.1
# It is told again when it has grown by this factor.
_TOLD_AGAIN = 1.5
# Rises that differ by less than this share have the same cause.
_ALIKE = 2.0
# Values rise by less than this share of the pace before a growth begins.
_FLAT_SHARE, _FIRST_VALUES = 0.25, 4
# By how much batches grow at least if the growth is theirs.
_LARGER_SHARE = 0.1


class _Search(NamedTuple):
    """A search for rises from a step on, of bytes and evenness. ``needs_name``: only those in a known container count."""

    begin: int
    least: int
    evenness: float
    needs_name: bool = False

    def make_finder(self) -> TrendFinder:
        return TrendFinder(HOST_GROWTH_BLOCKS, self.evenness)


_SEARCHES = (
    _Search(SETTLED_STEPS, HOST_GROWTH_BYTES, HOST_GROWTH_EVENNESS),
    _Search(WARM_UP_STEPS, _STEADY_BYTES, HOST_GROWTH_EVENNESS),
    _Search(WARM_UP_STEPS, _NAMED_BYTES, _NAMED_EVENNESS, needs_name=True),
)


class _Growth(NamedTuple):
    """A rise of a rank's memory, with all ranks whose memory rises alike."""

    process: Process
    rise: Rise
    ranks: list[int]
    search: _Search

    @property
    def rows(self) -> Rows:
        return self.process.steps[self.rise.begin : self.rise.end]

    @property
    def bytes(self) -> int:
        """By how much memory grew in these steps."""
        return int(measure_rise(self.process.steps["host_held_bytes"], self.rise)[0])

    @property
    def held_bytes(self) -> int:
        """The memory that it grew to."""
        return int(measure_rise(self.process.steps["host_held_bytes"], self.rise)[1])

    @property
    def pace(self) -> float:
        """The bytes a step that are told."""
        return self.bytes / len(self.rows)

    @property
    def follows_batches(self) -> bool:
        """Whether batches grow in the same steps."""
        sizes = get_batch_sizes(self.rows)
        known = sizes[sizes > 0]
        is_larger = len(known) > 1 and known[-1] >= (1 + _LARGER_SHARE) * known[0]
        return bool(is_larger) and follow_steps(sizes, self.rows["step"])

    @property
    def begin_ns(self) -> int:
        return int(self.rows["begin_unix_ns"][0])

    @property
    def end_ns(self) -> int:
        return int(self.rows["end_unix_ns"][-1])

    @property
    def is_in_jumps(self) -> bool:
        """Whether a few of its steps carry nearly all of it, and it is no steady one."""
        held = self.process.steps["host_held_bytes"][max(0, self.rise.begin - 1) : self.rise.end]
        jumps = np.sort(np.diff(held.astype(np.float64)))[-_FEW_JUMPS:]
        return bool(jumps.sum() > _JUMPS_SHARE * self.bytes)

    @property
    def is_in_few_jumps(self) -> bool:
        """Whether so few of its parts carry nearly all of it that it may be over."""
        held = self.process.steps["host_held_bytes"][max(0, self.rise.begin - 1) : self.rise.end].astype(np.float64)
        parts = np.diff(held[np.linspace(0, len(held) - 1, min(len(held), _JUMP_PARTS + 1)).astype(np.int64)])
        return bool(np.sort(parts)[-_MORE_JUMPS:].sum() > _MORE_SHARE * self.bytes)

    def repeats(self, told: _Growth) -> bool:
        """Whether an earlier finding says that the rank's memory grows about as fast, or that another's does then."""
        if self.process.rank not in told.ranks:
            return False
        is_alike = told.rise.slope / _ALIKE < self.rise.slope < told.rise.slope * _ALIKE
        return is_alike or (self.process is not told.process and self.begin_ns <= (told.begin_ns + told.end_ns) // 2)

    def continues(self, told: _Growth) -> bool:
        """Whether the rank's memory has grown about as fast since an earlier rise."""
        steps = self.rise.begin - told.rise.end
        return self.process is told.process and self.rise.low - told.rise.high >= told.rise.slope / _ALIKE * max(0, steps)

    def is_within(self, ended: _Growth) -> bool:
        """Whether it is a part of a growth that has ended."""
        return self.begin_ns < ended.end_ns and self.repeats(ended)

    def find_end(self) -> tuple[int, _Growth] | None:
        """Return the whole growth, and when it was known to be over: memory hardly grew for as many steps again."""
        length, held = max(_END_STEPS, len(self.rows)), self.process.steps["host_held_bytes"][self.rise.end - 1 :]
        early, late = held[:-length], held[length:]
        is_over = (early > 0) & (late > 0) & (late - early < _END_SHARE * self.rise.slope * length)
        if not is_over.any():
            return None
        index = int(np.argmax(is_over))
        end, block = self.rise.end + index, self.rise.block_length // 2  # the last level is that of one step now
        rise = self.rise._replace(end=end, high=max(self.rise.high, float(early[index])), block_length=block)
        return int(self.process.steps["end_unix_ns"][rise.end - 1 + length]), self._replace(rise=rise)

    def find_more(self, known_ns: int) -> tuple[int, _Growth] | None:
        """Return it as it went on up to a time: once much larger, or up to its process's end; and when that was known."""
        rise, rows, exit_ns = self.rise, self.process.steps_until(known_ns), find_known_end(self.process)
        sums = np.cumsum(rows["host_held_bytes"], dtype=np.float64)
        levels = (sums[rise.end :] - sums[rise.end - rise.block_length : -rise.block_length]) / rise.block_length
        grown = levels - rise.high
        goes_on = grown >= rise.slope / _ALIKE * np.arange(1, len(grown) + 1)
        is_much = np.flatnonzero(goes_on & (grown >= (_TOLD_AGAIN - 1) * self.bytes))
        if len(is_much):
            index, more_ns = int(is_much[0]), int(rows["end_unix_ns"][rise.end + is_much[0]])
        elif goes_on.any() and exit_ns is not None and exit_ns <= known_ns:
            index, more_ns = int(np.flatnonzero(goes_on)[-1]), exit_ns
        else:
            return None
        return more_ns, self._replace(rise=rise._replace(end=rise.end + index + 1, high=float(levels[index])))

    def extend_back(self, told: _Growth) -> _Growth:
        """Return the growth since an earlier rise began."""
        begin, low = told.rise.begin, told.rise.low
        return self._replace(rise=self.rise._replace(begin=begin, low=low), ranks=told.ranks)


class _News(NamedTuple):
    """A growth as it is told, with its container, at a time; ``has_ended``: it has not gone on for as long."""

    growth: _Growth
    held: FoundContainer
    has_ended: bool = False


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each rise, with newer numbers while it continues, when it has ended, and again if it becomes steeper.

    Ranks whose memory rises alike share one finding. The rise in the first real step is left out.
    """
    settled = [one for one in window.await_each(_find_growths(window), _await_container) if _counts(window.subject, *one)]
    settled.sort(key=lambda one: (one[1].known_ns, one[0].end_ns, one[0].process.rank))
    growths = window.gather(settled)  # an earlier one is told again, and ends
    for news in window.items(_list_news(growths, window.recording.cursor_ns)):
        yield _build_finding(window.subject, news)


def _list_news(growths: Sequence[tuple[_Growth, FoundContainer]], cursor_ns: int) -> list[_News]:
    """Return what is told about rises up to a moment, in the order in which it was known."""
    news: list[_News] = []
    told: list[_News] = []
    for growth, held in growths:
        news += _follow_known(told, held.known_ns)
        if any(one.has_ended and growth.is_within(one.growth) for one in news):
            continue  # its container was looked for until the whole growth had ended
        index = next((index for index, one in enumerate(told) if growth.repeats(one.growth)), len(told))
        one = _News(growth, held)
        if index < len(told):
            earlier, was_held = told[index].growth, told[index].held
            is_newer = growth.continues(earlier)
            if not is_newer and (held.container is None or was_held.container is not None):
                continue
            known = was_held.known_at(held.known_ns)._replace(container=held.container or was_held.container)
            one = _News(growth.extend_back(earlier) if is_newer else earlier, known)
        told[index : index + 1] = [one]
        news.append(one)
    return news + _follow_known(told, cursor_ns)


def _follow_known(told: list[_News], known_ns: int) -> list[_News]:
    """Return those that are known at a time to have gone on, or to have ended, in order; the latter are removed."""
    news: list[_News] = []
    for index, one in reversed([*enumerate(told)]):
        end = one.growth.find_end()
        if end is not None and end[0] > known_ns:
            end = None
        while (more := one.growth.find_more(known_ns)) is not None and (end is None or more[0] < end[0]):
            one = told[index] = _News(more[1], one.held.known_at(more[0]))
            news.append(one)
        if end is not None:
            del told[index]
            news.append(_News(end[1], one.held.known_at(end[0]), has_ended=True))
    return sorted(news, key=lambda one: one.held.known_ns)


def _counts(group: Group, growth: _Growth, held: FoundContainer) -> bool:
    """Whether a container explains a rise, or it is steady and would fill the node's memory within a day if it is small.

    Larger and larger batches need more memory without a leak.
    """
    if growth.search.needs_name or growth.follows_batches:
        return held.container is not None and held.container.explains_growth
    if held.container is None and growth.is_in_jumps:
        return False
    free, steps = _read_free_bytes(growth), len(growth.rows)
    if growth.search.least >= HOST_GROWTH_BYTES or held.container is not None or free is None:
        return True
    return free / _measure_slope(group, growth) * (growth.end_ns - growth.begin_ns) / steps < _SOON_NS


def _find_growths(window: SearchWindow[Group]) -> Iterator[_Growth]:
    group = window.subject
    for process in group.processes:
        for rise, search in _find_rises(window, process):
            growth = _Growth(process, rise, [], search)
            if _is_memory_new(growth):
                yield growth._replace(ranks=[other.rank for other in group.processes if _rises_alike(other, growth)])


def _find_rises(window: SearchWindow[Group], process: Process) -> Iterator[tuple[Rise, _Search]]:
    skipped = count_skipped_first(process)
    if skipped < len(process.steps):
        values = process.steps["host_held_bytes"]
        for search in _SEARCHES:
            finder = window.keep(search.make_finder, process)  # reads each step once
            for rise in finder.find_rises(values, skipped + search.begin, share=HOST_GROWTH_SHARE, least=search.least):
                yield _trim_begin(values, rise), search


def _trim_begin(values: Values, rise: Rise) -> Rise:
    """Return a rise without first values that do not rise."""
    first = values[rise.begin : rise.begin + 2 * rise.block_length].astype(np.float64)
    low = np.flatnonzero(first <= np.median(first[:_FIRST_VALUES]))
    flat = int(low[-1]) if len(low) else 0
    if not flat or first[flat] - first[0] > _FLAT_SHARE * rise.slope * flat:
        return rise
    begin = rise.begin + flat + 1
    return rise._replace(begin=begin, low=float(np.median(values[begin : begin + rise.block_length])))


def _measure_shared(growth: _Growth) -> int:
    """Return the growth of the rank's shared memory in the steps of a rise."""
    before, after = (
        growth.process.host_samples.read_last(time_ns) for time_ns in (int(growth.rows["begin_unix_ns"][0]), growth.end_ns)
    )
    return int(after["shared_bytes"]) - int(before["shared_bytes"]) if before is not None and after is not None else 0


def _is_memory_new(growth: _Growth) -> bool:
    """Whether the node uses more memory: pages of shared memory that another process has filled cost nothing to map."""
    shared = _measure_shared(growth)
    if shared <= growth.bytes / 2:
        return True
    records = growth.process.at.records("hosts", growth.process.host)
    rows = records.read_window(int(growth.rows["end_unix_ns"][0]), growth.end_ns).rows
    sizes = read_column(rows, "shared_bytes")
    return len(sizes) < 2 or not sizes[-1] - sizes[0] < shared / 2  # NaN: an older recording


def _measure_slope(group: Group, growth: _Growth) -> float:
    """Return the bytes a step by which all ranks of the node have grown in the steps of a rise."""
    grown, rows = 0.0, growth.rows
    for other in group.processes_on(growth.process.host):
        if other is growth.process:
            grown += growth.pace * (len(rows) - 1)
            continue
        held = other.steps_until(growth.end_ns)
        held = held[held["step"] >= rows["step"][0]]["host_held_bytes"]
        grown += max(0, int(held[-1]) - int(held[0])) if len(held) else 0
    return max(1.0, grown / max(1, len(rows) - 1))


def _read_free_bytes(growth: _Growth) -> int | None:
    memory = read_memory(growth.process.recording, growth.process.host, growth.end_ns)
    return memory.limit_bytes - memory.used_bytes if memory is not None else None


def _may_be_over(growth: _Growth, last_step: float) -> bool:
    """Whether a growth without a name came in few jumps, or leaves most of the node's memory free for many times as long."""
    memory, steps = read_memory(growth.process.recording, growth.process.host, growth.end_ns), growth.rows["step"]
    is_free = memory is not None and memory.limit_bytes - memory.used_bytes >= _MOST_FREE * memory.limit_bytes
    return growth.is_in_few_jumps or (is_free and last_step - steps[-1] > _FAR_TIMES * len(steps))


def _rises_alike(other: Process, growth: _Growth) -> bool:
    """Whether a rank's memory grew in the same steps by about as much."""
    if other is growth.process:
        return True
    rows = other.steps_until(growth.end_ns)
    rows = rows[rows["step"] >= growth.rows["step"][0]]
    if len(rows) < 2 or other.host != growth.process.host:
        return False
    grown = int(rows["host_held_bytes"][-1]) - int(rows["host_held_bytes"][0])
    return growth.bytes / 2 < grown < growth.bytes * 2


def _await_container(growth: _Growth) -> FoundContainer | None:
    return await_container(growth.process, growth.begin_ns, growth.end_ns)


def _build_finding(group: Group, news: _News) -> Finding:
    growth, held, has_ended = news
    (process, _, ranks, _), rows = growth, growth.rows
    node_ranks = len(group.processes_on(process.host))
    free = _read_free_bytes(growth)
    last_step = float(rows["step"][-1]) + max(0, free) / _measure_slope(group, growth) if free is not None else None
    is_shared = (shared_bytes := _measure_shared(growth)) > growth.bytes / 2
    evidence = {
        "bytes_per_step": growth.pace,
        "grown_bytes": growth.bytes,
        "resident_bytes": growth.held_bytes,
        "steps": len(rows),
        "free_bytes": None if has_ended else free,
        "last_step": None if has_ended else last_step,
        "shared_bytes": shared_bytes if is_shared else None,
        "until_step": float(rows["step"][-1]) if has_ended else None,
    }
    sharers = node_ranks if node_ranks > 1 else None
    kind, container = _SHARED if is_shared else _KIND, held.container
    kind = container.name_in(kind) if container is not None else kind
    if container is not None and container.rest_bytes is not None and container.rest_bytes < (free or 0):
        evidence["last_step"] = None  # its limit ends it
        kind = kind if container.is_wasteful else kind.with_changes(severity=Severity.INFO)
    if container is None and not is_shared and last_step is not None and _may_be_over(growth, last_step):
        kind, evidence["last_step"] = kind.with_changes(severity=Severity.INFO), None
    kind = _ENDED if has_ended else kind
    values: dict[str, Any] = {"kept_in": container.name, **container.values} if container is not None else {"kept_in": None}
    values["left_out"] = "files" if (rows["host_held_bytes"] != rows["host_rss_bytes"]).any() else None
    values["workers"] = "DataLoader workers" if count_workers([process], growth.begin_ns, growth.end_ns) else None
    values |= {"known_ns": held.known_ns, "ranks": ranks, "concerned": ranks, "node_ranks": sharers}
    return kind.at_steps(process, rows, evidence, **values)

"""PyTorch reserves ever more memory than is allocated at any time: new blocks fit into none that are cached."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.findings.support import Finding, FindingKind, Process, SearchWindow, in_each_rank
from zerotop.analysis.findings.support.links import Kinds, flushed_for_growth, grew_beside
from zerotop.analysis.findings.support.memory.looks import describe_larger, read_looks
from zerotop.analysis.findings.support.memory.reserve_rises import ReserveRise, ReserveSearch
from zerotop.analysis.formatting import GIB, Text
from zerotop.analysis.memory.tensor_inventory import read_pools
from zerotop_probe.recording import events
from zerotop_probe.recording.event_values import PEAK

_KIND = FindingKind(
    name="reserve_growth",
    confidence=0.9,
    gpu_bytes="unused_bytes",
    headline="Reserved, unused GPU memory {grows} {bytes_per_step:bytes} a step on rank {rank}{until}",
    details=(
        "Since step {since}, PyTorch reserves {reserved_bytes:bytes} instead of {before_bytes:bytes}, and at most"
        " {allocated_bytes:bytes} were ever allocated: {unused_bytes:bytes} are unused even at the peak.[ New segments take"
        " {late_bytes:bytes}, at first {early_bytes:bytes}: ever larger blocks are asked for, and fit into none that is"
        " cached.][ {lines}][ The device is full near step {last_step}.]"
    ),
    advice="Start with expandable segments; or allocate the tensor that grows once, at its full size.",
    fix="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    repeats=(Kinds(grew_beside, "memory_creep"),),
    superseded_by=(Kinds(grew_beside, "memory_creep"), Kinds(flushed_for_growth, "batch_growth")),
)
_EXPANDABLE = _KIND.with_changes(advice="Allocate the tensor that grows once, at its full size.", fix="")
# Worth a finding: these bytes, and this share of the device.
_LEAST_BYTES, _LEAST_SHARE = 1 * GIB, 0.05
# By this factor, new segments become larger; and the part of a rise in memory that only a CUDA graph or a stream can use.
_LARGER, _SIDE_SHARE = 1.2, 0.5


@in_each_rank(kinds=None)
def detect(window: SearchWindow[Process]) -> Iterator[Finding]:
    """Report each rise, again as it grows, and when it has ended."""
    process = window.subject
    if process.device_bytes:
        samples = window.records(process.records("allocator"))
        least = max(_LEAST_BYTES, _LEAST_SHARE * process.device_bytes)
        for rise in window.keep(ReserveSearch).find_rises(process, samples, least):
            if not _is_elsewhere(process, rise):
                yield _build_finding(process, rise)


def _is_elsewhere(process: Process, rise: ReserveRise) -> bool:
    """Whether other streams, or CUDA graphs, may hold most of what is unused: these have a finding of their own."""
    counts = [one for one in process.events_of(events.Tensors) if one.pools and one.unix_ns <= rise.known_ns]
    pools = [one for one in read_pools(counts[-1]) if one.is_private or not one.is_current] if counts else []
    return sum(one.reserved - one.allocated for one in pools) > _SIDE_SHARE * (
        rise.levels[-1].unused - rise.levels[0].unused
    )


def _describe_lines(process: Process, since: int, known_ns: int) -> Text | None:
    """Return a sentence about the lines that allocate larger blocks than before the rise; None if that was not looked at."""
    looks = [look for look in read_looks(process, PEAK) if look.known_ns <= known_ns]
    before = [look for look in looks if look.first_step < since]
    return describe_larger(looks[-1], before[-1]) if before and len(before) < len(looks) else None


def _build_finding(process: Process, rise: ReserveRise) -> Finding:
    first, last = rise.levels[0], rise.levels[-1]
    rows = process.steps[rise.first_steps : last.steps]
    evidence: dict[str, float | None] = {
        "bytes_per_step": rise.per_step,
        "reserved_bytes": last.reserved,
        "before_bytes": first.reserved,
        "allocated_bytes": last.reserved - last.unused,
        "unused_bytes": last.unused,
    }
    early, late = rise.segment_bytes or (0.0, 0.0)
    is_larger = not process.has_expandable_segments and 0 < _LARGER * early <= late
    left_bytes = (process.device_bytes or 0) - last.reserved
    held_step = int(rows["step"][-1])
    values = {
        "since": int(rows["step"][0]),
        "early_bytes": early if is_larger else None,
        "late_bytes": late if is_larger else None,
        "lines": _describe_lines(process, int(rows["step"][0]), rise.known_ns),
        "last_step": None if rise.has_ended else held_step + int(left_bytes / rise.per_step),
        "grows": "grew" if rise.has_ended else "grows",
        "until": f" to step {held_step}" if rise.has_ended else "",
    }
    kind = _EXPANDABLE if process.has_expandable_segments else _KIND
    return kind.at_steps(process, rows, evidence, known_ns=rise.known_ns, **values)

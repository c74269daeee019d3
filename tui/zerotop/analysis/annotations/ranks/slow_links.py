"""The GPUs of all ranks wait for gathered parameters: computation does not hide the transfers, or no longer does.

The wait of all ranks is the shortest wait of any compute stream; see ``slow_gpu`` for the longer waits of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.gather_looks import Looks, read_new_looks

_KIND = FindingKind(
    name="slow_links",
    severity=Severity.WARNING,
    confidence=0.8,
    headline="All GPUs wait {wait_s:seconds} of each iteration ({share:percent}) for gathered parameters",
    details="The transfers take longer than the computation that overlaps them. An iteration takes {iteration_s:seconds}.",
    advice="See which links NCCL uses, NVLink or only PCIe and sockets; a larger micro-batch hides more.",
    fix="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH",
)
_SLOWER = _KIND.with_changes(
    headline="All GPUs wait {wait_s:seconds} of each iteration for gathered parameters, {before_s:seconds} before",
    details="The links between the GPUs became slower, or others use them, too. An iteration takes {iteration_s:seconds}.",
    advice="See what else uses the links: other jobs on the node, copies between GPUs and host, the network.",
    fix="nvidia-smi topo -m",
)
# Marks a group whose growth was reported.
_GROWN = f"{_KIND.name} grown"
# Waits are reported from this share of an iteration on. They have grown if they are longer than the first ones by this
# factor, and by this share of an iteration.
_LEAST_SHARE, _TIMES, _MORE_SHARE = 0.15, 1.5, 0.05
# It must be so in this many looks in a row.
_LOOKS = 2


class _State:
    def __init__(self) -> None:
        self.first_s: list[float] = []  # the waits in the first looks
        self.long: list[Looks] = []  # the last ones in a row with long waits
        self.longer: list[Looks] = []  # and with longer ones than at first


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report long waits once for each attempt, and once that they have grown, after _LOOKS such looks in a row."""
    for group in recording.groups:
        if _GROWN not in group.reported:
            yield from _check_group(group)


def _check_group(group: Group) -> Iterator[Annotation]:
    state = group.get_state(_State, _KIND.name)
    for looks in read_new_looks(group, _KIND.name):
        wait = _measure_wait(looks)
        if len(state.first_s) < _LOOKS:
            state.first_s.append(wait)
        before = max(state.first_s)
        _extend_or_clear(state.longer, looks, goes_on=_has_grown(wait, before, looks.iteration_s))
        _extend_or_clear(state.long, looks, goes_on=wait >= _LEAST_SHARE * looks.iteration_s)
        if len(state.longer) == _LOOKS:
            group.reported |= {_KIND.name, _GROWN}
            yield _build_finding(group, state.longer, before)
            return
        # If the last wait has grown, the next look decides which finding it is.
        if len(state.long) >= _LOOKS and not state.longer and _KIND.name not in group.reported:
            group.reported.add(_KIND.name)
            yield _build_finding(group, state.long[-_LOOKS:], None)


def _extend_or_clear(row: list[Looks], looks: Looks, *, goes_on: bool) -> None:
    if goes_on:
        row.append(looks)
    else:
        row.clear()


def _measure_wait(looks: Looks) -> float:
    """Return the median over the steps of the shortest wait of any rank, in seconds."""
    return float(np.median(np.min([look.waited for look in looks.each], axis=0)))


def _has_grown(wait_s: float, before_s: float, iteration_s: float) -> bool:
    return wait_s >= _TIMES * before_s and wait_s - before_s >= _MORE_SHARE * iteration_s


def _build_finding(group: Group, looks: Sequence[Looks], before_s: float | None) -> Annotation:
    """``before_s``: the wait at first if it has grown, else None."""
    wait = float(np.mean([_measure_wait(one) for one in looks]))
    iteration = float(np.mean([one.iteration_s for one in looks]))
    return (_KIND if before_s is None else _SLOWER).at(
        group,
        int(looks[0].each[0].rows["begin_unix_ns"][0]),
        int(looks[-1].each[0].rows["end_unix_ns"][-1]),
        {"wait_s": wait, "iteration_s": iteration, "before_s": before_s},
        known_ns=looks[-1].known_ns,
        cost=(wait - (before_s or 0.0)) / iteration,
        share=wait / iteration,
    )

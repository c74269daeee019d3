"""Phases of a rank as begins and ends that nest, in the order in which a trace needs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zerotop.recording.samples import Ints, Rows


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Begins and ends of slices by time; all arrays have shape (n,)."""

    times_ns: Ints
    phases: Ints  # index into PHASES; of an end that of its begin
    is_begin: np.ndarray[tuple[int], np.dtype[np.bool_]]


def build_edges(spans: Rows) -> Edges:
    """Return the edges of spans (SPANS): every slice is within the one around it, and none is empty.

    Spans of one depth that overlap are cut at the begin of the later one, and inner ones at the end of the outer one.
    """
    parts = [_cut_overlaps(spans[spans["depth"] == depth], depth) for depth in np.unique(spans["depth"]).tolist()]
    kept: list[_Slices] = []
    for part in parts:
        kept.append(_cut_at_parent(part, kept[-1]) if kept else part)
    begins, ends, phases, depths = (
        np.concatenate([np.empty(0, np.int64), *(getattr(part, name) for part in kept)])
        for name in ("begins", "ends", "phases", "depths")
    )
    times = np.concatenate([begins, ends])
    is_begin = np.repeat([True, False], [len(begins), len(ends)])
    # At one moment inner slices end before outer ones, then outer ones begin before inner ones.
    level = np.concatenate([depths, -depths])
    order = np.lexsort((level, is_begin, times))
    return Edges(times[order], np.concatenate([phases, phases])[order], is_begin[order])


@dataclass(frozen=True, slots=True, eq=False)
class _Slices:
    begins: Ints
    ends: Ints
    phases: Ints
    depths: Ints


def _cut_overlaps(spans: Rows, depth: int) -> _Slices:
    order = np.argsort(spans["begin_ns"], kind="stable")
    begins = spans["begin_ns"][order].astype(np.int64)
    ends = np.minimum(spans["end_ns"][order], np.append(begins[1:], np.iinfo(np.int64).max)).astype(np.int64)
    return _drop_empty(begins, ends, spans["phase"][order].astype(np.int64), depth)


def _cut_at_parent(inner: _Slices, outer: _Slices) -> _Slices:
    """Cut slices at the end of the outer slice in which they begin; slices without an outer one are unchanged."""
    if not len(outer.begins):
        return inner
    index = np.searchsorted(outer.begins, inner.begins, "right") - 1
    is_inside = (index >= 0) & (inner.begins < outer.ends[index])
    # One that begins outside may not reach into the next outer one.
    after = np.append(outer.begins, np.iinfo(np.int64).max)[index + 1]
    ends = np.minimum(inner.ends, np.where(is_inside, outer.ends[index], after))
    return _drop_empty(inner.begins, ends, inner.phases, int(inner.depths[0]) if len(inner.depths) else 0)


def _drop_empty(begins: Ints, ends: Ints, phases: Ints, depth: int) -> _Slices:
    kept = ends > begins
    return _Slices(begins[kept], ends[kept], phases[kept], np.full(int(kept.sum()), depth, np.int64))

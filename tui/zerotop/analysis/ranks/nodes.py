"""Ranks by node: which ranks each node has, how much it sends, and how well the clocks of nodes agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings import Finding
from zerotop.analysis.ranks.matrix import Matrix, RankMatrix
from zerotop.recording.moments.moment import Moment, at_event
from zerotop.recording.reader import Recording
from zerotop_probe.recording.events import NodeDetail

# A node that has a finding is asked for full detail so long, and so many nodes are at a time.
_WANTED_NS, _MOST_WANTED = 600_000_000_000, 16


@dataclass(frozen=True, eq=False)
class NodeRows:
    """The ranks of a node as rows of a matrix, the one that differs most first, else the lowest."""

    host: str
    rows: NDArray[np.intp]


def group_nodes(matrix: RankMatrix, oddness: Matrix, *, by_number: bool) -> tuple[NodeRows, ...]:
    """Return the nodes by their lowest rank, or first those of which a rank differs most; see ``order_outliers``."""
    hosts: dict[str, list[int]] = {}
    for row, host in enumerate(matrix.host_names):
        hosts.setdefault(host, []).append(row)
    nodes = []
    for host, rows in hosts.items():
        first = max(rows, key=lambda row: oddness[row])
        nodes.append(NodeRows(host, np.array([first, *(row for row in rows if row != first)])))
    return tuple(nodes if by_number else sorted(nodes, key=lambda node: -oddness[node.rows[0]]))


def find_wanted_nodes(recording: Recording, now_ns: int, findings: tuple[Finding, ...], chosen: int | None) -> list[str]:
    """Return the nodes of the chosen rank and of those with a finding of the last ten minutes, the newest first."""
    hosts = {table.rank: table.host for table in recording.sources["spans"]}
    new = sorted(findings, key=lambda finding: -finding.known_ns)
    concerned = [rank for one in new if one.known_ns > now_ns - _WANTED_NS for rank in one.ranks]
    ranks = [*([] if chosen is None else [chosen]), *concerned]
    return list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))[:_MOST_WANTED]


@at_event()
def find_detail(at: Moment) -> dict[str, bool]:
    """Return whether each node sends full detail, by host; empty where all do."""
    return {event.host: event.is_full is not False for event in at.events_of(NodeDetail) if event.host is not None}


@dataclass(frozen=True)
class Network:
    """How a job's nodes send their parts."""

    full: int = 0  # so many nodes send full detail
    reduced: frozenset[str] = frozenset()  # and these do not
    clock_error_ns: int | None = None  # how wrong the aligned clock of the worst node may be


def view_network(at: Moment) -> Network:
    """Return how the nodes send their parts at a moment."""
    detail, errors = find_detail(at), at.recording.clock_errors_ns.values()
    reduced = frozenset(host for host, is_full in detail.items() if not is_full)
    return Network(len(detail) - len(reduced), reduced, max(errors, default=None))

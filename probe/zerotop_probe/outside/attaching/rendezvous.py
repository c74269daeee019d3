"""Deciding whether ranks of two nodes belong to one job, by the rendezvous variables from their launchers.

A loopback address means a different place on each node, and many jobs use the default port. So the world sizes must agree
too, and no rank may be on both nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zerotop_probe.outside.attaching.jobs import FoundJob
from zerotop_probe.recording import launchers

_ADDRESS = "MASTER_ADDR"
_LOOPBACK = ("localhost", "127.", "::1")
# torchrun's id of a job without one.
_UNNAMED = "none"


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous variables and rank numbers of one node's part of a job."""

    variables: Mapping[str, str]
    world: int | None  # ranks of all nodes
    ranks: frozenset[int]  # those of this node

    @classmethod
    def from_job(cls, job: FoundJob) -> Rendezvous | None:
        """Return the rendezvous of a job's ranks; None if their environment has no variables of it."""
        ranks = [rank for rank in job.ranks if rank.rank is not None]
        if not ranks:
            return None
        environment = ranks[0].environment
        variables = {name: environment[name] for name in (*launchers.JOB, _ADDRESS) if _is_meaningful(name, environment)}
        world = launchers.read_number(environment, launchers.WORLD_SIZE)
        numbers = frozenset(rank.rank for rank in ranks if rank.rank is not None)
        return cls(variables, world, numbers) if variables else None

    @classmethod
    def from_json(cls, value: Any) -> Rendezvous:
        """Parse the result of :meth:`to_json`. Raises KeyError, TypeError, ValueError."""
        world = value["world"]
        variables = {str(name): str(text) for name, text in dict(value["told"]).items()}
        return cls(variables, None if world is None else int(world), frozenset(map(int, value["ranks"])))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"told": dict(self.variables), "world": self.world, "ranks": sorted(self.ranks)}

    @property
    def is_complete(self) -> bool:
        """Whether all ranks of the job are on this node."""
        return self.world is not None and self.world <= len(self.ranks)

    def is_same_job(self, other: Rendezvous) -> bool:
        """Whether these are ranks of one job on two nodes."""
        common = [name for name in launchers.JOB if name in self.variables and name in other.variables]
        if not common or any(self.variables[name] != other.variables[name] for name in common):
            return False
        if self.world != other.world or self.ranks & other.ranks:
            return False
        addresses = {
            address
            for side in (self, other)
            if (address := side.variables.get(_ADDRESS)) and not address.startswith(_LOOPBACK)
        }
        return len(addresses) < 2


def _is_meaningful(name: str, environment: Mapping[str, str]) -> bool:
    value = environment.get(name, "")
    return bool(value) and (name, value) != ("TORCHELASTIC_RUN_ID", _UNNAMED)


def find_local_part(jobs: Iterable[FoundJob], rendezvous: Rendezvous) -> FoundJob | None:
    """Return the part of the job that runs on this node, with the ranks of all its launchers under the first one."""
    parts = [job for job in jobs if (own := Rendezvous.from_job(job)) is not None and own.is_same_job(rendezvous)]
    if not parts:
        return None
    ranks = sorted((rank for job in parts for rank in job.ranks), key=lambda rank: (rank.rank is None, rank.rank))
    return dataclasses.replace(parts[0], ranks=tuple(ranks))

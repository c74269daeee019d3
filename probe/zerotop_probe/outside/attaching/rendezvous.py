"""Whether ranks of two nodes are of one job: by what their launchers told them of where they meet.

A loopback address names a place on each node, and a port is often the usual one. So what also counts is how many ranks
there are in all, and that no rank is on both nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zerotop_probe.outside.attaching.jobs import FoundJob
from zerotop_probe.recording import launchers

# Each of these is one value for all ranks of a job.
_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
_ADDRESS = "MASTER_ADDR"
_LOOPBACK = ("localhost", "127.", "::1")
# What torchrun calls a job that nobody named.
_UNNAMED = "none"


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks of one node meet the others."""

    variables: Mapping[str, str]
    world: int | None  # ranks of all nodes
    ranks: frozenset[int]  # those of this node

    @classmethod
    def from_job(cls, job: FoundJob) -> Rendezvous | None:
        """The meeting of a job's ranks; None if nothing tells where that is."""
        ranks = [rank for rank in job.ranks if rank.rank is not None]
        if not ranks:
            return None
        environment = ranks[0].environment
        told = {name: environment[name] for name in (*_VARIABLES, _ADDRESS) if _is_meaningful(name, environment)}
        world = launchers.read_number(environment, launchers.WORLD_SIZE)
        numbers = frozenset(rank.rank for rank in ranks if rank.rank is not None)
        return cls(told, world, numbers) if told else None

    @classmethod
    def from_json(cls, value: Any) -> Rendezvous:
        """What :meth:`written` made. Raises KeyError, TypeError, ValueError."""
        world = value["world"]
        told = {str(name): str(text) for name, text in dict(value["told"]).items()}
        return cls(told, None if world is None else int(world), frozenset(map(int, value["ranks"])))

    def to_json(self) -> dict[str, Any]:
        """For JSON."""
        return {"told": dict(self.variables), "world": self.world, "ranks": sorted(self.ranks)}

    @property
    def is_complete(self) -> bool:
        """Whether all ranks of the job are on this node."""
        return self.world is not None and self.world <= len(self.ranks)

    def is_same_job(self, other: Rendezvous) -> bool:
        """Whether these are ranks of one job on two nodes."""
        common = [name for name in _VARIABLES if name in self.variables and name in other.variables]
        if not common or any(self.variables[name] != other.variables[name] for name in common):
            return False
        if self.world != other.world or self.ranks & other.ranks:
            return False
        addresses = {
            address for one in (self, other) if (address := one.variables.get(_ADDRESS)) and not _is_loopback(address)
        }
        return len(addresses) < 2


def _is_meaningful(name: str, environment: Mapping[str, str]) -> bool:
    value = environment.get(name, "")
    return bool(value) and (name, value) != ("TORCHELASTIC_RUN_ID", _UNNAMED)


def _is_loopback(address: str) -> bool:
    return address.startswith(_LOOPBACK)


def find_local_part(jobs: Iterable[FoundJob], rendezvous: Rendezvous) -> FoundJob | None:
    """What of the job that meets there runs here: where several launchers have started it, under the first of them."""
    found = [job for job in jobs if (own := Rendezvous.from_job(job)) is not None and own.is_same_job(rendezvous)]
    if not found:
        return None
    ranks = sorted((rank for job in found for rank in job.ranks), key=lambda rank: (rank.rank is None, rank.rank))
    return dataclasses.replace(found[0], ranks=tuple(ranks))

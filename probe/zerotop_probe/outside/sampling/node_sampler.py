"""What a sampler looks at on its node: GPUs in one lane, processes and the host in another."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence

from zerotop_probe.outside.procfs import Process
from zerotop_probe.outside.sampling.affinity import read_numa_nodes
from zerotop_probe.outside.sampling.cgroup import ControlGroup, count_system_oom_kills, count_usable_cores
from zerotop_probe.outside.sampling.gpu_sampler import GpuSampler
from zerotop_probe.outside.sampling.host_sampler import HostSampler, read_meminfo, read_processor_name
from zerotop_probe.outside.sampling.nvml import GpuDiscovery
from zerotop_probe.outside.sampling.process_sampler import ProcessSampler
from zerotop_probe.outside.sampling.rank_discovery import RankFinder
from zerotop_probe.outside.sampling.sampler_thread import SamplerThread
from zerotop_probe.recording import clock, events
from zerotop_probe.recording.writer import EventWriter, Identity

# Samplers tick ten times a second; what must be looked at more often is, twice a tick.
TICK_S = 0.1
_TICKS_PER_HOST = 5
# A driver that has not answered by then is reported as silent; if it answers later, that is reported too.
_DRIVER_PATIENCE_S = 5.0
_LANE_PATIENCE_S = 1.0


class JobSampler:
    """Finds ranks and samples them, and the host. Looks again at once when one of them has ended."""

    def __init__(self, ranks: RankFinder, processes: ProcessSampler, hosts: HostSampler) -> None:
        self._ranks = ranks
        self._processes = processes
        self._hosts = hosts
        self._rank_ended = False

    def prepare_sampling(self) -> None:
        """Follows what is there already: the first tick has something to compare with."""
        self._ranks.update_ranks()
        self._processes.follow_members(self._ranks.list_members())

    def take_sample(self, time_ns: int, tick: int) -> None:
        """One tick."""
        self._ranks.update_ranks(now=self._rank_ended)
        self._rank_ended = self._processes.take_sample(time_ns, tick, self._ranks.list_members())
        if tick % _TICKS_PER_HOST == 0:
            self._hosts.take_sample(time_ns)

    def close(self) -> None:
        """Says which ranks have gone, closes the files."""
        self._ranks.update_ranks(now=True)
        self._processes.close()
        self._hosts.close()


class NodeSampler:
    """All samplers of this node for one job."""

    def __init__(
        self,
        session: str,
        identity: Identity,
        root: Process,
        writer: EventWriter,
        *,
        attached_ranks: Sequence[Process] | None = None,
    ) -> None:
        """Start sampling. ``attached_ranks``: see :class:`RankFinder`."""
        self._writer = writer
        self._identity = identity
        self._gpus_known = threading.Event()
        self._started_s = time.monotonic()
        self._is_overdue = False
        self._has_gpus = False
        self._group = ControlGroup(root.pid)
        self._kills_before = self._read_kills()
        self.ranks = RankFinder(session, root, writer, attached_ranks=attached_ranks)
        self._gpus = GpuSampler(session, identity, on_seen=self._note_gpus, on_lost=self._note_lost)
        self._processes = ProcessSampler(session, identity, self._note_affinity)
        self._hosts = HostSampler(session, identity, self._group)
        host_lane = JobSampler(self.ranks, self._processes, self._hosts)
        self._gpu_lane = SamplerThread("gpus", self._gpus, on_error=self.note_error)
        self._host_lane = SamplerThread("processes", host_lane, on_error=self.note_error)
        self._gpu_lane.start()
        self._host_lane.start()

    @property
    def lost_records(self) -> int:
        """Records that could not be written."""
        parts = (self._gpus, self._processes, self._hosts)
        return sum(part.lost_records for part in parts) + self._writer.lost

    def request_samples(self, time_ns: int, number: int) -> None:
        """Asks all samplers for a sample of now, those of processes and the host at every second call."""
        if self._has_gpus and self._gpus.is_due(number):
            self._gpu_lane.request_sample(time_ns, number)
        if number % 2 == 0:
            self._host_lane.request_sample(time_ns, number // 2)
        late = time.monotonic() - self._started_s > _DRIVER_PATIENCE_S
        if late and not self._is_overdue and not self._gpus_known.is_set():
            self._is_overdue = True
            self._write_node(GpuDiscovery(None, (), "The NVIDIA driver has not answered yet."))

    def _note_gpus(self, discovery: GpuDiscovery) -> None:
        self._has_gpus = bool(discovery.gpus)
        self._gpus_known.set()
        self._write_node(discovery)

    def _write_node(self, discovery: GpuDiscovery) -> None:
        self._writer.write(
            time.monotonic_ns(),
            events.NODE,
            host=clock.read_hostname(),
            cores=count_usable_cores(),
            memory_bytes=read_meminfo().get(b"MemTotal"),
            kernel=os.uname().release,
            cpu=read_processor_name(),
            numa=read_numa_nodes(),
            driver=discovery.driver,
            gpus=[dataclasses.asdict(gpu) for gpu in discovery.gpus],
            gpu_notice=discovery.notice,
            sampler_pid=self._identity.pid,
            sampler_start=self._identity.start,
        )

    def _note_affinity(self, pid: int, cpus: str, threads: dict[str, str]) -> None:
        self._writer.write(time.monotonic_ns(), events.AFFINITY, pid=pid, cpus=cpus, threads=threads)

    def _note_lost(self, sentence: str) -> None:
        self._writer.write(time.monotonic_ns(), events.SAMPLER_ERROR, where="gpus", error=sentence)

    def note_error(self, where: str, error: BaseException) -> None:
        """Records that a part of the sampler has failed; the rest goes on."""
        text = f"{type(error).__name__}: {error}"
        self._writer.write(time.monotonic_ns(), events.SAMPLER_ERROR, where=where, error=text)

    def count_oom_kills(self) -> tuple[int, str]:
        """How many processes the kernel killed for memory since the start, and of what."""
        now, before = self._read_kills(), self._kills_before
        kills = max(now[0] - before[0], 0) if now[1] == before[1] else 0
        return kills, now[1]

    def _read_kills(self) -> tuple[int, str]:
        kills = self._group.count_oom_kills()
        return (kills, "its control group") if kills >= 0 else (count_system_oom_kills(), "this machine")

    def finish_sampling(self) -> None:
        """Ends sampling. A driver that hangs is left to hang."""
        self._host_lane.finish_sampling(_LANE_PATIENCE_S)
        self._gpu_lane.finish_sampling(_LANE_PATIENCE_S)

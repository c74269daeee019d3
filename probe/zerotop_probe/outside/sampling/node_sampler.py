"""All samplers of a node: one thread for GPUs, another for processes and the host."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence

from zerotop_probe.outside import procfs
from zerotop_probe.outside.folding.background import BackgroundFolding
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling.affinity import read_numa_nodes
from zerotop_probe.outside.sampling.cgroup import ControlGroup, count_system_oom_kills, count_usable_cores
from zerotop_probe.outside.sampling.faults.call_guard import GuardedThread
from zerotop_probe.outside.sampling.faults.fault_watch import FaultWatch
from zerotop_probe.outside.sampling.gpu_sampler import GpuSampler
from zerotop_probe.outside.sampling.host_sampler import (
    HostSampler,
    read_meminfo,
    read_processor_name,
    read_shared_memory_size,
)
from zerotop_probe.outside.sampling.nccl_inspector import InspectorReader
from zerotop_probe.outside.sampling.nvml import GpuDiscovery
from zerotop_probe.outside.sampling.process_sampler import ProcessSampler
from zerotop_probe.outside.sampling.ranks.rank_discovery import RankFinder
from zerotop_probe.outside.sampling.ring_collector import Report, RingCollector
from zerotop_probe.outside.sampling.sampler_thread import SamplerThread
from zerotop_probe.outside.sampling.stuck.loader_watcher import LoaderWatcher
from zerotop_probe.outside.sampling.stuck.stuck_rank_watcher import StuckRankWatcher
from zerotop_probe.recording import clock, directory, events, redact
from zerotop_probe.recording.writer import EventWriter, Identity

# Samplers tick ten times a second; GPU counters that wrap quickly are read twice a tick.
TICK_S = 0.1
_TICKS_PER_HOST = 5
# The time after which an unresponsive driver is reported. If it responds later, its GPUs are reported then.
_DRIVER_PATIENCE_S = 5.0
_THREAD_PATIENCE_S = 1.0
# No other process writes the remaining records of the rings: a slow file system gets more time for them.
_RINGS_PATIENCE_S = 10.0


class JobSampler:
    """Finds ranks, samples them and the host. Searches for ranks at once when one has ended."""

    def __init__(self, ranks: RankFinder, processes: ProcessSampler, hosts: HostSampler) -> None:
        self._ranks = ranks
        self._processes = processes
        self._hosts = hosts
        self._rank_ended = False

    def prepare_sampling(self) -> None:
        """Start following the processes that exist, so that the first tick has values to compare with."""
        self._ranks.update_ranks()
        self._processes.follow_members(self._ranks.list_members())

    def take_sample(self, time_ns: int, tick: int) -> None:
        """Record one tick."""
        self._ranks.update_ranks(now=self._rank_ended)
        self._rank_ended = self._processes.take_sample(time_ns, tick, self._ranks.list_members())
        if tick % _TICKS_PER_HOST == 0:
            ranks = (member.process.pid for member in self._ranks.list_members() if member.rank >= 0)
            self._hosts.take_sample(time_ns, next(ranks, None))

    def close(self) -> None:
        """Record which ranks have ended; close the files."""
        self._ranks.close()
        self._processes.close()
        self._hosts.close()


class NodeSampler:
    """All samplers of this node for one job."""

    def __init__(
        self,
        recording: str,
        identity: Identity,
        root: ProcessHandle,
        writer: EventWriter,
        *,
        attached_ranks: Sequence[ProcessHandle] | None = None,
        recorded: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        """Start sampling. ``attached_ranks``, ``recorded``: see :class:`RankFinder`."""
        self._writer = writer
        self._identity = identity
        self._gpus_known = threading.Event()
        self._started_s = time.monotonic()
        self._is_overdue = False
        self._has_gpus = False
        self._group = ControlGroup(root.pid)
        self._kills_before = self._read_kills()
        self.ranks = RankFinder(recording, root, writer, attached_ranks=attached_ranks, recorded=recorded)
        self._faults = FaultWatch(writer.write, self.note_error)
        self._gpus = GpuSampler(
            recording,
            identity,
            on_seen=self._note_gpus,
            on_open=self._faults.open,
            on_lost=self._note_lost,
            on_neighbour=self._note_gpu_process,
        )
        self._processes = ProcessSampler(recording, identity, writer.write)
        self._hosts = HostSampler(recording, identity, self._group)
        job_sampler = JobSampler(self.ranks, self._processes, self._hosts)
        self._gpu_thread = GuardedThread("gpus", self._gpus, on_error=self.note_error, on_silent=self._faults.note_silent)
        self._host_thread = SamplerThread("processes", job_sampler, on_error=self.note_error)
        self._folding = BackgroundFolding(recording, self.note_error)
        self._rings = RingCollector(recording, Report(writer.write, self.note_error))
        self._stuck = StuckRankWatcher(self._rings.list_heard, self.ranks.list_silent, writer.write)
        self._loaders = LoaderWatcher(self._rings.list_waiting, writer.write)
        self._inspector = InspectorReader(recording, self.ranks.list_processes, writer.write)
        try:
            self._rings.start()
            self._inspector.start()
            if directory.read_recording_info(recording).get(directory.STACKS_SETTING) is not False:
                self._stuck.start()
                self._loaders.start()
        except RuntimeError as error:  # a limit of processes; the ranks write to the recording themselves
            self.note_error("rings", error)
        self._gpu_thread.start_sampling()
        self._host_thread.start_sampling()

    @property
    def lost_records(self) -> int:
        """Records that could not be written."""
        parts = (self._gpus, self._processes, self._hosts)
        return sum(part.lost_records for part in parts) + self._writer.lost

    def needs_samples(self, number: int) -> bool:
        """Whether any sampler has something to do at a call of :meth:`request_samples`."""
        return self._is_host_due(number) or (self._has_gpus and self._gpus.is_due(number))

    def _is_host_due(self, number: int) -> bool:
        return number % 2 == 0 and self._processes.is_due(number // 2)

    def request_samples(self, time_ns: int, number: int) -> None:
        """Request samples that are due. Processes and the host are sampled at even numbers only."""
        if self._has_gpus and self._gpus.is_due(number):
            self._gpu_thread.request_sample(time_ns, number)
        self._gpu_thread.check_calls()
        self._faults.request_sample(time_ns, number)
        if self._is_host_due(number):
            self._host_thread.request_sample(time_ns, number // 2)
            self._folding.poll(time_ns)
        is_late = time.monotonic() - self._started_s > _DRIVER_PATIENCE_S
        if is_late and not self._is_overdue and not self._gpus_known.is_set():
            self._is_overdue = True
            self._write_node(GpuDiscovery(None, (), "The NVIDIA driver has not responded yet."))

    def _note_gpus(self, discovery: GpuDiscovery) -> None:
        self._has_gpus = bool(discovery.gpus)
        self._gpus_known.set()
        self._write_node(discovery)

    def _write_node(self, discovery: GpuDiscovery) -> None:
        self._writer.write(
            time.monotonic_ns(),
            events.Node,
            host=clock.read_hostname(),
            cores=count_usable_cores(),
            memory_bytes=read_meminfo().get(b"MemTotal"),
            shared_memory_bytes=read_shared_memory_size(),
            kernel=os.uname().release,
            cpu=read_processor_name(),
            numa=read_numa_nodes(),
            driver=discovery.driver,
            gpus=[dataclasses.asdict(gpu) for gpu in discovery.gpus],
            gpu_notice=discovery.notice,
            sampler_pid=self._identity.pid,
            sampler_start=self._identity.start,
        )

    def _note_lost(self, sentence: str) -> None:
        self._writer.write(time.monotonic_ns(), events.SamplerError, where="gpus", error=sentence)

    def _note_gpu_process(self, pid: int) -> None:
        program, user = redact.redact_text(procfs.read_program(pid)), procfs.read_user_name(pid)
        of_job = self.ranks.add_actor(pid)
        parents = procfs.list_ancestors(pid)[1:] if of_job else None
        facts = {"program": program or None, "user": user or None, "of_job": of_job, "parents": parents}
        self._writer.write(time.monotonic_ns(), events.GpuProcess, pid=pid, **facts)

    def note_error(self, where: str, error: BaseException) -> None:
        """Record that a sampler has failed; the others continue."""
        text = f"{type(error).__name__}: {error}"
        self._writer.write(time.monotonic_ns(), events.SamplerError, where=where, error=text)

    def count_oom_kills(self) -> tuple[int, str]:
        """Return how many processes the OOM killer has ended since the start, and of which group."""
        now, before = self._read_kills(), self._kills_before
        kills = max(now[0] - before[0], 0) if now[1] == before[1] else 0
        return kills, now[1]

    def _read_kills(self) -> tuple[int, str]:
        kills = self._group.count_oom_kills()
        return (kills, "its control group") if kills >= 0 else (count_system_oom_kills(), "this machine")

    def finish_sampling(self) -> None:
        """Stop sampling, without waiting for a driver that hangs."""
        self._stuck.finish()
        self._loaders.finish()
        self._inspector.finish()
        self._host_thread.finish_sampling(_THREAD_PATIENCE_S)
        self._faults.finish_sampling(_THREAD_PATIENCE_S)
        self._gpu_thread.finish_sampling(_THREAD_PATIENCE_S)
        self._rings.finish(_RINGS_PATIENCE_S)

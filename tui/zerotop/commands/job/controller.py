"""Job control for the screens: implements ``ui.base.interfaces.Controller`` for a recording's job."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Collection
from pathlib import Path

from zerotop.analysis.formatting import format_count
from zerotop.commands.common.node_orders import MICROSCOPE, has_nodes, order_nodes, order_stop, want_nodes
from zerotop.commands.job import attach_probe
from zerotop.commands.job.microscope_request import request_trace
from zerotop.recording.reader import Recording
from zerotop_probe.outside.job import daemon, job_control
from zerotop_probe.recording import directory, events

# With more nodes than this, messages give their number instead of names.
_MAX_NAMES = 3

AwaitEntry = Callable[[], tuple[int, list[str]]]


class JobController:
    """Controls the job of one recording, on this node and the other reached nodes."""

    def __init__(self, recording: Path, await_entry: AwaitEntry | None = None) -> None:
        """``await_entry`` waits for the result of an entry that has already been started."""
        self._path = recording
        self._await_entry = await_entry
        self._recording = str(recording)
        is_default = recording.parent == Path(directory.find_default_root()).absolute()
        self._attach_name = recording.name if is_default else str(recording)
        self.not_stopped: list[str] = []

    @property
    def is_entering(self) -> bool:
        """Whether an entry has already been started."""
        return self._await_entry is not None

    @property
    def attach_command(self) -> str:
        """The shell command that reattaches to the job."""
        collected = directory.read_recording_info(self._recording).get(directory.COLLECTED)
        if collected:
            job, address = map(str, collected)
            return f"zerotop collect {shlex.quote(address)} --job {shlex.quote(job)}"
        return f"zerotop attach {shlex.quote(self._attach_name)}"

    @property
    def stop_description(self) -> str:
        """A sentence about the effect of :meth:`stop_job`."""
        facts = job_control.read_facts(self._recording)
        if facts.joined:
            first_node = Recording.open(self._path).info.get("host") or "the node that attached first"
            return f"Stops the ranks of this node gracefully; stop the whole job from {first_node}."
        if facts.collected:
            return "Asks its nodes to stop it gracefully; again forces it."
        names = facts.reached_hosts
        others = f"{len(names)} other nodes" if len(names) > _MAX_NAMES else ", ".join(names)
        return f"Stops it gracefully{f' here and on {others}' if names else ''}; again forces it."

    def stop_job(self) -> str:
        """Ask the job to end on all reached nodes; the second call kills it.

        Return sentences about nodes that could not be asked, which are also in ``not_stopped``. Raises OSError if the job
        cannot be signalled on this node.
        """
        from zerotop.commands.job import remote_nodes

        if job_control.read_facts(self._recording).collected:
            order_stop(self._path)
            return ""
        if has_nodes(self._path) and not job_control.read_facts(self._recording).reached_hosts:
            order_stop(self._path)
        self.not_stopped = remote_nodes.stop_job(self._path, lambda: job_control.request_stop(self._recording))
        return " ".join(self.not_stopped)

    def request_trace(self, steps: int, stacks: bool) -> int:
        """Request an allocation trace of the next steps and return the request's number. Raises OSError."""
        after = 0
        if has_nodes(self._path):  # their own requests, whose answers came over the network, have numbers, too
            taken = Recording.open(self._path).events_of(events.Microscope)
            after = max([0, *(event.request for event in taken)])
        request = request_trace(self._recording, steps=steps, stacks=stacks, after=after)
        if has_nodes(self._path):
            order_nodes(self._path, MICROSCOPE, request=request, steps=steps, stacks=stacks)
        return request

    def want_detail(self, hosts: Collection[str]) -> None:
        """Ask nodes that send their parts over the network for full detail."""
        if has_nodes(self._path):
            with contextlib.suppress(OSError):
                want_nodes(self._path, hosts)

    def is_sampler_alive(self) -> bool:
        """Return False if the job runs without a sampler."""
        facts = job_control.read_facts(self._recording)
        return any(sampler.is_alive() for sampler in facts.samplers) or not facts.is_alive()

    def restart_sampler(self) -> None:
        """Start a new sampler for the running job. Raises OSError."""
        try:
            daemon.watch_in_background(self._recording)
        except daemon.AgentError as error:
            raise OSError(str(error)) from error

    def can_enter(self) -> bool:
        """Return True while the attached job has ranks without the probe."""
        return attach_probe.can_enter(self._path)

    def enter_ranks(self) -> str:
        """Inject the probe and return a summary. Takes seconds if ranks do not answer."""
        await_entry, self._await_entry = self._await_entry, None
        count, messages = await_entry() if await_entry is not None else attach_probe.enter_ranks(self._path)
        return " ".join([f"Probe injected into {format_count(count, 'rank')}."] * bool(count) + messages)

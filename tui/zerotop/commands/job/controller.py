"""Steering the job of a session from the screen: ``ui.base.interfaces.Controller`` over the sampler's control."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from zerotop.commands.job import attach_probe
from zerotop.commands.job.microscope_request import request_trace
from zerotop.session.reader import Session
from zerotop_probe.outside.job import daemon, job_control
from zerotop_probe.recording import directory

# More nodes than these are counted, not named.
_MAX_NAMES = 3


AwaitEntry = Callable[[], tuple[int, list[str]]]


class JobController:
    """The running job of one session on this node, and its parts on others."""

    def __init__(self, session: Path, await_entry: AwaitEntry | None = None) -> None:
        """``entering`` waits for what entering its ranks comes to where that was begun before."""
        self._path = session
        self._await_entry = await_entry
        self._session = str(session)
        usual = session.parent == Path(directory.find_default_root()).absolute()
        self._attach_name = session.name if usual else str(session)
        self.not_stopped: list[str] = []

    @property
    def attach_command(self) -> str:
        """What to type to come back."""
        return f"zerotop attach {shlex.quote(self._attach_name)}"

    @property
    def stop_description(self) -> str:
        """What :meth:`stop` does, as a sentence."""
        facts = job_control.read_facts(self._session)
        if facts.joined:
            began = Session.open(self._path).info.get("host") or "the node where it was attached to"
            return f"Asks its part on this node to end; all of it is stopped from {began}."
        names = facts.reached_hosts
        others = f"{len(names)} other nodes" if len(names) > _MAX_NAMES else ", ".join(names)
        return f"Asks it to end{f', here and on {others}' if names else ''}; asked again, it is killed."

    def stop_job(self) -> str:
        """Asks the job to end, on all nodes that take part; the second call ends it hard.

        Says which were not asked, in sentences; ``not_stopped`` has them too. Raises OSError if it cannot be reached here.
        """
        from zerotop.commands.job import remote_nodes

        self.not_stopped = remote_nodes.stop_job(self._path, lambda: job_control.request_stop(self._session))
        return " ".join(self.not_stopped)

    def request_trace(self, steps: int, stacks: bool) -> int:
        """Asks for a look through the microscope at the next steps; returns the request's number. Raises OSError."""
        return request_trace(self._session, steps=steps, stacks=stacks)

    def is_sampler_alive(self) -> bool:
        """False when the sampler is gone while the job still runs."""
        facts = job_control.read_facts(self._session)
        return any(sampler.is_alive() for sampler in facts.samplers) or not facts.is_alive()

    def restart_sampler(self) -> None:
        """Starts another sampler on the running job. Raises OSError if it cannot be started."""
        try:
            daemon.watch_in_background(self._session)
        except daemon.AgentError as error:
            raise OSError(str(error)) from error

    def can_enter(self) -> bool:
        """True while ranks that were attached to from outside have no probe."""
        return attach_probe.can_enter(self._path)

    def enter_ranks(self) -> str:
        """Puts the probe into them; says what came of it. Takes seconds where ranks do not answer."""
        begun, self._await_entry = self._await_entry, None
        count, told = begun() if begun is not None else attach_probe.enter_ranks(self._path)
        entered = "1 rank is entered." if count == 1 else f"{count} ranks are entered."
        return " ".join([entered] * bool(count) + told)

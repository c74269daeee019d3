"""Steering the job of a session from the screen: ``ui.ports.Controller`` over the sampler's control."""

from __future__ import annotations

import shlex
from pathlib import Path

from zerotop.commands import entering
from zerotop.commands.looking import ask
from zerotop_probe.outside import agent, control
from zerotop_probe.recording import directory


class JobController:
    """The running job of one session on this node."""

    def __init__(self, session: Path) -> None:
        self._path = session
        self._session = str(session)
        usual = session.parent == Path(directory.default_root()).absolute()
        self._called = session.name if usual else str(session)

    @property
    def attach_command(self) -> str:
        """What to type to come back."""
        return f"zerotop attach {shlex.quote(self._called)}"

    def stop(self) -> None:
        """Asks the job to end; the second call ends it hard. Raises OSError if it cannot be reached."""
        control.request_stop(self._session)

    def look(self, steps: int, stacks: bool) -> int:
        """Asks for a look through the microscope at the next steps; returns the request's number. Raises OSError."""
        return ask(self._session, steps=steps, stacks=stacks)

    def sampler_alive(self) -> bool:
        """False when the sampler is gone while the job still runs."""
        return control.sampler_alive(self._session) or not control.job_alive(self._session)

    def restart_sampler(self) -> None:
        """Starts another sampler on the running job. Raises OSError if it cannot be started."""
        try:
            agent.watch_in_background(self._session)
        except agent.AgentError as error:
            raise OSError(str(error)) from error

    def can_enter(self) -> bool:
        """True while ranks that were attached to from outside have no probe."""
        return entering.can_enter(self._path)

    def enter(self) -> str:
        """Puts the probe into them; says what came of it. Takes seconds where ranks do not answer."""
        count, told = entering.enter(self._path)
        entered = "1 rank is entered." if count == 1 else f"{count} ranks are entered."
        return " ".join([entered] * bool(count) + told)

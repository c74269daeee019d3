"""The job that a forwarded recording is of."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotop.commands.common.node_orders import DETACH, MICROSCOPE
from zerotop.commands.job.microscope_request import request_trace
from zerotop.commands.job.remote_nodes import detach_here
from zerotop_probe.outside.job import job_control

# How long a sampler may take to begin.
_START_S = 20.0


class LocalJob:
    """The job that a recording is of, on this node."""

    def __init__(self, path: Path) -> None:
        self._folder = str(path)
        self._began_s = time.monotonic()

    def is_over(self) -> bool:
        """Whether nothing more will be recorded. May raise OSError."""
        facts = job_control.read_facts(self._folder)
        if facts.job is None and not facts.other_host:  # it has yet to begin
            return time.monotonic() - self._began_s > _START_S
        is_over = facts.detached or not facts.is_alive()
        return is_over and not any(sampler.is_alive() for sampler in facts.samplers)

    def stop(self) -> None:
        """Ask it to stop; again, with the next stronger signal. Raise OSError."""
        job_control.request_stop(self._folder)

    def carry_out(self, order: Mapping[str, Any]) -> tuple[list[str], bool]:
        """Carry out an order; return sentences and whether that succeeded. May take seconds. Raise OSError, ValueError."""
        action = order.get("action")
        if action == MICROSCOPE:
            steps, after = int(order["steps"]), int(order["request"]) - 1
            request_trace(self._folder, steps=steps, stacks=order["stacks"] is True, after=after)
            return [], True
        if action == DETACH:
            return detach_here(self._folder)
        raise ValueError(f"zerotop there is too old to {str(action)[:20]}: install the same version on all nodes")

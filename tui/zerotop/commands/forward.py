"""``zerotop forward``: send this node's recording to the collector of its job, while it grows or afterwards."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotop.commands.common.errors import FAILED
from zerotop.commands.common.exit_messages import write_messages
from zerotop.commands.common.node_orders import DETACH, MICROSCOPE
from zerotop.commands.job.microscope_request import request_trace
from zerotop.commands.job.remote_nodes import detach_here
from zerotop.commands.nodes.forwarder import Forwarder
from zerotop.commands.nodes.joining import check_options
from zerotop.commands.nodes.link import Link, connect_nats
from zerotop.commands.nodes.messages import TOKEN_VARIABLE
from zerotop.commands.nodes.node_part import await_token, begin_part, end_part
from zerotop.commands.nodes.ssh_link import forward_by_pipe
from zerotop.recording.catalog import find_recording
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording import clock, directory

# Below training in the kernel's eyes.
_NICENESS = 10
# How long a sampler may take to begin.
_START_S = 20.0


def forward(options: argparse.Namespace) -> int:
    """Send the recording until it is over. Return 0 if the collector has all of it."""
    if options.for_rank is not None:
        begin_part(options.recording, options.for_rank, options.lock)
        if not options.collector:
            return 0
        os.environ[TOKEN_VARIABLE] = os.environ.get(TOKEN_VARIABLE) or await_token(options.job)
    if options.by_pipe:
        return forward_by_pipe(options.recording, _Job(Path(options.recording)))
    key = check_options(options)
    path = find_recording(options.recording)
    host = str(directory.read_recording_info(str(path)).get("host") or clock.read_hostname())
    os.nice(_NICENESS)

    async def connect() -> Link:
        return await connect_nats(options.collector, key)

    is_complete = asyncio.run(Forwarder(str(path), host, key, connect, job=_Job(path), tell=write_messages).run())
    if not is_complete and path.is_dir():
        write_messages(
            f"The collector of job {key.job} lacks the end of this node's part. Send it later with:"
            f" zerotop forward {path} --job {key.job} --collector ADDRESS"
        )
    if is_complete and (options.for_rank is not None or options.remove_sent):
        end_part(str(path), key.job)
    return 0 if is_complete else FAILED


class _Job:
    """The job of a recording, on this node."""

    def __init__(self, path: Path) -> None:
        self._folder = str(path)
        self._began_s = time.monotonic()

    def is_over(self) -> bool:
        facts = job_control.read_facts(self._folder)
        if facts.job is None and not facts.other_host:  # it has yet to begin
            return time.monotonic() - self._began_s > _START_S
        is_over = facts.detached or not facts.is_alive()
        return is_over and not any(sampler.is_alive() for sampler in facts.samplers)

    def stop(self) -> None:
        job_control.request_stop(self._folder)

    def carry_out(self, order: Mapping[str, Any]) -> tuple[list[str], bool]:
        action = order.get("action")
        if action == MICROSCOPE:
            steps, after = int(order["steps"]), int(order["request"]) - 1
            request_trace(self._folder, steps=steps, stacks=order["stacks"] is True, after=after)
            return [], True
        if action == DETACH:
            return detach_here(self._folder)
        raise ValueError(f"zerotop there is too old to {str(action)[:20]}: install the same version on all nodes")

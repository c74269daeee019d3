"""``zerotop forward``: send this node's recording to the collector of its job, while it grows or afterwards."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from zerotop.commands.common.errors import FAILED
from zerotop.commands.common.exit_messages import write_messages
from zerotop.commands.nodes.forwarder import Forwarder
from zerotop.commands.nodes.joining import check_options
from zerotop.commands.nodes.link import Link, connect_nats
from zerotop.commands.nodes.local_job import LocalJob
from zerotop.commands.nodes.messages import TOKEN_VARIABLE
from zerotop.commands.nodes.node_part import await_token, begin_part, end_part
from zerotop.commands.nodes.ssh_link import forward_by_pipe
from zerotop.recording.catalog import find_recording
from zerotop_probe.recording import clock, directory

# Below training in the kernel's eyes.
_NICENESS = 10


def forward(options: argparse.Namespace) -> int:
    """Send the recording until it is over. Return 0 if the collector has all of it."""
    if options.for_rank is not None:
        begin_part(options.recording, options.for_rank, options.lock)
        if not options.collector:
            return 0
        os.environ[TOKEN_VARIABLE] = os.environ.get(TOKEN_VARIABLE) or await_token(options.job)
    if options.by_pipe:
        return forward_by_pipe(options.recording, LocalJob(Path(options.recording)))
    key = check_options(options)
    path = find_recording(options.recording)
    host = str(directory.read_recording_info(str(path)).get("host") or clock.read_hostname())
    os.nice(_NICENESS)

    async def connect() -> Link:
        return await connect_nats(options.collector, key)

    is_complete = asyncio.run(Forwarder(str(path), host, key, connect, job=LocalJob(path), tell=write_messages).run())
    if not is_complete and path.is_dir():
        write_messages(
            f"The collector of job {key.job} lacks the end of this node's part. Send it later with:"
            f" zerotop forward {path} --job {key.job} --collector ADDRESS"
        )
    if is_complete and (options.for_rank is not None or options.remove_sent):
        end_part(str(path), key.job)
    return 0 if is_complete else FAILED

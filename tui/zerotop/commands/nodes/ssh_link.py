"""The connection by ssh, for ``attach --hosts``: the collector starts the forwarder on each node, and answers by its pipes.

Who can log in may read and write what it wants there: the seal of the messages has no secret.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence

from zerotop.commands.common.errors import FAILED
from zerotop.commands.common.exit_messages import write_messages
from zerotop.commands.nodes.collector import Collector
from zerotop.commands.nodes.forwarder import Forwarder
from zerotop.commands.nodes.link import Handler, Link, LinkError
from zerotop.commands.nodes.local_job import LocalJob
from zerotop.commands.nodes.messages import JobKey
from zerotop.commands.nodes.node_part import end_part, lock_part
from zerotop_probe.outside.attaching import ssh
from zerotop_probe.outside.attaching.remote_agent import SEND
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording import clock

SSH_KEY = JobKey("attached", "by ssh")
_MARK = b"\nzerotop speaks\n"  # after what the shell's startup files may print
_LENGTH_BYTES = 4
_LIMIT = 1 << 21
_AGAIN_S = 2.0
_POLL_S = 0.5
# Another process may answer a node already, and end soon because the node was detached from.
_LOCK_S = 10.0


class PipeClosed(Exception):
    """The collector is gone; it starts another forwarder when it is back."""


class PipeLink:
    """A node's side, on standard input and output."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls) -> PipeLink:
        """Begin to speak."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(_LIMIT)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        writer.write(_MARK)
        return cls(reader, writer)

    async def request(self, message: bytes, timeout_s: float) -> bytes:
        """Send a message and return the answer. Raise PipeClosed."""
        try:
            _write(self._writer, message)
            return await asyncio.wait_for(_read(self._reader), timeout_s)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            raise PipeClosed from error

    async def answer_requests(self, handle: Handler) -> None:
        """Raise LinkError: only the other side answers."""
        raise LinkError("a node answers nothing")

    async def close(self) -> None:
        """Close it."""
        self._writer.close()


class SshLink:
    """The collector's side: an ssh to each node, again and again until its forwarder says that all is sent."""

    def __init__(self, recording: str, parts: Mapping[str, str], command: Sequence[str]) -> None:
        """``parts``: the folder on each node, "" for the usual one; ``command``: of ssh, by default ``ssh``."""
        self._recording, self._parts, self._command = recording, dict(parts), command

    @property
    def names(self) -> list[str]:
        """The nodes that have not sent all."""
        return list(self._parts)

    async def request(self, message: bytes, timeout_s: float) -> bytes:
        """Raise LinkError: only nodes ask."""
        raise LinkError("a collector asks nothing")

    async def answer_requests(self, handle: Handler) -> None:
        """Answer until all nodes have sent all."""
        await asyncio.gather(*(self._answer_node(name, part, handle) for name, part in list(self._parts.items())))

    async def _answer_node(self, name: str, part: str, handle: Handler) -> None:
        words = ssh.build_command(self._command, name)
        here = [clock.read_hostname(), clock.read_boot_id()]
        request = {"action": SEND, "recording": self._recording, "part": part, "from": here}
        script = ssh.make_script(request).encode()
        pipe = asyncio.subprocess.PIPE
        while name in self._parts:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, limit=_LIMIT
            )
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(script)
                await process.stdout.readuntil(_MARK)
                while True:
                    _write(process.stdin, await handle(await _read(process.stdout)))
                    await process.stdin.drain()
            except (OSError, EOFError, asyncio.LimitOverrunError):
                process.stdin.close()
                with contextlib.suppress(asyncio.TimeoutError):
                    if await asyncio.wait_for(process.wait(), _AGAIN_S) == 0:
                        del self._parts[name]
                        return
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            await asyncio.sleep(_AGAIN_S)

    async def close(self) -> None:
        """Do nothing: the pipes are closed when the task that answers ends."""


def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(len(message).to_bytes(_LENGTH_BYTES, "big") + message)


async def _read(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > _LIMIT:
        raise EOFError
    return await reader.readexactly(length)


def forward_by_pipe(part: str, job: LocalJob) -> int:
    """Be the forwarder on a node. Return 0 if the collector has all of its part."""
    if not lock_part(f"{part}:sent"):  # the connection before this one has not ended yet
        return FAILED
    links: list[Link] = []

    async def connect() -> Link:
        if links:
            raise PipeClosed
        links.append(await PipeLink.open())
        return links[0]

    try:
        is_complete = asyncio.run(
            Forwarder(part, clock.read_hostname(), SSH_KEY, connect, job=job, tell=write_messages).run()
        )
    except PipeClosed:
        return FAILED
    if is_complete and not job_control.is_job_alive(part):  # else it may be attached to again
        end_part(part, SSH_KEY.job)
    return 0 if is_complete else FAILED


def collect_parts(options: argparse.Namespace) -> int:
    """Add the parts of nodes to the recording of this one, until they have sent all of them. Return 0."""
    asyncio.run(_collect_parts(options.beside, json.loads(options.parts), shlex.split(os.environ.get("ZEROTOP_SSH", ""))))
    return 0


async def _collect_parts(recording: str, parts: dict[str, str], command: list[str]) -> None:
    own: dict[str, str] = {}
    deadline_s = time.monotonic() + _LOCK_S
    while len(own) < len(parts) and time.monotonic() < deadline_s:
        own |= {name: part for name, part in parts.items() if name not in own and lock_part(f"{recording}:{name}")}
        await asyncio.sleep(_POLL_S)
    link = SshLink(recording, own, command)

    async def connect() -> Link:
        return link

    collector = Collector(recording, SSH_KEY, tell=write_messages, is_beside=True)
    collecting = asyncio.create_task(collector.run(connect))
    over_s = None
    while not collecting.done() and link.names and not collector.has_waited(over_s):
        await asyncio.sleep(_POLL_S)
        over_s = over_s or (time.monotonic() if job_control.is_recorded_no_more(recording) else None)
    collecting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await collecting
    for name in link.names:
        write_messages(f"Node {name} has not sent all of its part by ssh; it is probably in {recording}@HOST there")

"""``zerotop collect``: make one recording of a job's nodes, and watch it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from zerotop.commands.common.errors import FAILED, INTERRUPTED
from zerotop.commands.common.exit_messages import describe_place, write_messages
from zerotop.commands.common.gc_pause import freeze_imports
from zerotop.commands.common.node_orders import count_stops
from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.nodes.collector import Collector, prepare_folder
from zerotop.commands.nodes.joining import JOB_VARIABLE, URL_VARIABLE, check_options
from zerotop.commands.nodes.link import Link, connect_nats, hide_secrets
from zerotop.commands.nodes.messages import JobKey
from zerotop_probe.outside import own_python
from zerotop_probe.recording import directory

_POLL_S = 0.1
_END_S = 5.0
# How long an order takes to reach the nodes.
_ORDER_S = 2.0


def collect(options: argparse.Namespace) -> int:
    """Collect until all nodes have ended, or until the screen is left: nodes keep their recordings, and go on later."""
    if options.parts is not None:
        from zerotop.commands.nodes.ssh_link import collect_parts

        return collect_parts(options)
    key = check_options(options)
    if options.beside is not None:
        from zerotop.commands.nodes.hub import serve_nodes

        return serve_nodes(options, key)
    folder = os.path.abspath(options.folder or os.path.join(directory.find_default_root(), key.job))
    if options.headless or not has_terminal():
        return _collect_headless(options, key, folder)
    with _start_collector(options, folder) as collector:
        return _watch(options, Path(folder), collector)


def _collect_headless(options: argparse.Namespace, key: JobKey, folder: str) -> int:
    lock = prepare_folder(folder, key.job)
    place = hide_secrets(options.collector)
    given = {"max_bytes": options.max_size, "full_nodes": options.full_nodes}
    limits = {name: value for name, value in given.items() if value is not None}
    collector = Collector(folder, key, place=place, tell=write_messages, **limits)

    async def connect() -> Link:
        return await connect_nats(options.collector, key)

    async def run() -> None:
        collecting = asyncio.create_task(collector.run(connect))
        loop = asyncio.get_running_loop()

        def end_soon() -> None:
            loop.remove_reader(0)
            loop.call_later(_ORDER_S if count_stops(Path(folder)) else 0.0, collecting.cancel)

        if options.until_closed:
            loop.add_reader(0, end_soon)
        with contextlib.suppress(asyncio.CancelledError):
            await collecting

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        write_messages("The nodes keep what was not collected, and send it once zerotop collect runs again.")
        return INTERRUPTED
    finally:
        os.close(lock)
    write_messages(*[describe_place(folder)] if directory.read_recording_info(folder) else [])
    return 0


@contextmanager
def _start_collector(options: argparse.Namespace, folder: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start the collector in a process of its own, beside the screen; yield it with what it says. It ends when we do."""
    limit = [] if options.max_size is None else ["--max-size", str(options.max_size)]
    limit += [] if options.full_nodes is None else ["--full-nodes", str(options.full_nodes)]
    arguments = ["collect", "--headless", "--until-closed", "--recording", folder, *limit]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            own_python.build_command("zerotop.cli", *arguments),
            env=own_python.build_environment() | {URL_VARIABLE: options.collector, JOB_VARIABLE: options.job},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            yield process, said
        finally:
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _watch(options: argparse.Namespace, path: Path, collector: tuple[subprocess.Popen[bytes], IO[bytes]]) -> int:
    process, said = collector
    write_messages(f"Waiting for nodes of job {options.job} on {hide_secrets(options.collector)}. Ctrl-C ends waiting")
    shown = 0
    while not (path / directory.SESSION_FILE).exists() and process.poll() is None:
        shown = _show_new(said, shown)
        time.sleep(_POLL_S)
    _show_new(said, shown)
    if not (path / directory.SESSION_FILE).exists():
        return process.returncode or FAILED
    with freeze_imports():
        from zerotop.commands.job.watch import watch_job

    return watch_job(path)


def _show_new(said: IO[bytes], shown: int) -> int:
    """Pass on what the collector said since the last call; return how much it has said."""
    data = os.pread(said.fileno(), 1 << 16, shown)
    sys.stderr.buffer.write(data)
    sys.stderr.flush()
    return shown + len(data)

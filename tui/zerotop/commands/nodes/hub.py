"""The server and collector that ``zerotop run`` starts for a command with several nodes, and the plan for those nodes.

The collector adds the parts of the other nodes to the recording that this node's sampler writes. It is a process of its own
with the server as its child, and lives as long as the job.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import ctypes
import errno
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path

from zerotop.commands.common.errors import Problem, describe_error
from zerotop.commands.common.exit_messages import write_messages
from zerotop.commands.nodes import keys
from zerotop.commands.nodes.collector import Collector
from zerotop.commands.nodes.joining import Helper
from zerotop.commands.nodes.launched_nodes import LaunchedNodes, find_nodes, find_own_address
from zerotop.commands.nodes.link import Link, connect_nats, hide_secrets, pin_certificate
from zerotop.commands.nodes.messages import TOKEN_VARIABLE, JobKey, make_token
from zerotop.commands.nodes.ray_cluster import is_for_cluster, pass_on
from zerotop_probe.outside import own_python
from zerotop_probe.outside.job import job_control
from zerotop_probe.outside.sampling.ranks.launcher_programs import find_launcher
from zerotop_probe.recording import clock, directory
from zerotop_probe.recording.node_part import NODES_VARIABLE, NodesPlan

_SERVER = "nats-server"
_PEM_BEGIN, _PEM_END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_KILLED = (
    "The collector of the other nodes was killed. The rest of their parts is on them, in {recording}@HOST: send it by"
    " zerotop forward, while zerotop collect --recording {recording} runs here"
)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Below those that kernels give to connections, one of which could take it before the server does.
_PORTS = range(20_000, 30_000)
_PORT_TRIES = 50
_POLL_S = 0.5
_START_S = 10.0
# How long after the first of the other nodes the last one may come.
_MEETING_S = 60.0
# What the user may have named instead.
_ENV_LIST = "OMPI_MCA_mca_base_env_list"
_VERSION_S = 5.0
# Programs that take the place of Open MPI's in a shell script, and where they find the names.
_PROGRAMS = Path(__file__).with_name("open_mpi")
_NAMES_VARIABLE = "ZEROTOP_PASS_ON"
_PASSED_ON = ("PYTHONPATH", directory.SESSION_VARIABLE, NODES_VARIABLE, TOKEN_VARIABLE)
_IF_SET = (directory.PHASE_PEAKS_VARIABLE, directory.BUDGET_VARIABLE)
_SETTINGS = ("max_bytes", "redact_output", directory.STACKS_SETTING, "price_per_hour")


def prepare_nodes(recording: str, options: argparse.Namespace, *, quiet: bool) -> list[Helper]:
    """If the job has other nodes, put the plan for them into our environment, which it inherits; return the collector.

    Says what cannot be done, and why.
    """
    nodes = find_nodes(options.launch, os.environ)
    if options.meeting is not None:
        nodes = nodes or options.meeting.nodes
    is_ray = nodes is None and is_for_cluster(options.command, os.environ)
    if nodes is None and not is_ray:
        return []
    nodes = nodes or LaunchedNodes([], False, [])  # of Ray
    url, job, token = options.collector or "", options.job or "", os.environ.get(TOKEN_VARIABLE, "")
    started = []
    if not url:
        job, token = _make_job_name(recording), make_token()
        is_single = options.meeting is not None and options.meeting.has_one_node
        url = "" if is_single else _find_url(recording, nodes, job)
        os.environ[TOKEN_VARIABLE] = token
        way = ["--expects", str(len(nodes.names))] if url else ["--parts", json.dumps(dict.fromkeys(nodes.names, ""))]
        lost = _KILLED.format(recording=recording)
        arguments = ["collect", "--beside", recording, *way]
        started = (
            [Helper(arguments, url, job, quiet=quiet, if_killed=lost)] if url or (nodes.names and not is_single) else []
        )
    info = directory.read_recording_info(recording)
    settings = {name: info[name] for name in _SETTINGS if info.get(name) is not None}
    command = own_python.build_command("zerotop.cli")
    plan = NodesPlan(clock.read_hostname(), clock.read_boot_id(), url, job, command, settings)
    os.environ[NODES_VARIABLE] = plan.encode()
    if is_ray:
        pass_on(recording, (NODES_VARIABLE, *_IF_SET))
    if find_launcher(options.launch) == "mpi":
        _pass_on(options.command, is_in_script=options.command != options.launch)
    if url and not nodes.passes_secrets:
        _share_key(job, token, nodes, is_removed=bool(started))
    if options.meeting is not None:
        options.meeting.tell(recording)
    return started


def _pass_on(command: list[str], *, is_in_script: bool) -> None:
    """Name our variables to Open MPI, which passes no others on; other MPIs pass all."""
    names = [*_PASSED_ON, *(name for name in _IF_SET if name in os.environ)]
    if is_in_script:
        os.environ[_NAMES_VARIABLE] = " ".join(names)
        os.environ["PATH"] = f"{_PROGRAMS}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return
    if _ENV_LIST in os.environ or _ENV_LIST.removeprefix("OMPI_MCA_") in command:  # it takes only one way of naming them
        return
    asking = [command[0], "--version"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(asking, capture_output=True, text=True, timeout=_VERSION_S, check=False).stdout
        if "Open MPI" in said or "OpenRTE" in said:
            command[1:1] = [word for name in names for word in ("-x", name)]


def _make_job_name(recording: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", os.path.basename(recording))[:40]
    return f"{name}-{secrets.token_hex(4)}"


def _find_url(recording: str, nodes: LaunchedNodes, job: str) -> str:
    """Return the address for our server; "", after a message, if there can be none."""
    certificate, why = _read_certificate(job)
    if not _find_server():
        why = f"there is no {_SERVER} on the PATH: install it"
    try:
        import nats  # noqa: F401
    except ImportError:
        why = "its client is missing: pip install 'zerotop[nodes]'"
    address = find_own_address(nodes.names)
    if not why and not address:
        why = "this node has no address in a network"
    if why:
        write_messages(
            f"Other nodes use no server, since {why}. Those that see {recording} record there; others record to"
            f" {os.path.basename(recording)}@HOST, and send it "
            + (
                f"by ssh ({', '.join(nodes.names[:3])}{', ...' if nodes.names[3:] else ''})"
                if nodes.names
                else "later, by zerotop forward"
            )
        )
        return ""
    is_six = ":" in address
    port = _find_port(address, socket.AF_INET6 if is_six else socket.AF_INET)
    place = f"[{address}]:{port}" if is_six else f"{address}:{port}"
    return pin_certificate(f"tls://{place}", certificate) if certificate else f"nats://{place}"


def _read_certificate(job: str) -> tuple[str, str]:
    """Return the certificate for our server, "" if it has to do without, and why it is not fit."""
    keys.make_certificate(job)
    files = keys.find_certificate(job)
    if files is None:
        return "", ""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files, password=_refuse_password)
        text = Path(files[0]).read_text()
        return text[text.index(_PEM_BEGIN) : text.index(_PEM_END) + len(_PEM_END)], ""
    except (OSError, ValueError) as error:
        why = describe_error(error)
        return "", f"{files[0]} and {files[1]} are not a certificate and its key without a password ({why})"


def _refuse_password() -> str:
    raise ValueError("it has a password")


def _find_port(address: str, family: socket.AddressFamily) -> int:
    """Return a free port. Raise OSError without one."""
    for port in random.sample(_PORTS, _PORT_TRIES):
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, port))
            return port
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _find_server() -> str:
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
    return shutil.which(_SERVER, path=path) or ""


def _share_key(job: str, token: str, nodes: LaunchedNodes, *, is_removed: bool) -> None:
    """Send the token to the nodes. ``is_removed``: the collector removes its file on this node."""
    if not is_removed:
        atexit.register(keys.remove_key, job, sent=False)
    try:
        keys.write_key(job, token)
    except OSError as error:
        write_messages(f"Other nodes cannot take part: the token cannot be written for them: {error.strerror}")
        return
    ssh = os.environ.get("ZEROTOP_SSH", "").split()
    write_messages(*keys.share_key(job, token, nodes.names, ssh, nodes.ssh))


def serve_nodes(options: argparse.Namespace, key: JobKey) -> int:
    """Run the server and the collector until the job has ended on all nodes. Return 0."""
    with tempfile.TemporaryDirectory(prefix="zerotop-nodes-") as folder:
        try:
            asyncio.run(_serve_nodes(options, key, folder))
        finally:
            keys.remove_key(key.job, sent=False)
    return 0


def _write_config(url: str, job: str) -> str:
    """Return the server's configuration; the token comes in its environment."""
    text = f"listen: {hide_secrets(url).partition('://')[2]}\nauthorization {{ token: ${TOKEN_VARIABLE} }}\n"
    if url.startswith("tls:") and (files := keys.find_certificate(job)) is not None:
        certificate, key = map(json.dumps, files)
        text += f"tls {{ cert_file: {certificate}, key_file: {key} }}\n"
    return text


async def _serve_nodes(options: argparse.Namespace, key: JobKey, folder: str) -> None:
    recording, url = options.beside, options.collector
    config = Path(folder, "nats.conf")
    config.write_text(_write_config(url, key.job))
    is_open = True
    collector = Collector(recording, key, tell=write_messages, place=hide_secrets(url), is_beside=True)

    async def connect() -> Link:
        return await connect_nats(url, key)

    log = Path(folder, "nats.log")
    server = asyncio.create_task(_keep_server(str(config), str(log)))
    if not await _is_listening(url):
        said = log.read_text(errors="replace").splitlines() if log.exists() else []
        raise Problem(f"{_SERVER} cannot be started, so that nodes send nothing{': ' if said else ''}{''.join(said[-1:])}")
    collecting = asyncio.create_task(collector.run(connect))
    over_s = met_s = None
    try:
        while is_open:
            await asyncio.wait({server, collecting}, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in (server, collecting):
                if task.done():
                    task.result()
                    return
            now_s = time.monotonic()
            met_s = met_s or (now_s if collector.hosts else None)
            if options.expects and met_s is not None and now_s - met_s > _MEETING_S:
                _tell_missing(collector.hosts, options.expects)
                options.expects = 0
            over_s = over_s or (now_s if job_control.is_recorded_no_more(recording) else None)
            is_open = not collector.has_waited(over_s)
    finally:
        for task in (collecting, server):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    if any(Path(recording).glob("events-rank*")):  # else it failed before it trained
        _tell_missing(collector.hosts, options.expects)
    for host in collector.list_open():
        part = f"{recording}@{host}"
        write_messages(f"Node {host} has not sent the end of its part, which is on it, probably in {part}")


def _tell_missing(hosts: list[str], expected: int) -> None:
    if len(hosts) < expected:
        write_messages(
            f"{len(hosts)} of {expected} other nodes take part{': ' if hosts else ''}{', '.join(hosts)}. On the others"
            " zerotop must be installed at the same place as here, and this node must be reached"
        )


async def _keep_server(config: str, log: str) -> None:
    """Run the server; start it again if it ends."""
    while True:
        with open(log, "wb") as said:  # no more than since its last start
            process = await asyncio.create_subprocess_exec(
                _find_server(),
                *("-c", config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                preexec_fn=_end_with_parent,
            )
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await asyncio.sleep(_POLL_S)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _is_listening(url: str) -> bool:
    """Whether the server is there, as soon as it is."""
    host, _, port = hide_secrets(url).partition("://")[2].rpartition(":")
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            return True
        await asyncio.sleep(0.05)
    return False

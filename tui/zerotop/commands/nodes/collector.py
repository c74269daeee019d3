"""Writes the recordings of a job's nodes as one, from what their forwarders send, and notices nodes that fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotop.commands.common.errors import Problem
from zerotop.commands.common.node_orders import (
    FULL_NODES,
    NODES_FILE,
    ORDER_S,
    OrderAnswer,
    count_stops,
    is_withdrawn,
    read_order,
    read_wanted_nodes,
    write_answers,
)
from zerotop.commands.nodes import messages
from zerotop.commands.nodes.clocks import Alignment, write_alignment
from zerotop.commands.nodes.collected_folder import NodeFiles, OutOfStep
from zerotop.commands.nodes.forwarder import ANSWER_S
from zerotop.commands.nodes.link import Connect, Link, LinkError, LinkRefused
from zerotop.commands.nodes.messages import BadMessage, JobKey
from zerotop.recording.atomic_write import write_text_file
from zerotop_probe.outside.causes import describe_cause
from zerotop_probe.recording import clock, events
from zerotop_probe.recording.directory import COLLECTED, MAX_BYTES, SESSION_FILE, read_recording_info
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR
from zerotop_probe.recording.writer import EventWriter, Identity

LOST_S = 6.0
"""A node that is silent for this time is lost: it sends something every second."""
MAX_NODES = 10_000
_POLL_S = 0.5
_RETRY_S = 0.5
_PING_S = 2.0
# How long a node waits for a page of the list before it has to ask again.
_LIST_S = 2.0
# How long after the job's end here nodes may take to send the rest; likewise if none has taken part so far.
_REST_S, _LATE_S = 30.0, 3.0
# Nodes that are lost for this time keep the end of the others from being that of the job no longer.
_GIVEN_UP_S = 60.0
_MAX_SAID = 100  # sentences of a node


@dataclass
class _Node:
    host: str
    recording: str
    files: NodeFiles
    session: str = ""
    number: int = 0
    heard_s: float = 0.0
    deaf_s: float = 0.0  # the collector's when the node was heard last
    listing: tuple[str, asyncio.Task[list[tuple[str, int, str]]]] | None = None  # the page that was asked for last
    is_lost: bool = False
    has_ended: bool = False
    is_over: bool = False  # its job has ended, and it sends the rest
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Collector:
    """The collector of one job. ``tell`` receives sentences for the user."""

    def __init__(
        self,
        folder: str,
        key: JobKey,
        *,
        tell: Callable[[str], None],
        place: str = "",
        max_bytes: int = MAX_BYTES * 5 // 4,
        is_beside: bool = False,
        full_nodes: int = FULL_NODES,
    ) -> None:
        """Take over a folder that ``prepare_folder`` has prepared. ``place``: the server's address, without secrets.

        ``is_beside``: it is the recording of this node, beside whose files those of the others are put, until cancelled.
        ``full_nodes``: see FULL_NODES.
        """
        self._full_nodes = full_nodes
        self._is_beside = is_beside
        self._place = place
        self._folder, self._key, self._tell, self._max_bytes = folder, key, tell, max_bytes
        self._nodes: dict[str, _Node] = {}
        self._events: EventWriter | None = None
        self._told: set[str] = set()
        self._connected_s: float | None = None
        # For how long this process could not run and hear nobody, in all and when the connection was made.
        self._deaf_s = self._connected_deaf_s = 0.0
        self._heard_s: float | None = None  # when the server was last there, once it was
        self._is_server_lost = False
        self._stops = count_stops(Path(folder))
        self._order = read_order(Path(folder))
        self._ordered_s = -ORDER_S  # when we saw it first; earlier ones are passed on no more
        self._asked: list[str] = []
        self._answers: dict[str, OrderAnswer] = {}
        self._has_new_answers = False
        self._known = _read_nodes(folder)
        self._noted: dict[str, bool] = {}  # what was written down of how much nodes send
        self.detailed: set[str] = set()
        """The nodes that send full detail."""
        self.choose_detailed()

    @property
    def has_all(self) -> bool:
        """Whether all nodes have ended, except those that were given up."""
        now_s = time.monotonic()
        open_nodes = [node for node in self._nodes.values() if not node.has_ended]
        given_up = [node for node in open_nodes if node.is_lost and now_s - node.heard_s > _GIVEN_UP_S]
        return len(self._nodes) > len(open_nodes) and len(open_nodes) == len(given_up)

    def has_waited(self, over_s: float | None) -> bool:
        """Whether nodes have sent all, or had the time to, since the end of the job here, if it has ended."""
        rest_s = _REST_S if self._known else _LATE_S
        return over_s is not None and (self.has_all or time.monotonic() - over_s > rest_s)

    @property
    def hosts(self) -> list[str]:
        """The nodes that take part."""
        return sorted(self._known)

    def list_open(self) -> list[str]:
        """Return the nodes that have not sent their end."""
        return [node.host for node in self._nodes.values() if not node.has_ended]

    async def run(self, connect: Connect) -> None:
        """Collect until all nodes have ended. Raises Problem if the server refuses us or the job has a collector."""
        watch = asyncio.create_task(self._watch_nodes())
        try:
            while True:
                link: Link | None = None
                answering: asyncio.Task[None] | None = None
                try:
                    link = await connect()
                    await self._check_alone(link)
                    self._connected_s, self._connected_deaf_s = time.monotonic(), self._deaf_s
                    self._watch_server(self._connected_s)
                    answering = asyncio.create_task(link.answer_requests(self.handle))
                    done, _ = await asyncio.wait({watch, answering}, return_when=asyncio.FIRST_COMPLETED)
                    if watch in done:
                        watch.result()
                        return
                    answering.result()
                except LinkRefused as error:
                    raise Problem(str(error)) from error
                except LinkError as error:
                    self._tell_once(str(error))
                finally:
                    self._connected_s = None
                    if answering is not None:
                        answering.cancel()
                    if link is not None:
                        await link.close()
                await asyncio.sleep(_RETRY_S)
        finally:
            watch.cancel()
            self.look_for_order()  # the last node may have answered with its end
            if self._events is not None:
                self._events.close()

    async def _check_alone(self, link: Link) -> None:
        """Raise Problem if the job has a collector already."""
        with contextlib.suppress(LinkError, BadMessage):
            answer, _ = self._key.open(await link.request(self._key.seal({"kind": messages.PING}), _PING_S))
            if answer.get("kind") == messages.OK:
                raise Problem(f"Job {self._key.job} is being collected already, on {messages.shorten(answer.get('by'))}")

    async def handle(self, message: bytes) -> bytes:
        """Return the answer to a request."""
        question = None
        try:
            header, data = self._key.open(message)
            question = header.get("question")
            answer = await self._answer(header, data)
        except OutOfStep:
            answer = {"kind": messages.UNKNOWN}
        except BadMessage as error:
            answer = {"kind": messages.REFUSED, "why": str(error)}
            self._tell_once(f"Refused: {error}")
        except OSError as error:
            why = f"nothing can be written to {self._folder}: {describe_cause(error)}"
            answer = {"kind": messages.REFUSED, "why": why}
            self._tell_once(why[0].upper() + why[1:])
        return self._key.seal(answer | {"question": question})

    async def _answer(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        kind = header.get("kind")
        if kind == messages.PING:
            return {"kind": messages.OK, "by": os.uname().nodename, "unix_ns": time.time_ns()}
        host = messages.check_host(header.get("host"))
        if self._is_beside and host == clock.read_hostname():
            raise BadMessage(f"{host} is the name of the node that collects: give each node a host name of its own")
        if kind == messages.HELLO:
            return self._welcome(host, header)
        node = self._nodes.get(host)
        if node is None or not node.session or node.session != header.get("session"):
            return {"kind": messages.UNKNOWN}
        async with node.lock:
            self._note_heard(node)
            node.is_over = header.get("over") is True
            answer: dict[str, Any] = {"kind": messages.OK, "stops": self._stops, "detail": host in self.detailed}
            answer["order"] = self._order if time.monotonic() - self._ordered_s < ORDER_S else None
            self._note_answer(host, header.get("obeyed"))
            if kind == messages.LIST:
                answer["files"] = await self._list_page(node, str(header.get("after")))
            elif kind == messages.WRITE:
                self._write(node, header, data)
            elif kind == messages.BYE:
                node.has_ended = True
                self.choose_detailed()
            else:
                raise BadMessage(
                    f"this collector knows no request {str(kind)[:20]!r}: install the same version on all nodes"
                )
            return answer

    def look_for_order(self) -> None:
        """Take note of a new order, and write down what was answered."""
        order = read_order(Path(self._folder))
        is_new = order.get("number", 0) > self._order.get("number", 0) and not is_withdrawn(order)
        if is_new:
            self._order, self._ordered_s, self._answers = order, -ORDER_S, {}
            self._asked = [host for host in self._known if host not in self._nodes or not self._nodes[host].has_ended]
        if is_new or self._has_new_answers:
            self._has_new_answers = False
            with contextlib.suppress(OSError):  # whoever gave the order is told that nobody answers
                write_answers(Path(self._folder), self._order["number"], self._asked, self._answers)
                if is_new:
                    self._ordered_s = time.monotonic()

    def _note_answer(self, host: str, answer: Any) -> None:
        if not isinstance(answer, dict) or answer.get("number") != self._order.get("number") or host not in self._asked:
            return
        said = answer.get("said")
        sentences = tuple(messages.shorten(one) for one in said[:_MAX_SAID]) if isinstance(said, list) else ()
        self._answers[host] = OrderAnswer(isinstance(said, list), answer.get("failed") is True, sentences)
        self._has_new_answers = True

    async def _list_page(self, node: _Node, after: str) -> list[tuple[str, int, str]] | None:
        """Return a page of the list of a node's files; None while they are hashed: it asks again, and is heard."""
        if node.listing is None or node.listing[0] != after:
            node.listing = after, asyncio.create_task(asyncio.to_thread(node.files.list_page, after))
        task = node.listing[1]
        await asyncio.wait({task}, timeout=_LIST_S)
        return task.result() if task.done() else None

    def _write(self, node: _Node, header: dict[str, Any], data: bytes) -> None:
        changes, number = messages.parse_changes(header, data, node.host), header.get("number")
        if not changes:
            return
        if type(number) is not int or number < node.number:  # it came late, and was sent again meanwhile
            return
        try:
            node.files.apply(changes)
        except OutOfStep:
            node.session = ""
            raise
        node.number = number

    def _welcome(self, host: str, header: dict[str, Any]) -> dict[str, Any]:
        """Begin with a node, or once more. Raise BadMessage, OSError."""
        info, form = header.get("info"), header.get("format")
        if not isinstance(info, dict) or not info or not isinstance(form, list) or not form:
            raise BadMessage(f"node {host} sent no {SESSION_FILE}")
        if form[0] != FORMAT_MAJOR:
            raise BadMessage(
                f"zerotop on {host} records in format {form[0]}, here in {FORMAT_MAJOR}: install the same version on both"
            )
        recording = hashlib.blake2b(json.dumps(info, sort_keys=True).encode(), digest_size=16).hexdigest()
        if self._known.get(host, recording) != recording:
            raise BadMessage(
                f"job {self._key.job} already has a recording of node {host}: start another run with another --job,"
                " and give each node a host name of its own"
            )
        if host not in self._known:
            self._add_node(host, recording, info, Alignment.parse(header.get("alignment")))
        node = self._nodes.get(host)
        if node is None:
            node = self._nodes[host] = _Node(host, recording, NodeFiles(self._folder, host, self._max_bytes))
        node.files.begin()
        node.listing = None
        node.session, node.number, node.has_ended = str(header.get("session")), 0, False
        self._note_heard(node)
        return {"kind": messages.OK, "recording": _identify_recording(self._folder)}

    def _add_node(self, host: str, recording: str, info: dict[str, Any], alignment: Alignment | None) -> None:
        """Write down a new node and its clock, before any of its files. Raise BadMessage, OSError."""
        if len(self._known) >= MAX_NODES:
            raise BadMessage(f"job {self._key.job} has {MAX_NODES} nodes already")
        sentence = f"Node {host} takes part"
        if alignment is not None:
            ahead_ns, boot = alignment.count_ahead_ns(info.get("clock")), info.get("boot")
            info = info | {"clock": alignment.clock}
            write_alignment(self._folder, host, str(boot or ""), _make_own_identity(), alignment)
            way = "ahead" if ahead_ns > 0 else "behind"
            error_ms = alignment.error_ns / 1e6
            sentence += f"; its clock, {abs(ahead_ns) / 1e6:.1f} ms {way}, is aligned to ours to within {error_ms:.1f} ms"
        if not os.path.exists(os.path.join(self._folder, SESSION_FILE)):
            collected = {COLLECTED: [self._key.job, self._place], "zerotop": [FORMAT_MAJOR, FORMAT_MINOR]}
            write_text_file(Path(self._folder, SESSION_FILE), json.dumps(info | collected, indent=1) + "\n")
        self._known[host] = recording
        if len(self._known) == self._full_nodes + 1:
            self._tell(
                f"Nodes after the first {self._full_nodes} send steps, phases, GPU memory and events only, and the rest"
                " while they are chosen or have a finding, and at the end"
            )
        self.choose_detailed()
        write_text_file(Path(self._folder, NODES_FILE), json.dumps(self._known))
        self._tell(f"{sentence}.")

    def _note_heard(self, node: _Node) -> None:
        silent_s, node.heard_s, node.deaf_s = time.monotonic() - node.heard_s, time.monotonic(), self._deaf_s
        if node.is_lost:
            node.is_lost = False
            self._write_event(events.NodeReturned, node.host, seconds=round(silent_s, 1))
            self._tell(f"Node {node.host} is back after {silent_s:.0f} s.")

    async def _watch_nodes(self) -> None:
        """Tell of nodes that fall silent, while we can hear; return when all nodes have ended."""
        looked_s = time.monotonic()
        while self._is_beside or not self.has_all:
            await asyncio.sleep(_POLL_S)
            now_s = time.monotonic()
            if now_s - looked_s > 2 * _POLL_S:  # we stood still ourselves
                self._deaf_s += now_s - looked_s - _POLL_S
            looked_s = now_s
            self._watch_server(now_s)
            self._stops = count_stops(Path(self._folder))
            self.look_for_order()
            self.choose_detailed()
            for node in self._nodes.values():
                if self._count_silence(node, now_s) > LOST_S and not node.is_lost and not node.has_ended:
                    node.is_lost = True
                    self._write_event(events.NodeLost, node.host, seconds=round(now_s - node.heard_s, 1))
                    self._tell(f"Node {node.host} has been silent for {now_s - node.heard_s:.0f} s.")

    def _count_silence(self, node: _Node, now_s: float) -> float:
        """Return for how many seconds a node has been silent while we could hear."""
        if self._connected_s is None:
            return 0.0
        silent_s = now_s - node.heard_s - (self._deaf_s - node.deaf_s)
        listened_s = now_s - self._connected_s - (self._deaf_s - self._connected_deaf_s)
        if node.heard_s < self._connected_s:  # it may wait for an answer that was lost with our last connection
            listened_s -= ANSWER_S
        return min(silent_s, listened_s)

    def choose_detailed(self) -> None:
        """Choose the nodes that send full detail."""
        first, later = list(self._known)[: self._full_nodes], list(self._known)[self._full_nodes :]
        if not later:
            self.detailed = set(first)
            return  # which need not be told: all send full detail
        wanted = read_wanted_nodes(Path(self._folder))
        over = [host for host in later if (node := self._nodes.get(host)) and node.is_over and not node.has_ended]
        # Those that send their rest go on until they have sent it.
        over.sort(key=lambda host: host not in self.detailed)
        asked = [host for host in later if host in wanted][: self._full_nodes]
        self.detailed = {*first, *asked, *over[: max(1, self._full_nodes)]}
        for host in self._known:
            is_full = host in self.detailed or ((node := self._nodes.get(host)) is not None and node.has_ended)
            if self._noted.get(host) is not is_full:
                self._noted[host] = is_full
                self._write_event(events.NodeDetail, host, is_full=is_full)

    def _watch_server(self, now_s: float) -> None:
        if self._connected_s is None:
            if self._heard_s is not None and self._nodes and not self._is_server_lost and now_s - self._heard_s > LOST_S:
                self._is_server_lost = True
                self._write_event(events.NodeLost, None, seconds=round(now_s - self._heard_s, 1))
            return
        if self._is_server_lost and self._heard_s is not None:
            self._is_server_lost = False
            self._write_event(events.NodeReturned, None, seconds=round(now_s - self._heard_s, 1))
        self._heard_s = now_s

    def _write_event(self, event: type[events.Event], host: str | None, **facts: float) -> None:
        if self._events is None:
            self._events = EventWriter(self._folder, _make_own_identity())
        self._events.write(time.monotonic_ns(), event, host=host, **facts)

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told and len(self._told) < 1000:
            self._told.add(sentence)
            self._tell(f"{sentence}.")


def _make_own_identity() -> Identity:
    """Return an identity whose files are none of a node's, should one run on this machine: a node's name has no ``-``."""
    own = Identity.for_this_process("control")
    return own._replace(host=f"{own.host}-collector")


def _identify_recording(folder: str) -> str:
    """Return what tells this recording from another of the same job, perhaps at the same place: each numbers its orders."""
    with contextlib.suppress(OSError):
        status = os.stat(os.path.join(folder, SESSION_FILE))
        return f"{status.st_ino}-{status.st_mtime_ns}"
    return ""


def prepare_folder(folder: str, job: str) -> int:
    """Create the folder of a job's collected recording, or take over an earlier one; return the lock.

    Raises Problem.
    """
    info = read_recording_info(folder)
    has_parts = os.path.exists(os.path.join(folder, NODES_FILE))  # collected by the run itself, which is over
    if info and (info.get(COLLECTED) or [""])[0] != job and (COLLECTED in info or not has_parts):
        raise Problem(f"{folder} is the recording of something else: choose another --job or --recording")
    if not info and os.path.isdir(folder) and set(os.listdir(folder)) - {NODES_FILE}:
        raise Problem(f"{folder} is not empty: choose another folder with --recording")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.stat(folder)
    if status.st_uid != os.geteuid():
        raise Problem(f"{folder} belongs to another user: choose another folder with --recording")
    os.chmod(folder, status.st_mode & 0o755 & ~0o022)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise Problem(f"Another zerotop collects to {folder}") from None
    return lock


def _read_nodes(folder: str) -> dict[str, str]:
    try:
        value = json.loads(Path(folder, NODES_FILE).read_text(encoding="utf-8"))
        return {str(host): str(recording) for host, recording in value.items()}
    except (OSError, ValueError, AttributeError):
        return {}

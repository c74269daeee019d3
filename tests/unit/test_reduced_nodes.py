"""More nodes than send full detail: the others send what screens need most; all when asked, and all at the end."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recordings import open_searched, unpack_to_folder
from zerotop.analysis.findings import Finding
from zerotop.analysis.ranks.nodes import find_wanted_nodes
from zerotop.commands.common.node_orders import NODES_FILE, read_wanted_nodes, want_nodes
from zerotop.commands.nodes import collector as collectors
from zerotop.commands.nodes import forwarder, messages
from zerotop.commands.nodes.collector import Collector, prepare_folder
from zerotop.commands.nodes.forwarder import Forwarder
from zerotop.commands.nodes.link import Link, LinkError
from zerotop.commands.nodes.local_job import LocalJob
from zerotop.commands.nodes.messages import JobKey
from zerotop.commands.publishing import publisher
from zerotop.recording.reader import Recording
from zerotop_probe.recording import directory
from zerotop_probe.recording.tables import FORMAT_MAJOR

KEY = JobKey("llama", "a token that nobody guesses")
FIRST, LATER = "node0", ("node1", "node2", "node3")
_WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "PERIOD_S", 0.01)
    monkeypatch.setattr(forwarder, "REDUCED_PERIOD_S", 0.01)
    monkeypatch.setattr(forwarder, "BEAT_S", 0.0)
    monkeypatch.setattr(forwarder, "_LOOK_S", -1.0)
    monkeypatch.setattr(collectors, "_POLL_S", 0.01)


class Node(LocalJob):
    """A node whose job ends when ``has_ended`` is set; notes which bytes of which file it sends."""

    def __init__(self, folder: Path, collector: Collector, host: str) -> None:
        super().__init__(folder / host)
        self.host, self.collector, self.source, self.has_ended = host, collector, folder / host, False
        directory.create_recording(["python", "train.py"], path=str(self.source))
        self.sent: list[tuple[str, int, int]] = []

    def is_over(self) -> bool:
        return self.has_ended

    def stop(self) -> None:
        raise AssertionError

    def carry_out(self, order: Mapping[str, Any]) -> tuple[list[str], bool]:
        raise AssertionError(order)

    def append(self, table: str, data: bytes) -> str:
        name = f"{table}-rank0-{self.host}-7.{'jsonl' if table == 'events' else 'rec'}"
        with (self.source / name).open("ab") as file:
            file.write(data)
        return name

    async def request(self, message: bytes, timeout_s: float) -> bytes:
        header, _ = KEY.open(message)
        self.sent += [(change[0], change[2], change[3]) for change in header.get("changes", []) if change[3]]
        await asyncio.sleep(0)
        return await self.collector.handle(message)

    async def answer_requests(self, handle: Callable[[bytes], Any]) -> None:
        raise AssertionError

    async def close(self) -> None:
        pass

    async def connect(self) -> Link:
        return self

    async def forward(self) -> bool:
        return await Forwarder(str(self.source), self.host, KEY, self.connect, job=self, tell=print).run()


class Silence:
    """A connection on which nothing comes: requests are handed to the collector by nodes themselves."""

    @classmethod
    async def connect(cls) -> Link:
        return cls()

    async def request(self, message: bytes, timeout_s: float) -> bytes:
        raise LinkError("nobody is there")

    async def answer_requests(self, handle: Callable[[bytes], Any]) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


def make_collector(folder: Path, told: list[str]) -> Collector:
    """Return a collector that lets one node send full detail, which takes part already."""
    target = folder / "collected"
    os.close(prepare_folder(str(target), KEY.job))
    collector = Collector(str(target), KEY, tell=told.append, full_nodes=1)
    source = folder / FIRST
    directory.create_recording(["python", "train.py"], path=str(source))
    info = directory.read_recording_info(str(source))
    hello = {"kind": "hello", "host": FIRST, "session": "s", "format": [FORMAT_MAJOR, 0], "info": info}
    answer, _ = KEY.open(asyncio.run(collector.handle(KEY.seal(hello))))
    assert answer["kind"] == "ok"
    return collector


async def wait_for(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


def has(target: Path, name: str, data: bytes) -> bool:
    return (target / name).exists() and (target / name).read_bytes() == data


def test_a_node_sends_everything_while_it_is_wanted_and_at_the_end(tmp_path: Path) -> None:
    told: list[str] = []
    collector, target = make_collector(tmp_path, told), tmp_path / "collected"
    node = Node(tmp_path, collector, LATER[0])

    async def play() -> None:
        watching = asyncio.create_task(collector.run(Silence.connect))
        node.append("events", b"a\n")
        forwarding = asyncio.create_task(node.forward())
        await wait_for(lambda: has(target, f"events-rank0-{node.host}-7.jsonl", b"a\n"))
        detail = node.append("allocator", b"1111")
        for count in range(1, 4):
            spans = node.append("spans", b"22")
            await wait_for(partial(has, target, spans, b"22" * count))
        assert not (target / detail).exists()

        want_nodes(target, [node.host])
        await wait_for(lambda: has(target, detail, b"1111"))
        node.append("allocator", b"33")
        await wait_for(lambda: has(target, detail, b"111133"))

        (target / "wanted-nodes.json").unlink()
        await wait_for(lambda: node.host not in collector.detailed)
        await asyncio.sleep(0.1)
        node.append("allocator", b"4")
        spans = node.append("spans", b"5")
        await wait_for(lambda: has(target, spans, b"2222225"))
        assert has(target, detail, b"111133")

        node.has_ended = True
        assert await forwarding
        assert has(target, detail, b"1111334")
        watching.cancel()

    asyncio.run(play())
    for name in {name for name, _, _ in node.sent}:
        end = 0
        for _, offset, length in (one for one in node.sent if one[0] == name):
            assert offset == end, "nothing twice, and nothing left out"
            end += length
    assert sum("after the first 1 send" in sentence for sentence in told) == 1


def test_at_the_end_nodes_send_the_rest_in_turns(tmp_path: Path) -> None:
    collector, target = make_collector(tmp_path, []), tmp_path / "collected"
    nodes = [Node(tmp_path, collector, host) for host in LATER]
    names = [node.append("allocator", b"1" * (2 * messages.MAX_DATA_BYTES)) for node in nodes]
    most = 0

    async def play() -> None:
        nonlocal most
        watching = asyncio.create_task(collector.run(Silence.connect))
        for node in nodes:
            node.has_ended = True
        forwarding = asyncio.gather(*(node.forward() for node in nodes))
        while not forwarding.done():
            most = max(most, len(collector.detailed - {FIRST}))
            await asyncio.sleep(0)
        assert all(await forwarding)
        watching.cancel()

    asyncio.run(play())
    assert most == 1
    assert all((target / name).stat().st_size == 2 * messages.MAX_DATA_BYTES for name in names)


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "7", '{"node1": "x"}', '{"node1": null}', '{"node1": NaN}', '{"node1": 1e300}', "[" * 100_000]
)
def test_damaged_wishes_ask_no_node(tmp_path: Path, text: str) -> None:
    collector, target = make_collector(tmp_path, []), tmp_path / "collected"
    (target / "wanted-nodes.json").write_text(text)
    assert not read_wanted_nodes(target)
    collector.choose_detailed()
    assert collector.detailed == {FIRST}


def test_wishes_end_and_unknown_nodes_are_not_asked(tmp_path: Path) -> None:
    collector, target = make_collector(tmp_path, []), tmp_path / "collected"
    collector._known |= dict.fromkeys(LATER, "")
    want_nodes(target, ["elsewhere", *LATER])
    collector.choose_detailed()
    assert collector.detailed == {FIRST, LATER[0]}, "as many as send full detail without being asked"
    (target / "wanted-nodes.json").write_text(json.dumps({LATER[0]: time.time() - 1}))
    collector.choose_detailed()
    assert collector.detailed == {FIRST}


@pytest.mark.parametrize("name", ["cpu-straggler", "cpu-hang", "z2", "x4-z3"])
def test_what_is_not_sent_yet_makes_no_finding(name: str, tmp_path: Path) -> None:
    folder = unpack_to_folder(name, tmp_path)

    def find() -> set[tuple[str, tuple[int, ...]]]:
        return {(one.name, one.ranks) for one in open_searched(Recording.open(folder)).findings_at(None)}

    expected = find()
    for path in folder.iterdir():
        if path.suffix == ".rec" and not messages.is_reduced_file(path.name):
            path.unlink()
    assert find() <= expected


def test_the_screen_wants_nodes_of_the_chosen_rank_and_of_findings() -> None:
    source = open_searched("x4-z3")
    hosts = {table.host for table in source.recording.sources["spans"]}
    found = source.findings_at(None)

    def find(findings: tuple[Finding, ...], chosen: int | None) -> list[str]:
        return find_wanted_nodes(source.recording, source.end_ns, findings, chosen)

    assert find(found, None) == find((), 2) == [*hosts]
    assert find((), None) == find((), 99) == []
    assert not find((replace(found[0], known_ns=source.end_ns - 601_000_000_000),), None)


def test_without_a_screen_whoever_is_notified_of_findings_wants_their_nodes(tmp_path: Path) -> None:
    """A publisher searches for findings all the time, so that asking for detail costs nothing more."""
    source = open_searched("x4-z3")
    (host,) = {table.host for table in source.recording.sources["spans"]}
    source.recording.path = tmp_path
    publisher.want_detail(source)
    assert not read_wanted_nodes(tmp_path), "all nodes send full detail"
    (tmp_path / NODES_FILE).write_text("{}")
    publisher.want_detail(source)
    assert [*read_wanted_nodes(tmp_path)] == [host]

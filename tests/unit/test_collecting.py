"""Collecting the recordings of nodes: every change of a file arrives, whatever breaks meanwhile, and nothing else does."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from free_ports import find_free_port
from zerotop.commands.common import node_orders
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.node_orders import (
    DETACH,
    NODES_FILE,
    await_answers,
    count_stops,
    order_nodes,
    order_stop,
    read_order,
)
from zerotop.commands.nodes import collector as collecting
from zerotop.commands.nodes import forwarder, joining, messages
from zerotop.commands.nodes.clocks import Alignment
from zerotop.commands.nodes.collected_folder import NodeFiles, OutOfStep
from zerotop.commands.nodes.collector import Collector, prepare_folder
from zerotop.commands.nodes.forwarder import Forwarder
from zerotop.commands.nodes.link import Link, LinkError, connect_nats
from zerotop.commands.nodes.local_job import LocalJob
from zerotop.commands.nodes.messages import BadMessage, FileChange, JobKey
from zerotop.commands.nodes.sent_files import SentFiles
from zerotop.recording.reader import Recording
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording import clock, directory, events, segments
from zerotop_probe.recording.tables import FORMAT_MAJOR
from zerotop_probe.recording.writer import EventWriter, Identity

KEY = JobKey("llama", "a token that nobody guesses")
HOST = "node1"
SPANS, EVENTS, COARSE = (f"spans-rank0-{HOST}-7.rec", f"events-node-{HOST}-7.jsonl", f"gpus-node-{HOST}-7.coarse.rec")


class WrongAnswers:
    """A link without a network; ``breaks`` are the numbers of requests that are lost, before or after they were handled."""

    def __init__(self, collector: Collector, breaks: dict[int, bool] | None = None) -> None:
        self.collector, self.breaks, self.count = collector, breaks or {}, 0

    async def request(self, message: bytes, timeout_s: float) -> bytes:
        self.count += 1
        is_handled = self.breaks.get(self.count, True)
        answer = await self.collector.handle(message) if is_handled else b""
        if self.count in self.breaks:
            raise LinkError("cut")
        return answer

    async def answer_requests(self, handle: Callable[[bytes], Any]) -> None:
        raise AssertionError

    async def close(self) -> None:
        pass


class EndedJob(LocalJob):
    """A job that has ended; counts how often it was asked to stop."""

    stops = 0

    def __init__(self) -> None:
        super().__init__(Path("recording"))

    def is_over(self) -> bool:
        return True

    def stop(self) -> None:
        self.stops += 1

    def carry_out(self, order: Mapping[str, Any]) -> tuple[list[str], bool]:
        raise ValueError(f"{order['action']} is not for this job")


class ObedientJob(EndedJob):
    """A job that ends with its last order; remembers which it has carried out."""

    def __init__(self, orders: int = 0) -> None:
        super().__init__()
        self.carried_out: list[Mapping[str, Any]] = []
        self.orders = orders

    def is_over(self) -> bool:
        return self.stops + len(self.carried_out) >= self.orders

    def carry_out(self, order: Mapping[str, Any]) -> tuple[list[str], bool]:
        self.carried_out.append(order)
        return ["Done."], True


def make_source(folder: Path) -> Path:
    source = folder / "source"
    directory.create_recording(["python", "train.py"], path=str(source))
    return source


def make_collector(folder: Path, tell: Callable[[str], None] = lambda _: None, **options: Any) -> Collector:
    target = str(folder / "collected")
    os.close(prepare_folder(target, KEY.job))
    return Collector(target, KEY, tell=tell, **options)


def read_files(folder: Path) -> dict[str, bytes]:
    own = ("session.json", NODES_FILE)
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name not in own and "-control-" not in path.name
    }


def forward(source: Path, link: WrongAnswers, **options: Any) -> tuple[bool, list[str]]:
    told: list[str] = []

    async def connect() -> Link:
        return link

    chosen: dict[str, Any] = {"patience_s": 0.0, "job": EndedJob()} | options
    host = chosen.pop("host", HOST)
    sender = Forwarder(str(source), host, KEY, connect, tell=told.append, **chosen)
    return asyncio.run(sender.run()), told


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "_RETRY_S", 0.0)
    monkeypatch.setattr(forwarder, "_LOOK_S", -1.0)


# What happens to a file: (kind, which file, number).
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("append", "append", "cut", "rewrite", "replace", "delete", "scan", "scan", "restart", "collector")),
        st.sampled_from((SPANS, EVENTS, COARSE)),
        st.integers(0, 9000),
    ),
    max_size=25,
)


class Growing:
    """A folder, and both sides of a connection over which every request goes twice."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = folder / "source", folder / "target"
        self.source.mkdir()
        self.target.mkdir()
        self.sent, self.files = SentFiles(str(self.source), HOST), NodeFiles(str(self.target), HOST, 1 << 40)
        self.begin()

    def begin(self) -> None:
        self.files.begin()
        listed: list[tuple[str, int, str]] = []
        while page := self.files.list_page(listed[-1][0] if listed else ""):
            listed += page
        self.sent.begin(listed)

    def scan(self) -> None:
        for batch in self.sent.find_changes():
            header = json.loads(json.dumps({"changes": [change for change, _ in batch]}))
            changes = messages.parse_changes(header, b"".join(data for _, data in batch), HOST)
            for _ in range(2):
                self.files.apply(changes)

    def take_step(self, kind: str, name: str, number: int) -> None:
        path, content = self.source / name, os.urandom(number)
        if kind == "append":
            with path.open("ab") as file:
                file.write(content)
        elif kind == "cut" and path.exists():
            os.truncate(path, min(number, path.stat().st_size))
        elif kind == "rewrite":
            path.write_bytes(content)
        elif kind == "replace":
            path.with_suffix(".partial").write_bytes(content)
            path.with_suffix(".partial").rename(path)
        elif kind == "delete":
            path.unlink(missing_ok=True)
        elif kind == "scan":
            self.scan()
        elif kind == "restart":
            self.sent = SentFiles(str(self.source), HOST)
            self.begin()
        elif kind == "collector":
            self.files = NodeFiles(str(self.target), HOST, 1 << 40)
            self.begin()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
def test_cut_replaced_and_deleted_files_arrive(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    both = Growing(tmp_path_factory.mktemp("growing"))
    for step in steps:
        both.take_step(*step)
    both.scan()
    assert read_files(both.target) == read_files(both.source)


def test_a_table_is_never_there_with_a_gap(tmp_path: Path) -> None:
    """A reader would take the later records for those that are still missing, and stop when these come."""
    stem = SPANS.removesuffix(".rec")
    first, second, third = (segments.make_name(stem, number) for number in range(3))
    sent = SentFiles(str(tmp_path), HOST)

    def send() -> list[tuple[str, bytes]]:
        return [(change.name, data) for batch in sent.find_changes() for change, data in batch if data]

    (tmp_path / first).write_bytes(b"begin")
    assert send() == [(first, b"begin")]
    (tmp_path / first).write_bytes(b"begin, end")
    (tmp_path / second).write_bytes(b"goes on")
    assert send() == [(first, b", end"), (second, b"goes on")]
    (tmp_path / second).write_bytes(b"goes on, end")
    (tmp_path / third).write_bytes(b"goes on")
    assert send() == [(second, b", end"), (third, b"goes on")]
    assert send() == []


def test_long_files_take_many_messages(tmp_path: Path) -> None:
    both = Growing(tmp_path)
    both.take_step("append", SPANS, 3_000_000)
    both.scan()
    both.take_step("replace", SPANS, 2_000_000)
    both.take_step("append", EVENTS, 700_000)
    both.scan()
    assert read_files(both.target) == read_files(both.source)


def test_a_replacement_shows_only_when_it_is_complete(tmp_path: Path) -> None:
    files = NodeFiles(str(tmp_path), HOST, 1 << 40)
    files.apply([(FileChange(SPANS, 0, 0, 3, 3), b"old")])
    files.apply([(FileChange(SPANS, 1, 0, 2, 4), b"ne")])
    assert (tmp_path / SPANS).read_bytes() == b"old"
    files.apply([(FileChange(SPANS, 1, 2, 2, 4), b"w!")])
    assert read_files(tmp_path) == {SPANS: b"new!"}


@pytest.mark.parametrize("is_handled", [True, False])
@pytest.mark.parametrize("number", range(1, 16))
def test_a_request_that_is_lost_is_repeated(tmp_path: Path, number: int, is_handled: bool) -> None:
    source = make_source(tmp_path)
    (source / SPANS).write_bytes(os.urandom(1_500_000))
    (source / EVENTS).write_bytes(b"{}\n")
    link = WrongAnswers(make_collector(tmp_path), {number: is_handled})
    done, told = forward(source, link, patience_s=60.0)
    assert done
    assert [text for text in told if text.startswith("cut")]
    assert read_files(tmp_path / "collected") == read_files(source)


def test_records_that_the_collector_has_are_not_sent_again(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    (source / SPANS).write_bytes(os.urandom(5_000_000))
    first = WrongAnswers(make_collector(tmp_path))
    assert forward(source, first)[0]
    again = WrongAnswers(make_collector(tmp_path))
    assert forward(source, again)[0]
    assert first.count > again.count
    assert again.count - forwarder._ROUND_TRIPS <= 8


def test_the_collected_recording_names_no_process_here(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    assert forward(source, WrongAnswers(make_collector(tmp_path)))[0]
    info = directory.read_recording_info(str(tmp_path / "collected"))
    assert info[directory.COLLECTED] == ["llama", ""]
    assert info["command"] == ["python", "train.py"]
    facts = job_control.read_facts(str(tmp_path / "collected"))
    assert facts.job is None
    assert not facts.samplers
    with pytest.raises(job_control.JobUnreachable, match="stop it there"):
        job_control.request_stop(str(tmp_path / "collected"))


@pytest.mark.parametrize("host", ["..", "../up", "a/b", "node-1", "", "x" * 65, "node1\n", 7, None, ["node1"]])
def test_other_names_of_nodes_are_refused(tmp_path: Path, host: Any) -> None:
    told: list[str] = []
    collector = make_collector(tmp_path, told.append)
    info = directory.read_recording_info(str(make_source(tmp_path)))
    before = sorted(tmp_path.rglob("*"))
    hello = {"kind": "hello", "host": host, "session": "1", "format": [FORMAT_MAJOR, 0], "info": info}
    assert KEY.open(asyncio.run(collector.handle(KEY.seal(hello))))[0]["kind"] == "refused"
    assert told == ["Refused: a message has no valid name of a node."]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "name",
    [
        "../spans-rank0-node1-7.rec",
        "/tmp/spans-rank0-node1-7.rec",
        "spans-rank0-node1-7.rec/..",
        "spans-rank0-node2-7.rec",
        "session.json",
        "nodes.json",
        "microscope.json",
        "spans-rank0-node1-7.pickle",
        "events-node-node1-7.jsonl\n",
        "shells-rank0-node1-7.rec",
        "",
    ],
)
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadMessage, match=r"is not the name of a recording's file of node node1"):
        messages.parse_changes({"changes": [[name, 0, 0, 1, 1]]}, b"x", HOST)


@pytest.mark.parametrize(
    "change",
    [
        [SPANS, 0, -1, 1, 1],
        [SPANS, 0, 0, 2, 2],
        [SPANS, -1, 0, 1, 1],
        [SPANS, 0, 0, True, 1],
        [SPANS, 0, 0.0, 1, 1],
        [SPANS, 0, 1 << 61, 1, 1],
        [SPANS, 0, 0, 1],
        [7, 0, 0, 1, 1],
        None,
    ],
)
def test_impossible_changes_are_refused(change: Any) -> None:
    with pytest.raises(BadMessage):
        messages.parse_changes({"changes": [change]}, b"x", HOST)


def test_too_many_changes_are_refused() -> None:
    with pytest.raises(BadMessage):
        messages.parse_changes({"changes": [[SPANS, 0, 0, 0, 0]] * (messages.MAX_CHANGES + 1)}, b"", HOST)


@pytest.mark.parametrize("other", [JobKey("llama", "another token, as long"), JobKey("lama", KEY.token)])
def test_another_token_or_job_reads_and_writes_nothing(tmp_path: Path, other: JobKey) -> None:
    told: list[str] = []
    collector = make_collector(tmp_path, told.append)
    info = directory.read_recording_info(str(make_source(tmp_path)))
    hello = {"kind": "hello", "host": HOST, "session": "1", "format": [1, 0], "info": info}
    answer = asyncio.run(collector.handle(other.seal(hello)))
    assert os.listdir(tmp_path / "collected") == []
    assert told == ["Refused: a message was sent with another ZEROTOP_TOKEN or for another job."]
    with pytest.raises(BadMessage):
        other.open(answer)


@pytest.mark.parametrize("place", [0, 31, 32, 35, 40, -1])
def test_a_changed_message_is_refused(place: int) -> None:
    message = bytearray(KEY.seal({"kind": "ping"}, b"data"))
    message[place] ^= 1
    with pytest.raises(BadMessage):
        KEY.open(bytes(message))


def test_larger_messages_and_recordings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadMessage, match="larger"):
        KEY.open(KEY.seal({}, bytes(1 << 20)))
    source = make_source(tmp_path)
    (source / SPANS).write_bytes(bytes(3_000_000))
    done, told = forward(source, WrongAnswers(make_collector(tmp_path, max_bytes=1_000_000)))
    assert not done
    assert (
        "the collector refuses: the recording of node node1 is larger than 1 MB: collect with a larger --max-size" in told[0]
    )
    assert sum(map(len, read_files(tmp_path / "collected").values())) < 1_000_000


def test_links_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    (source / SPANS).write_bytes(b"records")
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    collector = make_collector(tmp_path)
    (tmp_path / "collected" / SPANS).symlink_to(victim)
    forward(source, WrongAnswers(collector))
    assert victim.read_bytes() == b"mine"


def test_beside_this_nodes_recording_others_name_no_process_here(tmp_path: Path) -> None:
    """Not even if their files say that this node has written them; and nobody else has this node's name."""
    own = make_source(tmp_path / "own")
    collector = Collector(str(own), KEY, tell=lambda _: None, is_beside=True)
    source, here = make_source(tmp_path), Identity.for_this_process("node")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = clock.read_process_start(child.pid)
        writer = EventWriter(str(source), here._replace(pid=child.pid, start=start))
        writer.write(time.monotonic_ns(), events.JobStarted, pid=child.pid, start=start, command=[])
        writer.close()
        (path,) = source.glob("events-*.jsonl")
        path.rename(source / f"events-node-{HOST}-7.jsonl")
        assert forward(source, WrongAnswers(collector)) == (True, [])
        assert (own / f"events-node-{HOST}-7.jsonl").exists()
        facts = job_control.read_facts(str(own))
        assert (facts.job, facts.samplers) == (None, [])
        is_complete, told = forward(source, WrongAnswers(collector), host=here.host)
        assert not is_complete
        assert f"{here.host} is the name of the node that collects" in told[0]
    finally:
        child.communicate(b"\n", timeout=20)


def test_a_second_recording_of_a_node_is_refused(tmp_path: Path) -> None:
    first = make_source(tmp_path)
    (first / SPANS).write_bytes(b"records")
    collector = make_collector(tmp_path)
    assert forward(first, WrongAnswers(collector))[0]
    second = tmp_path / "second"
    directory.create_recording(["python", "train.py"], path=str(second))
    done, told = forward(second, WrongAnswers(collector))
    assert not done
    assert "job llama already has a recording of node node1: start another run with another --job" in told[0]
    assert read_files(tmp_path / "collected") == {SPANS: b"records"}


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path)
    (source / SPANS).write_bytes(os.urandom(600_000))
    write, failures = os.pwrite, iter(range(3))

    def fill(descriptor: int, data: bytes, offset: int) -> int:
        if next(failures, None) is not None:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) // 2 + 1], offset)

    monkeypatch.setattr(os, "pwrite", fill)
    done, told = forward(source, WrongAnswers(make_collector(tmp_path)), patience_s=60.0)
    assert done
    assert "nothing can be written to" in told[0]
    assert read_files(tmp_path / "collected") == read_files(source)


def test_one_machine_loads_nothing_of_this() -> None:
    code = "import sys, zerotop.command_line, zerotop.commands.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [name for name in done.stdout.split() if name.startswith(("nats", "asyncio", "zerotop.commands.nodes"))]
    assert loaded == []


def test_without_the_client_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nats", None)
    monkeypatch.setenv(messages.TOKEN_VARIABLE, KEY.token)
    with pytest.raises(Problem, match=r"^NATS needs its client: pip install 'zerotop\[nodes\]'$"):
        joining.check_options(argparse.Namespace(collector="nats://head:4222", job="llama"))


@pytest.mark.parametrize(
    ("collector", "job", "token", "sentence"),
    [
        ("http://head", "llama", KEY.token, "http://head is not the address of a NATS server"),
        ("nats://me:secret@", "llama", KEY.token, "nats:// is not the address of a NATS server"),
        ("nats://head:port", "llama", KEY.token, "is not the address of a NATS server"),
        ("tls://head:4222#bm9uc2Vuc2U=", "llama", KEY.token, "tls://head:4222 is not the address of a NATS server"),
        ("tls://head:4222#x", "llama", KEY.token, "tls://head:4222 is not the address of a NATS server"),
        ("nats://head", "", KEY.token, "Name the job, the same on all nodes: --job NAME"),
        ("nats://head", "a/b", KEY.token, "a/b is not a job's name"),
        ("nats://head", "llama.*", KEY.token, "is not a job's name"),
        ("nats://head", "llama", "short", "ZEROTOP_TOKEN must have one secret of at least 16 characters"),
        (None, "llama", KEY.token, "Give the address of a NATS server"),
    ],
)
def test_wrong_options_are_refused(
    monkeypatch: pytest.MonkeyPatch, collector: str | None, job: str, token: str, sentence: str
) -> None:
    monkeypatch.setenv(messages.TOKEN_VARIABLE, token)
    with pytest.raises(Problem, match=re.escape(sentence)):
        joining.check_options(argparse.Namespace(collector=collector, job=job))


def test_another_recordings_folder_is_left_alone(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    with pytest.raises(Problem, match="is the recording of something else"):
        prepare_folder(str(source), KEY.job)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(Problem, match="is not empty"):
        prepare_folder(str(tmp_path / "full"), KEY.job)


def test_a_folder_has_one_collector(tmp_path: Path) -> None:
    lock = prepare_folder(str(tmp_path / "collected"), KEY.job)
    with pytest.raises(Problem, match="Another zerotop collects to"):
        prepare_folder(str(tmp_path / "collected"), KEY.job)
    os.close(lock)


def test_other_bytes_at_the_same_place_are_not_taken(tmp_path: Path) -> None:
    files = NodeFiles(str(tmp_path), HOST, 1 << 40)
    files.apply([(FileChange(SPANS, 0, 0, 4, 4), b"abcd")])
    with pytest.raises(OutOfStep):
        files.apply([(FileChange(SPANS, 0, 2, 4, 6), b"xxef")])
    with pytest.raises(OutOfStep):
        files.apply([(FileChange(SPANS, 0, 5, 1, 6), b"f")])
    assert read_files(tmp_path) == {SPANS: b"abcd"}


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    files = NodeFiles(str(tmp_path), HOST, 1 << 40)
    (tmp_path / "victim").write_bytes(b"")
    (tmp_path / SPANS).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        files.apply([(FileChange(SPANS, 0, 0, 4, 4), b"abcd")])
    assert (tmp_path / "victim").read_bytes() == b""


class Asking:
    """Requests of a node, one by one."""

    def __init__(self, folder: Path, tell: Callable[[str], None] = lambda _: None) -> None:
        self.collector = make_collector(folder, tell)
        self.info = directory.read_recording_info(str(make_source(folder)))

    def say_hello(self, session: str) -> str:
        return self.ask({"kind": "hello", "session": session, "format": [FORMAT_MAJOR, 0], "info": self.info})

    def write(self, session: str, number: int, change: list[object], data: bytes) -> str:
        return self.ask({"kind": "write", "session": session, "number": number, "changes": [change]}, data)

    def ask(self, header: dict[str, object], data: bytes = b"") -> str:
        answer, _ = KEY.open(asyncio.run(self.collector.handle(KEY.seal({"host": HOST, **header}, data))))
        return str(answer["kind"])


class NoCollector(WrongAnswers):
    """The collector's own connection, on which requests have no answer."""

    async def request(self, message: bytes, timeout_s: float) -> bytes:
        raise LinkError("no collector")


def time_loss(folder: Path, link_kind: type[NoCollector], seconds: float) -> float:
    """Return how long after its first message a node is reported as silent by a collector that runs for some seconds."""
    told: list[tuple[float, str]] = []
    asking = Asking(folder, lambda text: told.append((time.monotonic(), text)))
    link = link_kind(asking.collector)

    async def connect() -> Link:
        return link

    begin = time.monotonic()
    asking.say_hello("first")
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(asking.collector.run(connect), seconds))
    (lost,) = [passed for passed, text in told if "silent" in text]
    return lost - begin


def test_a_late_copy_of_a_message_changes_nothing(tmp_path: Path) -> None:
    node = Asking(tmp_path)
    assert node.say_hello("1") == "ok"
    assert node.write("1", 1, [SPANS, 0, 0, 3, 3], b"old") == "ok"
    assert node.write("1", 2, [SPANS, 0, 0, 0, -1], b"") == "ok"
    assert node.write("1", 1, [SPANS, 0, 0, 3, 3], b"old") == "ok"
    assert read_files(tmp_path / "collected") == {}


def test_nodes_that_wait_for_a_lost_answer_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is under way when the collector's connection breaks is sent again only after ANSWER_S."""
    for name, seconds in {"LOST_S": 0.2, "_POLL_S": 0.02, "_RETRY_S": 0.02, "ANSWER_S": 0.6}.items():
        monkeypatch.setattr(collecting, name, seconds)

    class Breaking(NoCollector):
        async def answer_requests(self, handle: Callable[[bytes], Any]) -> None:
            self.count += 1
            await asyncio.sleep(0.05 if self.count == 1 else 10.0)
            raise LinkError("cut")

    assert time_loss(tmp_path, Breaking, 1.5) > 0.8


def test_a_collector_that_gets_little_of_a_processor_tells_lost_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time in which it stood still does not count as silence, but what it heard before and after adds up."""
    for name, seconds in {"LOST_S": 0.3, "_POLL_S": 0.02, "_RETRY_S": 0.02, "ANSWER_S": 0.0}.items():
        monkeypatch.setattr(collecting, name, seconds)

    class Quiet(NoCollector):
        async def answer_requests(self, handle: Callable[[bytes], Any]) -> None:
            while True:
                await asyncio.sleep(0.1)
                time.sleep(0.1)

    assert 0.4 < time_loss(tmp_path, Quiet, 2.0) < 1.5, "half of the time it stood still"


def test_a_list_that_takes_long_is_asked_for_again_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "_LIST_S", 0.05)
    made: list[str] = []
    list_page = NodeFiles.list_page

    def list_slowly(files: NodeFiles, after: str) -> list[tuple[str, int, str]]:
        made.append(after)
        time.sleep(0.3)
        return list_page(files, after)

    monkeypatch.setattr(NodeFiles, "list_page", list_slowly)
    source = make_source(tmp_path)
    (source / SPANS).write_bytes(b"spans")
    link = WrongAnswers(make_collector(tmp_path))
    assert forward(source, link)[0]
    assert made == ["", "", SPANS]  # at the begin, and both pages once more at the end
    assert link.count > 10 + forwarder._ROUND_TRIPS, "it was asked for again and again, so that the node was heard"


def test_an_earlier_session_writes_nothing(tmp_path: Path) -> None:
    node = Asking(tmp_path)
    assert node.write("1", 1, [SPANS, 0, 0, 3, 3], b"old") == "unknown"
    assert node.say_hello("1") == "ok"
    assert node.say_hello("2") == "ok"
    assert node.write("1", 1, [SPANS, 0, 0, 3, 3], b"old") == "unknown"
    assert read_files(tmp_path / "collected") == {}


def test_another_format_is_refused(tmp_path: Path) -> None:
    node = Asking(tmp_path)
    assert node.ask({"kind": "hello", "session": "1", "format": [FORMAT_MAJOR + 1, 0], "info": node.info}) == "refused"
    assert os.listdir(tmp_path / "collected") == []


def test_an_answer_to_another_question_is_not_believed(tmp_path: Path) -> None:
    """Who replays an earlier answer could claim that everything has come."""
    source = make_source(tmp_path)
    (source / SPANS).write_bytes(b"records")

    class Replaying(WrongAnswers):
        first = b""

        async def request(self, message: bytes, timeout_s: float) -> bytes:
            self.first = self.first or await super().request(message, timeout_s)
            return self.first

    done, told = forward(source, Replaying(make_collector(tmp_path)))
    assert not done
    assert told[0].startswith("the collector answered another question")


def make_boot(folder: Path, number: int, ahead_ns: int) -> Path:
    """Return the recording of a node of its own boot, whose wall clock is ahead."""
    source = folder / f"source{number}"
    directory.create_recording(["python", "train.py"], path=str(source))
    host, boot = f"node{number}", f"boot{number}"
    info = json.loads((source / "session.json").read_text())
    pair = {**info["clock"], "unix_ns": info["clock"]["unix_ns"] + ahead_ns}
    (source / "session.json").write_text(json.dumps(info | {"host": host, "boot": boot, "clock": pair}))
    writer = EventWriter(str(source), Identity("node", -1, host, 7, 1, boot), clock=pair)
    writer.write(time.monotonic_ns(), events.JobStarted, pid=7, start=1, command=[])
    writer.close()
    return source


@pytest.mark.parametrize("is_live", [True, False])
def test_clocks_are_aligned_to_within_a_millisecond(tmp_path: Path, is_live: bool) -> None:
    told: list[str] = []
    collector, recording = make_collector(tmp_path, told.append), None
    for number, ahead_ns in ((1, 90 * 10**9), (2, -3600 * 10**9)):
        source = make_boot(tmp_path, number, ahead_ns)
        assert forward(source, WrongAnswers(collector), host=f"node{number}")[0]
        if is_live and recording is None:
            recording = Recording.open(tmp_path / "collected")
    recording = recording or Recording.open(tmp_path / "collected")
    recording.refresh()
    assert told[0].startswith("Node node1 takes part; its clock, 90000.")
    assert " ms ahead, is aligned to ours to within 0." in told[0]
    times = {event.writer.host: event.unix_ns for event in recording.events_of(events.JobStarted)}
    for host in ("node1", "node2"):
        true_ns = read_true_time(tmp_path / "collected", host)
        assert abs(times[host] - true_ns) < 1_000_000


@pytest.mark.parametrize("slow_count", [80, 1000])
def test_a_clock_is_aligned_once_the_collector_is_less_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_count: int
) -> None:
    class Busy(WrongAnswers):
        async def request(self, message: bytes, timeout_s: float) -> bytes:
            time.sleep(0.002 if self.count < slow_count else 0.0)
            answer = await super().request(message, timeout_s)
            time.sleep(0.002 if self.count < slow_count else 0.0)
            return answer

    monkeypatch.setattr(forwarder, "_BUSY_PAUSE_S", 0.0)
    told: list[str] = []
    assert forward(make_boot(tmp_path, 1, 0), Busy(make_collector(tmp_path, told.append)))[0]
    within_ms = float(told[0].partition("is aligned to ours to within ")[2].partition(" ms")[0])
    assert (within_ms < 1.5) is (slow_count == 80), "the true error, if it stays busy"


def read_true_time(folder: Path, host: str) -> int:
    """Return when a node's job started: it has our own monotonic clock."""
    line = json.loads((folder / f"events-node-{host}-7.jsonl").read_text().splitlines()[1])
    pair = clock.read_clock_pair()
    return int(line["time_ns"]) - pair["monotonic_ns"] + pair["unix_ns"]


def test_trying_again_reads_the_machines_authorities_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 23 ms of a processor, and a node whose server is not there tries twice a second."""
    pytest.importorskip("nats")
    made: list[object] = []
    create = ssl.create_default_context

    def count() -> ssl.SSLContext:
        made.append(create())
        return create()

    monkeypatch.setattr(ssl, "create_default_context", count)
    url = f"nats://127.0.0.1:{find_free_port()}"

    async def connect() -> None:
        with pytest.raises(LinkError):
            await connect_nats(url, KEY)

    for name, times in (("a", 2), ("b", 1)):
        monkeypatch.setenv("SSL_CERT_DIR", f"/nowhere/{name}{os.getpid()}")
        for _ in range(times):
            asyncio.run(connect())
    assert len(made) == 2, "and again for other authorities"


@given(st.integers(-400, 400), st.lists(st.tuples(*[st.integers(0, 50_000_000)] * 3), min_size=2, max_size=20))
def test_round_trips_leave_what_all_of_them_allow(ppm: int, trips: list[tuple[int, int, int]]) -> None:
    found, now_ns, ahead_ns = None, 1 << 40, 1 << 60
    for pause_ns, there_ns, back_ns in trips:
        asked_ns = now_ns + pause_ns
        read_ns, now_ns = asked_ns + there_ns, asked_ns + there_ns + back_ns
        unix_ns = read_ns + ahead_ns + read_ns * ppm // 1_000_000
        trip = Alignment.from_round_trip(asked_ns, now_ns, unix_ns)
        found = trip if found is None else found.narrow(trip)
        assert found.error_ns <= trip.error_ns + 1
        true_ns = found.monotonic_ns + ahead_ns + found.monotonic_ns * ppm // 1_000_000
        # Half of a round trip is taken for whole nanoseconds, and the clock drifts within one.
        assert abs(found.unix_ns - true_ns) <= found.error_ns + there_ns // 1000 + back_ns // 1000 + 2


def test_a_quick_question_and_a_quick_answer_align_a_clock_better_than_either() -> None:
    slow_back = Alignment.from_round_trip(1_000_000, 1_010_000, 1_001_000)
    slow_there = Alignment.from_round_trip(1_010_000, 1_020_000, 1_019_000)
    found = slow_back.narrow(slow_there)
    assert abs(found.unix_ns - found.monotonic_ns) < 10, "it is not off at all"
    assert found.error_ns < 1_010 < min(slow_back.error_ns, slow_there.error_ns)


def test_a_clock_that_was_set_between_round_trips_is_aligned_anew() -> None:
    before, later = Alignment(1_000, 5_000_000, 100), Alignment(2_000, 9_000_000, 300)
    assert before.narrow(later) == later


@pytest.mark.parametrize("value", [None, [1, 2], [1, 2, -3], [1, 2.0, 3], [1 << 63, 1, 1], "123"])
def test_an_impossible_alignment_is_left_out(value: Any) -> None:
    assert Alignment.parse(value) is None


def test_nodes_obey_orders_to_stop_once(tmp_path: Path) -> None:
    job = EndedJob()
    collector = make_collector(tmp_path)
    folder = tmp_path / "collected"

    class Ordering(WrongAnswers):
        async def request(self, message: bytes, timeout_s: float) -> bytes:
            if self.count == 11:
                order_stop(folder)
                collector._stops = count_stops(folder)
            return await super().request(message, timeout_s)

    assert forward(make_source(tmp_path), Ordering(collector), job=job)[0]
    assert job.stops == 1
    assert forward(make_source(tmp_path / "later"), WrongAnswers(collector), host="node2", job=job)[0]
    assert job.stops == 1, "an earlier order is not for a node that comes later"


class OrderingLink(WrongAnswers):
    """A link that calls a function before each heartbeat."""

    def __init__(self, *collectors: Collector) -> None:
        super().__init__(collectors[0])
        self.collectors = collectors
        self.actions: Iterator[Callable[[], Any]] = iter(())

    async def request(self, message: bytes, timeout_s: float) -> bytes:
        if KEY.open(message)[0]["kind"] == messages.WRITE:
            next(self.actions, lambda: None)()
        for collector in self.collectors:
            collector.look_for_order()
        return await super().request(message, timeout_s)

    def move(self) -> None:
        self.collector = self.collectors[1]


@pytest.fixture
def _beating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "BEAT_S", 0.02)
    monkeypatch.setattr(forwarder, "PERIOD_S", 0.02)


@pytest.mark.usefixtures("_beating")
def test_an_older_order_of_another_recording_does_not_stop_the_job(tmp_path: Path) -> None:
    older, job = tmp_path / "older" / "collected", ObedientJob(1)
    make_collector(tmp_path / "older")
    order_stop(older)
    later = Collector(str(older), KEY, tell=lambda _: None)
    stops: list[int] = []

    def order() -> None:
        stops.append(job.stops)
        order_nodes(older, DETACH)

    link = OrderingLink(make_collector(tmp_path), later)
    link.actions = iter([lambda: None, link.move, lambda: None, order])
    assert forward(make_source(tmp_path), link, job=job, patience_s=30.0)[0]
    assert later.hosts == [HOST]
    assert stops == [0]


@pytest.mark.usefixtures("_beating")
def test_orders_of_a_new_recording_are_obeyed_though_the_last_one_had_more(tmp_path: Path) -> None:
    older, newer = tmp_path / "older" / "collected", tmp_path / "collected"
    later, job = make_collector(tmp_path), ObedientJob(2)
    link = OrderingLink(make_collector(tmp_path / "older"), later)

    def order_twice() -> None:
        order_nodes(older, DETACH)
        order_nodes(older, DETACH)

    link.actions = iter([order_twice, link.move, lambda: None, lambda: order_nodes(newer, DETACH)])
    assert forward(make_source(tmp_path), link, job=job, patience_s=30.0)[0]
    later.look_for_order()
    assert [order["number"] for order in job.carried_out] == [2, 1]
    assert await_answers(newer, 1) == ([f"{HOST}: Done."], True)


@pytest.mark.usefixtures("_beating")
def test_an_order_during_another_is_carried_out_afterwards(tmp_path: Path) -> None:
    class Slow(ObedientJob):
        def carry_out(self, order: Mapping[str, Any]) -> tuple[list[str], bool]:
            time.sleep(0.5)
            return super().carry_out(order)

    collector, job = make_collector(tmp_path), Slow(2)

    def order() -> None:
        order_nodes(tmp_path / "collected", DETACH)

    link = OrderingLink(collector)
    link.actions = iter([order, order])
    assert forward(make_source(tmp_path), link, job=job)[0]
    assert [order["number"] for order in job.carried_out] == [1, 2]


def order_during(folder: Path, collector: Collector, *, at: int = 11) -> WrongAnswers:
    """Return a connection during which an order is given."""

    class Ordering(WrongAnswers):
        async def request(self, message: bytes, timeout_s: float) -> bytes:
            if self.count == at:
                order_nodes(folder, DETACH)
            collector.look_for_order()
            return await super().request(message, timeout_s)

    return Ordering(collector)


def test_an_order_is_carried_out_once_and_answered_before_the_end(tmp_path: Path) -> None:
    carried_out: list[Any] = []

    class Slow(EndedJob):
        def carry_out(self, order: Mapping[str, Any]) -> tuple[list[str], bool]:
            time.sleep(0.5)
            carried_out.append(order)
            return ["Done\nhere."], True

    collector, folder = make_collector(tmp_path), tmp_path / "collected"
    assert forward(make_source(tmp_path), order_during(folder, collector), job=Slow())[0]
    collector.look_for_order()
    assert await_answers(folder, 1) == ([f"{HOST}: Done here."], True)
    assert carried_out == [{"number": 1, "action": DETACH}]
    assert forward(make_source(tmp_path / "later"), WrongAnswers(collector), host="node2", job=Slow())[0]
    assert len(carried_out) == 1, "an earlier order is not for a node that comes later"


def test_an_order_that_fails_is_a_sentence(tmp_path: Path) -> None:
    collector, folder = make_collector(tmp_path), tmp_path / "collected"
    assert forward(make_source(tmp_path), order_during(folder, collector))[0]
    collector.look_for_order()
    sentences, done = await_answers(folder, 1)
    assert not done
    assert sentences == [f"{HOST}: detach is not for this job."]


@pytest.mark.parametrize("order", [{"action": DETACH}, {"number": True}, {"number": "2"}, [], "detach", 7])
def test_an_impossible_order_is_not_obeyed(tmp_path: Path, order: Any) -> None:
    class Ordering(WrongAnswers):
        async def request(self, message: bytes, timeout_s: float) -> bytes:
            answer = KEY.open(await super().request(message, timeout_s))[0]
            return KEY.seal(answer | ({"order": order} if self.count > 11 else {}))

    job = ObedientJob()
    assert forward(make_source(tmp_path), Ordering(make_collector(tmp_path)), job=job)[0]
    assert not job.carried_out


def test_a_late_order_is_withdrawn_and_the_silent_node_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_orders, "_TAKEN_S", 0.2)
    folder = tmp_path / "collected"
    folder.mkdir()
    (folder / NODES_FILE).write_text('{"node7": "its recording"}')
    collector = make_collector(tmp_path)
    number = order_nodes(folder, DETACH)
    collector.look_for_order()
    sentences, done = await_answers(folder, number)
    assert (sentences, done) == (["node7 does not answer. It may have taken the order, and takes none this late."], False)


def test_without_a_collector_an_order_is_refused_and_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_orders, "_HEARD_S", 0.2)
    collector, folder = make_collector(tmp_path), tmp_path / "collected"
    first = order_nodes(folder, DETACH)
    with pytest.raises(Problem, match="nobody collects"):
        await_answers(folder, first)

    class Looking(WrongAnswers):
        async def request(self, message: bytes, timeout_s: float) -> bytes:
            if self.count >= 11:  # it stood still until now
                collector.look_for_order()
            return await super().request(message, timeout_s)

    job = ObedientJob()
    assert forward(make_source(tmp_path), Looking(collector), job=job)[0]
    assert not job.carried_out
    assert order_nodes(folder, DETACH) > first


def test_an_order_that_came_too_late_is_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(WrongAnswers):
        async def request(self, message: bytes, timeout_s: float) -> bytes:
            if self.count == 11:
                order_nodes(folder, DETACH)
            collector.look_for_order()
            answer = await super().request(message, timeout_s)
            if KEY.open(answer)[0].get("order"):
                await asyncio.sleep(0.2)
            return answer

    monkeypatch.setattr(forwarder, "WAY_S", 0.1)
    collector, folder, job = make_collector(tmp_path), tmp_path / "collected", ObedientJob()
    assert forward(make_source(tmp_path), Late(collector), job=job)[0]
    assert not job.carried_out
    assert read_order(folder)["number"] == 1


def test_an_order_with_another_token_is_not_obeyed(tmp_path: Path) -> None:
    class Forging(WrongAnswers):
        async def request(self, message: bytes, timeout_s: float) -> bytes:
            raw = await super().request(message, timeout_s)
            if self.count < 12:
                return raw
            answer = KEY.open(raw)[0] | {"order": {"number": 99, "action": DETACH}}
            return JobKey(KEY.job, "another token").seal(answer)

    job = ObedientJob()
    done, told = forward(make_source(tmp_path), Forging(make_collector(tmp_path)), job=job)
    assert not done
    assert not job.carried_out
    assert "is not valid" in told[0]

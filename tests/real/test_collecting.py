"""Recordings of several nodes become one through a real NATS server, whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import growing_recording
from agents import wait_for
from nats_servers import SERVER, TOKEN, NatsServer, make_certificate
from programs import ZEROTOP, make_environment
from terminals import Terminal
from zerotop.commands.common.live_recording import RunningRecording
from zerotop.commands.common.node_orders import NODES_FILE, ORDER_S
from zerotop.commands.nodes import link, messages
from zerotop.commands.nodes.collector import LOST_S
from zerotop.commands.nodes.link import LinkError, connect_nats, pin_certificate
from zerotop.commands.nodes.messages import JobKey
from zerotop.recording.reader import Recording
from zerotop_probe.inside.device.microscope import StepMicroscope
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import MICROSCOPE_FILE
from zerotop_probe.recording.writer import EventWriter, Identity

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not SERVER, reason="there is no program nats-server"),
]
JOB = ["--job", "llama"]


@pytest.fixture(scope="session", autouse=True)
def _own_operators() -> None:
    """No job here needs DeepSpeed's operators, which take minutes to compile."""


class Programs:
    """The programs of a test, all of which end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, host: str = "", **options: str) -> subprocess.Popen[bytes]:
        """Start zerotop; what it says is appended to ``said``."""
        environment = make_environment(self.folder, ZEROTOP_TOKEN=TOKEN) | options
        with (self.folder / "said").open("ab") as said:
            process = subprocess.Popen(on_host(host, [*ZEROTOP, *arguments]), env=environment, stdout=said, stderr=said)
        self._running.append(process)
        return process

    def grow(self, recording: Path, *arguments: str, host: str = "") -> subprocess.Popen[bytes]:
        """Start a made-up job."""
        command = on_host(host, [sys.executable, growing_recording.__file__, str(recording), *arguments])
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        self._running.append(process)
        return process

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def on_host(name: str, command: list[str]) -> list[str]:
    """Return the command as on a node of this name, "" for this machine's."""
    return ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh", *command] if name else command


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    found = Programs(tmp_path)
    yield found
    found.end()


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".rec", ".jsonl", ".log")}


def end_process(process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.wait(30)


def count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.rec")) if folder.is_dir() else 0


def disturb(source: Path) -> None:
    """Do to files what writers, folding and reopening do: cut, replace, delete."""
    begins, spans, allocator = (sorted(source.glob(f"{table}-rank*.rec")) for table in ("begins", "probe", "allocator"))
    begins[0].unlink()
    os.truncate(begins[1], begins[1].stat().st_size - 5)
    replacement = source / "replacement.partial"
    replacement.write_bytes(spans[0].read_bytes()[:5000] + b"folded")
    replacement.rename(spans[0])
    with allocator[0].open("r+b") as file:
        file.truncate(4096)
        file.write(b"begun again")


@pytest.mark.parametrize("victim", ["server", "forwarder", "collector", "disturbed"])
def test_nothing_is_lost_when_something_is_killed(programs: Programs, tmp_path: Path, victim: str) -> None:
    source, target = tmp_path / "source", tmp_path / "collected"
    job = programs.grow(source, "--ranks", "4", "--hertz", "20")
    with NatsServer(tmp_path) as server:
        collect = ["collect", server.url, *JOB, "--headless", "--recording", str(target)]
        forward = ["forward", str(source), "--collector", server.url, *JOB]
        collector, forwarder = programs.start(*collect), programs.start(*forward)
        wait_for(lambda: count_bytes(target) > 100_000)
        if victim == "server":
            server.kill()
            wait_for(lambda: Recording.open(target).events_of(events.NodeLost), 12)
            live = RunningRecording.open(target)
            assert [event.host for event in live.events_of(events.NodeLost)] == [None]
            assert live.is_live, "the job goes on, as far as anybody knows"
            before = count_bytes(target)
            server.start()
            wait_for(lambda: count_bytes(target) > before)
        elif victim == "forwarder":
            end_process(forwarder)
            disturb(source)
            time.sleep(1)
            forwarder = programs.start(*forward)
        elif victim == "collector":
            end_process(collector)
            disturb(source)
            time.sleep(1)
            collector = programs.start(*collect)
        else:
            disturb(source)
        time.sleep(2)
        end_process(job)
        assert forwarder.wait(60) == 0, programs.said
        assert collector.wait(60) == 0, programs.said
    # The forwarder's own words, of its last moments, need not have come.
    sent, come = (
        {name: data for name, data in read_files(folder).items() if "-control-" not in name} for folder in (source, target)
    )
    assert come == sent
    assert list(target.glob("*.partial")) == []
    recording = Recording.open(target)
    assert recording.sources["spans"]
    if victim == "server":
        assert [event.host for event in recording.events_of(events.NodeReturned)] == [None]


NODE_JOB = (
    "import sys, time\nfor step in range(int(sys.argv[1])):\n    print('step', step, flush=True)\n    time.sleep(0.1)\n"
)


def start_node(
    programs: Programs, name: str, server: NatsServer, steps: int, *more: str, code: str = NODE_JOB
) -> subprocess.Popen[bytes]:
    """Run a little job as on a node of this name."""
    script = programs.folder / "job.py"
    script.write_text(code)
    run = [*ZEROTOP, "run", "--headless", "--recording", str(programs.folder / name), "--collector", server.url, *JOB, *more]
    command = on_host(name, [*run, "--", sys.executable, str(script), str(steps)])
    with (programs.folder / "said").open("ab") as said:
        process = subprocess.Popen(
            command,
            env=make_environment(programs.folder, ZEROTOP_TOKEN=TOKEN),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    programs._running.append(process)
    return process


needs_hosts = pytest.mark.skipif(
    subprocess.run(["unshare", "--uts", "hostname", "x"], capture_output=True, check=False).returncode != 0,
    reason="this user may not give a process another host name",
)


@needs_hosts
def test_run_on_each_node_makes_one_recording(programs: Programs, tmp_path: Path) -> None:
    target = tmp_path / "zerotop" / "sessions" / "llama"
    with NatsServer(tmp_path) as server:
        collector = programs.start("collect", server.url, *JOB, "--headless")
        nodes = [start_node(programs, "nodea", server, 30), start_node(programs, "nodeb", server, 60)]
        wait_for(lambda: len(list(target.glob("events-node-*.jsonl"))) == 2)
        assert nodes[0].wait(60) == 0, programs.said
        live = Recording.open(target)
        assert not live.is_over, "another node goes on"
        assert nodes[1].wait(60) == 0, programs.said
        assert collector.wait(60) == 0, programs.said
    recording = Recording.open(target)
    assert recording.is_over
    assert {event.writer.host for event in recording.events_of(events.JobEnded)} == {"nodea", "nodeb"}
    sent = {name: data for node in ("nodea", "nodeb") for name, data in read_files(tmp_path / node).items()}
    assert {name: data for name, data in read_files(target).items() if "-control-" not in name} == {
        name: data for name, data in sent.items() if "-control-" not in name
    }
    assert not [path for path in target.iterdir() if TOKEN.encode() in path.read_bytes()]
    assert sorted(json.loads((target / NODES_FILE).read_text())) == ["nodea", "nodeb"]
    assert not recording.events_of(events.NodeLost)


@needs_hosts
def test_a_lost_node_is_reported_within_ten_seconds(programs: Programs, tmp_path: Path) -> None:
    target = tmp_path / "collected"
    with NatsServer(tmp_path) as server:
        programs.start("collect", server.url, *JOB, "--headless", "--recording", str(target))
        start_node(programs, "nodea", server, 400)
        lost = start_node(programs, "nodeb", server, 400)
        wait_for(lambda: len(list(target.glob("output-node-*.log"))) == 2)
        time.sleep(2)
        begin = time.monotonic()
        for pid in find_processes(str(tmp_path / "nodeb")):
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: "Node nodeb has been silent" in programs.said)
            assert LOST_S - 1 < time.monotonic() - begin < 10
            recording = Recording.open(target)
            assert [event.host for event in recording.events_of(events.NodeLost)] == ["nodeb"]
            size = sum(path.stat().st_size for path in target.glob("*-nodea-*"))
            time.sleep(2)
            assert sum(path.stat().st_size for path in target.glob("*-nodea-*")) > size, "the others go on"
        finally:
            for pid in find_processes(str(tmp_path / "nodeb")):
                os.kill(pid, signal.SIGCONT)
        wait_for(lambda: "Node nodeb is back" in programs.said)
        assert lost.poll() is None


def find_processes(text: str) -> list[int]:
    """Return the processes with this in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_server_without_authentication_is_refused(programs: Programs, tmp_path: Path) -> None:
    with NatsServer(tmp_path, token="") as server:
        assert programs.start("collect", server.url, *JOB, "--headless").wait(60) == 1
    assert "lets everybody in, who could read the recording: start it with authentication" in programs.said


def test_the_server_takes_any_token_that_we_make(tmp_path: Path) -> None:
    """It parses the value of a variable, and 7e77d4 is no number."""
    config = tmp_path / "nats.conf"
    config.write_text("authorization { token: $ZEROTOP_TOKEN }\n")

    def is_taken(token: str) -> bool:
        environment = os.environ | {"ZEROTOP_TOKEN": token}
        return (
            subprocess.run([SERVER, "-t", "-c", str(config)], env=environment, capture_output=True, check=False).returncode
            == 0
        )

    tokens = [messages.make_token() for _ in range(20)]
    assert all(map(is_taken, tokens))
    assert {token[:1].isalpha() for token in tokens} == {True}
    assert not is_taken("7e77d4b4721aa1a1a9e1c86f61d7d467")


def test_another_token_is_refused(programs: Programs, tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        wrong = programs.start("collect", server.url, *JOB, "--headless", ZEROTOP_TOKEN="another-token-of-tests")
        assert wrong.wait(60) == 1
    assert "refuses our token: give nodes, collector and server the same one" in programs.said


def connect(url: str) -> str:
    """Connect to a server; return the kind of failure and its sentence."""

    async def try_it() -> None:
        await (await connect_nats(url, JobKey("llama", TOKEN))).close()

    said = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # nats-py does not close what it could not use
        try:
            asyncio.run(try_it())
        except LinkError as error:
            said = f"{type(error).__name__}: {error}"
        gc.collect()
    return said


def test_a_busy_collector_keeps_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's answer to a ping comes after all that the nodes have sent before it."""
    monkeypatch.setattr(link, "_PING_S", 0.3)
    key = JobKey("llama", TOKEN)

    async def handle(message: bytes) -> bytes:
        time.sleep(0.1)
        return message[:4]

    async def ask(url: str) -> list[bytes]:
        node = await connect_nats(url, key)
        try:
            return await asyncio.gather(*(node.request(b"%4d" % number + bytes(500_000), 30.0) for number in range(25)))
        finally:
            await node.close()

    async def collect(url: str) -> list[bytes]:
        collector = await connect_nats(url, key)
        answering = asyncio.create_task(collector.answer_requests(handle))
        asking = asyncio.create_task(asyncio.to_thread(asyncio.run, ask(url)))
        await asyncio.wait({answering, asking}, return_when=asyncio.FIRST_COMPLETED)
        assert not answering.done(), "the connection was lost"
        await collector.close()
        return await asking

    with NatsServer(tmp_path) as server:
        assert asyncio.run(collect(server.url)) == [b"%4d" % number for number in range(25)]


def test_a_certificate_is_checked_against_the_sites_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = make_certificate(tmp_path, "authority")
    with NatsServer(tmp_path, tls=make_certificate(tmp_path, "server", authority=authority)) as server:
        refused = f"LinkRefused: {server.url} shows a certificate that cannot be trusted here (unable to get local issuer"
        assert connect(server.url).startswith(refused)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
        assert connect(server.url) == ""
        assert "Hostname mismatch" in connect(server.url.replace("127.0.0.1", "localhost"))


def test_only_the_certificate_in_the_address_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = make_certificate(tmp_path, "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    right, other = (make_certificate(tmp_path, name, authority=authority) for name in ("right", "other"))
    with NatsServer(tmp_path, tls=right) as server:
        assert connect(pin_certificate(server.url, right[0].read_text())) == ""
        said = connect(pin_certificate(server.url, other[0].read_text()))
    assert said.startswith(f"LinkRefused: {server.url} shows a certificate that cannot be trusted here")


@pytest.mark.parametrize("secret", ["", "user:password@", "token-of-tests@"])
def test_a_token_is_not_sent_where_encryption_was_asked_for_in_vain(secret: str) -> None:
    """Somebody between us and the server can leave out that it encrypts."""
    heard: list[bytes] = []

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b'INFO {"auth_required":true,"max_payload":1048576,"tls_required":false}\r\n')
            while data := connection.recv(1000):
                heard.append(data)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        said = connect(f"tls://{secret}127.0.0.1:{listening.getsockname()[1]}")
        thread.join(30)
    assert "does not encrypt: use nats:// only where nobody else reads the network" in said
    assert heard == []


def test_a_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_CONNECT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        said = connect(f"nats://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - begin < 10
    assert "cannot be reached" in said
    assert "start nats-server there, or correct the address" in said


def test_a_job_has_one_collector(programs: Programs, tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        programs.start("collect", server.url, *JOB, "--headless")
        time.sleep(3)
        second = programs.start("collect", server.url, *JOB, "--headless", "--recording", str(tmp_path / "other"))
        assert second.wait(60) == 1
    assert "Job llama is being collected already, on" in programs.said


@needs_hosts
def test_the_job_runs_without_a_server(programs: Programs, tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    begin = time.monotonic()
    node = start_node(programs, "nodea", server, 5)
    wait_for(lambda: "step 4" in programs.said)
    assert time.monotonic() - begin < 15, "it waited"
    assert node.wait(100) == 0
    assert "cannot be reached" in programs.said
    assert "start nats-server there, or correct the address. This node records to" in programs.said
    assert "lacks the end of this node's part. Send it later with: zerotop forward" in programs.said
    assert Recording.open(tmp_path / "nodea").is_over


@needs_hosts
def test_the_screen_shows_all_nodes_and_stops_them(programs: Programs, tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        environment = make_environment(tmp_path, ZEROTOP_TOKEN=TOKEN)
        screen = Terminal([*ZEROTOP, "collect", server.url, *JOB], environment=environment, folder=tmp_path, rows=40)
        screen.wait_for("Waiting for nodes of job llama")
        nodes = [start_node(programs, name, server, 3000) for name in ("nodea", "nodeb")]
        screen.wait_for("nodea", "nodeb")
        wait_for(lambda: len(list((tmp_path / "zerotop" / "sessions" / "llama").glob("output-node-*.log"))) == 2)
        screen.type_keys("q")
        screen.wait_for("Asks its nodes to stop it gracefully")
        screen.type_keys("s")
        for node in nodes:
            assert node.wait(30) != 0
        screen.wait_for("The job has ended.")
        screen.type_keys("l")
        screen.exit_code()
        assert "Training continues" not in screen.text
        screen.close()
    recording = Recording.open(tmp_path / "zerotop" / "sessions" / "llama")
    assert {event.writer.host for event in recording.events_of(events.StopSent)} == {"nodea", "nodeb"}


@needs_hosts
def test_a_node_that_is_looked_at_sends_full_detail(programs: Programs, tmp_path: Path) -> None:
    """Of four nodes two send all; the others do so from when the screen shows one of their ranks, and at the end."""
    target, hosts = tmp_path / "zerotop" / "sessions" / "llama", [f"node{number}" for number in range(4)]
    jobs, forwarders = [], []

    def has_steps(host: str) -> bool:
        return any(target.glob(f"spans-*-{host}-*"))

    def list_tables(host: str) -> set[str]:
        return {path.name.partition("-")[0] for path in target.glob(f"*-{host}-*.rec")}

    with NatsServer(tmp_path) as server:
        environment = make_environment(tmp_path, ZEROTOP_TOKEN=TOKEN)
        collect = [*ZEROTOP, "collect", server.url, *JOB, "--full-nodes", "2"]
        screen = Terminal(collect, environment=environment, folder=tmp_path, rows=40, columns=120)
        for number, host in enumerate(hosts):
            given = ("--ranks", "2", "--first-rank", str(2 * number), "--hertz", "10")
            jobs.append(programs.grow(tmp_path / host, *given, host=host))
            forward = ("forward", str(tmp_path / host), "--collector", server.url, *JOB)
            forwarders.append(programs.start(*forward, host=host))
            screen.wait_until(lambda _: all(map(has_steps, hosts[: len(jobs)])))
        screen.type_keys("5")
        screen.wait_until(lambda _: "2 nodes full, 2 reduced; clocks within " in screen.screen)
        screen.type_keys("N")
        screen.wait_until(lambda _: "node3 6-7" in screen.screen)
        assert all("processes" in list_tables(host) for host in hosts[:2])
        assert all("processes" not in list_tables(host) for host in hosts[2:])
        screen.type_keys("/6\r")
        screen.wait_until(lambda _: {"processes", "gpus", "threads", "allocator"} <= list_tables("node3"))
        screen.wait_until(lambda _: "3 nodes full, 1 reduced" in screen.screen)
        assert "processes" not in list_tables("node2")
        for job in jobs:
            end_process(job)
        screen.wait_until(lambda _: all(forwarder.poll() is not None for forwarder in forwarders))
        assert [forwarder.returncode for forwarder in forwarders] == [0] * 4, programs.said
        screen.close()
    recording = Recording.open(target)
    last = {event.host: event.is_full for event in recording.events_of(events.NodeDetail)}
    assert last == dict.fromkeys(hosts, True), "at the end all is there"
    for host in hosts:
        sent = {name: data for name, data in read_files(tmp_path / host).items() if "-control-" not in name}
        assert {name: (target / name).read_bytes() for name in sent} == sent


TRAINING = """
import time, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(600):
    optimizer.zero_grad()
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    print("step", step, flush=True)
    time.sleep(0.05)
"""


def order(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run zerotop where the recording is collected."""
    environment = make_environment(folder)
    return subprocess.run([*ZEROTOP, *arguments], env=environment, capture_output=True, text=True, timeout=100, check=False)


@needs_hosts
def test_nodes_are_detached_from_afar_and_train_on(programs: Programs, tmp_path: Path) -> None:
    target = tmp_path / "zerotop" / "sessions" / "llama"
    with NatsServer(tmp_path) as server:
        collector = programs.start("collect", server.url, *JOB, "--headless")
        nodes = [start_node(programs, name, server, 0, code=TRAINING) for name in ("nodea", "nodeb")]
        wait_for(lambda: len(list(target.glob("spans-rank*.rec"))) == 2)
        said = order(tmp_path, "detach", str(target))
        assert said.returncode == 0, said
        for name in ("nodea", "nodeb"):
            assert any(line.startswith(f"{name}: Process ") for line in said.stdout.splitlines()), said
        assert (
            said.stdout.count("removes the probe at the end of its step") + said.stdout.count("has removed the probe") == 2
        )
        assert [node.wait(100) for node in nodes] == [0, 0], "training goes on to its end"
        ended_s = time.time()
        assert collector.wait(60) == 0, programs.said
    said = order(tmp_path, "detach", str(target))
    assert (said.returncode, said.stdout) == (0, f"The job of {target} has ended: there is nothing to detach from\n")
    for path in target.glob("spans-rank*.rec"):
        ours = tmp_path / ("nodea" if "-nodea-" in path.name else "nodeb") / path.name
        assert ours.stat().st_mtime < ended_s - 5, "the probe writes nothing more"
    recording = Recording.open(target)
    assert len(recording.events_of(events.JobEnded)) == 2, "zerotop run records on from outside"


@needs_hosts
def test_a_node_that_takes_no_order_is_named_and_does_not_carry_it_out_later(programs: Programs, tmp_path: Path) -> None:
    target = tmp_path / "zerotop" / "sessions" / "llama"
    with NatsServer(tmp_path) as server:
        collector = programs.start("collect", server.url, *JOB, "--headless")
        forwarders = []
        for rank, name in enumerate(("nodea", "nodeb")):
            programs.grow(tmp_path / name, "--ranks", "1", "--first-rank", str(rank), host=name)
            forwarders.append(programs.start("forward", str(tmp_path / name), "--collector", server.url, *JOB, host=name))
        wait_for(lambda: len(list(target.glob("allocator-*.rec"))) == 2)
        forwarders[1].send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        said = order(tmp_path, "microscope", str(target), "--wait", "1")
        assert time.monotonic() - began_s < 15
        assert "nodeb does not answer" in said.stderr
        assert "nodea does not" not in said.stderr
        forwarders[1].send_signal(signal.SIGCONT)
        assert json.loads((tmp_path / "nodea" / MICROSCOPE_FILE).read_text())["steps"] == 1
        time.sleep(ORDER_S)
        assert not (tmp_path / "nodeb" / MICROSCOPE_FILE).exists()
        end_process(collector)
        refused = order(tmp_path, "microscope", str(target), "--wait", "1")
        assert (refused.returncode, "nobody collects this recording now" in refused.stderr) == (1, True), refused
        said = order(tmp_path, "detach", str(target))
    assert said.returncode == 1
    assert "nobody collects this recording now" in said.stdout


@needs_hosts
def test_allocations_on_all_nodes_are_asked_for_from_afar(programs: Programs, tmp_path: Path) -> None:
    """The probe's own reader of requests, which here has no GPU and refuses."""
    target = tmp_path / "zerotop" / "sessions" / "llama"
    with NatsServer(tmp_path) as server:
        programs.start("collect", server.url, *JOB, "--headless")
        probes = []
        for rank, name in enumerate(("nodea", "nodeb")):
            programs.grow(tmp_path / name, "--ranks", "1", "--first-rank", str(rank), host=name)
            programs.start("forward", str(tmp_path / name), "--collector", server.url, *JOB, host=name)
            identity = Identity.for_this_process("rank", rank)._replace(pid=200_000 + rank, host=name)
            writer = EventWriter(str(tmp_path / name), identity)
            memory = types.SimpleNamespace()
            why = f"There is no GPU on {name}."
            probes.append(StepMicroscope(str(tmp_path / name), identity, 0, memory, writer.write, CostMeter(), why))
        wait_for(lambda: len(list(target.glob("allocator-*.rec"))) == 2)
        asking = subprocess.Popen(
            [*ZEROTOP, "microscope", str(target), "--wait", "60"],
            env=make_environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        programs._running.append(asking)
        while asking.poll() is None:
            for probe in probes:
                probe.poll(5, 0, 0)
                probe.end_step(5)
            time.sleep(0.1)
        assert asking.stdout is not None
        said = asking.stdout.read().decode()
        assert asking.returncode == 0, said
    for rank, name in enumerate(("nodea", "nodeb")):
        assert f"trace 1, rank {rank}, steps 6 to 6: refused. There is no GPU on {name}." in said

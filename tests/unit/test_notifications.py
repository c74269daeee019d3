"""Notifications: chosen from a recording, at most one a minute, and deliveries that fail are a sentence."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import recordings
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.publishing import delivery as deliveries
from zerotop.commands.publishing.delivery import Delivery, choose_delivery
from zerotop.commands.publishing.notifications import PAUSE_S, Notifier
from zerotop.commands.publishing.publisher import follow


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Received:
    """A delivery whose messages are kept."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.delivery = Delivery(lambda message: self.messages.append(json.loads(message)), lambda sentence: None)

    def wait(self) -> list[dict[str, Any]]:
        self.delivery.wait(5)
        return self.messages


def test_the_worst_comes_first_and_the_others_are_counted() -> None:
    source, clock, received = recordings.open_searched("story"), Clock(), Received()
    notifier = Notifier("", print, clock, received.delivery)
    notifier.update(source)
    (first,) = received.wait()
    assert first["event"] == "finding"
    assert first["finding"]["severity"] == "warning"
    assert first["finding"]["headline"] in first["text"]
    assert (first["held_back"], len(first["held_back_headlines"])) == (1, 1)  # warnings; explanations are not told
    clock.now_s = 2 * PAUSE_S
    notifier.update(source)
    assert len(received.wait()) == 1  # nothing is told twice
    notifier.finish(source)
    assert [one["event"] for one in received.messages] == ["finding", "end"]
    assert received.messages[1]["end"] == {"state": "ended", "exit_code": 0, "sentence": "The job ended with exit code 0."}
    assert received.messages[1]["held_back"] == 0


def test_findings_within_a_minute_are_held_back_and_counted() -> None:
    clock, received = Clock(), Received()
    notifier = Notifier("", print, clock, received.delivery)
    notifier.update(recordings.open_searched("gpu-leak"))
    clock.now_s = PAUSE_S - 1
    notifier.update(recordings.open_searched("cpu-slow"))
    notifier.update(recordings.open_searched("z2-oom"))
    assert len(received.wait()) == 1
    clock.now_s = PAUSE_S
    notifier.update(recordings.open_searched("z2-oom"))
    assert [one["finding"]["name"] for one in received.wait()] == ["memory_creep", "out_of_memory"]
    assert received.messages[1]["held_back"] == 2


def test_a_hang_has_an_event_of_its_own_and_the_end_waits_for_no_minute() -> None:
    source, received = recordings.open_searched("cpu-hang"), Received()
    notifier = Notifier("", print, Clock(), received.delivery)
    follow(source.recording, [notifier])
    (end,) = received.wait()
    assert (end["event"], end["finding"]["name"]) == ("end", "hung_ranks")  # of a job that was over from the start
    received.messages.clear()
    notifier = Notifier("", print, Clock(), received.delivery)
    notifier.update(source)
    notifier.finish(source)
    assert [one["event"] for one in received.messages] == ["hang", "end"]


class Broken:
    """A subscriber with a defect."""

    def update(self, source: RecordingSource) -> None:
        raise ZeroDivisionError("oops")

    finish = update


def test_one_that_fails_keeps_the_others_from_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    received = Received()
    follow(recordings.open_recording("cpu-dead"), [Broken(), Notifier("", print, Clock(), received.delivery)])
    assert [one["event"] for one in received.wait()] == ["end"]
    assert "Broken of zerotop failed and was left out from then on: ZeroDivisionError: oops" in capsys.readouterr().err


def deliver(target: str, message: bytes = b'{"text": "hello"}') -> list[str]:
    """Deliver a message; return the sentences about it."""
    told: list[str] = []
    delivery = choose_delivery(target, told.append)
    delivery.send(message)
    delivery.wait(20)
    return told


def test_a_command_gets_the_message_and_its_failure_is_a_sentence(tmp_path: Path) -> None:
    assert deliver(f"cat > {tmp_path}/got") == []
    assert json.loads((tmp_path / "got").read_text()) == {"text": "hello"}
    assert deliver("echo no route >&2; exit 7") == ["The command of --notify failed with exit code 7: no route"]
    (said,) = deliver("no-such-command-anywhere")
    assert said.startswith("The command of --notify failed with exit code 127")
    assert deliver("exec true < /dev/null", b"x" * (1 << 20)) == []  # one that reads nothing


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "_COMMAND_S", 0.5)
    assert deliver(f"(sleep 3; touch {tmp_path}/late) & sleep 60") == [
        "The command of --notify did not end within 0 s and was killed"
    ]
    time.sleep(3)
    assert not (tmp_path / "late").exists()


class _Server(BaseHTTPRequestHandler):
    got: list[tuple[str, dict[str, Any]]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/hang":
            time.sleep(5)
        self.got.append((self.path, json.loads(body)))
        self.send_response(404 if self.path == "/missing" else 204)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    _Server.got = []
    running = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}", _Server.got
    running.shutdown()
    thread.join()
    running.server_close()


def test_a_web_address_gets_it_and_what_fails_names_no_secret(
    server: tuple[str, list[tuple[str, dict[str, Any]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, got = server
    assert deliver(f"{address}/services/SECRET") == []
    assert got == [("/services/SECRET", {"text": "hello"})]
    assert deliver(f"{address}/missing") == ["The server of --notify, 127.0.0.1, answered 404 Not Found"]
    monkeypatch.setattr(deliveries, "_SERVER_S", 0.5)
    (said,) = deliver(f"{address}/hang")
    assert said == "The server of --notify, 127.0.0.1, was not reached: timed out"
    (said,) = deliver("http://127.0.0.1:1/SECRET")
    assert said == "The server of --notify, 127.0.0.1, was not reached: Connection refused"
    assert deliver("http://[broken/SECRET") == ["The address of --notify is not valid"]
    (said,) = deliver("http://127.0.0.1:99999/SECRET")
    assert "SECRET" not in said

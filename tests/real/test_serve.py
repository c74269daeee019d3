"""``zerotop serve``: access by token and cookie, and the program itself in a real Chromium."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import aiohttp
import pytest

import browser
import recordings
from agents import wait_for
from web_servers import PATIENCE_S, Serving, client_of, is_running, start_serving
from zerotop.cli import main
from zerotop.commands.serve import has_local_browser

TOKEN = "it's-a-secret"


@pytest.fixture
def state_folder(tmp_path: Path) -> Path:
    """A state directory with two recordings."""
    folders = tmp_path / "zerotop" / "sessions"
    folders.mkdir(parents=True)
    shutil.copy(recordings.find_packed_file("story"), folders)
    shutil.copy(recordings.find_packed_file("z2-oom"), folders)
    return tmp_path


def get_page(address: str, **headers: str) -> tuple[int, str]:
    """(status, text)"""
    request = urllib.request.Request(address, headers={name.title(): value for name, value in headers.items()})
    browser_like = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    try:
        with browser_like.open(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_page_loads_nothing_from_other_hosts(state_folder: Path) -> None:
    with start_serving(state_folder) as server:
        status, page = get_page(server.address)
        assert status == 200
        assert "://" not in page.replace("${scheme}://", "")
        for place in re.findall(r'(?:src|href)="(static/[^"]+)"|url\("(static/[^"]+)"\)', page):
            assert get_page(server.plain + "".join(place) + server.query)[0] == 200


def test_without_an_option_the_token_is_random(state_folder: Path) -> None:
    with start_serving(state_folder) as server, start_serving(state_folder) as other:
        assert re.fullmatch(r"\?token=[\w-]{32}", server.query)
        assert server.query != other.query
        assert get_page(server.plain)[0] == 403
        assert get_page(server.plain + other.query)[0] == 403
        assert get_page(server.address)[0] == 200


async def test_a_websocket_needs_the_token_too(state_folder: Path) -> None:
    with start_serving(state_folder, str(recordings.find_packed_file("story"))) as server:
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                await client.ws_connect(f"{server.plain}ws")
            assert server.children() == []
        async with client_of(server) as client, client.ws_connect(server.window) as socket:
            await socket.receive(timeout=PATIENCE_S)


def test_requests_from_other_pages_are_refused(state_folder: Path) -> None:
    with start_serving(state_folder) as server:
        # Browsers let any page open a websocket to any host.
        for origin in ("http://somebody.example", "null", "http://["):
            status, text = get_page(f"{server.plain}ws{server.query}", origin=origin)
            assert (status, text) == (403, "Requests from other web pages are refused.\n")
        # A host name that its owner has pointed at this machine has no cookie, and its page no token.
        assert get_page(server.plain, host=f"somebody.example:{server.port}")[0] == 403


def test_a_token_is_needed_once_and_stays_in_no_address(state_folder: Path) -> None:
    with start_serving(state_folder, "--token", TOKEN) as server:
        assert server.address.endswith("/?token=it%27s-a-secret")
        for wrong in ("", "?token=", "?token=it", "?token=it%27s-a-secret2", "?token=%ff%fe", "static/js/textual.js", "ws"):
            status, text = get_page(server.plain + wrong)
            assert status == 403, wrong
            assert text.startswith("The token is missing or wrong")
        jar = urllib.request.HTTPCookieProcessor()
        with urllib.request.build_opener(jar).open(server.address, timeout=PATIENCE_S) as answer:
            assert answer.status == 200
            assert answer.url == server.plain
            assert TOKEN not in answer.read().decode()
        cookie, admission = sorted(jar.cookiejar, key=lambda one: one.name)
        assert admission.expires is not None
        assert cookie.value != TOKEN
        assert cookie.has_nonstandard_attr("HttpOnly")
        assert get_page(f"{server.plain}static/js/textual.js", cookie=f"{cookie.name}={cookie.value}")[0] == 200
        assert get_page(f"{server.plain}static/js/textual.js", cookie=f"{cookie.name}={TOKEN}")[0] == 403


def test_a_token_may_come_from_the_environment_and_goes_no_further(state_folder: Path) -> None:
    with start_serving(state_folder, ZEROTOP_TOKEN=TOKEN) as server:
        assert get_page(server.plain)[0] == 403
        assert get_page(f"{server.plain}?token=it%27s-a-secret")[0] == 200


async def test_windows_end_with_their_connection(state_folder: Path) -> None:
    with start_serving(state_folder, str(recordings.find_packed_file("story"))) as server:
        assert server.children() == []
        async with client_of(server) as client:
            async with client.ws_connect(f"{server.window}?width=90&height=30") as socket:
                seen = b""
                while b"LlamaForCausalLM" not in seen:
                    seen += (await socket.receive(timeout=PATIENCE_S)).data
                assert len(server.children()) == 1
            wait_for(lambda: not server.children(), PATIENCE_S)


async def test_windows_end_with_the_server(state_folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "zerotop",
        "serve",
        "--no-browser",
        "--port",
        "0",
        str(recordings.find_packed_file("story")),
    ]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        server = Serving(process, process.stdout.readline().split()[-1])
        async with client_of(server) as client, client.ws_connect(server.window) as socket:
            await socket.receive(timeout=PATIENCE_S)
            (window,) = server.children()
            process.kill()
        wait_for(lambda: not is_running(window), PATIENCE_S)


def test_a_recording_cannot_be_a_command(state_folder: Path) -> None:
    folder = state_folder / "$(touch injected); touch injected #'\""
    folder.mkdir()
    recording = recordings.unpack_to_folder("z2-oom", folder)
    with start_serving(state_folder, str(recording)) as server:
        assert get_page(server.address)[0] == 200
        command = subprocess.run(["pgrep", "-f", "web.window"], capture_output=True, text=True, check=False)
        assert str(recording) not in command.stdout
    assert not (state_folder / "injected").exists()
    assert shlex.split(shlex.join([str(recording)])) == [str(recording)]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--token", ""], 2, "The token must be one or more ASCII letters"),
        (["--token", "two words"], 2, "The token must be one or more ASCII letters"),
        (["--host", "nosuch.invalid"], 2, "Unknown address 'nosuch.invalid'"),
        (["--host", ""], 2, "Unknown address ''"),
        (["--port", "65536"], 2, "Invalid port 65536"),
        (["--host", "192.0.2.1", "--token", "x"], 1, "Cannot listen on 192.0.2.1, port 8023"),
        (["no-such-recording"], 1, "There is no recording 'no-such-recording'"),
    ],
)
def test_an_error_is_one_sentence(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str], state_folder: Path
) -> None:
    assert main(["serve", *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith(f"zerotop: {sentence}")
    assert error.count("\n") == 1


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert (
        error
        == f"zerotop: Cannot listen on 127.0.0.1, port {port}: Address already in use. Choose another port with --port\n"
    )


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == "zerotop: zerotop serve needs textual-serve: pip install 'zerotop[serve]'\n"


def test_a_browser_is_opened_only_where_the_user_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert has_local_browser({"DISPLAY": ":0"})
    assert has_local_browser({"WAYLAND_DISPLAY": "wayland-0"})
    assert not has_local_browser({})
    assert not has_local_browser({"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"})


def test_the_opened_browser_gets_a_token_for_one_visit(state_folder: Path) -> None:
    browser_command = state_folder / "browser"
    browser_command.write_text(f'#!/bin/sh\necho "$1" > {state_folder}/opened\n')
    browser_command.chmod(0o755)
    variables = os.environ | {"XDG_STATE_HOME": str(state_folder), "DISPLAY": ":0", "BROWSER": str(browser_command)}
    for name in ("SSH_CONNECTION", "SSH_TTY"):
        variables.pop(name, None)
    command = [sys.executable, "-m", "zerotop", "serve", "--port", "0"]
    with subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        server = Serving(process, process.stdout.readline().split()[-1])
        try:
            opened = state_folder / "opened"
            address = wait_for(lambda: opened.exists() and opened.read_text().strip(), PATIENCE_S)
            assert address.startswith(f"{server.plain}?token=")
            assert address != server.address
            assert [get_page(address)[0], get_page(address)[0], get_page(server.address)[0]] == [200, 403, 200]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0


async def test_the_program_runs_in_a_real_browser(state_folder: Path, tmp_path: Path) -> None:
    program = browser.find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    with start_serving(state_folder, "--token", TOKEN) as server:
        async with browser.open_page(program, tmp_path / "profile") as page:
            await page.open_address(server.address)
            await page.wait_for("2 recordings")
            assert await page.evaluate_script("location.href") == server.plain
            # Typed without a click: keys go to the terminal at once.
            await page.type_text("/story")
            await page.wait_for("1 shown")
            await page.press_key("Enter", 13, "\r")
            await page.press_key("Enter", 13, "\r")
            await page.wait_for("EXIT 0")
            shown = await page.wait_for("GPU memory GiB")
            assert "LlamaForCausalLM 8.03B" in shown.splitlines()[0]
            await page.type_text("2")
            await page.wait_for(" findings")  # on the timeline's first lane
            await page.type_text("?")
            await page.wait_for("Help: ")
            await page.press_key("Escape", 27)
            await page.wait_while("Help: ")
            await page.type_text("q")
            await page.wait_for("1 shown")
            picture = tmp_path / "page.png"
            await page.save_picture(picture)
            assert picture.stat().st_size > 10_000
            await page.type_text("q")
            while "-closed" not in await page.evaluate_script("document.body.className"):
                time.sleep(0.05)
        assert [address for address in page.requested if not address.startswith(server.plain)] == []
        wait_for(lambda: not server.children(), PATIENCE_S)

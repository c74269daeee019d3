"""``zerotop serve``: who is let in and who is not, and the program itself in a real Chromium."""

from __future__ import annotations

import contextlib
import os
import pwd
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

import browser
import recordings
from zerotop.cli import main
from zerotop.commands.web.guard import NOBODY, find_owner

PATIENCE_S = 60.0
TOKEN = "it's-a-secret"


@dataclass
class Serving:
    """A server of its own process."""

    process: subprocess.Popen[str]
    address: str  # as it was printed

    @property
    def port(self) -> int:
        found = re.search(r":(\d+)/", self.address)
        assert found is not None
        return int(found[1])

    @property
    def plain(self) -> str:
        """The address without a token."""
        return f"http://127.0.0.1:{self.port}/"

    def children(self) -> list[int]:
        """The processes that windows run."""
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        return [int(line) for line in found.stdout.split()]


@contextlib.contextmanager
def serving(state: Path, *arguments: str, **variables: str) -> Iterator[Serving]:
    """Serves on a free port of this machine, until the end of the block."""
    environment = os.environ | {"XDG_STATE_HOME": str(state), "LC_ALL": "C"} | variables
    command = [sys.executable, "-m", "zerotop", "serve", "--port", "0", *arguments]
    with subprocess.Popen(
        command, env=environment, cwd=state, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found is not None, line + process.stdout.read()
        try:
            yield Serving(process, found[0])
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert process.stdout.read() == "Ctrl-C ends it; jobs go on.\n"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with two recordings."""
    sessions = tmp_path / "zerotop" / "sessions"
    sessions.mkdir(parents=True)
    shutil.copy(recordings.packed("story"), sessions)
    shutil.copy(recordings.packed("z2-oom"), sessions)
    return tmp_path


def get(address: str, **headers: str) -> tuple[int, str]:
    """(status, text)"""
    request = urllib.request.Request(address, headers={name.title(): value for name, value in headers.items()})
    browser_like = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    try:
        with browser_like.open(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_page_needs_nothing_from_elsewhere(state: Path) -> None:
    with serving(state) as server:
        status, page = get(server.address)
        assert status == 200
        assert "://" not in page.replace("${scheme}://", "")
        for place in re.findall(r'(?:src|href)="(static/[^"]+)"|url\("(static/[^"]+)"\)', page):
            assert get(server.plain + "".join(place))[0] == 200


def test_names_pages_and_users_that_are_not_ours_are_refused(state: Path) -> None:
    with serving(state) as server:
        assert get(server.plain)[0] == 200
        assert get(server.plain, host=f"localhost:{server.port}")[0] == 200
        # A name that its owner has made point here.
        status, text = get(server.plain, host=f"somebody.example:{server.port}")
        assert (status, text) == (403, "Without --token, zerotop serve answers as 127.0.0.1, ::1, localhost only.\n")
        # A page of somebody else, which a browser lets open websockets to anywhere.
        for origin in ("http://somebody.example", "null", "http://["):
            status, text = get(f"{server.plain}ws", origin=origin)
            assert (status, text) == (403, "Another page may not open this one.\n")
        assert get(f"{server.plain}static/js/textual.js", host="somebody.example")[0] == 403


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_of_this_machine_is_refused(state: Path) -> None:
    with serving(state) as server:
        code = f"import urllib.request as r; print(r.urlopen('{server.plain}').status)"
        nobody = pwd.getpwnam("nobody")
        other = subprocess.run(
            ["/usr/bin/env", "python3", "-c", code],
            user=nobody.pw_uid,
            group=nobody.pw_gid,
            extra_groups=[],
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "HTTP Error 403" in other.stderr, other
    with serving(state, "--token", TOKEN) as server:
        code = f"import urllib.request as r; print(r.urlopen({server.address!r} + '&fontsize=9').status)"
        assert get(server.plain)[0] == 403


def test_a_token_is_asked_for_once_and_stays_in_no_address(state: Path) -> None:
    with serving(state, "--token", TOKEN) as server:
        assert server.address.endswith("/?token=it%27s-a-secret")
        for wrong in ("", "?token=", "?token=it", "?token=it%27s-a-secret2", "?token=%ff%fe", "static/js/textual.js", "ws"):
            status, text = get(server.plain + wrong)
            assert status == 403, wrong
            assert text.startswith("The token is missing or wrong")
        jar = urllib.request.HTTPCookieProcessor()
        with urllib.request.build_opener(jar).open(server.address, timeout=PATIENCE_S) as answer:
            assert answer.status == 200
            assert answer.url == server.plain
            assert TOKEN not in answer.read().decode()
        (cookie,) = jar.cookiejar
        assert cookie.value != TOKEN
        assert cookie.has_nonstandard_attr("HttpOnly")
        assert get(f"{server.plain}static/js/textual.js", cookie=f"{cookie.name}={cookie.value}")[0] == 200
        assert get(f"{server.plain}static/js/textual.js", cookie=f"{cookie.name}={TOKEN}")[0] == 403


def test_a_token_may_come_from_the_environment_and_goes_no_further(state: Path) -> None:
    with serving(state, ZEROTOP_TOKEN=TOKEN) as server:
        assert get(server.plain)[0] == 403
        assert get(f"{server.plain}?token=it%27s-a-secret")[0] == 200


async def test_windows_end_with_their_connection(state: Path) -> None:
    with serving(state, str(recordings.packed("story"))) as server:
        assert server.children() == []
        async with aiohttp.ClientSession() as client:
            async with client.ws_connect(f"{server.plain}ws?width=90&height=30") as socket:
                seen = b""
                while b"LlamaForCausalLM" not in seen:
                    seen += (await socket.receive(timeout=PATIENCE_S)).data
                assert len(server.children()) == 1
            deadline = time.monotonic() + PATIENCE_S
            while server.children():
                assert time.monotonic() < deadline
                time.sleep(0.05)


async def test_windows_end_with_the_server(state: Path) -> None:
    command = [sys.executable, "-m", "zerotop", "serve", "--port", "0", str(recordings.packed("story"))]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        server = Serving(process, process.stdout.readline().split()[-1])
        async with aiohttp.ClientSession() as client, client.ws_connect(f"{server.plain}ws") as socket:
            await socket.receive(timeout=PATIENCE_S)
            (window,) = server.children()
            process.kill()
        deadline = time.monotonic() + PATIENCE_S
        while _runs(window):
            assert time.monotonic() < deadline, "the window goes on"
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process that nobody may have waited for still does anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_session_cannot_be_a_command(state: Path) -> None:
    folder = state / "$(touch injected); touch injected #'\""
    folder.mkdir()
    session = recordings.as_directory("z2-oom", folder)
    with serving(state, str(session)) as server:
        assert get(server.plain)[0] == 200
        command = subprocess.run(["pgrep", "-f", "served"], capture_output=True, text=True, check=False)
        assert str(session) not in command.stdout
    assert not (state / "injected").exists()
    assert shlex.split(shlex.join([str(session)])) == [str(session)]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--host", "0.0.0.0"], 2, "On 0.0.0.0 others could see your jobs"),
        (["--host", "::"], 2, "On :: others could see your jobs"),
        (["--host", "0.0.0.0", "--token", ""], 2, "A token is some letters"),
        (["--host", "nosuch.invalid"], 2, "There is no address 'nosuch.invalid' here"),
        (["--host", ""], 2, "There is no address '' here"),
        (["--port", "65536"], 2, "There is no port 65536"),
        (["--host", "192.0.2.1", "--token", "x"], 1, "Cannot listen on 192.0.2.1, port 8023"),
        (["no-such-session"], 1, "There is no session 'no-such-session'"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    assert main(["serve", *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith(f"zerotop: {sentence}")
    assert error.count("\n") == 1


def test_a_port_that_is_taken_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error == f"zerotop: Cannot listen on 127.0.0.1, port {port}: Address already in use; choose another with --port\n"


def test_without_the_extra_the_sentence_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == "zerotop: A browser needs textual-serve: pip install 'zerotop[serve]'\n"


def test_the_kernel_knows_whose_a_connection_is() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as listening:
            listening.bind((host, 0))
            listening.listen()
            with socket.create_connection(listening.getsockname()[:2]) as ours:
                mine = ours.getsockname()
                assert find_owner(mine[0], mine[1]) == os.getuid()
            assert find_owner(mine[0], mine[1]) == NOBODY
    assert find_owner("no address", 1) is None


async def test_the_program_runs_in_a_real_browser(state: Path, tmp_path: Path) -> None:
    program = browser.chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    with serving(state, "--token", TOKEN) as server:
        async with browser.page(program, tmp_path / "profile") as page:
            await page.open(server.address)
            await page.wait_for("2 recordings")
            assert await page.evaluate("location.href") == server.plain
            # Typed without a click: keys go to the terminal at once.
            await page.type("/story")
            await page.wait_for("1 shown")
            await page.press("Enter", 13, "\r")
            await page.press("Enter", 13, "\r")
            shown = await page.wait_for("ENDED 0")
            assert "LlamaForCausalLM 8.03B" in shown.splitlines()[0]
            assert "GPU memory GiB" in shown
            await page.type("2")
            await page.wait_for(" findings")  # on the timeline's first lane
            await page.type("?")
            await page.wait_for("Help: ")
            await page.press("Escape", 27)
            await page.wait_while("Help: ")
            await page.type("q")
            await page.wait_for("1 shown")
            picture = tmp_path / "page.png"
            await page.picture(picture)
            assert picture.stat().st_size > 10_000
            await page.type("q")
            while "-closed" not in await page.evaluate("document.body.className"):
                time.sleep(0.05)
        assert [address for address in page.requested if not address.startswith(server.plain)] == []
        deadline = time.monotonic() + PATIENCE_S
        while server.children():
            assert time.monotonic() < deadline
            time.sleep(0.05)

"""``zerotop mcp`` asked by the SDK's own client, as programs ask it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

import recordings
from programs import ZEROTOP, make_environment
from zerotop.cli import main
from zerotop_probe.recording import directory


@pytest.fixture
def recording_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = Path(directory.find_default_root())
    folder.mkdir(parents=True)
    for name in ("story", "z2-oom", "cpu-clean"):
        shutil.copy(recordings.find_packed_file(name), folder)
    (folder / "broken.zerotop").write_bytes(b"PK nothing of ours")
    return folder


@asynccontextmanager
async def connect(state: Path) -> AsyncIterator[Client]:
    server = StdioServerParameters(command=sys.executable, args=[*ZEROTOP[1:], "mcp"], env=make_environment(state))
    async with Client(server) as client:
        yield client


async def ask(client: Client, name: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    answer: dict[str, Any] = result.structured_content
    return answer


async def test_all_questions_have_answers_and_none_changes_anything(recording_root: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in recording_root.iterdir()}
    async with connect(tmp_path) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == {"list_recordings", "findings", "memory_ledger", "phases", "compare"}
        assert all(tool.annotations is not None and tool.annotations.read_only_hint for tool in tools)
        listed = await ask(client, "list_recordings")
        assert listed["in_all"] == 4
        states = {one["name"]: one["state"] for one in listed["recordings"]}
        assert (states["story.zerotop"], states["broken.zerotop"]) == ("ended", "unreadable")
        assert len((await ask(client, "list_recordings", most=1))["recordings"]) == 1
        found = (await ask(client, "findings", recording="story"))["findings"]
        spike = next(one for one in found if one["name"] == "double_spike")
        assert spike["headline"].startswith("GPUs idle 64 %")
        assert spike["lost_s"] > 1
        ledger = await ask(client, "memory_ledger", recording="story", step=11)
        assert len(ledger["gpus"]) == 4
        assert sum(row["bytes"] for row in ledger["gpus"][0]["rows"]) > 0
        phases = await ask(client, "phases", recording="story", first_step=11)
        assert [one["step"] for one in phases["last_steps"]] == [11, 12, 13]
        assert phases["median_s"]["step"] == pytest.approx(1.8, abs=0.05)
        compared = await ask(client, "compare", recordings=["story", "z2-oom"])
        assert compared["recordings"] == ["story.zerotop", "z2-oom.zerotop"]
        assert any(row["name"] == "ZeRO stage" for row in compared["rows"])
    assert {path.name: path.stat().st_mtime_ns for path in recording_root.iterdir()} == before


async def test_an_error_is_a_sentence_and_the_next_question_is_answered(recording_root: Path, tmp_path: Path) -> None:
    async with connect(tmp_path) as client:
        for name, arguments, said in (
            ("findings", {"recording": "nobody"}, "There is no recording 'nobody'"),
            ("findings", {"recording": "broken"}, "broken.zerotop"),
            ("memory_ledger", {"recording": "story", "step": 99}, "Step 99 did not finish in this recording"),
            ("compare", {"recordings": ["story"]}, "compare needs two or more recordings"),
            ("phases", {"recording": "/etc/passwd"}, "/etc/passwd"),
        ):
            result = await client.call_tool(name, arguments)
            assert result.is_error
            assert said in str(result.content)
            assert "Traceback" not in str(result.content)
        nothing = await ask(client, "phases", recording="story", first_step=500)
        assert (nothing["steps"], nothing["median_s"]) == (0, {})
        assert (await ask(client, "list_recordings", most=-1))["recordings"] == []


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    assert main(["mcp"]) == 1
    assert "pip install 'zerotop[mcp]'" in capfd.readouterr().err

"""The what-if dialog over real recordings: its keys, and that it says what ``zerotop what-if`` prints."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import recordings
from screens import Shown
from waiting import wait_until
from zerotop.analysis.sweeps.asked_setting import WhatIfAnswer
from zerotop.analysis.sweeps.baseline import read_baseline
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS
from zerotop.ui.drawing.rows import row_text, row_width
from zerotop.ui.memory.screen import MemoryScreen
from zerotop.ui.memory.what_if_dialog import WhatIfDialog, draw_what_if
from zerotop.ui.memory.what_if_settings import AskedSettings


@asynccontextmanager
async def open_dialog(name: str, size: tuple[int, int] = (120, 40)) -> AsyncIterator[Shown[MemoryScreen]]:
    app = ZerotopApp(RecordingSource(recordings.open_recording(name)), title=name, glyphs=BLOCKS)
    async with app.run_test(size=size) as pilot:
        app.action_switch("memory")
        await pilot.pause()
        app.draw_frame()
        await pilot.press("w")
        await wait_until(pilot, lambda: isinstance(app.screen, WhatIfDialog) or bool(app._notifications))
        await pilot.pause()
        yield Shown(app, pilot, MemoryScreen)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
async def test_every_key_moves_the_ledger(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_dialog("z2", size) as seen:
        told: list[str] = []
        monkeypatch.setattr(seen.app, "notify", lambda message, **_: told.append(message))
        for keys, command in (
            ((), "zerotop what-if z2"),
            (("right",), "zerotop what-if z2 --stage 3"),
            (("j", "l"), "zerotop what-if z2 --stage 3 --offload optimizer"),
            (("h", "minus"), "zerotop what-if z2 --stage 3"),
            (("k", "left", "down", "down", "plus"), "zerotop what-if z2 --micro-batch 8"),
            (("1", "6"), "zerotop what-if z2 --micro-batch 16"),
            (("backspace", "backspace", "3"), "zerotop what-if z2 --micro-batch 3"),
            (("up", "up", "0"), "zerotop what-if z2 --stage 0 --micro-batch 3"),
            (("r",), "zerotop what-if z2"),
        ):
            before = seen.read_text()
            text = await seen.press_keys(*keys)
            assert f"{command} " in text
            assert not keys or text != before
            assert "allocated" in text
            assert " fits" in text
        await seen.press_keys("y")
        assert told[-1].endswith("zerotop what-if z2")
        for key in ("q", "w", "enter", "escape"):
            await seen.press_keys(key)
            assert seen.app.screen is seen.screen
            await seen.pilot.press("w")
            await wait_until(seen.pilot, lambda: isinstance(seen.app.screen, WhatIfDialog))


async def test_a_recording_that_tells_nothing_says_why() -> None:
    async with open_dialog("cpu-clean") as seen:
        assert seen.app.screen is seen.screen
        (notification,) = seen.app._notifications
        assert "no readings of a GPU's allocator, as on a CPU. `zerotop estimate MODEL`" in notification.message


def press(asked: AskedSettings, *moves: tuple[str, int]) -> None:
    """Change settings by name: one value on (1) or back (-1)."""
    for name, direction in moves:
        asked.move(-len(asked.options))
        asked.move([option.name for option in asked.options].index(name))
        asked.change(direction)


@pytest.mark.parametrize("name", ["z2", "z2-offload", "x4-z3", "x2-fsdp2", "gpu-lora", "gpu-trainer-gpt2"])
@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII])
def test_every_answer_is_that_of_the_command(name: str, glyphs: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Each setting is moved on its own; a refusal is the same sentence."""
    path = recordings.FOLDER / f"{name}.zerotop"
    base = read_baseline(Recording.open(path))
    for option in AskedSettings(base).options:
        asked = AskedSettings(base)
        press(asked, (option.name, 1))
        answer = asked.answer()
        words = shlex.split(asked.command)
        code = main(["what-if", str(path), *words[3:]])
        printed = capsys.readouterr()
        sentence = answer if isinstance(answer, str) else printed.out.splitlines()[0]
        assert code == (1 if isinstance(answer, str) else 0)
        assert sentence.rstrip(".") in printed.err + printed.out
        for width, height in ((72, 21), (110, 24), (146, 26), (30, 5), (9, 2)):
            rows = draw_what_if(asked, width, height, BLOCKS if glyphs is BLOCKS else ASCII)
            assert [row_width(row) for row in rows] == [width] * height
            if width > 70:
                text = " ".join(row_text(row).strip() for row in rows)
                assert sentence in text


def test_a_ledger_without_room_adds_its_smallest_rows() -> None:
    base = read_baseline(recordings.open_recording("x4-z3"))
    asked = AskedSettings(base)
    press(asked, ("micro-batch", 1))
    answer = asked.answer()
    assert isinstance(answer, WhatIfAnswer)
    text = "\n".join(row_text(row) for row in draw_what_if(asked, 72, 18, BLOCKS))
    assert "other rows" in text
    assert "host memory of a rank" in text


def test_a_number_without_end_is_not_taken() -> None:
    asked = AskedSettings(read_baseline(recordings.open_recording("z2")))
    asked.move(2)
    assert not asked.type_digit("0")
    assert asked.type_digit("9")
    for _ in range(30):
        asked.type_digit("9")
    answer = asked.answer()
    assert isinstance(answer, str)
    assert "is more than any machine trains with" in answer
    asked.move(-2)
    assert not asked.type_digit("7")
    assert asked.read_value(asked.options[0]) == 2

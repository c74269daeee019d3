"""Takes the pictures in this folder anew: the program itself, on real recordings. ``make pictures`` runs it.

Names of pictures as arguments take only those.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from zerotop import demo
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.report_files import build_page
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.drawing.glyphs import BLOCKS

HERE = Path(__file__).parent
RECORDINGS = HERE.parent / "tests" / "recordings"
SIZE = (120, 40)


class Picture(NamedTuple):
    """The contents of one picture."""

    name: str
    recording: Path
    screen: str
    finding: str = ""
    """Gone to with ``n``, as a user would; without one the end of the step ``step`` is."""
    step: int = -1
    keys: tuple[str, ...] = ()
    size: tuple[int, int] = SIZE


STORY = demo.RECORDING_PATH
PICTURES = (
    Picture("live", STORY, "live", step=12),
    Picture("timeline", STORY, "timeline", finding="skipping_ended"),
    Picture("iteration", STORY, "iteration", step=13),
    Picture("memory", RECORDINGS / "gpu-microscope.zerotop", "memory", step=40),
    Picture(
        "what-if",
        RECORDINGS / "z2-offload.zerotop",
        "memory",
        keys=("w", "wait:2000", "right", "down", "down", "right"),
        size=(120, 32),
    ),
    Picture("validation-jump", RECORDINGS / "z2-offload.zerotop", "timeline", finding="validation_jump"),
    Picture("post-mortem", RECORDINGS / "z2-oom.zerotop", "memory", keys=("end",)),
    Picture("ranks", RECORDINGS / "held-straggler.zerotop", "ranks", keys=("end",)),
    Picture("hang", RECORDINGS / "cpu-stuck.zerotop", "ranks", finding="hung_ranks"),
    Picture("xid", RECORDINGS / "hardware-bus.zerotop", "timeline", keys=("minus",) * 4, finding="gpu_xid"),
    Picture("turns", RECORDINGS / "turns-kept.zerotop", "timeline", keys=("w",), finding="gpu_turns"),
    Picture("threads", STORY, "threads", step=12),
    Picture("output", RECORDINGS / "z2-oom.zerotop", "output", keys=("end",)),
    Picture("story-linear", RECORDINGS / "gpu-linear.zerotop", "timeline", step=1, keys=("plus",)),
    Picture("story-linear-peak", RECORDINGS / "gpu-linear.zerotop", "memory", step=1),
    Picture("story-gpt2", RECORDINGS / "gpu-trainer-gpt2.zerotop", "memory", finding="logits_peak"),
    Picture("story-lora", RECORDINGS / "gpu-lora.zerotop", "memory", step=3),
    Picture("story-gpt2-small", RECORDINGS / "gpu-trainer-gpt2-small.zerotop", "memory", finding="peak_owner"),
)


async def take_picture(picture: Picture) -> None:
    """Writes one picture. Raises SystemExit where the recording has no such finding."""
    source = RecordingSource(Recording.open(picture.recording))
    app = ZerotopApp(source, glyphs=BLOCKS, title=picture.recording.stem)
    said = detect_findings(Recording.open(picture.recording), source.recording.last_written_ns)
    async with app.run_test(size=picture.size) as pilot:
        while len(source.findings_at(None)) < len(said):
            await pilot.pause(0.1)
        if picture.finding:
            findings = [one for one in source.findings_at(None) if one.name == picture.finding]
            if not findings:
                raise SystemExit(f"{picture.recording.name} has no {picture.finding}")
            app.viewer.go_to_finding(findings[0])
        elif picture.step >= 0:
            app.viewer.go_to_step(picture.step)
        app.action_switch(picture.screen)  # only now: a screen keeps the zoom with which it was shown first
        await pilot.pause(0.5)
        await pilot.press(*picture.keys)
        await pilot.pause(1.0)
        (HERE / f"{picture.name}.svg").write_text(app.export_screenshot(title=""))
        print(f"docs/{picture.name}.svg")


def take_report() -> None:
    """Writes the report of the story and, where there is a Chromium, a picture of its beginning."""
    page = HERE / "report.html"
    page.write_bytes(build_page(Recording.open(STORY), HourlyPrice(30)))
    if (program := shutil.which("chromium") or shutil.which("google-chrome")) is not None:
        options = [
            "--headless=new",
            "--no-sandbox",
            "--hide-scrollbars",
            "--virtual-time-budget=3000",
            "--window-size=1120,1480",
        ]
        subprocess.run(
            [program, *options, f"--screenshot={HERE / 'report.png'}", page.as_uri()], check=True, capture_output=True
        )


if __name__ == "__main__":
    for each in PICTURES:
        if not sys.argv[1:] or each.name in sys.argv[1:]:
            asyncio.run(take_picture(each))
    if not sys.argv[1:]:
        take_report()

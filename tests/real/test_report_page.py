"""The page of ``zerotop report`` in a real Chromium: charts, a phone, paper, both themes, and no request."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

import browser
import recordings
import sweep_progress
import zerotop
from zerotop.cli import main
from zerotop.recording.sweeps import write_sweep

STORY = str(recordings.find_packed_file("story"))
STORY_CHARTS = 9
_DRAWN = "document.querySelectorAll('figure .uplot canvas').length"
_PIXELS = "document.querySelector('#chart-iterations canvas').toDataURL()"
# Dots of a chart's canvas that are of the colour of step(): orange.
_ORANGE = """
(() => {
  const canvas = document.querySelector('#chart-iterations canvas');
  const dots = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let i = 0; i < dots.length; i += 4) {
    found += dots[i] > 200 && dots[i + 1] > 90 && dots[i + 1] < 150 && dots[i + 2] < 80;
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def story_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "story.html"
    assert main(["report", STORY, "-o", str(path)]) == 0
    return path


@pytest_asyncio.fixture
async def open_report(story_page: Path, tmp_path: Path) -> AsyncIterator[browser.Page]:
    program = browser.find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    async with browser.open_page(program, tmp_path / "profile", width=1280, height=900) as page:
        await page.open_address(story_page.as_uri())
        await wait_until(page, f"{_DRAWN} === {STORY_CHARTS}")
        yield page
        assert page.requested == [story_page.as_uri()]


async def wait_until(page: browser.Page, condition: str) -> None:
    deadline = time.monotonic() + browser.PATIENCE_S
    while not await page.evaluate_script(condition):
        assert time.monotonic() < deadline, f"never true: {condition}"
        await asyncio.sleep(0.05)


async def test_charts_are_drawn_zoomed_and_switched(open_report: browser.Page) -> None:
    assert await open_report.evaluate_script(_ORANGE) > 1000
    await open_report.evaluate_script("scrollTo(0, document.querySelector('#chart-iterations').offsetTop - 100)")
    box = await open_report.evaluate_script(
        "JSON.parse(JSON.stringify(document.querySelector('#chart-iterations .u-over').getBoundingClientRect()))"
    )
    middle = box["y"] + box["height"] / 2
    await open_report.call_method("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + 0.7 * box["width"], y=middle)
    legend = "document.querySelector('#chart-iterations .u-legend').innerText"
    await wait_until(open_report, f"{legend}.includes('step 10')")
    await wait_until(
        open_report, "document.querySelector('#chart-gpu-memory .u-legend').innerText.includes('38.2')"
    )  # together
    whole = await open_report.evaluate_script(_PIXELS)
    for kind, share, buttons in (("mousePressed", 0.6, 1), ("mouseMoved", 0.8, 1), ("mouseReleased", 0.8, 0)):
        where = {"x": box["x"] + share * box["width"], "y": middle, "buttons": buttons}
        await open_report.call_method("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)
    await wait_until(open_report, f"{_PIXELS} !== {whole!r}")
    await open_report.evaluate_script(
        "(() => { const s = document.getElementById('rank'); s.value = '3'; s.dispatchEvent(new Event('change')); })()"
    )
    await wait_until(open_report, "document.querySelector('#chart-gpu-memory .u-legend').innerText.includes('37.7 max')")


async def test_the_page_fits_a_phone(open_report: browser.Page) -> None:
    await open_report.call_method(
        "Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=3, mobile=True
    )
    await wait_until(open_report, "document.querySelector('figure canvas').getBoundingClientRect().width < 390")
    assert await open_report.evaluate_script("document.documentElement.scrollWidth") <= 390
    tops = await open_report.evaluate_script(
        "[...document.querySelectorAll('#verdict p')].map(e => e.getBoundingClientRect().bottom)"
    )
    assert tops[0] < 300  # the verdict is on the first screen


async def test_it_follows_the_dark_theme(open_report: browser.Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light, light_chart = await open_report.evaluate_script(ground), await open_report.evaluate_script(_PIXELS)
    await open_report.call_method("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    await wait_until(open_report, f"{ground} === 'rgb(16, 20, 26)'")
    assert light == "rgb(251, 252, 253)"
    await wait_until(open_report, f"{_PIXELS} !== {light_chart!r}")


async def test_it_prints_on_white_paper(open_report: browser.Page, tmp_path: Path) -> None:
    await open_report.call_method("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    await open_report.evaluate_script(
        "addEventListener('beforeprint', () => { window.printed = ["
        "document.documentElement.dataset.theme, document.querySelector('figure canvas').getBoundingClientRect().width] })"
    )
    answer = await open_report.call_method("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69)
    pdf = base64.b64decode(answer["data"])
    assert pdf.count(b"/Type /Page\n") >= 4
    assert await open_report.evaluate_script("window.printed") == ["light", 640]
    assert await open_report.evaluate_script("'theme' in document.documentElement.dataset") is False


async def test_a_recording_displays_itself_in_a_notebook(tmp_path: Path) -> None:
    program = browser.find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!DOCTYPE html><style>iframe {{zoom: 0.2}}</style>{zerotop.open_recording(STORY)._repr_html_()}")
    async with browser.open_page(program, tmp_path / "profile", width=1000, height=900) as page:
        await page.open_address(cell.as_uri())
        picture = tmp_path / "cell.png"
        deadline = time.monotonic() + browser.PATIENCE_S
        await wait_until(page, "(frame => frame && (frame.style.height = '3800px'))(document.querySelector('iframe'))")
        while True:  # the frame's document is nobody's to read: look at it
            await page.save_picture(picture)
            red, green, blue = np.asarray(Image.open(picture).convert("RGB")).transpose(2, 0, 1)
            if ((red > 200) & (green > 90) & (green < 150) & (blue < 80)).sum() > 200:
                break
            assert time.monotonic() < deadline, "the chart of iterations is not drawn"
        assert page.requested == [cell.as_uri()]


async def test_charts_of_a_sweep_are_drawn(tmp_path: Path) -> None:
    program = browser.find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    folder = tmp_path / "sweep"
    folder.mkdir()
    write_sweep(replace(sweep_progress.make_sweep(16), path=folder))
    assert main(["report", str(folder), "-o", str(tmp_path / "sweep.html")]) == 0
    async with browser.open_page(program, tmp_path / "profile", width=390, height=844) as page:
        await page.open_address((tmp_path / "sweep.html").as_uri())
        await wait_until(page, f"{_DRAWN} === 4")
        legend = "document.querySelector('#chart-reserved-peak-bytes .u-legend').innerText"
        await wait_until(page, f"{legend}.includes('52.7 max')")
        assert await page.evaluate_script("document.documentElement.scrollWidth") <= await page.evaluate_script("innerWidth")
        assert page.requested == [(tmp_path / "sweep.html").as_uri()]


@pytest.mark.parametrize("width", [390, 1100])
async def test_labels_of_a_sweep_s_axis_do_not_overlap(tmp_path: Path, width: int) -> None:
    """128 and 256 of 8,192 tokens are a few pixels apart. The labels are on a canvas: what was written is noted."""
    program = browser.find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    folder = Path(__file__).parents[2] / "docs" / "sweeps" / "lengths"
    page_path = tmp_path / "sweep.html"
    assert main(["report", str(folder), "-o", str(page_path)]) == 0
    noted = (
        "<script>window.labels = []; const write = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x) {"
        " const half = this.measureText(text).width / 2;"
        " if (this.textAlign === 'center') labels.push([x - half, x + half]);"  # those of the horizontal axis
        " return write.apply(this, arguments); };</script>"
    )
    page_path.write_text(page_path.read_text().replace("<script>", f"{noted}<script>", 1))
    async with browser.open_page(program, tmp_path / "profile", width=width, height=844) as page:
        await page.open_address(page_path.as_uri())
        await wait_until(page, f"{_DRAWN} === 4")
        labels = json.loads(await page.evaluate_script("JSON.stringify(labels)"))
    row = sorted({(left, right) for left, right in labels})  # of all four charts, which have the same axis
    assert len(row) >= 4
    assert all(right < left for (_, right), (left, _) in pairwise(row))

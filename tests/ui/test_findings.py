"""Findings on the screen: one sentence under the header, marks, keys that go there, and the feed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from textual.widgets import OptionList

from played_source import PlayedSource
from story_app import Watch
from waiting import wait_until
from zerotop.analysis.failures.end import End
from zerotop.analysis.findings import Finding, Severity, load_kinds
from zerotop.analysis.reports.finding_costs import rank_findings
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop.ui.base.bars.header import build_notices, count_notice_rows, draw_notices
from zerotop.ui.base.findings import choose_finding, find_step_marks, format_evidence, format_evidence_rows, wrap_sentence
from zerotop.ui.dialogs.findings_dialog import FindingsDialog
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.drawing.rows import row_text

BEGIN_NS = PlayedSource("story", float).begin_ns


def make_finding(name: str, at_s: float, severity: Severity, **changes: object) -> Finding:
    known_ns = BEGIN_NS + int(at_s * 1e9)
    usual: dict[str, object] = {
        "step": 6,
        "ranks": (0, 1),
        "confidence": 0.9,
        "headline": f"Something about {name} was found in step 6",
        "details": "Its numbers: the rest of it follows after that.",
        "advice": f"Set what helps with {name}.",
        "fix": f"{name}=1",
        "evidence": {"gap_s": 1.8, "gap_share": 0.67, "state_bytes": float(15 << 30), "broken_bytes": math.nan},
        "kind": load_kinds().get(name),
    }
    facts = {**usual, **changes}
    return Finding(name, known_ns - 10, known_ns, known_ns, severity=severity, **facts)  # type: ignore[arg-type]


def choose_ranked(findings: list[Finding], cursor_ns: int) -> Finding | None:
    return choose_finding(rank_findings(findings, np.empty(0, STEP_DTYPE), cursor_ns), cursor_ns)


SKIPS = make_finding("pinned_overhead", 45.0, Severity.WARNING, step=2)
REAL = make_finding("first_real_step", 55.0, Severity.INFO)
SPIKE = make_finding("double_spike", 55.0, Severity.WARNING, step=7)
FULL = make_finding("out_of_memory", 70.0, Severity.ERROR, step=11)
FOUND = (SKIPS, REAL, SPIKE, FULL)


@pytest.mark.parametrize(
    ("at_s", "told"),
    [(40.0, None), (46.0, SKIPS), (56.0, SPIKE), (71.0, FULL), (700.0, FULL)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_most_serious_finding_is_chosen(at_s: float, told: Finding | None) -> None:
    cursor_ns = BEGIN_NS + int(at_s * 1e9)
    known = [one for one in FOUND if one.known_ns <= cursor_ns]
    assert choose_ranked(known, cursor_ns) is told


def test_explained_and_doubtful_findings_are_not_chosen() -> None:
    assert choose_ranked([REAL], REAL.known_ns) is REAL
    assert choose_ranked([REAL], REAL.known_ns + 61 * 10**9) is None
    doubtful = make_finding("double_spike", 1.0, Severity.WARNING, confidence=0.4)
    assert choose_ranked([doubtful], doubtful.known_ns) is None
    assert find_step_marks([doubtful, REAL, make_finding("x", 56.0, Severity.WARNING)]) == {6: "warn"}


def test_a_long_sentence_ends_with_a_part_of_it() -> None:
    assert wrap_sentence("One part of it; another part.", 40, 1, BLOCKS) == ["One part of it; another part."]
    assert wrap_sentence("One longer part of it, and another (with more) words", 28, 1, BLOCKS) == ["One longer part of it…"]
    assert wrap_sentence("no part ends in this long text at all", 20, 1, BLOCKS) == ["no part ends in…"]
    assert len(wrap_sentence(SPIKE.details * 3, 60, 2, BLOCKS)) == 2


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("gap_s", 1.8, ("gap", "1.80 s")),
        ("step_s", 0.0006, ("step", "0.60 ms")),
        ("gap_share", 0.67, ("gap", "67 %")),
        ("state_bytes", float(15 << 30), ("state", "15.00 GiB")),
        ("state_bytes", float(5 << 20), ("state", "5.00 MiB")),
        ("loss_scale", 16777216.0, ("loss scale", "16 777 216")),
        ("cores_used", 62.92, ("cores used", "62.9")),
        ("state_bytes", math.nan, ("state", "–")),
    ],
)
def test_evidence_has_units(key: str, value: float, told: tuple[str, str]) -> None:
    assert format_evidence(key, value) == told


def test_evidence_stands_in_columns() -> None:
    wide, narrow = format_evidence_rows(SPIKE, 80, BLOCKS), format_evidence_rows(SPIKE, 20, BLOCKS)
    assert len(wide) == 1
    assert len(narrow) == 4
    assert max(map(len, wide)) <= 80


async def test_keys_go_from_finding_to_finding() -> None:
    seen = Watch("story", 75.0, findings=FOUND)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        viewer = seen.app.viewer
        told = []
        for key in ("p", "p", "p", "p", "n"):
            await pilot.press(key)
            frame = viewer.make_frame()
            assert frame.headline is not None
            told.append(frame.headline)
            assert frame.view.cursor_ns == frame.headline.known_ns
        assert told == [FULL, SPIKE, REAL, SKIPS, REAL]
        await pilot.press("p", "p")
        assert viewer.make_frame().headline is SKIPS
        await pilot.press("f")
        assert viewer.make_frame().headline is FULL


async def test_the_line_and_the_marks() -> None:
    seen = Watch("story", 75.0, findings=FOUND)
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.press("g", *"1:02", "enter")
        text = seen.text()
        assert "! Something about double_spike was found" in text
        assert text.count("▼") == 3
        assert text.count("◆") == 3
        assert "4 findings" in text


async def test_a_failure_is_shown_in_full_with_what_to_do() -> None:
    seen = Watch("story", 75.0, findings=FOUND)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        text = " ".join(seen.text().split())
        assert "the rest of it follows after that." in text
        assert "→ Set what helps with out_of_memory: out_of_memory=1" in text


def test_after_a_failure_its_advice_comes_before_explanations() -> None:
    cursor_ns = BEGIN_NS + int(75e9)
    end = End(kind="memory", ranks=(0,), unix_ns=FULL.begin_ns, what="It ended.", where="", why="", advice="Keep less.")

    def choose(*found: Finding) -> Finding | None:
        return choose_finding(rank_findings(found, np.empty(0, STEP_DTYPE), cursor_ns), cursor_ns, end)

    assert choose(REAL, FULL) is FULL
    assert choose(SPIKE, FULL, REAL) is SPIKE  # the failure is told above it
    assert choose(REAL) is REAL
    notices = build_notices(PlayedSource("story", float).view_at(cursor_ns), finding=FULL, failure=end, roomy=False)
    assert [notice.sentence for notice in notices[:2]] == ["It ended.", "Keep less."]


async def test_the_feed_shows_all_and_goes_there() -> None:
    seen = Watch("story", 75.0, findings=FOUND)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.press("a")
        await wait_until(pilot, lambda: isinstance(seen.app.screen, FindingsDialog))
        assert seen.app.screen.query_one(OptionList).highlighted == 3
        await pilot.press("up", "up", "up")
        await wait_until(pilot, lambda: "→ Set what helps with pinned_overhead." in seen.text())
        assert "ranks 0, 1, pinned overhead" in seen.text()
        await pilot.press("enter")
        assert seen.app.viewer.make_frame().view.cursor_ns == SKIPS.known_ns


DATA = make_finding("data_stall", 50.0, Severity.WARNING, ranks=(1,))
LATE = make_finding("straggler", 50.0, Severity.WARNING, ranks=(1,), evidence={"late_s": 0.2, "data_s": 0.2}, cost=0.9)
LEAK = make_finding("memory_creep", 52.0, Severity.WARNING, step=3, evidence={"bytes_per_step": 1e9})
GONE = make_finding("out_of_memory", 70.0, Severity.ERROR, step=11, evidence={"requested_bytes": 5e9, "free_bytes": 1e9})


def test_a_cause_is_shown_before_what_it_explains() -> None:
    cursor_ns = BEGIN_NS + int(75e9)
    assert choose_ranked([LATE], cursor_ns) is LATE
    assert choose_ranked([LATE, DATA], cursor_ns) is DATA
    assert choose_ranked([LEAK, GONE], cursor_ns) is GONE


async def test_effects_are_listed_under_their_cause() -> None:
    seen = Watch("story", 75.0, findings=(LATE, SKIPS, DATA, LEAK, GONE))
    async with seen.app.run_test(size=(100, 30)) as pilot:
        await wait_until(pilot, lambda: "Because of: Something about memory_creep was found in step 6" in seen.text())
        await pilot.press("a")
        await wait_until(pilot, lambda: isinstance(seen.app.screen, FindingsDialog))
        feed = seen.app.screen
        assert isinstance(feed, FindingsDialog)
        assert [one.finding.name for one in feed.shown_findings] == [
            *("data_stall", "straggler", "pinned_overhead", "memory_creep", "out_of_memory")
        ]
        await pilot.press("up", "up", "up")
        await wait_until(pilot, lambda: "└ Something about straggler was found" in seen.text())
        await wait_until(pilot, lambda: "Because of: Something about data_stall was found in step 6." in seen.text())


async def test_the_feed_is_searched() -> None:
    seen = Watch("story", 75.0, findings=FOUND)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.press("a")
        await wait_until(pilot, lambda: isinstance(seen.app.screen, FindingsDialog))
        feed = seen.app.screen
        assert isinstance(feed, FindingsDialog)
        await pilot.press("slash", *"Double spike")
        await wait_until(pilot, lambda: [one.finding for one in feed.shown_findings] == [SPIKE])
        await wait_until(pilot, lambda: "→ Set what helps with double_spike." in seen.text())
        await pilot.press("x")
        await wait_until(pilot, lambda: "No matches for Double spikex." in seen.text())
        await pilot.press("escape")
        await wait_until(pilot, lambda: len(feed.shown_findings) == 4)
        await pilot.press("slash", *"pinned overhead", "enter", "enter")
        await wait_until(pilot, lambda: seen.app.viewer.make_frame().view.cursor_ns == SKIPS.known_ns)
        await pilot.press("a", "escape")
        await wait_until(pilot, lambda: not isinstance(seen.app.screen, FindingsDialog))


async def test_the_feed_says_its_order_and_changes_it() -> None:
    """What the header shows stands first by severity and cost; what explains each other stays together."""
    costly = make_finding("data_stall", 56.0, Severity.WARNING, cost=0.6)
    effect = make_finding("straggler", 57.0, Severity.WARNING, evidence={"data_s": 1.0, "late_s": 1.0}, cost=0.7)
    seen = Watch("story", 75.0, findings=(SKIPS, REAL, costly, effect, FULL))
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.press("a")
        await wait_until(pilot, lambda: "Findings in order of time" in seen.text())
        feed = seen.app.screen
        assert isinstance(feed, FindingsDialog)
        assert [one.finding for one in feed.shown_findings] == [SKIPS, REAL, costly, effect, FULL]
        await pilot.press("o")
        await wait_until(pilot, lambda: "Findings by severity and cost" in seen.text())
        assert [one.finding for one in feed.shown_findings] == [FULL, costly, effect, SKIPS, REAL]
        await pilot.press("o")
        await wait_until(pilot, lambda: "Findings in order of time" in seen.text())
        assert [one.finding for one in feed.shown_findings] == [SKIPS, REAL, costly, effect, FULL]


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
async def test_the_border_of_the_feed_names_keys_in_whole_words(columns: int) -> None:
    seen = Watch("story", 75.0, findings=FOUND)
    async with seen.app.run_test(size=(columns, 24)) as pilot:
        await pilot.press("a")
        await wait_until(pilot, lambda: "escape close ─" in seen.text())


async def test_the_border_of_the_feed_offers_to_copy_only_a_fix_that_is_there() -> None:
    seen = Watch("story", 75.0, findings=(replace(SKIPS, fix=""), replace(REAL, fix="bf16=True")))
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.press("a", "end")
        await wait_until(pilot, lambda: "y copy the fix   escape close" in seen.text())
        await pilot.press("home")
        await wait_until(pilot, lambda: "by cost   escape close" in seen.text())


async def test_an_empty_feed_says_so() -> None:
    seen = Watch("story", 75.0, findings=())
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.press("a")
        await pilot.pause()
        assert "No findings yet" in seen.text()
        await pilot.press("a")
        await pilot.press("n")
        assert not isinstance(seen.app.screen, FindingsDialog)


def test_the_feed_s_picture(snap_compare: Any) -> None:
    assert snap_compare(Watch("story", 75.0, findings=FOUND).app, terminal_size=(80, 24), press=["p", "p", "a"])


def test_the_header_says_in_which_step_a_finding_begins_where_it_fits() -> None:
    view = PlayedSource("story", lambda: 70.0).view_at(None)
    finding = make_finding("creep", 60, Severity.WARNING, headline="Memory grows, full near step 4346", step=16)
    notices = build_notices(view, (), finding)
    assert row_text(draw_notices(notices, 80, 2, BLOCKS)[0]).rstrip() == (
        " ! Memory grows, full near step 4346 · begins in step 16"
    )
    assert "begins" not in row_text(draw_notices(notices, 45, 2, BLOCKS)[0])
    for told in ("Slower from step 16 on", "Killed after 16 steps", "It waits in steps 40 to 79"):
        finding = make_finding("shift", 60, Severity.WARNING, headline=told, step=16)
        assert "begins" not in row_text(draw_notices(build_notices(view, (), finding), 80, 2, BLOCKS)[0])
    without = make_finding("others", 60, Severity.WARNING, headline="GPU 0 was in use before", step=None)
    assert "step" not in row_text(draw_notices(build_notices(view, (), without), 80, 2, BLOCKS)[0])


def test_growth_of_each_step_is_a_size() -> None:
    assert format_evidence("bytes_per_step", float(32 << 20)) == ("each step", "0.03 GiB")


def test_beside_a_finding_on_a_low_terminal_a_notice_keeps_to_one_row() -> None:
    view = PlayedSource("story", lambda: 70.0).view_at(None)
    view = replace(view, job=replace(view.job, notices=("Nothing is known of the GPUs: " + "no driver answered " * 4,)))
    finding = make_finding("creep", 60, Severity.WARNING)
    assert count_notice_rows(build_notices(view, (), finding, roomy=False), 80, 9, BLOCKS) == 3  # headline and fix
    assert count_notice_rows(build_notices(view, (), None, roomy=False), 80, 9, BLOCKS) == 2
    assert count_notice_rows(build_notices(view, (), finding, roomy=True), 80, 9, BLOCKS) == 4


@pytest.mark.parametrize(
    ("advice", "fix", "row"),
    [
        (
            "Before the next run, see who uses the GPUs, and choose free ones.",
            "nvidia-smi",
            "see who uses the GPUs… nvidia-smi",
        ),
        ("Train in bf16.", "bf16=True", "Train in bf16: bf16=True"),
        ("Set it high enough that it is not reached: num_steps=40.", "num_steps=40", " num_steps=40"),
        ("Train on the longest first.", "x" * 70, " " + "x" * 70),
    ],
)
def test_on_a_low_terminal_the_fix_follows_what_it_is_for(advice: str, fix: str, row: str) -> None:
    view = PlayedSource("story", lambda: 70.0).view_at(None)
    finding = make_finding("creep", 60, Severity.WARNING, headline="Memory grows", advice=advice, fix=fix)
    shown = row_text(draw_notices(build_notices(view, (), finding, roomy=False), 80, 2, BLOCKS)[1]).rstrip()
    assert shown.endswith(row)
    assert shown.startswith(f" {BLOCKS.arrow} ")

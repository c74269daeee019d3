"""The two top rows: who is running, and how far and how fast it is; and the sentences under them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from zerotop.analysis.annotations import Annotation, Severity
from zerotop.analysis.formatting import called
from zerotop.analysis.live_view import Job, LiveView, Progress, State
from zerotop.ui.base.findings import advice, clause, sentence, told_style
from zerotop.ui.charts.bars import stacked_bar
from zerotop.ui.drawing import labels
from zerotop.ui.drawing.formatting import about, clock, count, known, share, speed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, both_ends, choose, filled, row_width, spaced, to_height
from zerotop.ui.drawing.text import fit, literal


class Notice(NamedTuple):
    """A sentence under the header."""

    mark: str
    sentence: str
    style: str
    most: int = 5  # rows; a longer one is cut where a part of it ends
    block: bool = False  # it gets all of its rows before those after it get any


def draw_header(view: LiveView, badge: Row, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """One or two rows. ``badge`` says whether this is now or the past, and is drawn at the right edge."""
    if height < 2:
        items = [item for item in _progress_items(view.progress, view.job, 0, glyphs) if item[0] > 4]
        room = width - row_width(badge) - 3
        left = spaced(choose([(5, ((literal(view.job.name, glyphs), "name"),)), *items], room), style="band")
        return [_band(left, badge, width, glyphs)]
    return [
        _band(_who(view.job, width - row_width(badge) - 3, glyphs), badge, width, glyphs),
        _band(_how(view, width - 2, glyphs), (), width, glyphs),
    ]


def _band(left: Row, right: Row, width: int, glyphs: Glyphs) -> Row:
    edge = ((" ", "band"),)
    return both_ends((*edge, *left), (*right, *edge), width, glyphs, "band")


def _who(job: Job, width: int, glyphs: Glyphs) -> Row:
    """Name, model, stage, offload, dtype, batch, and as much of the command as there is room for."""
    name = fit(literal(job.name, glyphs), max(8, width // 2), glyphs)
    model = literal(labels.model(job), glyphs)
    facts: list[tuple[int, Row]] = [
        (9, ((name, "name"),)),
        (6, ((model, "band"),)),
        (8, ((labels.stage(job), "band"),)),
        (7, ((literal(labels.offload(job, glyphs), glyphs), "band"),)),
        (5, ((literal(job.dtype or "", glyphs), "band"),)),
        (4, ((labels.batch(job, glyphs), "band"),)),
    ]
    if width >= 60:
        facts.insert(0, (3, (("zerotop", "brand"),)))
    row = spaced(choose(facts, width), style="band")
    room = width - row_width(row) - 3
    if room < 12:
        return row
    command = fit(literal(shlex.join(job.command), glyphs), room, glyphs)
    return (*row, ("   ", "band"), (command, "band-muted"))


def _how(view: LiveView, width: int, glyphs: Glyphs) -> Row:
    items = _progress_items(view.progress, view.job, _bar_width(width), glyphs)
    if view.inferred is not None:
        # "About", and said to be inferred: nobody counted steps here.
        told = f"about {speed(view.inferred.iteration_s)}"
        items.insert(1, (8, ((told, "band-value"), (f" inferred, {share(view.inferred.confidence)} sure", "band-muted"))))
    return spaced(choose(items, width, gap=3 if width > 100 else 2), gap=3 if width > 100 else 2, style="band")


def _bar_width(width: int) -> int:
    return 0 if width < 70 else min(40, (width - 60) // 2)


def _progress_items(progress: Progress, job: Job, bar: int, glyphs: Glyphs) -> list[tuple[int, Row]]:
    """(importance, row) in drawing order."""
    items: list[tuple[int, Row]] = [(9, _step(progress, glyphs))]
    if progress.total_steps and bar >= 4:
        done = progress.finished_steps / progress.total_steps
        items.append((2, stacked_bar([("progress", done)], 1.0, bar, glyphs, rest="progress-rest")))
    if known(progress.iteration_s):
        items.append((8, ((speed(progress.iteration_s), "band-value"),)))
    if known(progress.tokens_per_s):
        items.append((6, ((count(progress.tokens_per_s), "band-value"), (" tok/s", "band"))))
    if known(progress.eta_s) and job.state is State.RUNNING:
        items.append((7, (("ETA ", "band-muted"), (about(progress.eta_s), "band-value"))))
    if known(progress.elapsed_s):
        items.append((5, (("elapsed ", "band-muted"), (clock(progress.elapsed_s), "band"))))
    if progress.skipped_steps:
        items.append((4, ((f"{progress.skipped_steps} skipped", "band-warn"),)))
    return items


def _step(progress: Progress, glyphs: Glyphs) -> Row:
    """``13/616 steps``: how many are finished, of which the last is step 12. As wide for the first as for the last."""
    if progress.step is None:
        text = "no step yet" if progress.total_steps is None else f"–/{progress.total_steps} steps"
        return ((glyphs.plain(text), "band-muted"),)
    if progress.total_steps is None:
        word = called(progress.finished_steps, "step")
        return ((str(progress.finished_steps), "band-value"), (f" {word}", "band-muted"))
    total = str(progress.total_steps)
    return (
        (str(progress.finished_steps).rjust(len(total)), "band-value"),
        (f"/{total}", "band"),
        (" steps", "band-muted"),
    )


def notices(
    view: LiveView, problems: tuple[str, ...] = (), told: Annotation | None = None, *, roomy: bool = True
) -> list[Notice]:
    """Sentences, the most pressing first.

    ``problems`` are the screen's own, such as a dead sampler; ``told`` is the finding to say, in one row, or in two
    where it is ``roomy``; a failure is told in full, with what to do about it.
    """
    job = view.job
    result: list[Notice] = []
    if job.exit_text:
        style = labels.fared(job)
        mark = "!" if style in ("alert", "warn") else ""
        result.append(Notice(mark, job.exit_text, style, block=style == "alert"))
    result.extend(Notice("!", sentence, "warn") for sentence in problems)
    if told is not None:
        result.extend(_told(told, view.cursor_ns, 2 if roomy else 1))
    result.extend(Notice("", sentence, "muted") for sentence in job.notices)
    return result


def _told(finding: Annotation, cursor_ns: int, most: int) -> list[Notice]:
    style = told_style(finding, cursor_ns)
    if finding.severity is not Severity.ERROR:
        return [Notice("" if finding.severity is Severity.INFO else "!", sentence(finding), style, most)]
    why = Notice("!", sentence(finding), style, block=True)
    return [why, Notice("→", advice(finding), "value", most=2, block=True)] if finding.advice else [why]


def notice_rows(sentences: Sequence[Notice], width: int, most: int, glyphs: Glyphs) -> int:
    """How many rows ``draw_notices`` wants, at most ``most``."""
    return min(most, sum(len(_lines(notice, width, most, glyphs)) for notice in sentences))


def draw_notices(sentences: Sequence[Notice], width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """The sentences in ``height`` rows: one each at least, and what is left to the first; all to a block."""
    rows: list[Row] = []
    told = 0
    shown = sentences[:height]
    for number, notice in enumerate(shown):
        most = height - len(rows) - (0 if notice.block else len(shown) - number - 1)
        if most <= 0:
            break
        style = notice.style
        lead = f" {glyphs.plain(notice.mark)[:1] or glyphs.bullet} "
        lines = _lines(notice, width, most, glyphs)
        rows.extend(((lead if place == 0 else "   ", style), (line, style)) for place, line in enumerate(lines))
        told += 1
    hidden = len(sentences) - told
    if hidden and rows:
        rows[-1] = both_ends(rows[-1], ((f" +{hidden} more: i ", "muted"),), width, glyphs)
    return to_height([filled(row, width, glyphs) for row in rows], width, height, glyphs)


def _lines(notice: Notice, width: int, most: int, glyphs: Glyphs) -> Sequence[str]:
    return clause(notice.sentence, max(1, width - 4), min(most, notice.most), glyphs) or [""]

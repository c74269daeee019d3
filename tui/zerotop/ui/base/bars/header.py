"""The two top rows, with the job, its progress and its speed, and the notices under them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from zerotop.analysis.failures.end import End
from zerotop.analysis.findings import Finding, Severity
from zerotop.analysis.formatting import format_count, format_percent, pluralize
from zerotop.analysis.hardware.gpu_speeds import measure_mfu
from zerotop.analysis.live_view import Job, JobState, LiveView, Progress
from zerotop.analysis.reports.finding_costs import is_about_end
from zerotop.ui.base.findings import (
    choose_sentence_style,
    describe_advice,
    describe_cause,
    describe_details,
    describe_finding,
    describe_step,
    is_place,
    wrap_sentence,
)
from zerotop.ui.charts.bars import draw_stacked_bar
from zerotop.ui.drawing import labels
from zerotop.ui.drawing.formatting import format_clock, format_number, format_pace, format_rough_time, format_share, is_known
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, align_ends, choose_items, fit_height, fit_row, join_rows, row_width
from zerotop.ui.drawing.text import cell_width, fit_text, sanitize
from zerotop.ui.drawing.units import convert_sizes

_LEAST_MODEL = 8  # cells of a model's name where other facts need the room
_LEAST_ADVICE = 24  # cells: advice that is cut to fewer says nothing
_WHOLE_WORDS_WIDTH = 108  # cells of the first row from which the batch is described in whole words


ADVICE_MARK = "→"


class Notice(NamedTuple):
    """A sentence under the header."""

    mark: str
    sentence: str
    style: str
    max_rows: int = 5  # a longer sentence is cut at the end of a clause
    needs_all_rows: bool = False  # takes all of its rows before the next notices get any
    step_text: str = ""  # the step of a finding, shown after a sentence of one row where it fits
    fix: str = ""  # ends the sentence, which is cut before it, on one row


def draw_header(view: LiveView, badge: Row, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw one or two rows. ``badge`` (live or the past) is at the right edge."""
    if height < 2:
        items = [item for item in _build_progress_items(view, 0, glyphs) if item[0] > 4]
        room = width - row_width(badge) - 3
        left = join_rows(choose_items([(5, ((sanitize(view.job.name, glyphs), "name"),)), *items], room), style="band")
        return [_draw_band(left, badge, width, glyphs)]
    return [
        _draw_band(_draw_job(view.job, width - row_width(badge) - 3, glyphs), badge, width, glyphs),
        _draw_band(_draw_progress(view, width - 2, glyphs), (), width, glyphs),
    ]


def _draw_band(left: Row, right: Row, width: int, glyphs: Glyphs) -> Row:
    edge = ((" ", "band"),)
    return align_ends((*edge, *left), (*right, *edge), width, glyphs, "band")


def _draw_job(job: Job, width: int, glyphs: Glyphs) -> Row:
    """Draw name, model, stage, offload, dtype, batch, and as much of the command as fits."""
    row = _draw_facts(job, width, _LEAST_MODEL, glyphs)
    row = _draw_facts(job, width, _LEAST_MODEL + width - row_width(row), glyphs)
    brand: Row = (("zerotop", "brand"), ("  ", "band"))
    if 60 <= width >= row_width(brand) + row_width(row):
        row = (*brand, *row)
    room = width - row_width(row) - 3
    if room < 12:
        return row
    command = fit_text(sanitize(shlex.join(job.command), glyphs), room, glyphs)
    return (*row, ("   ", "band"), (command, "band-muted"))


def _draw_facts(job: Job, width: int, model_width: int, glyphs: Glyphs) -> Row:
    """Draw what fits of the facts; the model's name may take ``model_width`` cells."""
    name = fit_text(sanitize(job.name, glyphs), max(8, width // 2), glyphs)
    whole, model = (sanitize(text or "", glyphs) for text in (labels.format_model(job.engine), job.engine.model))
    model = fit_text(model, model_width, glyphs) + whole.removeprefix(model)
    batch = labels.format_batch(job.engine, glyphs, short=width < _WHOLE_WORDS_WIDTH)
    facts: list[tuple[int, Row]] = [
        (9, ((name, "name"),)),
        (6, ((model, "band"),)),
        (8, ((sanitize(job.engine.setup_text, glyphs), "band"),)),
        (7, ((sanitize(labels.format_offload(job.engine, glyphs), glyphs), "band"),)),
        # The setup of a loop contains it.
        (5, ((sanitize("" if job.engine.is_loop else job.engine.short_precision, glyphs), "band"),)),
        (4, ((batch, "band"),)),
    ]
    return join_rows(choose_items(facts, width), style="band")


def _draw_progress(view: LiveView, width: int, glyphs: Glyphs) -> Row:
    items = _build_progress_items(view, _bar_width(width), glyphs)
    if view.inferred is not None:
        pace = f"about {format_pace(view.inferred.iteration_s)}"
        certainty = f" inferred, {format_share(view.inferred.confidence)} sure"
        items.insert(1, (8, ((pace, "band-value"), (certainty, "band-muted"))))
    return join_rows(choose_items(items, width, gap=3 if width > 100 else 2), gap=3 if width > 100 else 2, style="band")


_WHOLE_BAR = 25  # cells: in wider terminals there is room for words, too


def _bar_width(width: int) -> int:
    return 0 if width < 70 else min(40, (width - 60) // 2)


def _build_progress_items(view: LiveView, bar: int, glyphs: Glyphs) -> list[tuple[int, Row]]:
    """Return (importance, row) in drawing order."""
    progress, job = view.progress, view.job
    items: list[tuple[int, Row]] = [(9, _draw_step(progress, view.job.state.is_over, glyphs))]
    if progress.total_steps and bar >= 4:
        done = progress.finished_steps / progress.total_steps
        items.append((2, draw_stacked_bar([("progress", done)], 1.0, bar, glyphs, rest="progress-rest")))
    # While the job runs both are means of the last steps.
    is_named = job.state.is_over and bar >= _WHOLE_BAR
    if is_known(progress.iteration_s):
        pace: Row = ((format_pace(progress.iteration_s), "band-value"),)
        items.append((8, (("median ", "band-muted"), *pace) if is_named else pace))
    if is_known(progress.tokens_per_s):
        rate: Row = ((format_number(progress.tokens_per_s), "band-value"), (" tok/s", "band"))
        items.append((6, (("mean ", "band-muted"), *rate) if is_named else rate))
    # Groups of ranks that share a replica hold parts of the parameters.
    ranks = job.engine.ranks if job.engine.batch_ranks == job.engine.ranks and not job.engine.stages else None
    gpus = [gpu.name for gpu in view.job_gpus]
    count = None if ranks is None else max(1, round(ranks / view.ranks_on_gpu))
    sizes = (job.engine.parameters, job.engine.trainable_parameters, count)
    mfu = measure_mfu(progress.tokens_per_s, *sizes, gpus, job.engine.short_precision, job.engine.model)
    if is_known(mfu):
        items.append((1, (("mean MFU " if is_named else "MFU ", "band-muted"), (format_percent(mfu, 1), "band-value"))))
    if is_known(progress.eta_s) and job.state is JobState.RUNNING:
        items.append((7, (("ETA ", "band-muted"), (format_rough_time(progress.eta_s), "band-value"))))
    if is_known(progress.elapsed_s):
        items.append((5, (("elapsed ", "band-muted"), (format_clock(progress.elapsed_s), "band"))))
    if view.cost_text:
        items.append((6, (("cost ", "band-muted"), (sanitize(view.cost_text, glyphs), "band-value"))))
    if progress.skipped_steps:
        items.append((4, ((f"{progress.skipped_steps} skipped", "band-warn"),)))
    return items


def _draw_step(progress: Progress, is_over: bool, glyphs: Glyphs) -> Row:
    """Draw ``13/616 steps``, the number of finished steps, padded to the width of the total."""
    if progress.step is None:
        none = "no step" if is_over else "no step yet"
        text = none if progress.total_steps is None else f"–/{format_count(progress.total_steps, 'step')}"
        return ((glyphs.to_plain(text), "band-muted"),)
    if progress.total_steps is None:
        word = pluralize(progress.finished_steps, "step")
        return ((str(progress.finished_steps), "band-value"), (f" {word}", "band-muted"))
    total = str(progress.total_steps)
    return (
        (str(progress.finished_steps).rjust(len(total)), "band-value"),
        (f"/{total}", "band"),
        (" steps", "band-muted"),
    )


def build_notices(
    view: LiveView,
    problems: tuple[str, ...] = (),
    finding: Finding | None = None,
    cause: Finding | None = None,
    tip: str = "",
    *,
    roomy: bool = True,
    failure: End | None = None,
) -> list[Notice]:
    """Return the notices, the most urgent first.

    Args:
        problems: sentences of the viewer itself, such as a dead sampler.
        finding: the finding to show. A failure gets all of its rows, and its advice.
        cause: the finding that explains it.
        tip: what to look at next.
        roomy: gives other findings two rows instead of one.
        failure: takes the place of the job's end and of findings about it, in one row.
    """
    job = view.job
    result: list[Notice] = []
    if failure is not None:
        result.append(Notice("!", convert_sizes(failure.what), "alert", max_rows=1, step_text="why: 1"))
        if finding is not None and is_about_end(finding, failure):
            finding = None
            if advice := describe_advice(failure):
                result.append(Notice(ADVICE_MARK, advice, "value", max_rows=2 if roomy else 1))
    elif job.exit_text:
        style = labels.choose_exit_style(job)
        mark = "!" if style in ("alert", "warn") else ""
        result.append(Notice(mark, job.exit_text, style, needs_all_rows=style == "alert"))
    result.extend(Notice("!", sentence, "warn") for sentence in problems)
    if finding is not None:
        notices = _build_finding_notices(finding, cause, view.cursor_ns, 2 if roomy else 1)
        if failure is not None and not roomy and finding.severity is Severity.ERROR:
            # It is over: on a low terminal its details are for those who look it up.
            brief = notices[0]._replace(sentence=describe_finding(finding), max_rows=2, step_text=describe_step(finding))
            notices = [brief, *(notice._replace(max_rows=1) for notice in notices[1:])]
        result.extend(notices)
    result.extend([Notice("", tip, "accent")] * bool(tip))
    # Beside a finding on a low terminal they keep to a row each; ``i`` shows them whole.
    most = 1 if finding is not None and not roomy else 5
    result.extend(Notice("", sentence, "muted", max_rows=most) for sentence in job.notices)
    return result


def _build_finding_notices(finding: Finding, cause: Finding | None, cursor_ns: int, max_rows: int) -> list[Notice]:
    style = choose_sentence_style(finding, cursor_ns)
    advice = describe_advice(finding)
    if finding.severity is not Severity.ERROR:
        mark = "" if finding.severity is Severity.INFO else "!"
        notices = [Notice(mark, describe_finding(finding), style, step_text=describe_step(finding))]
        if cause is not None and max_rows > 1:
            notices.append(Notice("", describe_cause(finding, cause), style))
        elif advice and max_rows > 1:
            notices.append(Notice(ADVICE_MARK, advice, "text" if style != "muted" else style))
        elif advice:
            first_line = finding.fix.partition("\n")[0]
            first_line = finding.advice if is_place(first_line) else first_line  # which says not what to do
            told = Notice(ADVICE_MARK, convert_sizes(first_line), "text" if style != "muted" else style, max_rows=1)
            if finding.advice and first_line not in finding.advice:  # alone it may be taken for something else
                told = told._replace(sentence=convert_sizes(finding.advice), fix=convert_sizes(first_line))
            notices.append(told)
        return notices
    sentence = ". ".join(part for part in (describe_finding(finding), describe_details(finding)) if part)
    notices = [Notice("!", sentence, style, needs_all_rows=True)]
    if cause is not None:
        notices.append(Notice("", describe_cause(finding, cause), style, max_rows=2, needs_all_rows=True))
    if advice:
        notices.append(Notice(ADVICE_MARK, advice, "value", max_rows=2, needs_all_rows=True))
    return notices


def count_notice_rows(notices: Sequence[Notice], width: int, most: int, glyphs: Glyphs) -> int:
    """Return how many rows ``draw_notices`` would use, at most ``most``."""
    return min(most, sum(len(_wrap_notice(notice, width, most, glyphs)) for notice in notices))


def draw_notices(notices: Sequence[Notice], width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw the notices in ``height`` rows: at least one each, and spare rows for the first ones."""
    rows: list[Row] = []
    drawn = 0
    candidates = notices[:height]
    for index, notice in enumerate(candidates):
        most = height - len(rows) - (0 if notice.needs_all_rows else len(candidates) - index - 1)
        if most <= 0:
            break
        style = notice.style
        lead = f" {glyphs.to_plain(notice.mark)[:1] or glyphs.bullet} "
        lines = _wrap_notice(notice, width, most, glyphs)
        rows.extend(((lead if number == 0 else "   ", style), (line, style)) for number, line in enumerate(lines))
        step = glyphs.to_plain(f" · {notice.step_text}")
        if notice.step_text and len(lines) == 1 and row_width(rows[-1]) + len(step) <= width:
            rows[-1] = (*rows[-1], (step, "muted"))
        drawn += 1
    hidden = len(notices) - drawn
    if hidden and rows:
        rows[-1] = align_ends(rows[-1], ((f" +{hidden} more: i ", "muted"),), width, glyphs)
    return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)


def _wrap_notice(notice: Notice, width: int, most: int, glyphs: Glyphs) -> Sequence[str]:
    if notice.fix:
        room = width - 4 - cell_width(notice.fix) - len(": ")
        if room < _LEAST_ADVICE:
            return wrap_sentence(notice.fix, max(1, width - 4), 1, glyphs) or [""]
        advice = wrap_sentence(notice.sentence, room, 1, glyphs)[0]
        return [f"{advice.removesuffix('.')}{'' if advice.endswith(glyphs.ellipsis) else ':'} {notice.fix}"]
    return wrap_sentence(notice.sentence, max(1, width - 4), min(most, notice.max_rows), glyphs) or [""]

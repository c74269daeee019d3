"""From a frame to the picture of the timeline: what the lanes are of, and what lies on them. Knows no terminal."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from zerotop.analysis.live_view import State
from zerotop.analysis.timeline.range_summary import Summary, summary
from zerotop.analysis.timeline.timeline import Subject, Timeline, Timelines, Window
from zerotop.ui.base import findings
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source
from zerotop.ui.charts import Watched
from zerotop.ui.timeline.lanes import plan, ribbons
from zerotop.ui.timeline.picture import Mark, Picture
from zerotop.ui.timeline.window import Now, TimelineView

# A picture reads for about so long; what is left is read for the next one.
BUDGET_S = 0.04


class Pictures:
    """Makes pictures of one recording."""

    def __init__(self, source: Source, view: TimelineView) -> None:
        self._source, self._view = source, view
        self._timelines = Timelines(source.session, lambda: source.processes)
        self._scales = Watched()
        self._scaled: tuple[Subject, int] | None = None
        self._summary: tuple[object, Summary | None] = (None, None)
        self.last: Picture | None = None
        """The picture made last."""

    def recorded(self, frame: Frame) -> bool:
        """Whether there is anything to show."""
        return bool(self._timelines.ranks() or self._timelines.lanes(self._subject(frame)).recorded())

    def _subject(self, frame: Frame) -> Subject:
        known = self._timelines.ranks()
        rank = frame.rank if frame.rank in known else next(iter(known), -1)
        return self._timelines.subject(-1 if rank is None else rank)

    def picture(self, frame: Frame, cells: int, height: int) -> Picture:
        """The picture for charts of so many cells."""
        origin_ns, subject = self._timelines.origin_ns, self._subject(frame)
        end_ns, now = self._source.end_ns, self._now(frame, origin_ns)
        window = self._view.window(now, 2 * cells, frame.view.progress.iteration_s)
        self._timelines.update([subject.rank])
        recorded = self._timelines.lanes(subject).recorded()
        marks = self._marks(frame, origin_ns)
        ranks = self._ranks(subject.rank)
        places = plan(height, recorded, len(ranks), marks=bool(marks))
        shown = ranks[: ribbons(places)]
        timeline = self._timelines.at(window, subject, shown, end_ns, budget_s=BUDGET_S)
        self._forget_scales(subject, window)
        selected = self._view.range()
        self.last = Picture(
            timeline=timeline,
            subject=subject,
            places=tuple(places),
            ranks=tuple(shown),
            other_ranks=len(ranks) - len(shown),
            cursor=now.cursor,
            marks=marks,
            steps=self._steps(timeline, subject),
            step=self._timelines.step_at(subject.rank, origin_ns + now.cursor),
            range=selected,
            summary=self._summed(subject, selected, timeline),
            cores=self._timelines.cores_of(subject.host),
            missing=_missing(recorded, "" if shown else _NO_ENGINE if frame.view.job.state is State.STARTING else _NO_PROBE),
            scales=self._scales,
        )
        return self.last

    def _now(self, frame: Frame, origin_ns: int) -> Now:
        moment, last = frame.moment, self._source.last_step
        over_ns = self._source.step_time(last) if last is not None and moment.following and not moment.live else None
        return Now(
            cursor=max(0, frame.view.cursor_ns - origin_ns),
            end=max(0, self._source.end_ns - origin_ns),
            following=moment.following,
            playing=moment.playing,
            idle=0 if over_ns is None else max(0, self._source.end_ns - over_ns),
        )

    def _ranks(self, chosen: int) -> list[int]:
        """Those with phases, the chosen one first, then those after it."""
        ranks = list(self._timelines.awake())
        place = ranks.index(chosen) if chosen in ranks else 0
        return [*ranks[place:], *ranks[:place]]

    @staticmethod
    def _marks(frame: Frame, origin_ns: int) -> tuple[Mark, ...]:
        return tuple(
            Mark(finding.known_ns - origin_ns, findings.style(finding), findings.headed(finding))
            for finding in frame.known
            if finding.confidence >= findings.SURE
        )

    def _steps(self, timeline: Timeline, subject: Subject) -> tuple[tuple[int, int], ...]:
        """Begins and numbers of the steps in the window, all or every tenth, hundredth and so on."""
        window, origin_ns = timeline.window, self._timelines.origin_ns
        begin_ns = origin_ns + window.first * window.column_ns
        begins, numbers = self._timelines.steps_begun(subject.rank, begin_ns, begin_ns + window.columns * window.column_ns)
        distance = _distance(len(numbers), window.columns // 2, len(str(numbers[-1])) if len(numbers) else 1)
        shown = numbers % distance == 0
        return tuple(zip((begins[shown] - origin_ns).tolist(), numbers[shown].tolist(), strict=True))

    def _summed(self, subject: Subject, selected: tuple[int, int] | None, timeline: Timeline) -> Summary | None:
        if selected is None:
            return None
        key = (subject, selected, timeline if self._source.live else None)
        if self._summary[0] != key:
            begin_ns, end_ns = (moment + self._timelines.origin_ns for moment in selected)
            self._summary = key, summary(self._timelines, subject, begin_ns, end_ns)
        return self._summary[1]

    def _forget_scales(self, subject: Subject, window: Window) -> None:
        """Scales do not shrink while one looks around, but another zoom or rank begins anew."""
        if self._scaled != (subject, window.column_ns):
            self._scaled = subject, window.column_ns
            self._scales.forget()


def _distance(steps: int, cells: int, digits: int) -> int:
    """Every so many steps have room for their number."""
    needed = steps * (digits + 3) / max(1, cells)
    power: int = 10 ** max(0, int(np.floor(np.log10(max(1.0, needed)))))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= needed)


_NO_ENGINE, _NO_PROBE = "phases (no rank has made its engine yet)", "phases (the probe is in no rank)"


def _missing(recorded: Collection[str], phases: str) -> tuple[str, ...]:
    """One sentence about what is not there and why; ``phases`` says why these are not, where they are not."""
    missing = [phases] if phases else []
    if "utilization" not in recorded:
        missing.append("GPU")
    else:
        missing += ["PCIe"] if "sent" not in recorded else []
        missing += ["PyTorch's memory"] if "allocated" not in recorded else []
    if "cores" not in recorded and "host_cores" not in recorded:
        missing.append("CPU (nobody sampled)")
    return (f"Not recorded: {', '.join(missing)}",) if missing else ()

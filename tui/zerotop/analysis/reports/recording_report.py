"""All that the report of a recording shows, read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.live_view import LiveView
from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.reports.comparison import compare_setup, compare_versions
from zerotop.analysis.reports.finding_costs import FindingCost, rank_findings
from zerotop.analysis.reports.measures import Measure
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.analysis.reports.verdict import Verdict, build_verdict
from zerotop.analysis.timeline.metrics import LONGEST_BASE_NS
from zerotop.analysis.timeline.timeline import Timeline, TimelineBuilder, Window
from zerotop.analysis.views.memory_view import MemoryView, read_last_memory
from zerotop.analysis.views.notices import describe_damage, describe_missing_steps, describe_thinning
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording

_COLUMNS = 1200
_MOST_TIMELINES = 8
# Reading the samples of more records than this would take seconds.
_MOST_RECORDS = 3_000_000


@dataclass(frozen=True, slots=True, eq=False)
class RecordingReport:
    """One recording, up to its end."""

    name: str
    begin_ns: int
    end_ns: int
    view: LiveView
    source: RecordingSource
    verdict: Verdict
    findings: tuple[FindingCost, ...]  # the costliest first
    memory: MemoryView  # at the end of the last step, or at the failure
    timelines: dict[int, Timeline]  # by rank, of a few ranks
    setup: tuple[Measure, ...]  # one value each
    options: dict[str, str]  # of the script
    config: dict[str, str]  # DeepSpeed's effective configuration, one entry per leaf
    environment: dict[str, str]
    notices: tuple[str, ...]  # sentences about gaps and damage
    price: HourlyPrice | None


def read_recording_report(recording: Recording, price: HourlyPrice | None = None) -> RecordingReport:
    """Read the report of a recording, which may lack steps. ``price``: [the recording's]."""
    run = RecordedRun(recording, memory=False, price=price)
    source, view = run.source, run.view
    findings = rank_findings(run.findings, source.job_steps, source.end_ns)
    memory = _read_memory(source)
    measures = (*compare_setup([run]), *compare_versions([run]))
    return RecordingReport(
        name=recording.name,
        begin_ns=recording.begin_ns,
        end_ns=source.end_ns,
        view=view,
        source=source,
        verdict=build_verdict(source, findings, memory.failure),
        findings=findings,
        memory=memory,
        timelines=_build_timelines(source, findings, memory.rank),
        setup=tuple(measure for measure in measures if measure.values[0] is not None),
        options=run.options,
        config=run.flat_config,
        environment=(run.hello.environment or {}) if run.hello is not None else {},
        notices=tuple(
            filter(
                None,
                (
                    *view.job.notices,
                    *describe_damage(recording),
                    *describe_thinning(recording.at(source.end_ns)),
                    describe_missing_steps(recording),
                ),
            )
        ),
        price=view.job.price,
    )


def _read_memory(source: RecordingSource) -> MemoryView:
    """Return the view of the rank whose GPU was the fullest."""
    recording = source.recording
    fullest = max(source.view_at(None).gpus, key=lambda gpu: gpu.reserved_peak_bytes or 0, default=None)
    timelines = TimelineBuilder(recording, lambda: source.rank_steps)
    gpus = {rank: timelines.find_gpu_key(rank, host) for rank, host in timelines.find_rank_hosts().items()}
    on_fullest = (rank for rank, key in gpus.items() if fullest is not None and key == (fullest.host, fullest.index))
    return read_last_memory(source, next(on_fullest, None))


def _build_timelines(source: RecordingSource, findings: Sequence[FindingCost], fullest: int | None) -> dict[int, Timeline]:
    """Return the timelines of the ranks that matter most: the fullest, those of findings, then the lowest."""
    recording = source.recording
    timelines = TimelineBuilder(recording, lambda: source.rank_steps)
    known = timelines.find_rank_hosts()
    named = [fullest, *(rank for cost in findings for rank in cost.ranks[:2]), *known]
    chosen = [rank for rank in dict.fromkeys(named) if rank in known][:_MOST_TIMELINES]
    span_ns = max(1, source.end_ns - recording.begin_ns)
    unit_ns = LONGEST_BASE_NS if span_ns > _COLUMNS * LONGEST_BASE_NS else 1
    column_ns = max(1_000_000, -(-span_ns // (_COLUMNS * unit_ns)) * unit_ns)
    window = Window(0, column_ns, -(-span_ns // column_ns))
    built: dict[int, Timeline] = {}
    records = 0
    for rank in chosen:
        subject = timelines.make_subject(rank)
        timelines.update([rank])
        records += timelines.get_lanes(subject).count_records()
        if built and records > _MOST_RECORDS:
            break
        built[rank] = timelines.build_timeline(window, subject, (), source.end_ns)
    return dict(sorted(built.items()))

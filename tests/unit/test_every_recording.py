"""What holds for every recording of a real run: one pass over each, whose failures are named.

Their labels are in recordings/labels.json, by hand, with reasons.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

import recordings
from declared_events import check_event
from memory_sums import check_memory_view
from recorded import Recorded
from zerotop.analysis.failures.diagnosis import find_known_failure
from zerotop.analysis.failures.out_of_memory import find_post_mortem
from zerotop.analysis.findings import Severity, begin_detection, detect_findings, link_findings
from zerotop.analysis.findings.support import detection
from zerotop.analysis.memory.expected.zero_model import compare_ledger, compute_expected, parse_setup
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.host_ledger import read_host_ledgers
from zerotop.analysis.memory.ledger_rows import ALLOCATED, FREED, OUTSIDE, UNALLOCATED, UNEXPLAINED
from zerotop.analysis.memory.peak_ledger import read_peak_ledgers
from zerotop.analysis.memory.phase_peaks import read_rank_peaks
from zerotop.analysis.reports.finding_costs import rank_findings
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.analysis.reports.recording_summary import build_overview
from zerotop.analysis.views.memory_view import read_memory_view
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.views.rhythm import infer_iteration
from zerotop.recording import quick_read
from zerotop.recording.events.event_files import E
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording.events import EngineFacts, Goodbye, JobEnded, OutOfMemory, RankGone, Tensors
from zerotop_probe.recording.redact import redact_command, redact_tree
from zerotop_probe.recording.tables import PHASE_CODE

LABELS = recordings.read_labels()
S = 1_000_000_000
PRIVATE = re.compile(rb"/(?:root|opt|work|Users)\b|/home/(?!user1?\b)|(?i:password|secret|api_?key|hf_[a-z0-9]{20})")
# Of these small models a batch that waits for its step, in no category, is more than 2 %; and so are the 512 bytes to which
# the blocks of many small states are rounded up.
BATCH_BYTES = {"jobs-workers": 32 << 20, "rollouts": 2 << 20} | {
    f"outside-{name}": 5 << 20 for name in ("frames", "draws", "grows")
}
ROUNDED_BYTES = {"jobs-workers": 2 << 20}
# A fix with one of these needs a process that lives.
LIVE = re.compile(r"--pid|-p \d|-pc \d|-CONT|pgrep")
# Recordings in which a finding explains another one, see test_links.py.
LINKED = {
    "cpu-straggler",
    "cpu-slow-cores",
    "unseen-late-data",
    "x2-slow-gpu",
    "hardware-bus",
    "hardware-event",
    "hardware-nvlink-hang",
    "host-cache",
    "host-killed",
    "gpu-lines-jump",
    "hand-fp32",
    "outside-dense",
    "held-grows",
}
# A signal to the launcher: no detector's finding, but these jobs did not end by themselves.
STOPPED = ("hand-threads", "gpu-offload-110", "x2-hang-kernel", "x2-hang-collectives")
# Its memory grows in each step, and steps are short: seldom does NVML's reading match that of the allocator.
GROWING = ("gpu-counted-leak",)
# The allocator's blocks are a little larger than their tensors: by a larger share in a small model with many of them.
BLOCKS_LARGER, BLOCKS_LARGER_IN = 0.02, {"hand-clean2": 0.03}
# Warnings of what may end the job, whatever it costs so far, and of faults of the hardware.
DANGERS = {
    "allocator_retries",
    "host_memory_forecast",
    "host_memory_short",
    "nvlink_faults",
    "nvml_silent",
    "pcie_link",
}
LEAST_SHARE = 0.005  # of the training time: less is shown as 0 %
# Moments at which ledgers and the memory screen are looked at.
LEDGERS, VIEWS = 150, 12


# --- findings ------------------------------------------------------------------------------------------------------------


def findings_match_the_labels(recorded: Recorded) -> None:
    kinds = [(finding.name, finding.step) for finding in recorded.findings]
    right, wrong, missed = recordings.compare_findings(LABELS[recorded.name], kinds)
    assert (wrong, missed) == ([], [])
    assert len(right) == len(LABELS[recorded.name])


def every_finding_is_complete(recorded: Recorded) -> None:
    for finding in recorded.findings:
        assert finding.begin_ns <= finding.end_ns <= finding.known_ns
        assert 0 < finding.confidence <= 1
        assert finding.headline[0].isalnum()
        assert not finding.headline.endswith(".")
        assert len(finding.headline) <= 80
        assert all(text.endswith(".") for text in (finding.details, finding.advice) if text)
        # Where names or numbers of the job are unknown, there is advice, and nothing to copy.
        assert finding.fix or finding.advice or finding.severity is Severity.INFO or finding.name == "memory_creep"
        assert "nan" not in f"{finding.headline} {finding.details}".split()
        assert "{" not in f"{finding.headline} {finding.details} {finding.advice}"
        assert 0 <= finding.cost <= 1
        assert finding.evidence
        assert all(type(value) is float and value == value for value in finding.evidence.values())


def a_warning_costs_time_or_memory_or_names_a_danger(recorded: Recorded) -> None:
    steps = RecordingSource(recorded.recording).job_steps
    for cost in rank_findings(recorded.findings, steps, recorded.recording.end_ns):
        if cost.finding.severity is Severity.WARNING and cost.finding.name not in DANGERS:
            assert cost.bytes or (cost.share or 0.0) >= LEAST_SHARE, cost.finding.headline


def no_sentence_compares_a_figure_with_itself(recorded: Recorded) -> None:
    for finding in recorded.findings:
        for text in (str(finding.headline), str(finding.details)):
            pairs = re.findall(r"([\d.,]+(?: \S+)?) instead of ([\d.,]+(?: \S+)?)", text)
            assert all(after.rstrip(".,") != before.rstrip(".,") for after, before in pairs), text
            assert not re.search(r"(?<![\d.,])(?:0(?:\.0+)? (?:ms|s|%|[KMGT]iB)|1\.0 times)\b", text), text


def findings_at_a_cursor_are_those_known_by_then(recorded: Recorded) -> None:
    """At cursors just before and at each change of the list of findings."""
    recording = recorded.recording
    changes = [recording.begin_ns, *sorted({finding.known_ns for finding in recorded.findings}), recording.end_ns]
    for cursor_ns in sorted({*changes, *(change - 1 for change in changes[1:])}):
        found = detect_findings(recording, cursor_ns)
        assert found == recorded.detection.findings_at(cursor_ns)
        assert all(finding.known_ns <= cursor_ns for finding in found)
    assert recorded.detection.findings_at(recording.begin_ns - 1) == ()


def no_finding_covers_less_than_before(recorded: Recorded) -> None:
    covered: dict[object, int] = {}
    for known_ns in sorted({finding.known_ns for finding in recorded.detection.ordered_findings}):
        for finding in recorded.detection.findings_at(known_ns):
            assert finding.end_ns >= covered.get(finding.event, 0)
            covered[finding.event] = finding.end_ns


def reading_in_pieces_makes_no_difference(recorded: Recorded) -> None:
    """As a growing job is read, or a long one a little at a time."""
    recording, known = recorded.recording, [finding.known_ns for finding in recorded.findings]
    for piece in (30, 500):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(detection, "_PIECE", piece)
            again = begin_detection(recording)
            for cursor_ns in sorted({recording.end_ns, *(time_ns - late for time_ns in known for late in (1, 0))}):
                again.update(cursor_ns)
                assert again.findings_at(cursor_ns) == recorded.detection.findings_at(cursor_ns)
            assert not again.update()


def an_update_says_whether_there_are_new_findings(recorded: Recorded) -> None:
    assert recorded.has_found is bool(recorded.findings)
    assert not recorded.detection.update()


def what_was_not_staged_explains_nothing(recorded: Recorded) -> None:
    """held-straggler and held-grows: other processes had the cores earlier, which is not why a rank slept."""
    causes = [one.finding.name for one in link_findings(recorded.findings) if one.cause is not None]
    assert (recorded.name in LINKED) is bool(causes)


def no_fix_of_an_ended_job_needs_a_live_process(recorded: Recorded) -> None:
    if recorded.recording.events_of(JobEnded):
        found = RecordedRun(recorded.recording, memory=False).findings
        assert [one.fix for one in found if LIVE.search(one.fix)] == []


# --- the end -------------------------------------------------------------------------------------------------------------


def deaths_are_seen_and_no_others(recorded: Recorded) -> None:
    labels = {label.name for label in LABELS[recorded.name]}
    is_dead = bool({"out_of_memory", "dead_rank"} & labels) and recorded.name != "held-restart"
    at_end = recorded.recording.at(recorded.recording.last_written_ns)
    failure = find_known_failure(at_end)
    assert (failure is not None) == (is_dead or recorded.name in STOPPED)
    assert failure is None or "-1" not in f"{failure.what} {failure.where}"
    if "out_of_memory" not in labels:
        assert (find_post_mortem(at_end) is None) is (recorded.name != "host-killed")


# --- steps and summary ---------------------------------------------------------------------------------------------------


def an_overview_equals_the_whole_recording(recorded: Recorded) -> None:
    whole = recorded.recording
    about = build_overview(quick_read.open_glimpse(recordings.find_packed_file(recorded.name)))
    rows = read_steps(whole)
    lowest = rows[rows["rank"] == rows["rank"].min()]
    engine = next(event.facts for event in whole.events if event.event_name == "engine")
    # A recording that was detached knows neither the end of the job nor its exit code.
    detached_s = (whole.last_written_ns - whole.begin_ns) / 1e9
    ended = next((event.facts for event in whole.events if event.event_name == "job_ended"), {"seconds": detached_s})
    finished = recorded.view.progress.finished_steps
    assert (about.ranks, about.exit_code) == (engine["world_size"], ended.get("exit_code"))
    # Where a job was killed, one of its ranks may have finished a step more than the lowest.
    assert about.steps == finished or (ended.get("exit_code") != 0 and about.steps == finished - 1)
    updating = lowest[~lowest["skipped"]]
    assert about.iteration_s == pytest.approx(float(np.median(updating["iteration_s"])))
    assert max(about.iterations) == pytest.approx(float(lowest["iteration_s"].max()), abs=1e-6)
    peaks = [int(source.array["reserved_peak_bytes"].max()) for source in whole.sources["allocator"]]
    resident = [int(source.array["rss_bytes"][source.array["rank"] >= 0].max()) for source in whole.sources["processes"]]
    assert about.peak_bytes == max(peaks or resident, default=None)
    assert about.peak_on_host is bool(resident and not peaks)
    assert (about.model, about.zero_stage, about.dtype) == (engine["model"], engine.get("zero_stage"), engine["dtype"])
    assert about.seconds == pytest.approx(ended["seconds"], abs=1.0)


def the_rhythm_from_outside_is_right_or_not_told(recorded: Recorded) -> None:
    iteration = infer_iteration(recorded.recording.at(recorded.recording.last_written_ns - 2 * S))
    usual_s = float(np.median(np.diff(recorded.view.iterations.begin_s[-8:])))
    assert iteration is None or iteration.iteration_s == pytest.approx(usual_s, rel=0.03)


# --- memory --------------------------------------------------------------------------------------------------------------


def the_memory_screen_sums_to_the_byte_at_every_moment(recorded: Recorded) -> None:
    recording = recordings.open_recording(recorded.name)  # which has not been asked for other moments
    moments = choose_moments(recording)
    # A rank that is not there is as none.
    for moment_ns, rank in [*product(moments, (None, 1)), (moments[-2], 77)]:
        view = read_memory_view(recording.at(moment_ns), rank)
        check_memory_view(view)
        assert view is read_memory_view(recording.at(view.cursor_ns), rank)


def choose_moments(recording: Recording) -> list[int]:
    """Return at most 12 moments: both ends, around the first forward, an error, an exit and a peak, and ends of phases."""
    moments = [recording.begin_ns, recording.last_written_ns]
    moments += [event.unix_ns for event in (*pick_event(recording, Tensors, -1), *pick_event(recording, OutOfMemory, 0))]
    exits = [event.unix_ns for kind in (Goodbye, RankGone, JobEnded) for event in pick_event(recording, kind, 0)]
    moments += [min(exits) - 1, min(exits)] if exits else []
    moments += [peaks.owning_peak.unix_ns for peaks in read_rank_peaks(recording.at(recording.last_written_ns))[:1]]
    for source in recording.sources["spans"][:1]:
        forwards = source.array[source.array["phase"] == PHASE_CODE["forward"]]
        moments += [int(span["begin_ns"]) + source.offset_ns - 1 for span in forwards[:1]]
        later = source.array[len(source.array) // 2 :]
        _, first_of_phase = np.unique(later["phase"], return_index=True)
        moments += source.unix_times(later[first_of_phase]).tolist()
    return sorted(list(dict.fromkeys(moments))[:VIEWS])


def pick_event(recording: Recording, kind: type[E], place: int) -> Sequence[E]:
    """One event of a kind, if there is any."""
    named = recording.events_of(kind)
    return [named[place]] if named else []


def ledgers_add_up_and_are_what_nvml_says(recorded: Recorded) -> None:
    """Almost nothing is unexplained. NVML's process is PyTorch and what is outside of it, exactly.

    Between a reading of NVML and one of the allocator memory may be taken, but mostly is not; the ledger then says that what
    is free is derived.
    """
    recording, seen, still = recorded.recording, 0, 0
    for cursor_ns in list_moments(recording):
        for found in read_ledgers(recording.at(cursor_ns)):
            assert sum(row.bytes for row in found.rows) == found.total_bytes
            assert found.sum_bytes(*ALLOCATED) == found.allocated_bytes
            assert all(row.bytes >= 0 or row.key == FREED for row in found.rows)
            assert found.sum_bytes(UNEXPLAINED) <= max(0.02 * found.allocated_bytes, BATCH_BYTES.get(recorded.name, 0))
            if found.ranks and found.job_bytes is not None:
                seen += 1
                if found.rows[0].basis.startswith("NVML") and found.allocated_bytes:
                    still += 1
                    assert found.job_bytes == found.sum_bytes(OUTSIDE, UNALLOCATED, *ALLOCATED)
        for host in read_host_ledgers(recording.at(cursor_ns)):
            assert sum(row.bytes for row in host.rows) == host.resident_bytes
    if recording.sources["gpu_processes"] and recording.sources["allocator"]:
        assert still > (0.25 if recorded.name in GROWING else 0.7) * seen > 0
    for at_peak in read_peak_ledgers(recording.at(recording.last_written_ns)):
        assert at_peak.ledger.sum_bytes(UNEXPLAINED) <= max(
            0.02 * at_peak.ledger.allocated_bytes, BATCH_BYTES.get(recorded.name, 0)
        )


def list_moments(recording: Recording) -> list[int]:
    """From the first reading of an allocator to the last; none without a GPU."""
    tables = [source for source in recording.sources["allocator"] if len(source.array)]
    if not tables:
        return []
    first = min(int(source.array["time_ns"][0]) + source.offset_ns for source in tables)
    last = max(source.last_ns or 0 for source in tables)
    return [first + (last - first) * place // (LEDGERS - 1) for place in range(LEDGERS)]


def what_formulas_say_is_what_was_counted(recorded: Recorded) -> None:
    recording = recorded.recording
    if not recording.sources["allocator"]:
        return
    cursor_ns = int(read_steps(recording)["end_unix_ns"].max())
    engines = [event.facts for event in recording.events if event.event_name == "engine"]
    known = parse_setup(EngineFacts(engines[0]))
    assert known is not None
    masters = () if engines[0].get("kind") == "loop" else ("master_weights",)
    larger = BLOCKS_LARGER_IN.get(recorded.name, BLOCKS_LARGER)
    # A machine may have more GPUs than the job.
    ledgers = [found for found in read_ledgers(recording.at(cursor_ns)) if found.ranks]
    assert ledgers
    for found in ledgers:
        differences = {each.key: each for each in compare_ledger(found, compute_expected(known))}
        for name in ("parameters", "optimizer_state", *masters):
            each = differences[name]
            assert each.expected_bytes == pytest.approx(
                each.measured_bytes, rel=larger, abs=ROUNDED_BYTES.get(recorded.name, 1 << 20)
            ), (name, each)
    for host in read_host_ledgers(recording.at(cursor_ns)):
        differences = {each.key: each for each in compare_ledger(host, compute_expected(known))}
        for name in ("optimizer_state", *masters):
            each = differences[name]
            assert each.expected_bytes == pytest.approx(each.measured_bytes, rel=0.01, abs=1 << 20), (name, each)


# --- what is written -----------------------------------------------------------------------------------------------------


def events_match_their_declarations(recorded: Recorded) -> None:
    for file, content in recorded.files.items():
        if file.endswith(".jsonl"):
            for line in content.splitlines()[1:]:
                check_event(json.loads(line))


def nothing_private_lies_inside(recorded: Recorded) -> None:
    assert [file for file, content in recorded.files.items() if PRIVATE.search(content)] == []


def commands_and_facts_hold_no_secret(recorded: Recorded) -> None:
    command = recorded.recording.info["command"]
    assert redact_command(command) == command
    for event in recorded.recording.events:
        assert redact_tree(event.facts) == event.facts


INVARIANTS = (
    findings_match_the_labels,
    every_finding_is_complete,
    no_sentence_compares_a_figure_with_itself,
    a_warning_costs_time_or_memory_or_names_a_danger,
    findings_at_a_cursor_are_those_known_by_then,
    no_finding_covers_less_than_before,
    reading_in_pieces_makes_no_difference,
    an_update_says_whether_there_are_new_findings,
    what_was_not_staged_explains_nothing,
    no_fix_of_an_ended_job_needs_a_live_process,
    deaths_are_seen_and_no_others,
    an_overview_equals_the_whole_recording,
    the_rhythm_from_outside_is_right_or_not_told,
    the_memory_screen_sums_to_the_byte_at_every_moment,
    ledgers_add_up_and_are_what_nvml_says,
    what_formulas_say_is_what_was_counted,
    events_match_their_declarations,
    nothing_private_lies_inside,
    commands_and_facts_hold_no_secret,
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in sorted(LABELS)])
def test_every_invariant_holds(name: str) -> None:
    recorded, failed = Recorded(name), list[str]()
    for check in INVARIANTS:
        try:
            check(recorded)
        except Exception:
            failed.append(f"{check.__name__} of {name}:\n{traceback.format_exc()}")
    assert not failed, "\n".join(failed)


def test_most_recordings_are_of_gpus() -> None:
    """Whose memory is checked."""
    names = [name for name in LABELS if recordings.has_table(name, "allocator")]
    assert len(names) >= 40
    assert {"story", "z2", "x4-z3", "gpu-clean", "hand-fp32"} <= set(names)

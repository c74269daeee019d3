"""``zerotop check``: a recording against a budget, for CI: an exit code, and JUnit XML."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

from zerotop.analysis.checks.budget import Budget, BudgetError, read_budget
from zerotop.analysis.checks.checks import Check, CheckOutcome, check_run, describe_other_job
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.analysis.text_tables import align_columns
from zerotop.commands.common.errors import FAILED, USAGE, Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.open_recording import open_named
from zerotop.commands.common.past_runs import find_past
from zerotop.recording import catalog
from zerotop.recording.atomic_write import write_text_file
from zerotop.recording.reader import Recording, RecordingError
from zerotop.report.elements import clean_text

_FILE_MODE = 0o644
_MOST_LOOKED_AT = 5  # earlier runs of a command, for a baseline


def check(options: argparse.Namespace) -> int:
    """Print the checks. Return 0 if none failed, 1 if one did, 2 for a budget that cannot be used."""
    budget = _read_budget(options)
    with open_named(options.recording) as recording:
        run, baseline = RecordedRun(recording), _find_baseline(options, budget)
        checks = check_run(run, budget, _open_baseline(baseline, run) if baseline is not None else None)
    failed = [one for one in checks if one.outcome is CheckOutcome.FAILED]
    if options.junit is not None:
        write_text_file(Path(options.junit), _build_junit(recording.name, checks), mode=_FILE_MODE)
    if options.json:
        print(
            json.dumps(
                [{"check": one.name, "outcome": one.outcome.value, "sentence": one.sentence} for one in checks], indent=1
            )
        )
    else:
        for line in align_columns([(one.outcome.value, one.name, one.sentence) for one in checks], "<<<"):
            print(escape_unprintable(line))
    print(_summarize_checks(checks), file=sys.stderr)
    return FAILED if failed else 0


def _read_budget(options: argparse.Namespace) -> Budget:
    if options.budget is None:
        if options.baseline is None:
            raise Problem("Name a budget file, or a recording to compare with: --baseline RECORDING", USAGE)
        return Budget()
    try:
        return read_budget(Path(options.budget))
    except FileNotFoundError:
        raise Problem(f"There is no budget file at {options.budget}", USAGE) from None
    except BudgetError as error:
        raise Problem(str(error), USAGE) from None


def _find_baseline(options: argparse.Namespace, budget: Budget) -> Path | None:
    """Return the path of the baseline; in a budget it is from the folder of the budget."""
    if options.baseline is not None:
        return catalog.find_recording(options.baseline)
    if budget.recording is None:
        return None
    beside = Path(options.budget).parent / budget.recording
    return catalog.find_recording(str(beside) if beside.exists() else budget.recording)


def _open_baseline(path: Path, run: RecordedRun) -> RecordedRun:
    """Open the baseline. Another model's is refused: its memory and pace are no measure for this one's."""
    baseline = RecordedRun(Recording.open(path))
    if reason := describe_other_job(run, baseline):
        past = islice(find_past(Path(run.recording.path)), _MOST_LOOKED_AT)
        last = next((one for one in past if not _is_of_other_job(run, one)), None)
        instead = f"name the last run of this one's command, {last.name}" if last else "name a recording of this model"
        raise Problem(f"The baseline {baseline.recording.name} is of another job: {reason}. Instead, {instead}.", USAGE)
    return baseline


def _is_of_other_job(run: RecordedRun, path: Path) -> bool:
    try:
        return bool(describe_other_job(run, RecordedRun(Recording.open(path), memory=False)))
    except (RecordingError, OSError):
        return True


def _summarize_checks(checks: Sequence[Check]) -> str:
    counts = {outcome: sum(one.outcome is outcome for one in checks) for outcome in CheckOutcome}
    return ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)


def _build_junit(recording: str, checks: Sequence[Check]) -> str:
    """Return the outcome in the form of the JUnit XML schema that CI systems read."""
    counts = {outcome: str(sum(one.outcome is outcome for one in checks)) for outcome in CheckOutcome}
    numbers = {
        "tests": str(len(checks)),
        "failures": counts[CheckOutcome.FAILED],
        "skipped": counts[CheckOutcome.SKIPPED],
        "errors": "0",
    }
    suites = ElementTree.Element("testsuites", numbers)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": f"zerotop check {clean_text(recording)}", **numbers})
    for one in checks:
        case = ElementTree.SubElement(suite, "testcase", {"classname": clean_text(recording), "name": one.name})
        sentence = clean_text(one.sentence)
        if one.outcome is CheckOutcome.PASSED:
            ElementTree.SubElement(case, "system-out").text = sentence
        else:
            tag = "failure" if one.outcome is CheckOutcome.FAILED else "skipped"
            ElementTree.SubElement(case, tag, {"message": sentence})
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"

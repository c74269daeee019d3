"""``zerotop mcp``: answers questions about recordings by the Model Context Protocol, on standard input and output.

It only reads: no tool changes a recording or a job.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from zerotop.analysis.reports.finding_json import list_findings_json
from zerotop.analysis.reports.memory import build_json as build_memory_json
from zerotop.analysis.reports.memory import read_report
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.errors import Problem, describe_error
from zerotop.commands.compare import build_json as build_comparison_json
from zerotop.commands.compare import compare_recordings
from zerotop.commands.recordings import describe_recording, open_overviews
from zerotop.recording import catalog
from zerotop.recording.reader import Recording, RecordingError

_MOST_STEPS = 200
_INSTRUCTIONS = """\
zerotop records DeepSpeed and PyTorch trainings. RECORDING is a name from list_recordings, its start, or a path. Times are in
seconds (fields that end with _s) or unix nanoseconds (_ns), sizes in bytes; null means not recorded. Nothing can be changed.
"""


def mcp(options: argparse.Namespace) -> int:
    """Serve until standard input is closed. Return 0."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.types import ToolAnnotations
    except ImportError:
        raise Problem("zerotop mcp needs the package mcp: pip install 'zerotop[mcp]'") from None

    @contextmanager
    def explain_refusal() -> Iterator[None]:
        try:
            yield
        except (Problem, RecordingError, OSError) as error:
            raise ToolError(describe_error(error)) from None

    server = MCPServer("zerotop", instructions=_INSTRUCTIONS, log_level="ERROR")
    tool = server.tool(annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))

    @tool
    def list_recordings(most: int = 20) -> dict[str, Any]:
        """List the newest recordings: command, state, result, pace and peak memory of each."""
        with explain_refusal():
            return _list_recordings(most)

    @tool
    def findings(recording: str) -> dict[str, Any]:
        """List what zerotop found in a recording: what happened, the numbers behind it, what it cost, and advice."""
        with explain_refusal():
            run = RecordedRun(_open(recording), memory=False)
            return _clean({"recording": run.recording.name, "findings": list_findings_json(run)})

    @tool
    def memory_ledger(recording: str, step: int | None = None) -> dict[str, Any]:
        """Return where the memory of each GPU and rank was at the end of a step [the last step, or the failure]."""
        with explain_refusal():
            return _read_ledger(recording, step)

    @tool
    def phases(recording: str, first_step: int = 0, last_step: int | None = None) -> dict[str, Any]:
        """Return the seconds of each phase: medians over a range of steps, and each of at most 200 steps of it."""
        with explain_refusal():
            return _read_phases(recording, first_step, last_step)

    @tool
    def compare(recordings: list[str]) -> dict[str, Any]:
        """Compare two or more recordings: configuration, phases, peaks of memory and findings side by side."""
        with explain_refusal():
            return _compare(recordings)

    server.run("stdio")
    return 0


def _open(text: str) -> Recording:
    return Recording.open(catalog.find_recording(text))


def _list_recordings(most: int) -> dict[str, Any]:
    found = open_overviews().read_all()
    return _clean({"recordings": [describe_recording(one) for one in found[: max(0, most)]], "in_all": len(found)})


def _read_ledger(text: str, step: int | None) -> dict[str, Any]:
    recording = _open(text)
    report = read_report(recording, step)
    if report is None:
        last = RecordingSource(recording).last_step
        raise Problem(f"Step {step} did not finish in this recording; the last finished step is {last}")
    return _clean(build_memory_json(report))


def _read_phases(text: str, first: int, last: int | None) -> dict[str, Any]:
    recording = _open(text)
    iterations = RecordingSource(recording).view_at(None).iterations
    chosen = (iterations.step >= first) & (iterations.step <= (np.iinfo(np.int64).max if last is None else last))
    columns = {"iteration": iterations.iteration_s, **iterations.phase_s}
    seconds = {name: values[chosen] for name, values in columns.items()}
    medians = {name: float(np.nanmedian(values)) for name, values in seconds.items() if not np.isnan(values).all()}
    steps = iterations.step[chosen][-_MOST_STEPS:]
    rows = [
        {"step": int(step), "seconds": {name: float(values[-_MOST_STEPS:][index]) for name, values in seconds.items()}}
        for index, step in enumerate(steps)
    ]
    return _clean({"recording": recording.name, "steps": int(chosen.sum()), "median_s": medians, "last_steps": rows})


def _compare(texts: Sequence[str]) -> dict[str, Any]:
    if len(texts) < 2:
        raise Problem("compare needs two or more recordings")
    return _clean(build_comparison_json(compare_recordings([catalog.find_recording(text) for text in texts])))


def _clean(answer: dict[Any, Any]) -> dict[str, Any]:
    """Return an answer in values that JSON has: what is not known is null."""
    return {str(key): _clean_value(value) for key, value in answer.items()}


def _clean_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _clean(value)
    if isinstance(value, (list, tuple)):
        return [_clean_value(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

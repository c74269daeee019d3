"""What is said of a recording without findings: few steps of a long job are no sign that all is well."""

from __future__ import annotations

from zerotop.analysis.formatting import format_count, format_seconds
from zerotop.recording.samples import Rows

# So few steps, and so much time (s) after the last of them, in which the job ran on.
_FEW_STEPS, _LONG_S = 5, 5.0


def describe_no_findings(steps: Rows, end_ns: int) -> str:
    """Return a sentence. ``steps``: of the job (STEP_DTYPE). ``end_ns``: unix time at which its ranks ended."""
    if not len(steps):
        return "No findings: no finished step was recorded."
    later_s = (end_ns - int(steps["end_unix_ns"].max())) / 1e9
    if len(steps) >= _FEW_STEPS or later_s < _LONG_S:
        return "No findings in this recording."
    return (
        f"No findings, but only {format_count(len(steps), 'step')} {'was' if len(steps) == 1 else 'were'} seen:"
        f" the job ran for {format_seconds(later_s)} after that, of which no step is known."
    )

"""What is said of a recording without findings: few steps of a long job are no sign that all is well."""

from __future__ import annotations

from zerotop.analysis.formatting import Text, pluralize
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
    values = {"steps": pluralize(len(steps), "step"), "count": float(len(steps)), "later_s": later_s}
    said = (
        "No findings, but only {count:.0f} {steps} was seen"
        if len(steps) == 1
        else "No findings, but only {count:.0f} {steps} were seen"
    )
    return str(Text(said + ": the job ran for {later_s:seconds} after that, of which no step is known.", values))

"""A debugging mode that was switched on or off when the iteration time changed."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.findings.support.causes.step_change import Cause, StepChange
from zerotop.analysis.findings.support.mode_uses import NAMES, list_uses


def check_modes(change: StepChange) -> Cause | None:
    """Return the cause that a mode was switched on or off. It has a finding of its own if it lasts."""
    before, after = change.before, change.after
    is_slower = np.median(after["iteration_s"]) > np.median(before["iteration_s"])
    # Steps between the two were only counted, or the first one began without the mode.
    earliest_ns, latest_ns = int(before["end_unix_ns"][-1]), int(after["end_unix_ns"][0])
    known_ns = max(change.known_ns, int(after["end_unix_ns"][-1]))
    for use in list_uses(change.process):
        # Between two looks of the probe.
        if is_slower and use.begin_ns <= latest_ns and earliest_ns <= use.known_ns <= known_ns:
            return Cause(f"{NAMES[use.mode]} was switched on", "", "", 0.95, has_own_finding=True)
        end_ns, end_known_ns = use.end_ns or known_ns + 1, use.end_known_ns or known_ns + 1
        if not is_slower and end_ns <= latest_ns and earliest_ns <= end_known_ns <= known_ns:
            return Cause(f"{NAMES[use.mode]} was switched off", "", "", 0.9)
    return None

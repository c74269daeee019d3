"""Wait, and take Python's lock then, whatever the training thread does.

A thread that waits for the lock gets it when the thread that holds it gives it away for long, or has kept it for the switch
interval (5 ms). A training loop gives it away for microseconds at a time, in each operation, and then the interval begins
anew: a sampler would only ever see the few long calls, and nothing of Python code that takes a few milliseconds at a
time. With the shorter interval that is set here it sees 83 % of 91 % where that code takes 8 ms at a time, 47 % of 84 % with
1.6 ms (benchmarks/lock_wait.py). Not much shorter: while a function in C keeps the lock, a thread that waits for it looks
once in each interval, which takes 7 % of a core at 0.3 ms and 20 % at 50 us.
"""

from __future__ import annotations

import sys
import threading

SHORT_S = 3e-4
"""The switch interval meanwhile, unless the job's is shorter."""
# Python keeps whole microseconds of the interval, rounded down.
_EXACT_S = 1.5e-6

_usual_s = 0.0  # the job's own interval while the short one is set; else 0


def wait_promptly(event: threading.Event, seconds: float) -> bool:
    """Wait as ``event.wait`` does, and hold the lock soon after that. One thread at a time may call this.

    No other thread than the training thread may compute in Python meanwhile: the two would take turns more often.
    """
    global _usual_s
    _usual_s = sys.getswitchinterval()
    sys.setswitchinterval(min(SHORT_S, _usual_s))
    try:
        return event.wait(seconds)
    finally:
        restore_interval()


def restore_interval() -> None:
    """Set the job's interval again, unless the job has set another one meanwhile. A forked child calls this, too."""
    global _usual_s
    if _usual_s and abs(sys.getswitchinterval() - min(SHORT_S, _usual_s)) < _EXACT_S:
        sys.setswitchinterval(_usual_s)
    _usual_s = 0.0

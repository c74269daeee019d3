"""A C version of the probe's work in counted steps, which costs less than the same work in Python.

In a real loop the probe's Python code is in none of the processor's caches, and loading it costs more than the work itself.

``counted_steps`` is the compiled module. It is None if there was no compiler when zerotop was installed, if another Python
or machine loads the probe, and with ``PYTHONZEROTOP_NATIVE=0``: then Python code does the same. Nothing else belongs here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zerotop_probe.recording.directory import NATIVE_VARIABLE
from zerotop_probe.recording.interruptions import OWN_FOLDER
from zerotop_probe.recording.tables import SPANS

if TYPE_CHECKING:
    from types import ModuleType

# The record that the C code writes.
_SPAN_FORMAT = "<qqqiiiiHHBBH"


def _load_module() -> ModuleType | None:
    if os.environ.get(NATIVE_VARIABLE) == "0" or SPANS.record_struct.format != _SPAN_FORMAT:
        return None
    try:
        from zerotop_probe.inside.native import _counted_steps

        _counted_steps.hide_frames_of(OWN_FOLDER)
    except Exception:  # also if it was compiled from an older source
        return None
    return _counted_steps if SPANS.record_struct.size == _counted_steps.SPAN_BYTES else None


counted_steps = _load_module()

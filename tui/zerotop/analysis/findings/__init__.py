"""Findings: what happened in a recording and why, each with its numbers and one thing to do.

To add one, write a module in a folder of this package, and its test:
1. Declare a ``FindingKind``: name, severity, confidence, and templates of the sentence and the advice (``formatting.Text``).
2. Put its thresholds beside it, each with its unit and its reason; shared ones are in ``support.thresholds``.
3. Define ``detect(window: SearchWindow[Process]) -> Iterator[Finding | None]``, decorated with ``in_each_rank`` or
   another of ``support.window``: it is found by that name.
4. Yield ``KIND.at_steps(process, rows, evidence)`` or ``KIND.at(process, begin_ns, end_ns, evidence)``; None is skipped.
5. It is called again as the cursor moves. The window shows what is new, and before that as much as the detector asks for;
   findings that it has had are dropped. A search that follows the whole recording is kept with ``window.keep``.
6. Use only records up to ``known_ns``: findings must not depend on how the recording was read. Duplicates count once.
"""

# No __future__ import here: it would bind the name findings.
import importlib
import pkgutil
import sys
from functools import lru_cache

from zerotop.analysis.findings.support.detection import Detection, Detector
from zerotop.analysis.findings.support.evidence import Evidence
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.links import LinkedFinding, link_findings, name_relation, order_by_cause
from zerotop.recording.reader import Recording

__all__ = [
    "Detection",
    "Detector",
    "Evidence",
    "Finding",
    "LinkedFinding",
    "Severity",
    "begin_detection",
    "detect_findings",
    "link_findings",
    "load_detectors",
    "load_kinds",
    "name_relation",
    "order_by_cause",
]


def load_detectors() -> dict[str, Detector]:
    """Import all detectors. Returns them by the name of their module."""
    return dict(_import_detectors(tuple(__path__)))


def load_kinds() -> dict[str, FindingKind]:
    """Return the kinds of findings by name, sorted."""
    modules = (vars(sys.modules[detect.__module__]) for detect in load_detectors().values())
    kinds = [(value.name, value) for module in modules for value in module.values() if isinstance(value, FindingKind)]
    return dict(sorted(kinds, key=lambda one: one[0]))


@lru_cache(maxsize=1)
def _import_detectors(folders: tuple[str, ...]) -> dict[str, Detector]:
    names = [item.name for item in pkgutil.walk_packages(folders, f"{__name__}.") if not item.ispkg]
    modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    return {name: module.detect for name, module in sorted(modules.items()) if hasattr(module, "detect")}


def begin_detection(recording: Recording) -> Detection:
    """Return a search of a recording with all detectors."""
    return Detection(recording, load_detectors().values())


def detect_findings(recording: Recording, cursor_ns: int) -> tuple[Finding, ...]:
    """Return the findings known at the cursor (unix nanoseconds), in the order in which they became known."""
    detection = begin_detection(recording)
    detection.update(cursor_ns)
    return detection.findings_at(cursor_ns)

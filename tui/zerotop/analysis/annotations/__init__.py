"""What happened and why: findings in a recording, each with its numbers and one thing to do.

A detector is a module of this package with a function ``detect(facts: Facts) -> Iterable[Annotation | None]``; a file put
here is found, nothing else is touched. It is called again and again, with facts up to a cursor that moves on. What it has
said it may say again: the same finding counts once. What would have to be computed anew it keeps, with ``kept`` of the
facts, a process or a group. Where it looks at all ranks or nodes, of which there may be very many, it yields PAUSE at each.
A finding rests only on what was recorded up to its ``known_ns`` and never changes after, so that a list at a cursor is the
whole recording's list up to there, in however many pieces it was read.
"""

# No annotations of the future here: that import would take the name of the function.
import importlib
import pkgutil

from zerotop.analysis.annotations.support.annotation import Annotation, Severity
from zerotop.analysis.annotations.support.annotator import Annotator as _Annotator
from zerotop.analysis.annotations.support.annotator import Detector
from zerotop.analysis.annotations.support.evidence import Evidence
from zerotop.session.reader import Session

__all__ = ["Annotation", "Annotator", "Detector", "Evidence", "Severity", "find_annotations", "load_detectors"]


def load_detectors() -> dict[str, Detector]:
    """All there are, by the name of their file."""
    names = [item.name for item in pkgutil.walk_packages(__path__, f"{__name__}.") if not item.ispkg]
    modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    return {name: module.detect for name, module in sorted(modules.items()) if hasattr(module, "detect")}


class Annotator(_Annotator):
    """Looks with all detectors."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, load_detectors().values())


def find_annotations(session: Session, cursor_ns: int) -> tuple[Annotation, ...]:
    """What was known at the cursor (unix nanoseconds), in the order in which it became known."""
    annotator = Annotator(session)
    annotator.update(cursor_ns)
    return annotator.findings_at(cursor_ns)

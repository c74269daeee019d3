"""What happened and why: findings in a recording, each with its numbers and one thing to do.

A detector is a module of this package with a function ``detect(facts: Facts) -> Iterable[Annotation]``; a file put here is
found, nothing else is touched. Its findings rest only on what was recorded up to their ``known_ns`` and never change after,
so that a list at a cursor is the whole recording's list up to there.
"""

# No annotations of the future here: that import would take the name of the function.
import importlib
import pkgutil
from collections.abc import Callable, Iterable

from zerotop.analysis.annotations.annotation import Annotation, Severity
from zerotop.analysis.annotations.facts import Facts
from zerotop.analysis.steps import StepTable
from zerotop.session.reader import Session

__all__ = ["Annotation", "Annotator", "Facts", "Severity", "annotations", "detectors"]

Detector = Callable[[Facts], Iterable[Annotation]]


def detectors() -> dict[str, Detector]:
    """All there are, by the name of their file."""
    modules = {item.name: importlib.import_module(f"{__name__}.{item.name}") for item in pkgutil.iter_modules(__path__)}
    return {name: module.detect for name, module in sorted(modules.items()) if hasattr(module, "detect")}


def annotations(session: Session, cursor_ns: int, steps: StepTable | None = None) -> tuple[Annotation, ...]:
    """What was known at the cursor (unix nanoseconds), in the order in which it became known.

    ``steps``: the session's, up to date, where the caller has them already.
    """
    facts = Facts(session, cursor_ns, steps)
    found = [finding for detect in detectors().values() for finding in detect(facts)]
    return tuple(sorted(found, key=lambda finding: (finding.known_ns, finding.begin_ns, finding.name)))


class Annotator:
    """The findings of a session that may still grow, at any cursor: looked for when it has grown, then only chosen from."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps = StepTable(session)
        self._found: tuple[Annotation, ...] = ()
        self._upto_ns = -1

    def update(self) -> bool:
        """Looks at what the session has read since. True when there is a new finding."""
        upto_ns = self._session.last_written_ns
        if upto_ns == self._upto_ns:
            return False
        self._upto_ns = upto_ns
        self._steps.update()
        before, self._found = self._found, annotations(self._session, upto_ns, self._steps)
        return self._found != before

    def at(self, cursor_ns: int) -> tuple[Annotation, ...]:
        """What was known at the cursor."""
        return tuple(finding for finding in self._found if finding.known_ns <= cursor_ns)

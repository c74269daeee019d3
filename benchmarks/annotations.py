"""What is found in labelled real recordings, against their labels; and how long looking takes.

    python benchmarks/annotations.py

The thresholds were chosen with these recordings in sight, so that this says how well they fit, not how well they foretell.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

from zerotop.analysis import annotations as room
from zerotop.demo import RECORDING
from zerotop.session.packing import SUFFIX
from zerotop.session.reader import Session

_FOLDER = Path(__file__).resolve().parent.parent / "tests" / "recordings"


def main() -> None:
    """Prints a line for each recording, then precision and recall by kind."""
    labels = json.loads((_FOLDER / "labels.json").read_text())
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for name, entry in labels.items():
        session = Session.open(RECORDING if name == RECORDING.stem else _FOLDER / (name + SUFFIX))
        began = time.perf_counter()
        found = Counter((finding.name, finding.step) for finding in room.annotations(session, session.end_ns))
        took = time.perf_counter() - began
        expected = Counter((kind, step) for kind, step in entry["findings"])
        for into, these in ((right, found & expected), (wrong, found - expected), (missed, expected - found)):
            into.update(kind for kind, _ in these.elements())
        strange = sorted(kind for kind, _ in ((found - expected) + (expected - found)).elements())
        agreed = (found & expected).total()
        print(f"{name:16} {agreed:2} of {expected.total():2} found, {took * 1e3:6.1f} ms  {' '.join(strange)}")
    print(f"\n{'kind':20} {'labels':>6} {'precision':>9} {'recall':>6}")
    for kind in sorted(right | wrong | missed):
        print(_line(kind, right[kind], wrong[kind], missed[kind]))
    print(_line("all", right.total(), wrong.total(), missed.total()))


def _line(kind: str, right: int, wrong: int, missed: int) -> str:
    precision = f"{right / (right + wrong):.0%}" if right + wrong else "-"
    recall = f"{right / (right + missed):.0%}" if right + missed else "-"
    return f"{kind:20} {right + missed:6} {precision:>9} {recall:>6}"


if __name__ == "__main__":
    main()

"""What is found in labelled real recordings, against their labels; and how long looking takes.

    python benchmarks/annotations.py [--million]

Precision and recall by kind, over all recordings and over those made after thresholds were chosen (``unseen``). The others
were in sight when they were: of those this says how well thresholds fit, not how well they foretell; of ``held`` ones
tests/recordings/README.md says what was found in them before anything was mended by them. ``--million``: writes a job of a
million steps, and says how long looking at it takes in all, and for a live viewer each time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from zerotop.analysis import annotations as room
from zerotop.session.reader import Session

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import long_recording
import recordings

_GROUPS = ("unseen", "held", "all")


def main() -> None:
    """Prints a line for each recording, then precision and recall by kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", action="store_true", help="only how long a million steps take")
    if parser.parse_args().million:
        _million()
        return
    counts = {group: {name: Counter[str]() for name in ("right", "wrong", "missed")} for group in _GROUPS}
    for name, session, labels in _sessions():
        began = time.perf_counter()
        found = [(finding.name, finding.step) for finding in room.find_annotations(session, session.end_ns)]
        took = time.perf_counter() - began
        right, wrong, missed = recordings.compare(labels, found)
        for group in ("all", name.partition("-")[0]):
            for into, kinds in zip(counts.get(group, {}).values(), (right, wrong, missed), strict=False):
                into.update(kinds)
        strange = " ".join([*(f"+{kind}" for kind in wrong), *(f"-{kind}" for kind in missed)])
        print(f"{name:24} {len(right):2} of {len(labels):2} found, {took * 1e3:6.1f} ms  {strange}")
    for group in _GROUPS:
        _print_table(group, **counts[group])


def _sessions() -> Iterator[tuple[str, Session, list[recordings.Label]]]:
    """Each recording, and of those with a GPU also what samplers alone saw of it."""
    outside, missed = recordings.labels("outside"), recordings.labels("missed")
    for name, labels in recordings.labels().items():
        session = recordings.recording(name)
        yield name, session, labels + missed[name]
        if session.sources["gpus"]:
            with tempfile.TemporaryDirectory() as folder:
                yield f"{name} from outside", recordings.from_outside(name, Path(folder)), outside[name]


def _print_table(group: str, right: Counter[str], wrong: Counter[str], missed: Counter[str]) -> None:
    print(f"\n{group:20} {'labels':>6} {'precision':>9} {'recall':>6}")
    for kind in sorted(right | wrong | missed):
        print(_line(kind, right[kind], wrong[kind], missed[kind]))
    print(_line("all kinds", right.total(), wrong.total(), missed.total()))


def _line(kind: str, right: int, wrong: int, missed: int) -> str:
    precision = f"{right / (right + wrong):.0%}" if right + wrong else "-"
    recall = f"{right / (right + missed):.0%}" if right + missed else "-"
    return f"{kind:20} {right + missed:6} {precision:>9} {recall:>6}"


def _million() -> None:
    with tempfile.TemporaryDirectory() as folder:
        session = Session.open(long_recording.write(Path(folder) / "session", 1_000_000))
        records = sum(len(source.array) for sources in session.sources.values() for source in sources)
        began = time.perf_counter()
        found = room.find_annotations(session, session.end_ns)
        print(f"1,000,000 steps, {records:,} records: {time.perf_counter() - began:.2f} s, {len(found)} findings")
        annotator, pieces, end_ns = room.Annotator(session), [], session.end_ns
        annotator.update(end_ns - 60 * 10**9)
        for second in range(60):
            began = time.perf_counter()
            annotator.update(end_ns - (59 - second) * 10**9)
            pieces.append(time.perf_counter() - began)
        print(
            f"then each second of the last minute: median {sorted(pieces)[30] * 1e3:.1f} ms, at most {max(pieces) * 1e3:.1f}"
        )


if __name__ == "__main__":
    main()

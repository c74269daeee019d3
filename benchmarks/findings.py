"""Findings in labelled real recordings against their labels, and the time that the search takes.

    python benchmarks/findings.py [--long HOURS [TROUBLE ...] | --live]

Precision and recall by kind, over all recordings and over those made after thresholds were chosen (``unseen``). Thresholds
were chosen with the others in sight: their figures say how well thresholds fit, not how well they predict. For ``held``
ones, tests/recordings/README.md says what was found before they changed anything. ``--long``: the time for a recording of so
many hours with each kind of trouble in it, against one without trouble and one of half the length. ``--live``: the time
for each second of a live job after a million steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from zerotop.analysis.findings import Detector, Evidence, Finding, begin_detection, detect_findings, load_detectors
from zerotop.analysis.findings.support.detection import Detection
from zerotop.recording.reader import Recording

# First: there is a benchmark of the name long_recording too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import long_recording
import recordings
from long_recording import Trouble
from planted_troubles import MIXTURES, TROUBLES

_GROUPS = ("unseen", "held", "all")


def main() -> None:
    """Print a line for each recording, then precision and recall by kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", type=float, metavar="HOURS", help="only the time for long recordings with troubles")
    parser.add_argument("troubles", nargs="*", metavar="TROUBLE", help="with --long: only these, see planted_troubles.py")
    parser.add_argument("--live", action="store_true", help="only the time for each second of a live job")
    options = parser.parse_args()
    if options.long:
        _print_long(options.long, options.troubles)
        return
    if options.live:
        _print_live()
        return
    counts = {group: {name: Counter[str]() for name in ("right", "wrong", "missed")} for group in _GROUPS}
    for name, recording, labels in _list_recordings():
        began = time.perf_counter()
        found = [(finding.name, finding.step) for finding in detect_findings(recording, recording.end_ns)]
        took = time.perf_counter() - began
        right, wrong, missed = recordings.compare_findings(labels, found)
        for group in ("all", name.partition("-")[0]):
            for into, kinds in zip(counts.get(group, {}).values(), (right, wrong, missed), strict=False):
                into.update(kinds)
        strange = " ".join([*(f"+{kind}" for kind in wrong), *(f"-{kind}" for kind in missed)])
        print(f"{name:24} {len(right):2} of {len(labels):2} found, {took * 1e3:6.1f} ms  {strange}")
    for group in _GROUPS:
        _print_table(group, **counts[group])


def _list_recordings() -> Iterator[tuple[str, Recording, list[recordings.Label]]]:
    """Yield each recording, and each one with a GPU once more without the files of its probe."""
    outside, missed = recordings.read_labels("outside"), recordings.read_labels("missed")
    for name, labels in recordings.read_labels().items():
        recording = recordings.open_recording(name)
        yield name, recording, labels + missed[name]
        if recording.sources["gpus"]:
            with tempfile.TemporaryDirectory() as folder:
                yield f"{name} from outside", recordings.open_without_probe(name, Path(folder)), outside[name]


def _print_table(group: str, right: Counter[str], wrong: Counter[str], missed: Counter[str]) -> None:
    print(f"\n{group:20} {'labels':>6} {'precision':>9} {'recall':>6}")
    for kind in sorted(right | wrong | missed):
        print(_format_row(kind, right[kind], wrong[kind], missed[kind]))
    print(_format_row("all kinds", right.total(), wrong.total(), missed.total()))


def _format_row(kind: str, right: int, wrong: int, missed: int) -> str:
    precision = f"{right / (right + wrong):.0%}" if right + wrong else "-"
    recall = f"{right / (right + missed):.0%}" if right + missed else "-"
    return f"{kind:20} {right + missed:6} {precision:>9} {recall:>6}"


def _print_long(hours: float, names: Sequence[str]) -> None:
    """Print the time for each trouble, or those named, of a recording of that length, and how it compares."""
    load_detectors()
    steps = int(hours * 3600 / long_recording.STEP_S)
    print(f"{hours:g} hours, {steps:,} steps    {'all':>7} {'of quiet':>8} {'of half':>7}  slowest detector")
    quiet_s = {ranks: _search_long(steps, Trouble(ranks=ranks))[0] for ranks in (1, 2)}
    troubles = {"quiet": Trouble(), **TROUBLES, **MIXTURES}
    for name in names or troubles:
        trouble = troubles[name]
        half_s, _ = _search_long(steps // 2, trouble)
        whole_s, by_detector = _search_long(steps, trouble)
        slowest, seconds = by_detector.most_common(1)[0]
        ratios = f"{whole_s / quiet_s[trouble.ranks]:7.1f}x {whole_s / half_s:6.1f}x"
        print(f"{name:32} {whole_s:5.1f} s {ratios}  {slowest} {seconds:.2f} s", flush=True)


def _search_long(steps: int, trouble: Trouble) -> tuple[float, Counter[str]]:
    """Return the processor seconds that looking at such a recording takes, in all and by detector."""
    spent = Counter[str]()

    def time_detector(name: str, detect: Detector) -> Detector:
        def run_timed(evidence: Evidence) -> list[Finding | None]:
            began = time.process_time()
            findings = list(detect(evidence))
            spent[name] += time.process_time() - began
            return findings

        return run_timed

    with tempfile.TemporaryDirectory() as folder:
        recording = Recording.open(long_recording.write_recording(Path(folder) / "recording", steps, trouble))
        detection = Detection(recording, [time_detector(*item) for item in load_detectors().items()])
        began = time.process_time()
        detection.update()
        return time.process_time() - began, spent


def _print_live() -> None:
    """Print the time for each second of a live job that has made a million steps."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording.open(long_recording.write_recording(Path(folder) / "recording", 1_000_000))
        detection, pieces, end_ns = begin_detection(recording), [], recording.end_ns
        detection.update(end_ns - 60 * 10**9)
        for second in range(60):
            began = time.perf_counter()
            detection.update(end_ns - (59 - second) * 10**9)
            pieces.append(time.perf_counter() - began)
    milliseconds = [piece * 1e3 for piece in sorted(pieces)]
    print(f"each second of the last minute: median {milliseconds[30]:.1f} ms, at most {milliseconds[-1]:.1f}")


if __name__ == "__main__":
    main()

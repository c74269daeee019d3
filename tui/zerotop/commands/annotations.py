"""``zerotop annotations``: what happened in a recording and why, as a list or as JSON."""

# No annotations of the future here: that import would take the name of the function.
import argparse
import dataclasses
import json
import math
import textwrap
from typing import Any

from zerotop.analysis.annotations import Annotation
from zerotop.analysis.annotations import find_annotations as find
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.open_recording import open_named

_WIDTH = 100
_INDENT = " " * 4


def annotations(options: argparse.Namespace) -> int:
    """Prints to standard output. Returns 0."""
    session = open_named(options.session)
    found = find(session, session.end_ns)
    if options.json:
        print(json.dumps([build_dict(finding) for finding in found], indent=1, allow_nan=False))
    elif found:
        print("\n".join(_format_finding(finding, session.begin_ns) for finding in found))
    else:
        print("There is nothing to remark on in this recording.")
    return 0


def build_dict(finding: Annotation) -> dict[str, Any]:
    """A finding as plain values; what is not finite is null."""
    facts = dataclasses.asdict(finding)
    facts["severity"] = finding.severity.value
    facts["evidence"] = {name: value if math.isfinite(value) else None for name, value in finding.evidence.items()}
    return facts


def _format_finding(finding: Annotation, begin_ns: int) -> str:
    where = f"step {finding.step}" if finding.step is not None else "no step"
    head = f"{(finding.known_ns - begin_ns) / 1e9:9.1f} s  {where}  {finding.name}  ({finding.severity.value})"
    texts = (escape_unprintable(finding.sentence), "-> " + escape_unprintable(finding.advice))
    return "\n".join(
        [head, *(textwrap.fill(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT) for text in texts)]
    )

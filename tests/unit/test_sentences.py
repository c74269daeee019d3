"""Templates of sentences, and the findings that are made of them."""

import copy
import dataclasses
import json
from typing import Any, cast

import numpy as np
import pytest

from zerotop.analysis.findings.support.finding import FindingKind, Severity
from zerotop.analysis.formatting import Text
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop_probe.recording.events import EngineFacts

KIND = FindingKind(
    name="made_up",
    confidence=0.5,
    headline="Rank {rank} holds {held_bytes:bytes}[ of {device_bytes:bytes}][ in step {step}]",
    advice="Call {helper}.",
    fix='{"helper": "{helper}"}',
)


class Subject:
    """Two ranks in step 7."""

    engine = EngineFacts({})

    command = ""

    def ranks_at(self, known_ns: int) -> tuple[int, ...]:
        return (3, 4) if known_ns >= 10 else (3,)

    def step_at(self, time_ns: int) -> int | None:
        return 7


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{gap:seconds} of {long:seconds} ({share:percent})", "250 ms of 12 s (67 %)"),
        ("{up:change}, {down:change}", "+50 %, -25 %"),
        ("{ranks:Ranks} wait for {one:ranks}", "Ranks 0 to 2 wait for rank 5"),
        ("{count:count process}, {five:count rank}", "1 process, 5 ranks"),
        ("{five:.1f} {name}", "5.0 backward"),
        ("a[, {five}][, {missing} {five}][ ({five}[ of {missing}])]", "a, 5 (5)"),
        ("{1073741824:bytes}, {-1048576:size}", "1.00 GiB, -1.0 MiB"),
        ('{"json": 1} {}', '{"json": 1} {}'),
    ],
)
def test_templates(template: str, expected: str) -> None:
    values = {"gap": 0.25, "long": 12.0, "share": 2 / 3, "up": 0.5, "down": -0.25, "ranks": (0, 1, 2), "one": [5]}
    assert Text(template, {**values, "count": 1.0, "five": 5, "name": "backward", "missing": None}) == expected


def test_a_value_that_must_be_there() -> None:
    with pytest.raises(KeyError, match="missing"):
        Text("It took {missing:seconds}.", {"missing": None})


def test_a_text_is_a_string_and_survives_a_copy() -> None:
    text = Text("{size:bytes}", {"size": 1 << 30})
    for copied in (copy.copy(text), copy.deepcopy(text)):
        assert isinstance(copied, Text)
        assert (copied, copied.template, copied.values) == (text, text.template, text.values)
        assert copied.render((("kB", 10**3), ("MB", 10**6), ("GB", 10**9))) == "1.07 GB"
    assert json.dumps(text) == '"1.00 GiB"'
    assert {text: 1}["1.00 GiB"] == 1  # type: ignore[index]


def test_a_finding_has_the_step_and_the_ranks_of_its_subject() -> None:
    finding = KIND.at(Subject(), 5, 10, cast(Any, {"held_bytes": np.int64(1 << 30), "device_bytes": None}), helper="f()")
    assert (finding.begin_ns, finding.end_ns, finding.known_ns, finding.step, finding.ranks) == (5, 10, 10, 7, (3, 4))
    assert finding.evidence == {"held_bytes": float(1 << 30)}
    assert type(finding.evidence["held_bytes"]) is float
    assert (finding.headline, finding.details, finding.advice) == ("Rank 3 holds 1.00 GiB in step 7", "", "Call f().")
    assert finding.fix == '{"helper": "f()"}'
    other = KIND.at(None, 5, 10, {"held_bytes": 0.0}, known_ns=12, step=None, ranks=[9], helper="g()")
    assert (other.known_ns, other.step, other.ranks) == (12, None, (9,))
    assert other.headline == "Rank 9 holds 0.0 MiB"


def test_a_finding_about_steps_is_known_at_the_end_of_the_last() -> None:
    rows: Any = np.zeros(2, STEP_DTYPE)
    rows["step"], rows["begin_unix_ns"], rows["end_unix_ns"] = (20, 21), (100, 200), (150, 250)
    finding = KIND.with_changes(severity=Severity.ERROR).at_steps(Subject(), rows, {"held_bytes": 1.0}, helper="f()")
    assert (finding.begin_ns, finding.end_ns, finding.known_ns, finding.step) == (100, 250, 250, 20)
    assert finding.severity is Severity.ERROR
    assert KIND.at_steps(Subject(), rows, {"held_bytes": 1.0}, known_ns=300, helper="f()").end_ns == 300
    assert finding == dataclasses.replace(finding)

"""The line about the worst finding that ``zerotop run --headless`` ends with."""

from __future__ import annotations

from pathlib import Path

import pytest

import recordings
from zerotop.commands.job.job_report import describe_worst_finding


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cpu-hang", "No progress for 30 s: rank 1 is behind, in step. To see it: zerotop annotations "),
        ("z2-oom", "all 5 findings: zerotop annotations "),
        ("held-straggler", "Rank 0 delays each iteration by 119 ms (49 %) from step 12 on. To see all 2 findings: "),
    ],
)
def test_the_worst_finding_is_named(name: str, said: str, tmp_path: Path) -> None:
    folder = recordings.as_directory(name, tmp_path)
    (line,) = describe_worst_finding(str(folder))
    assert said in line
    assert line.endswith(str(folder))


def test_explanations_alone_and_jobs_without_ranks_have_no_line(tmp_path: Path) -> None:
    assert describe_worst_finding(str(recordings.as_directory("cpu-clean", tmp_path))) == []
    assert describe_worst_finding(str(tmp_path)) == []

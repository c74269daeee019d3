"""Jobs that end normally after they have waited for threads, processes or something else to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_recording import second_to_unix_ns
from stuck_ranks_recording import SILENT_S, SLEEPING, WAITING, Left, Stand, write_standing
from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop.recording.reader import Recording

UPLOAD = "uploader", "time.sleep", ("train.py", 6, "upload", True)
MAIN = ("train.py", 130, "<module>", True)
JOIN = ("threading.py", 1119, "Thread.join", False)
AT_EXIT = Stand((("threading.py", 1590, "_shutdown", False),), "acquire", other=UPLOAD)
LEFT_S = 45.0


def find(recording: Recording, second: float = 60) -> dict[str, Finding]:
    found = detect_findings(recording, second_to_unix_ns(second))
    return {one.name: one for one in found if one.name in ("hung_ranks", "long_end")}


@pytest.mark.parametrize(
    ("stand", "headline", "fix"),
    [
        (AT_EXIT, "rank 0 waits for thread uploader", "train.py:6"),
        (Stand((JOIN, MAIN), "acquire", other=UPLOAD), "rank 0 waits for thread uploader at train.py:130", "train.py:130"),
        (
            Stand((JOIN, ("multiprocessing/pool.py", 665, "Pool.join", False), MAIN), "acquire", other=UPLOAD),
            "rank 0 waits for a process pool at train.py:130",
            "train.py:130",
        ),
        (
            Stand((("multiprocessing/process.py", 149, "BaseProcess.join", False), MAIN), "waitpid"),
            "rank 0 waits for a process at train.py:130",
            "train.py:130",
        ),
        (
            Stand((("torch/utils/data/dataloader.py", 1703, "_Iter._shutdown_workers", False), MAIN), "poll"),
            "rank 0 waits for the end of loader workers at train.py:130",
            "train.py:130",
        ),
    ],
)
def test_what_a_job_waits_for_at_its_end(tmp_path: Path, stand: Stand, headline: str, fix: str) -> None:
    found = find(write_standing(tmp_path, {0: stand}, left=Left(LEFT_S, 0)))
    assert list(found) == ["long_end"]
    end = found["long_end"]
    assert (end.headline, end.fix) == (f"The end took 25 s: {headline}", fix)
    assert (end.severity, end.known_ns) == (Severity.WARNING, second_to_unix_ns(LEFT_S + 1))
    assert end.evidence == {"end_s": 25, "waited_s": 25}
    assert ("see what keeps them busy" in end.advice) is ("workers" in headline)


def test_workers_that_nobody_told_to_end_end_once_their_loader_is_deleted(tmp_path: Path) -> None:
    """PyTorch 2.11 with pinned memory and persistent workers: Python's exit waits 5 s for each of them."""
    waits = Stand((("torch/utils/data/dataloader.py", 1703, "_Iter._clean_up_worker", False),), "poll")
    end = find(write_standing(tmp_path, {0: waits}, left=Left(LEFT_S, 0)))["long_end"]
    assert end.headline == "The end took 25 s: rank 0 waits for the end of loader workers"
    assert end.advice.startswith("Delete the data loader, and iterators over it,")
    assert "up to 5 s for each worker in turn" in end.advice


def test_the_wait_is_a_hang_until_the_job_has_ended_normally(tmp_path: Path) -> None:
    joining = Stand((JOIN, MAIN), "acquire", other=UPLOAD)
    assert list(find(write_standing(tmp_path, {0: joining}, left=Left(LEFT_S, 0)), LEFT_S)) == ["hung_ranks"]
    (tmp_path / "failed").mkdir()
    assert list(find(write_standing(tmp_path / "failed", {0: joining}, left=Left(LEFT_S, 1)))) == ["hung_ranks"]


def test_python_that_exits_does_not_hang_unless_other_ranks_wait_for_it(tmp_path: Path) -> None:
    assert find(write_standing(tmp_path, {0: AT_EXIT})) == {}
    (tmp_path / "uneven").mkdir()
    (hung,) = find(write_standing(tmp_path / "uneven", {0: Stand(WAITING, "wait"), 1: AT_EXIT})).values()
    assert hung.name == "hung_ranks"
    assert hung.headline == "No progress for 20 s: rank 1 waited for thread uploader"


def test_a_job_that_works_at_its_end_or_ends_soon_is_no_finding(tmp_path: Path) -> None:
    working = Stand(SLEEPING, "sum", cores_used=0.9)
    assert find(write_standing(tmp_path, {0: working}, left=Left(LEFT_S, 0))) == {}
    (tmp_path / "soon").mkdir()
    assert find(write_standing(tmp_path / "soon", {0: AT_EXIT}, (25,), left=Left(SILENT_S + 8, 0))) == {}
    (tmp_path / "unknown").mkdir()
    (end,) = find(write_standing(tmp_path / "unknown", {0: None}, left=Left(SILENT_S + 40, 0)), 70).values()
    assert end.headline == "The end took 40 s"


def test_a_process_that_ends_long_after_pythons_exit_functions_have_begun(tmp_path: Path) -> None:
    (end,) = find(write_standing(tmp_path, {0: None}, (), left=Left(SILENT_S + 2, 0), ended_s=SILENT_S + 20)).values()
    assert end.headline == "The end took 20 s: rank 0 ran exit functions for 18 s"
    assert end.evidence == {"end_s": 20, "waited_s": 18}


def test_an_interrupted_job_did_not_end_normally(tmp_path: Path) -> None:
    found = find(write_standing(tmp_path, {0: AT_EXIT}, left=Left(LEFT_S, 0, "KeyboardInterrupt\n")))
    assert found["long_end"].details.endswith("No phase began or ended on any rank before the job was interrupted.")

"""``zerotop check``: budgets, forbidden findings, a baseline with noise, JUnit XML and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import long_recording
import recordings
from zerotop.analysis.checks.budget import SizeLimit, parse_budget
from zerotop.analysis.checks.pace import compare_paces, measure_pace
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.recording.reader import Recording
from zerotop_probe.recording import directory

STORY = str(recordings.find_packed_file("story"))
WARMUP, TOLERANCE = 5, 0.02


def run_check(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Run it with ``--json``; return the exit code, and outcome and sentence of each check."""
    code = main(["check", *arguments, "--json"])
    return code, {one["check"]: (one["outcome"], one["sentence"]) for one in json.loads(capfd.readouterr().out)}


@pytest.fixture
def write_budget(tmp_path: Path) -> Any:
    def write_text(text: str) -> str:
        path = tmp_path / "budget.toml"
        path.write_text(text)
        return str(path)

    return write_text


def test_bounds_pass_and_fail_by_the_numbers_of_the_recording(write_budget: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
        warmup_steps = 0
        [limits]
        gpu_memory = "{gpu}"
        host_memory = "40 GiB"
        iteration_seconds = {seconds}
        tokens_per_second = {rate}
        steps = {steps}
    """
    code, checks = run_check(capfd, STORY, write_budget(text.format(gpu="39 GiB", seconds=2.7, rate=1300, steps=14)))
    assert code == 0
    assert {outcome for outcome, _ in checks.values()} == {"passed"}
    assert checks["gpu_memory"][1] == "The peak was 38.25 GiB, the limit is 39 GiB."
    code, checks = run_check(capfd, STORY, write_budget(text.format(gpu="38 GiB", seconds=2.6, rate=1400, steps=15)))
    assert code == 1
    failed = {name for name, (outcome, _) in checks.items() if outcome == "failed"}
    assert failed == {"gpu_memory", "iteration_seconds", "tokens_per_second", "steps"}


def test_findings_that_must_not_occur(write_budget: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = '[findings]\nforbidden = ["double_spike", "straggler", "error"]'
    code, checks = run_check(capfd, STORY, write_budget(text))
    assert code == 1
    assert checks["finding double_spike"][0] == "failed"
    assert checks["finding double_spike"][1].startswith("GPUs idle 64 % of each iteration while")
    assert checks["finding straggler"] == ("passed", "It did not occur.")
    assert checks["finding error"][0] == "passed"
    forbidden = write_budget('[findings]\nforbidden = ["error", "hung_ranks"]')
    for name, is_over in (("x2-hang-kernel", False), ("cpu-hang", True)):
        code, checks = run_check(capfd, str(recordings.find_packed_file(name)), forbidden)
        assert checks["finding hung_ranks"][0] == "failed"
        assert checks["finding error"][0] == ("passed" if is_over else "failed"), "a job that went on did not fail"


def test_a_failed_job_and_a_recording_without_steps_fail(
    write_budget: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, checks = run_check(capfd, str(recordings.find_packed_file("z2-oom")), write_budget(""))
    assert (code, checks["end"]) == (1, ("failed", "The job ended with exit code 1."))
    directory.create_recording(["python", "train.py"], path=str(tmp_path / "empty"))
    limits = write_budget('[limits]\niteration_seconds = 1\ntokens_per_second = 5\ngpu_memory = "1GiB"')
    code, checks = run_check(capfd, str(tmp_path / "empty"), limits)
    assert code == 1
    assert checks["steps"] == ("failed", "No finished step was recorded: there is nothing to measure.")
    assert checks["iteration_seconds"][0] == checks["tokens_per_second"][0] == "failed"
    assert checks["gpu_memory"] == ("skipped", "No GPU memory was recorded.")


def test_a_baseline_of_another_machine_or_setting_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    elsewhere = recordings.unpack_to_folder("z2", tmp_path)
    for path in elsewhere.glob("*.jsonl"):
        path.write_text(path.read_text().replace("NVIDIA H200", "NVIDIA A100"))
    code, checks = run_check(capfd, str(recordings.find_packed_file("z2")), "--baseline", str(elsewhere))
    assert code == 0
    assert checks["slowdown"][0] == "skipped"
    assert "it ran on another machine, 1 NVIDIA A100" in checks["slowdown"][1]
    code, checks = run_check(
        capfd, str(recordings.find_packed_file("z2")), "--baseline", str(recordings.find_packed_file("z2-offload"))
    )
    assert checks["slowdown"][1] == "Not compared with the baseline z2-offload: its optimizer offload is cpu, not none."
    assert checks["gpu_memory_growth"][0] == "failed"


def test_too_few_steps_are_not_compared(write_budget: Any, capfd: pytest.CaptureFixture[str]) -> None:
    code, checks = run_check(capfd, STORY, write_budget(f'[baseline]\nrecording = "{STORY}"'))
    assert code == 0
    assert checks["slowdown"][0] == "skipped"
    assert "Too few steps to compare: 4 and 4 after the warm-up, 20 needed" in checks["slowdown"][1]


def write_run(path: Path, seed: int, slower: float = 1.0) -> Path:
    """Write a run of 100 steps whose noise has a memory, as that of a busy machine, and a level of its own."""
    random = np.random.default_rng(seed)
    noise = np.zeros(100)
    for step in range(1, 100):
        noise[step] = 0.7 * noise[step - 1] + random.normal(0, 0.004)
    level = 1 + random.normal(0, 0.002)
    spikes = np.where(random.random(100) < 0.05, random.exponential(0.5, 100), 0.0)

    def vary_levels(seconds: np.ndarray, rank: int) -> None:
        seconds *= (slower * level * (1 + noise) + spikes)[:, None]

    def keep_busy(rows: np.ndarray) -> None:
        rows["utilization_percent"] = 97

    return long_recording.write_recording(path, 100, long_recording.Trouble(paces=vary_levels, tables={"gpus": keep_busy}))


def test_equal_runs_never_fail_and_one_slower_by_3_percent_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paces = [
        measure_pace(
            RecordingSource(Recording.open(write_run(tmp_path / f"{kind}-{seed}", seed + 100 * (kind > 0), 1 + kind))),
            WARMUP,
        )
        for kind, count in ((0.0, 25), (0.03, 4))
        for seed in range(count)
    ]
    same, slow = paces[:25], paces[25:]

    def is_slower(one: Any, other: Any) -> bool:
        slower, explained = compare_paces(one, other)
        return bool(slower > max(explained, TOLERANCE))

    assert not any(is_slower(one, other) for one in same for other in same if one is not other)  # 600 comparisons
    found = sum(is_slower(one, other) for one in slow for other in same)
    assert found >= 0.9 * len(slow) * len(same)
    code, checks = run_check(capfd, str(tmp_path / "0.03-0"), "--baseline", str(tmp_path / "0.0-0"))
    assert code == 1
    assert checks["slowdown"][0] == "failed"
    assert "% slower; 2.0 % is allowed, noise explains up to" in checks["slowdown"][1]


def test_a_job_that_computes_on_the_cpu_needs_a_larger_slowdown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Equal runs of it differ by a few percent: see ``benchmarks/check_noise.py --computes``."""
    runs = [write_run(tmp_path / str(slower), 1, slower) for slower in (1.0, 1.04, 1.15)]
    for path in runs:
        (gpus,) = path.glob("gpus-*.rec")
        gpus.unlink()
    code, checks = run_check(capfd, str(runs[1]), "--baseline", str(runs[0]))
    assert (code, checks["slowdown"][0]) == (0, "skipped")
    code, checks = run_check(capfd, str(runs[2]), "--baseline", str(runs[0]))
    assert (code, checks["slowdown"][0]) == (1, "failed")


def test_a_slowdown_within_a_large_spread_is_left_open(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def vary_slowly(seconds: np.ndarray, rank: int) -> None:
        seconds *= (1.0 + 0.3 * np.sin(np.arange(100) / 10))[:, None]

    long_recording.write_recording(tmp_path / "wavers", 100, long_recording.Trouble(paces=vary_slowly))
    write_run(tmp_path / "even", 1)
    code, checks = run_check(capfd, str(tmp_path / "wavers"), "--baseline", str(tmp_path / "even"))
    assert code == 0
    assert checks["slowdown"][0] == "skipped"
    assert "but noise explains up to" in checks["slowdown"][1]


def test_junit_has_a_case_for_each_check(write_budget: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    junit = tmp_path / "check.xml"
    assert (
        main(["check", STORY, write_budget('[limits]\ngpu_memory = "1GiB"'), "--junit", str(junit), "--baseline", STORY])
        == 1
    )
    assert "failed   gpu_memory" in capfd.readouterr().out
    suites = ElementTree.parse(junit).getroot()
    assert {name: suites.attrib[name] for name in ("failures", "skipped", "errors")} == {
        "failures": "1",
        "skipped": "1",
        "errors": "0",
    }
    cases = {case.attrib["name"]: [child.tag for child in case] for case in suites.iter("testcase")}
    assert cases["gpu_memory"] == ["failure"]
    assert cases["slowdown"] == ["skipped"]
    assert cases["end"] == ["system-out"]
    assert suites.attrib["tests"] == str(len(cases))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits\n", "is not valid TOML"),
        ("[limits]\ngpu_memroy = 3", "unknown key limits.gpu_memroy. Keys here: gpu_memory, host_memory, iteration_seconds"),
        ("[limit]\ngpu_memory = 3", "unknown key limit. Keys here: warmup_steps; tables: [limits], [findings], [baseline]"),
        ("limits = 3", "limits is a table: write [limits] above its keys"),
        ('[limits]\ngpu_memory = "much"', "limits.gpu_memory: much is not a size such as 500MB or 2GB"),
        ("[limits]\niteration_seconds = true", "limits.iteration_seconds: True is not a number above zero"),
        ("[limits]\ngpu_memory = 1e999", "limits.gpu_memory: inf is not a number above zero"),
        ("[limits]\niteration_seconds = nan", "limits.iteration_seconds: nan is not a number above zero"),
        ("[limits]\nsteps = -1", "limits.steps: -1 is not a whole number"),
        ('[findings]\nforbidden = ["oom"]', "unknown finding 'oom'. Choose from: error, warning, allocator_retries, "),
        ("[findings]\nforbidden = [3]", "write a list of names of findings"),
        ("[baseline]\nrecording = 3", "baseline.recording: 3 is not a text"),
    ],
)
def test_broken_budgets_are_refused_with_a_reason(
    text: str, said: str, write_budget: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", STORY, write_budget(text)]) == 2
    assert said in capfd.readouterr().err


def test_missing_files_are_named(write_budget: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", STORY]) == 2
    assert "--baseline RECORDING" in capfd.readouterr().err
    assert main(["check", STORY, str(tmp_path / "none.toml")]) == 2
    assert "There is no budget file at" in capfd.readouterr().err
    assert main(["check", STORY, write_budget('[baseline]\nrecording = "nowhere"')]) == 1
    sweep = str(Path(__file__).parents[2] / "docs" / "sweeps" / "fit")
    assert main(["check", sweep, write_budget("")]) == 1
    assert f"{sweep} is a sweep: name the recording of a point, as {sweep}/points/0005-2.zerotop" in capfd.readouterr().err


def test_sizes_may_be_numbers_of_bytes() -> None:
    assert parse_budget({"limits": {"gpu_memory": 5, "host_memory": "1.5 GB"}}).host_memory == SizeLimit(
        1_500_000_000, "1.5 GB"
    )


@pytest.mark.parametrize(("limit", "peak"), [("39GB", "41.07 GB"), ("36 GiB", "38.25 GiB"), ("36G", "38.25 GiB")])
def test_a_limit_is_shown_as_it_was_written(
    limit: str, peak: str, write_budget: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    _, checks = run_check(capfd, STORY, write_budget(f'[limits]\ngpu_memory = "{limit}"'))
    assert checks["gpu_memory"][1] == f"The peak was {peak}, the limit is {limit}."


def test_a_baseline_of_another_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    other = str(recordings.find_packed_file("cpu-clean"))
    run = recordings.unpack_to_folder("z2", tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main(["check", str(run), "--baseline", other]) == 2
    said = capfd.readouterr().err
    assert "The baseline cpu-clean is of another job: its model is Model, not Qwen2ForCausalLM." in said
    assert "name a recording of this model" in said
    assert main(["check", str(recordings.find_packed_file("gpu-linear")), "--baseline", other]) == 2
    assert "its model is Model, not Linear" in capfd.readouterr().err


def test_instead_of_another_models_baseline_the_last_run_of_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    root = Path(directory.find_default_root())
    root.mkdir(parents=True)
    for name, begin_ns in (("first", 1), ("last", 2), ("this", 3)):
        recordings.unpack_to_folder("z2", tmp_path).rename(root / name)
        info = json.loads((root / name / directory.SESSION_FILE).read_text())
        info["clock"]["unix_ns"] -= 10**12 * (3 - begin_ns)
        (root / name / directory.SESSION_FILE).write_text(json.dumps(info))
    assert main(["check", "this", "--baseline", str(recordings.find_packed_file("cpu-clean"))]) == 2
    assert "Instead, name the last run of this one's command, last." in capfd.readouterr().err

"""``zerotop what-if``: a recorded training at another setting, against recordings of that setting."""

from __future__ import annotations

import importlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recordings import FOLDER, find_packed_file, open_recording
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.findings.support.gpu_use import measure_gpu_use, measure_use_in_steps
from zerotop.analysis.findings.support.memory.square_blocks import SquareBlocks
from zerotop.analysis.formatting import format_bytes, format_seconds
from zerotop.analysis.memory.expected.peak_moments import LOSS, REDUCTION
from zerotop.analysis.memory.expected.zero_model import is_foreach
from zerotop.analysis.memory.kept_memory import Leak, find_leak
from zerotop.analysis.memory.phase_peaks import read_rank_peaks
from zerotop.analysis.sweeps import baseline
from zerotop.analysis.sweeps.asked_setting import Changes, answer_changes, choose_setting
from zerotop.analysis.sweeps.baseline import Baseline, NoBaselineError, read_baseline
from zerotop.analysis.sweeps.grading import ask_for
from zerotop.analysis.sweeps.ranking import build_recorded, find_hardware
from zerotop.analysis.sweeps.recorded_moments import LaterBatch
from zerotop.analysis.sweeps.what_if import change_setup, predict_memory
from zerotop.analysis.sweeps.what_if_time import find_time_obstacle, predict_time
from zerotop.analysis.sweeps.what_if_verdict import (
    describe_baseline,
    describe_changes,
    describe_recorded,
    describe_time,
    judge_gpu,
    list_ledger,
)
from zerotop.cli import main
from zerotop.commands.common.estimate_text import format_options, recommend
from zerotop.commands.measuring.machine_file import MachineFigures, find_machine_file, write_figures
from zerotop.recording.moments.devices import locate_allocators
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Samples
from zerotop_probe.recording.events import EngineFacts
from zerotop_probe.recording.tables import END, PHASE_CODE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def read(name: str, until_step: int | None = None) -> Baseline:
    return read_baseline(open_recording(name), until_step)


@pytest.mark.parametrize(
    "name",
    ["z2", "z2-offload", "x4-z3", "x2-zero3", "x4-attached", "x2-fsdp2", "gpu-gpt2", "gpu-trainer-gpt2-small", "gpu-lora"],
)
def test_the_recorded_setting_is_what_was_measured(name: str) -> None:
    base = read(name)
    memory = predict_memory(base, base.setup, base.work)
    assert memory.moments[0].bytes == pytest.approx(base.peak, rel=1e-9)
    assert memory.allocated.low == memory.allocated.high
    assert memory.reserved.likely == pytest.approx(base.reserved)
    assert memory.device.likely == pytest.approx(base.nvml)
    assert memory.host.likely == pytest.approx(base.host_rss)
    time = predict_time(base, base.setup, base.work, base.nodes)
    assert base.times is not None
    assert time.seconds == pytest.approx([base.times.iteration] * 3, rel=0.02)


@pytest.mark.parametrize("name", ["hand-clean0", "hand-clean2", "jobs-publish"])
def test_the_gpu_computes_for_as_long_as_the_finding_of_its_launches_says(name: str) -> None:
    recording = Recording.open(FOLDER / f"{name}.zerotop")
    found = next(one for one in detect_findings(recording, recording.end_ns) if one.name == "launch_bound")
    base = read(name)
    rows = predict_time(base, base.setup, base.work, base.nodes).rows
    assert base.times is not None
    rest = base.times.iteration - base.times.update
    compute = next(row.before for row in rows if row.name == "compute")
    assert compute == pytest.approx(found.evidence["use"] * rest, rel=0.2)  # of fewer steps
    assert sum(row.before for row in rows) == pytest.approx(base.times.iteration, rel=0.02)


def test_the_gpu_is_not_idle_because_of_a_pause() -> None:
    steps = np.zeros(40, [("begin_unix_ns", "i8"), ("end_unix_ns", "i8"), ("iteration_s", "f8")])
    steps["iteration_s"] = 0.1
    steps["iteration_s"][20:22] = 4.0  # two pauses
    steps["end_unix_ns"] = np.cumsum(steps["iteration_s"] * 1e9)
    steps["begin_unix_ns"] = steps["end_unix_ns"] - steps["iteration_s"] * 1e9
    times = np.arange(0, int(steps["end_unix_ns"][-1]), 200_000_000)
    used = np.zeros(len(times), [("utilization_percent", "f4")])
    used["utilization_percent"] = np.where((times > 2e9) & (times < 10.1e9), 0, 60)
    samples = SimpleNamespace(read_window=Samples(times, used).clip_window)
    process: Any = SimpleNamespace(is_on_gpu=True, gpu_key=("a", 0), gpu_samples=samples)
    assert measure_gpu_use(process, 0, int(steps["end_unix_ns"][-1])) == 0
    assert measure_use_in_steps(process, steps) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("name", "target", "most"),
    [
        ("z2", "z2-offload", 0.045),  # their largest tensor was not recorded
        ("gpu-z3-all", "x4-z3", 0.03),
        ("gpu-offload-110", "x4-z3", 0.04),
        ("z2", "z2-oom", 0.02),  # 20 times the tokens
        ("gpu-gpt2", "gpu-gpt2", 0.0001),
    ],
)
def test_another_setting_is_close_to_its_run(name: str, target: str, most: float) -> None:
    base, other = read(name), read(target)
    names = ("stage", "offload_optimizer", "offload_parameters", "ranks")
    setup = replace(base.setup, **{key: getattr(other.setup, key) for key in names})
    memory = predict_memory(base, setup, replace(other.work, foreach=base.work.foreach))
    assert memory.allocated.likely == pytest.approx(other.peak, rel=most)


def test_twice_the_length_within_one_recording() -> None:
    base, later = read("gpu-long", until_step=20), read("gpu-long")
    assert (base.work.sequence, later.work.sequence) == (512, 1024)
    memory = predict_memory(base, base.setup, later.work)
    assert memory.allocated.likely == pytest.approx(later.peak, rel=0.005)
    assert memory.allocated.low < later.peak < memory.allocated.high
    low, _, high = predict_time(base, base.setup, later.work, 1).seconds
    assert later.times is not None
    assert low < later.times.iteration < high


def test_ranks_that_share_a_gpu_must_all_fit_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = open_recording("x2-fsdp2")
    apart = read_baseline(recording)
    located = locate_allocators(recording.at())
    monkeypatch.setattr(baseline, "locate_allocators", lambda _at: dict.fromkeys(located, next(iter(located.values()))))
    base = read_baseline(recording)
    assert (apart.gpus, apart.ranks_on_gpu, base.gpus, base.ranks_on_gpu) == (2, 1, 1, 2)
    assert "on 1 x 1 " in describe_baseline(base)
    assert ", 2 ranks on each" in describe_baseline(base)
    answer = answer_changes(base, Changes(gpus=1))
    assert not answer.is_changed
    assert answer.room is not None
    assert answer.room.needed == pytest.approx(2 * (answer.memory.allocated.high + answer.memory.context.high), rel=0.1)
    assert answer.host_needed == 2 * answer.memory.host.high
    whole, own = ((one, answer_changes(one, Changes())) for one in (base, apart))
    assert re.search(r"; at that pace [\d,]+ tokens/s, MFU ", describe_time(answer))
    before, after = (re.search(r"MFU ([\d.]+)", describe_time(one[1])) for one in (own, whole))
    assert before is not None
    assert after is not None
    assert float(after[1]) == pytest.approx(2 * float(before[1]), rel=0.05)
    spread = answer_changes(base, Changes(gpus=2))
    assert spread.memory.needed < 0.6 * answer.memory.needed
    assert "GPUs 1 -> 2, ranks on each GPU 2 -> 1" in describe_changes(spread)
    assert "Ranks share a GPU in the recording" in spread.time.reason
    assert answer_changes(base, Changes(gpus=1, micro_batch=base.work.micro_batch * 2)).time.reason


def test_a_backward_that_waits_for_gloo_launches_nothing_meanwhile() -> None:
    base = read("z2")
    recorded, rows = base.times, {}
    assert recorded is not None
    base = replace(base, setup=replace(base.setup, ranks=2))
    for is_over_gloo in (False, True):
        times = replace(recorded, iteration=1.0, backward=0.8, is_over_gloo=is_over_gloo)
        answer = predict_time(replace(base, times=times), base.setup, base.work, base.nodes)
        assert answer.seconds[0] == pytest.approx(1.0, abs=0.01)
        rows[is_over_gloo] = {row.name: row.likely for row in answer.rows}
    assert rows[True]["communication"] > 0.6 > rows[False].get("communication", 0.0)
    assert rows[False]["launches"] > 0.4 > rows[True].get("launches", 0.0)


def test_more_tokens_never_need_less() -> None:
    base = read("z2")
    sizes = [predict_memory(base, base.setup, replace(base.work, micro_batch=rows)).needed for rows in range(1, 40, 3)]
    assert sizes == sorted(sizes)
    for stage, offload in ((0, "none"), (1, "optimizer"), (3, "optimizer_params"), (3, "nvme_optimizer_params")):
        setup = change_setup(base.setup, stage, offload)
        memory = predict_memory(base, setup, base.work)
        assert memory.allocated.low <= memory.allocated.likely <= memory.allocated.high
        assert all(moment.bytes > 0 for moment in memory.moments)


def test_blocks_of_rows_x_rows_grow_with_the_square_of_the_rows() -> None:
    plain = read("gpu-gpt2")
    loss = next(
        row for row in predict_memory(plain, plain.setup, plain.work).moments[0].rows if row.name == "logits and loss"
    )
    rows = plain.work.micro_batch
    item_bytes = int(loss.bytes / 2 / rows**2)
    base = replace(plain, square=SquareBlocks(1, rows, item_bytes, ""))

    def name_rows(micro_batch: int) -> dict[str, float]:
        moment = predict_memory(base, base.setup, replace(base.work, micro_batch=micro_batch)).moments[0]
        return {row.name: row.bytes for row in moment.rows}

    recorded, doubled = name_rows(rows), name_rows(2 * rows)
    assert recorded["blocks of rows x rows"] == rows**2 * item_bytes
    assert recorded["blocks of rows x rows"] + recorded["logits and loss"] == pytest.approx(loss.bytes)
    assert doubled["blocks of rows x rows"] == 4 * recorded["blocks of rows x rows"]
    assert doubled["logits and loss"] == pytest.approx(2 * recorded["logits and loss"])


def ask(capsys: pytest.CaptureFixture[str], name: str, *options: str) -> str:
    assert main(["what-if", str(find_packed_file(name)), *options]) == 0
    return capsys.readouterr().out


def test_the_verdict_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ask(capsys, "z2", "--micro-batch", "8", "--memory", "80GB").splitlines()
    assert lines[0].startswith("Stage 2, 8 x 512 tokens, fits: it needs at most ")
    assert lines[0].endswith(" to spare.")
    assert " fits: it needs at most " in lines[1]
    assert lines[2].startswith("Host memory of a node: 2.22 GiB -> 2.22 GiB, fits")
    assert lines[3].startswith("Time of a step: 131 ms -> ")
    assert "micro-batch 4 -> 8" in lines
    assert "\nmicro-batch 4 -> 1,000,000\n" in (text := ask(capsys, "z2", "--micro-batch", "1000000"))
    assert not re.search(r"\d{4,}(\.\d+)? (GiB|s)\b", text)
    text = ask(capsys, "z2", "--memory", "10GB")
    assert text.startswith("Stage 2, 4 x 512 tokens, does not fit: it needs ")
    assert "as recorded: all figures are measurements" in text


def test_the_amount_of_the_verdict_is_a_row_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ask(capsys, "z2", "--micro-batch", "16").splitlines()
    amount = lines[0].split("at most ")[1].split(" of ")[0]
    row = next(line for line in lines if line.startswith("must fit"))
    assert row.endswith(amount)
    assert any(line.startswith("Must fit: ") for line in lines)


def test_a_row_that_the_recording_lacks_is_not_recorded_as_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = ask(capsys, "story", "--stage", "3", "--gpus", "8")
    table = text[text.index("which decides") : text.index("Must fit")]
    recorded = {line[2:28].strip(): line[28:37].strip() for line in table.splitlines()[1:]}
    assert (recorded["gathered parameters"], recorded["activations"]) == ("", "0.53 GiB")
    assert "0.0 MiB" not in recorded.values()
    answer = answer_changes(read("z2"), Changes(stage=3), None)
    others = answer.recorded.moments[1:]
    lines = list_ledger(replace(answer, recorded=replace(answer.recorded, moments=others)))
    assert all(line.before is None for line in lines if not line.is_sum)


def test_the_recorded_setting_takes_no_less_than_was_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory leaks, and the last step whose phases are known is not the last one."""
    base = read("gpu-lines-leak")
    assert base.highest_peak is not None
    assert base.steps is not None
    most = base.highest_peak.allocated_bytes
    answer = answer_changes(base, Changes(), gpu_bytes=most)
    assert answer.memory.needed < most
    assert answer.fits is False
    same = answer_changes(base, Changes())
    assert same.room is not None
    assert same.room.needed == most + same.memory.context.high + same.memory.stuck.bytes
    said = ask(capsys, "gpu-lines-leak")
    verdict, growth = said.splitlines()[:2]
    assert f"{format_bytes(same.room.needed)} of " in verdict
    assert f"{format_bytes(most)} allocated in {base.highest_peak.describe_steps()}, but memory grew by " in verdict
    assert ". The rows are of step " in verdict
    assert growth.startswith("Its memory grew to the end: steps 300 to 599 left 9.34 GiB behind, 32.0 MiB each.")
    assert "evaluation" not in said
    other = answer_changes(base, Changes(micro_batch=1))
    assert other.measured_more is None
    assert next(describe_recorded(other)) == growth
    assert not [*describe_recorded(answer_changes(read("z2"), Changes()))]


def test_nothing_fits_for_long_where_memory_grew_to_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The recording grew by 32 MiB a step from step 300 on, of which its forecast has what had grown by then."""
    base, name = read("gpu-lines-leak"), "gpu-lines-leak"
    assert base.leak is not None
    assert base.steps is not None
    text = "but memory grew by 32.0 MiB a step: full near step "
    lines = ask(capsys, name).splitlines()
    assert ", fits so far: it needed up to " in lines[0]
    assert text in lines[0]
    answer = answer_changes(base, Changes(micro_batch=2 * base.work.micro_batch))
    assert answer.room is not None
    assert answer.full_steps is not None
    assert answer.full_steps[0] == base.steps[1] + int(answer.room.spare / base.leak.bytes_each)
    assert answer.full_steps[1] == base.steps[1] + int(answer.room.spare / base.leak.bytes_each / 2)
    assert ", fits at first: it needs at most " in judge_gpu(answer)
    assert judge_gpu(answer).endswith(f"or near {answer.full_steps[1]:,} if it grows with the batch, by 64.0 MiB.")
    recommended = recommend([build_recorded(answer, "none")], find_hardware(answer))
    assert " fits at first: it needs" in recommended
    assert text in recommended
    assert answer_changes(base, Changes(), gpu_bytes=1 << 30).full_steps is None
    assert answer_changes(read("z2"), Changes()).full_steps is None


def make_levels(steps: Sequence[int], held: Sequence[int]) -> Any:
    rows = np.zeros(
        len(steps), [("step", "i8"), ("edge", "i8"), ("phase", "i8"), ("device", "i8"), ("allocated_bytes", "i8")]
    )
    rows["step"], rows["allocated_bytes"] = steps, np.array(held) << 20
    rows["edge"], rows["phase"] = END, PHASE_CODE["step"]
    return SimpleNamespace(until=lambda _ns: rows)


def test_a_leak_is_seen_across_steps_without_readings() -> None:
    steps = [0, 1, 2, 60, 80, 130, 131, 132, 133]
    leak = find_leak(make_levels([*steps, 134], [*(400 + 80 * max(0, step - 70) for step in steps), 0]), 0)
    assert leak is not None
    assert (leak.since_step, leak.until_step, leak.bytes_each) == (69, 133, pytest.approx(80 << 20, rel=0.03))
    assert leak.is_going_on
    jump = [400, 400, 400, 400, 402, 4400, 4402, 4404, 4406]
    assert find_leak(make_levels(steps, jump), 0) is None


def test_growth_that_reached_a_level_has_a_bound() -> None:
    leak = Leak(bytes=64 << 20, since_step=10, until_step=110, base_bytes=1 << 30, last_rise_step=60)
    assert not leak.is_going_on
    assert leak._replace(last_rise_step=105).is_going_on


def test_the_recorded_setting_does_not_fit_where_the_recording_ran_out_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The steps before had smaller batches, which fit; another setting has them, and another GPU may be large enough."""
    base = read("z2-oom")
    assert base.failure is not None
    answer = answer_changes(base, Changes(), gpu_bytes=base.gpu_bytes)
    assert answer.fits is False
    lines = ask(capsys, "z2-oom").splitlines()
    assert lines[0].startswith("As recorded, it does not fit: rank 0 ran out of GPU memory in step 4. Evaluation requested ")
    assert not any(" fits: it needs at most " in line for line in lines)
    for other in (answer_changes(base, Changes(micro_batch=4)), answer_changes(base, Changes(), gpu_bytes=1 << 40)):
        assert other.fits is None
        assert "without the evaluation that ran out of memory, it needs at most" in judge_gpu(other)
        assert next(describe_recorded(other)).startswith("The recorded setting ran out of memory. Evaluation requested ")


def test_micro_batches_that_are_larger_than_the_one_that_failed_do_not_fit() -> None:
    base = read("z2-oom")
    assert base.failure is not None
    rows = base.failure.rows or 0
    sequence = max(base.work.sequence, base.failure.sequence or 0)
    larger = answer_changes(base, Changes(micro_batch=2 * rows, seq_length=sequence))
    assert larger.fits is False
    assert "does not fit: as recorded, with no larger micro-batches, memory ran out." in judge_gpu(larger)
    assert answer_changes(base, Changes(micro_batch=2 * rows, seq_length=sequence, stage=3)).failure is None


def test_nothing_is_recommended_that_may_repeat_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """No forecast has an evaluation, nor a micro-batch that is larger than those that were asked for."""
    recorded = ask(capsys, "z2-oom", "--all")
    assert recorded.startswith("Nothing is recommended: no forecast includes the evaluation that ran out of memory. Lower ")
    assert "fits without it" in recorded
    assert "It: the evaluation that ran out of memory, which is in no figure of this table." in recorded
    assert not recorded.rstrip().endswith(" fits")
    failed = read("z2-oom").failure
    assert failed is not None
    base = replace(read("z2"), failure=replace(failed, outer_phase="forward"))
    rows, sequence = failed.rows or 0, failed.sequence or 0
    assert answer_changes(base, Changes(micro_batch=1, stage=3)).fits is None
    covered = answer_changes(base, Changes(micro_batch=rows, seq_length=sequence, stage=3), gpu_bytes=1 << 50)
    assert covered.left_out is None
    assert covered.fits is True


def test_a_setting_that_ran_out_of_memory_needs_the_same_in_all_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch may use a part of the GPU, and the steps of the forecast fit in it."""
    found = read("z2-oom").failure
    base = replace(read("z2"), limit_bytes=100 << 30, failure=found)
    answer = answer_changes(base, Changes())
    assert answer.room is not None
    assert answer.room.is_limited
    needed = format_bytes(answer.room.needed)
    assert f"which need at most {needed} of the 100 GiB that PyTorch may use." in judge_gpu(answer)
    assert next(row.high for row in list_ledger(answer) if row.name == "must fit") == answer.room.needed
    option = build_recorded(answer, "none")
    hardware = find_hardware(answer)
    assert option.measure_needed(hardware) == answer.room.needed
    assert "ran out of memory" in "".join(format_options([option], hardware))
    assert recommend([option], hardware).startswith("Nothing is recommended: no forecast includes the evaluation")


def test_the_highest_peak_is_told_of_the_steps_of_its_window() -> None:
    """A window of the allocator may reach over many counted steps; the table of steps has its peak in one of them."""
    base = read("gpu-lines-leak")
    at = Recording.open(FOLDER / "gpu-lines-leak.zerotop").at()
    assert base.highest_peak in [peak for one in read_rank_peaks(at) for peak in one.phases]


def test_estimate_of_a_recording_answers_alike(capsys: pytest.CaptureFixture[str]) -> None:
    def estimate(name: str, *options: str) -> str:
        assert main(["estimate", str(FOLDER / f"{name}.zerotop"), *options]) == 0
        return capsys.readouterr().out

    failed = estimate("z2-oom", "--stage", "2", "--offload", "none")
    assert "As recorded, it does not fit: rank 0 ran out of GPU memory in step 4." in failed
    assert " fits: it needs" not in failed
    same = answer_changes(read("gpu-lines-leak"), Changes())
    assert same.room is not None
    grown = estimate("gpu-lines-leak")
    assert f"needs at most {format_bytes(same.room.needed)} of " in grown
    assert "Its memory grew to the end: steps 300 to 599 left" in grown
    assert "micro-batch of 1 row on each GPU" in estimate("outside-grows", "--micro-batch", "1")


def test_pytorch_may_use_only_a_part_of_the_gpu() -> None:
    base = replace(read("z2"), failure=None)
    memory = predict_memory(base, base.setup, base.work)
    most = round(memory.allocated.high + memory.stuck.bytes)
    enough, short = (answer_changes(replace(base, limit_bytes=most + beyond), Changes()) for beyond in (1 << 20, -(1 << 20)))
    assert (enough.fits, short.fits) == (True, False)
    assert f"{format_bytes(most)} of the {format_bytes(most)} that PyTorch may use, 1.0 MiB to spare" in judge_gpu(enough)
    option = build_recorded(short, "none")
    assert option.fits(find_hardware(short)) is False
    assert answer_changes(replace(base, limit_bytes=most - 1), Changes(), gpu_bytes=base.gpu_bytes).fits is True


def test_what_the_start_allocated_is_told_where_it_is_more(capsys: pytest.CaptureFixture[str]) -> None:
    """The model was loaded before its optimizer was offloaded; the same setting starts in the same way, another may not."""
    base = read("story")
    same = answer_changes(base, Changes(), gpu_bytes=base.start_peak)
    assert same.memory.needed < base.start_peak
    assert same.fits is False
    assert answer_changes(base, Changes(micro_batch=1), gpu_bytes=base.start_peak).fits is True
    said = f" Before the first step, the recording allocated up to {format_bytes(base.start_peak)}."
    assert ask(capsys, "story").splitlines()[0].endswith(said)
    assert said in str(judge_gpu(same))
    assert "Before the first step" not in ask(capsys, "z2")


def test_the_recommended_command_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """What is to be pasted is asked, and answers with the same amount."""
    for name, options in (("z2", ()), ("x2-fsdp2", ("--memory", "24GB")), ("gpu-z3-all", ("--memory", "16GB"))):
        sentence, _, command = ask(capsys, name, *options).splitlines()[1].partition(": zerotop what-if ")
        path, *words = command.split()
        assert Path(path).stem == name
        needed = sentence.split("at most ")[1].partition(" of ")[0]
        verdict = ask(capsys, name, *words, *options).splitlines()[0]
        assert f"fits: it needs at most {needed} of " in verdict


def test_all_combinations_are_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(ask(capsys, "x4-z3", "--all", "--memory", "16GB", "--json"))["options"]
    assert {row["gpus"] for row in rows} == {1, 2, 4}
    assert {row["micro_batch"] for row in rows} >= {1, 2, 4, 8}
    fits = [row["fits"] for row in rows]
    assert fits == sorted(fits, reverse=True)
    known = [row for row in rows if row["rate"] is not None]
    assert {row["offload"] for row in known} == {"none", "optimizer", "params", "optimizer_params"}  # no drive was measured
    rates = [row["rate"] for row in known if row["fits"]]
    assert len(rates) > 2
    assert rates == sorted(rates, reverse=True)
    asked = ("--stage", "3", "--offload", "optimizer", "--gpus", "4", "--memory", "16GB")
    lines = ask(capsys, "x4-z3", "--all", *asked).splitlines()
    assert " rows a micro-batch fits: it needs at most " in lines[0]
    assert " tokens/s: zerotop what-if " in lines[0]


@pytest.mark.parametrize(
    ("name", "target", "most"),
    [
        ("gpu-long", "gpu-clean", 0.10),  # half the length
        ("gpu-trainer-gpt2", "gpu-trainer-gpt2-small", 0.10),  # from arithmetic to launches
        ("z2", "z2-oom", 0.15),  # 20 times the tokens: from launches to arithmetic
        ("gpu-offload-4", "gpu-offload-110", 0.07),  # accumulation
        ("z2", "z2-offload", 0.18),  # three runs of it took 0.33, 0.35 and 0.39 s
        ("z2-offload", "z2", 0.14),
        ("z2", "gpu-z3-all", 0.20),
        ("gpu-z3-all", "z2", 0.20),
    ],
)
def test_time_is_close_to_that_of_another_run(name: str, target: str, most: float) -> None:
    base, other = read(name), read(target)
    setup, work = ask_for(base, other)
    assert other.times is not None
    low, likely, high = predict_time(base, setup, work, 1).seconds
    assert likely == pytest.approx(other.times.iteration, rel=most)
    assert low < other.times.iteration < high


def test_time_is_not_told_where_nothing_measures_it() -> None:
    base, loop = read("z2"), read("x2-fsdp2")
    assert "NVMe" in find_time_obstacle(base, replace(base.setup, stage=3, offload_optimizer="nvme"), base.work, 1)
    assert "more nodes" in find_time_obstacle(base, base.setup, base.work, 2)
    nodes = replace(base, nodes=2, setup=replace(base.setup, ranks=2))
    assert "connection of the nodes" in find_time_obstacle(nodes, replace(nodes.setup, stage=3), base.work, 2)
    assert "loop without DeepSpeed" in find_time_obstacle(loop, replace(loop.setup, ranks=4), loop.work, 1)
    assert "another optimizer" in find_time_obstacle(base, replace(base.setup, state_each=2), base.work, 1)
    for gpu, sentence in (("", "this GPU are not known"), ("NVIDIA H100 PCIe", "connection of NVIDIA H100 PCIes")):
        other = replace(base, gpu=gpu)
        assert sentence in find_time_obstacle(other, replace(base.setup, ranks=2), base.work, 1)
        assert not find_time_obstacle(other, base.setup, replace(base.work, micro_batch=8), 1)


def test_the_machines_own_figures_are_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def ask_seconds() -> list[float]:
        asked = ("--gpus", "2", "--offload", "optimizer", "--json")
        seconds: list[float] = json.loads(ask(capsys, "z2", *asked))["time"]["seconds"]
        return seconds

    before = ask_seconds()
    values = {"all_reduce": 20e9, "from_gpu": 5e9, "adam": 1e9}
    for gpu, is_used in (("NVIDIA A100", False), ("NVIDIA H200", True)):
        write_figures(MachineFigures(socket.gethostname(), time.time(), gpu, "", values), find_machine_file())
        assert (ask_seconds()[1] > 1.5 * before[1]) is is_used


@pytest.mark.parametrize("name", ["z2-offload", "gpu-z3-all", "x4-z3", "x2-zero3", "x4-attached", "gpu-trainer-gpt2"])
def test_the_recorded_setting_takes_what_was_measured_whatever_the_speeds(name: str) -> None:
    for speed in (1e6, 1e9, 1e15):
        base = replace(read(name), machine={"all_reduce": speed, "from_gpu": speed, "adam": speed}, threads=1)
        assert base.times is not None
        seconds = predict_time(base, base.setup, base.work, base.nodes).seconds
        assert seconds == pytest.approx([base.times.iteration] * 3, rel=0.02)


def test_an_interval_grows_with_what_was_not_measured() -> None:
    base = read("z2")
    setups = (
        base.setup,
        replace(base.setup, offload_optimizer="cpu"),
        replace(base.setup, stage=3, offload_optimizer="cpu"),
    )
    times = [predict_time(base, base.setup, replace(base.work, accumulation=2), 1).seconds]
    times += [predict_time(base, setup, base.work, 1).seconds for setup in setups[1:]]
    widths = [(high - low) / likely for low, likely, high in times]
    assert widths == sorted(widths)


def test_more_work_takes_longer() -> None:
    for name in ("z2", "x4-z3", "gpu-offload-4", "gpu-trainer-gpt2"):
        base = read(name)
        works = [replace(base.work, micro_batch=rows, accumulation=count) for rows in (1, 4, 16) for count in (1, 4)]
        seconds = [predict_time(base, base.setup, work, 1).seconds[1] for work in works]
        assert seconds[0] < seconds[1] < seconds[3] < seconds[5]
        assert seconds[0] < seconds[2] < seconds[4]


def test_every_row_says_where_it_is_from(capsys: pytest.CaptureFixture[str]) -> None:
    text = ask(capsys, "x4-attached", "--offload", "none", "--explain")
    assert "at the optimizer step, which decides" in text
    assert "In the recording the first reduction decides" in text
    for part in ("4 bytes x 8,030.3 M / N", "on their way to fp32", "measured: NVML less reserved", "half of which scales"):
        assert part in text
    assert "bytes of gradients and gathered parameters that nothing overlaps, over NVLink" in text


def test_json_has_the_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(ask(capsys, "z2", "--stage", "3", "--gpus", "4", "--accumulation", "2", "--json"))
    assert (content["setting"]["stage"], content["setting"]["ranks"], content["setting"]["accumulation"]) == (3, 4, 2)
    assert content["fits"] is True
    assert content["needed_bytes"] > content["memory"]["allocated"]["likely"]
    assert content["recorded"]["allocated"]["likely"] == pytest.approx(13_582_294_528)
    assert content["host"]["fits"] is True
    low, likely, high = content["time"]["seconds"]
    assert 0 < low < likely < high


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("cpu-clean", [], "has no readings of a GPU's allocator, as on a CPU. `zerotop estimate MODEL` needs no run"),
        ("x2-fsdp2", ["--stage", "2"], "trains without DeepSpeed, whose settings --stage and --offload are"),
        ("x2-fsdp2", ["--gpus", "1"], "FSDP gathers nothing on one GPU"),
        ("z2", ["--stage", "2", "--offload", "params"], "only stage 3 can offload them"),
        ("z2", ["--stage", "0", "--offload", "optimizer"], "cannot offload it: stages 1 to 3 can"),
        ("z2", ["--stage", "1", "--offload", "nvme_optimizer"], "cannot offload to NVMe"),
        ("z2", ["--checkpointing", "on"], "does not have the sizes of its layers"),
        ("z2", ["--micro-batch", "1" + 30 * "0"], "is more than any machine trains with"),
        ("z2", ["--gpus", "0"], "0 is not a positive whole number"),
        ("z2", ["--seq-length", "-5"], "-5 is not a positive whole number"),
        ("z2", ["--stage", "7"], "invalid choice: 7"),
        ("z2", ["--memory", "0GB"], "0GB is less than a MiB"),
        ("cpu-clean", ["--all"], "as on a CPU"),
        ("x2-fsdp2", ["--all", "--offload", "optimizer"], "trains without DeepSpeed"),
        ("gpu-lora", ["--dtype", "fp32"], "another dtype or optimizer has no formula"),
        ("nowhere", [], "nowhere"),
    ],
)
def test_unknown_settings_are_refused(
    capsys: pytest.CaptureFixture[str], name: str, options: list[str], sentence: str
) -> None:
    try:
        code = main(["what-if", str(find_packed_file(name)), *options])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code != 0
    assert sentence in capsys.readouterr().err


def test_checkpointing_follows_the_layers(capsys: pytest.CaptureFixture[str]) -> None:
    base = read("gpu-trainer-gpt2")
    memory = predict_memory(base, base.setup, replace(base.work, checkpointing="full"))
    assert memory.allocated.high < base.peak
    assert "layers at the new setting" in ask(capsys, "gpu-trainer-gpt2", "--checkpointing", "on")


def test_a_recording_without_steps_is_refused() -> None:
    with pytest.raises(NoBaselineError, match=r"has no step with the memory of its phases|no finished step"):
        read_baseline(Recording.open(FOLDER / "z2.zerotop"), until_step=0)


def test_damaged_times_are_no_figure() -> None:
    base = read("z2")
    assert base.times is not None
    for damaged in (0.0, -1.0, float("nan")):
        broken = replace(base, times=replace(base.times, iteration=damaged))
        assert predict_time(broken, base.setup, base.work, 1).reason.startswith("The recording has too few steps")
    for name in ("forward", "backward", "update"):
        damage: dict[str, Any] = {name: -1.0}
        broken = replace(base, times=replace(base.times, **damage))
        assert predict_time(broken, base.setup, base.work, 1).reason.startswith("The recording has too few steps")
    nothing = replace(base, setup=replace(base.setup, parameters=0))
    work = replace(base.work, micro_batch=8)
    assert predict_time(nothing, nothing.setup, work, 1).rows


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("foreach-off", "the GPU waits for the host"),  # no tokens, and launches decide
        ("gpu-linear", "the time between the phases"),  # 98 % of a step
        ("gpu-counted-data", "the time between the phases"),
    ],
)
def test_a_batch_whose_time_was_not_measured_has_none(name: str, reason: str) -> None:
    base = read(name)
    time = predict_time(base, base.setup, replace(base.work, micro_batch=12 * base.work.micro_batch), 1)
    assert not time.rows
    assert reason in time.reason


def test_a_part_of_the_optimizer_on_the_gpu() -> None:
    base = read("x4-z3")
    half = choose_setting(base, Changes(offload_ratio=0.5)).setup
    memory, all_offloaded = (predict_memory(base, setup, base.work) for setup in (half, base.setup))
    # Half of 12 bytes of states for each parameter of a rank move to the GPU.
    moved = 6 * base.setup.parameters / 4
    assert memory.allocated.likely - all_offloaded.allocated.likely >= moved * 0.95
    assert memory.host.likely < all_offloaded.host.likely
    assert predict_time(base, half, base.work, 1).seconds[1] < predict_time(base, base.setup, base.work, 1).seconds[1]
    for changes in (Changes(stage=2, offload_ratio=0.5), Changes(offload="none", offload_ratio=0.5)):
        with pytest.raises(NoBaselineError, match="in stage 3 alone"):
            choose_setting(base, changes)
    # Stage 2 has no part: DeepSpeed refuses one.
    assert change_setup(half, 2, "optimizer").offloaded_share == 1


def test_more_gpus_than_a_node_has_take_no_known_time() -> None:
    base = read("z2")
    assert predict_time(base, replace(base.setup, ranks=16), base.work, 1).rows
    assert "No node has 64" in predict_time(base, replace(base.setup, ranks=64), base.work, 1).reason


def test_another_dtype_changes_the_optimizers_state() -> None:
    base = read("x2-zero3")
    assert base.setup.state_each == 8
    asked = choose_setting(base, Changes(dtype="bf16_master")).setup
    assert (asked.state_each, asked.master_each) == (4, 2)
    with pytest.raises(NoBaselineError, match="DeepSpeed keeps master weights"):
        choose_setting(base, Changes(dtype="pure"))


def test_the_fastest_is_of_those_whose_speed_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    line = ask(capsys, "gpu-counted-data", "--all").splitlines()[0]
    found = re.search(r"the fastest of (\d+) whose speed is known, of (\d+) that fit", line)
    assert found is not None
    assert 1 < int(found[1]) < int(found[2])


def test_batches_that_differ_are_told_as_the_reason() -> None:
    base = replace(read("gpu-gpt2"), times=None)
    assert "too few steps" in find_time_obstacle(base, base.setup, base.work, 1)
    reason = find_time_obstacle(replace(base, batches_differ=True), base.setup, base.work, 1)
    assert reason.startswith("The batches of the steps with the times of their phases differ")


def test_phases_without_times_tell_nothing_of_another_batch() -> None:
    base = read("z2")
    assert base.times is not None
    broken = replace(base, times=replace(base.times, forward=0.0, backward=0.0))
    assert predict_time(broken, base.setup, base.work, 1).rows
    reason = predict_time(broken, base.setup, replace(base.work, micro_batch=8), 1).reason
    assert reason.startswith("The recording has no times of forward and backward")


def test_an_interval_is_as_wide_as_errors_of_other_runs_were() -> None:
    base = read("z2")
    _, likely, high = predict_time(base, base.setup, replace(base.work, micro_batch=5), 1).seconds
    assert high >= 1.2 * likely
    _, likely, high = predict_time(base, change_setup(base.setup, 2, "optimizer"), base.work, 1).seconds
    assert high >= 1.4 * likely


def test_it_needs_no_torch() -> None:
    path: Any = str(FOLDER / "z2.zerotop")
    code = f"import sys; from zerotop.cli import main; main(['what-if', {path!r}]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL, cwd=Path(path).parent)
    assert done.returncode == 0


def test_estimate_lists_every_option_of_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in (("gpu-gpt2", 12), ("x2-fsdp2", 1)):
        assert main(["estimate", str(FOLDER / f"{name}.zerotop"), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["options"]
        assert len(rows) == count
        base = read(name)
        recorded = [row["memory"]["allocated"]["likely"] for row in rows if row["stage"] == base.setup.stage]
        assert any(size == pytest.approx(base.peak) for size in recorded)


@pytest.mark.parametrize(
    ("change", "most"), [("batch, length", 0.02), ("accumulation", 0.02), ("stage", 0.04), ("offload", 0.04)]
)
def test_mean_errors_of_all_pairs(monkeypatch: pytest.MonkeyPatch, change: str, most: float) -> None:
    """What the table in ``docs/sweeps.md`` says of allocated memory, and no verdict that says "fits" wrongly."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    grader = importlib.import_module("what_if")
    runs = [grader.parse_run(line) for line in (BENCHMARKS / "what_if_runs.jsonl").read_text().splitlines()]
    pairs = [
        (base, target)
        for (_, base), (_, target) in permutations(runs, 2)
        if grader.is_same_job(base, target) and grader.name_change(base, target) == change
    ]
    figures = [one for base, target in pairs for one in grader.list_figures(base, target, False)]
    errors = [abs(part.likely / truth - 1) for name, part, truth, _ in figures if name == "allocated"]
    assert len(errors) >= 4
    assert sum(errors) / len(errors) < most
    enough = [truth <= part.high for name, part, truth, _ in figures if name == "needed"]
    assert sum(enough) >= 0.97 * len(enough)


def test_a_fused_optimizer_that_deepspeed_wraps_needs_no_temporaries() -> None:
    """``torch.optim.AdamW(fused=True)`` has the same class name as the one with foreach functions."""
    forms = []
    for settings in ({"fused": True}, {"foreach": False}, {"fused": False}, {}):
        facts = {"inner_optimizer": "AdamW", "optimizers": [{"class": "AdamW", "settings": settings}]}
        forms.append(is_foreach(EngineFacts(facts)))
    assert forms == [False, False, True, True]
    for name, package in (("Lion", "__main__"), ("SGD", "torch"), ("AdamW", "bitsandbytes")):
        facts = {"inner_optimizer": name, "optimizers": [{"class": name, "package": package, "settings": {}}]}
        assert not is_foreach(EngineFacts(facts))


def test_two_buckets_of_overlapped_communication_decide_a_small_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Llama-1B on an H100: 2 rows, whose backward held 6.09 GB, predict 8, whose loss held 18.99 GB, and the reverse."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    grader = importlib.import_module("what_if")
    runs = dict(grader.parse_run(line) for line in (BENCHMARKS / "what_if_runs.jsonl").read_text().splitlines())
    small, large = (runs[f"llama-1b-g1-z2-cpu-b{rows}-s1024-a1-c0"] for rows in (2, 8))
    for base, target, moment in ((small, large, LOSS), (large, small, REDUCTION)):
        memory = predict_memory(base, target.setup, target.work)
        assert memory.moments[0].name == moment
        assert memory.moments[0].bytes == pytest.approx(target.peak, rel=0.01)


def test_the_pace_of_steps_after_those_of_the_forecast_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    base = read("outside-frames")
    assert base.later is not None
    step, seconds = base.later
    assert base.steps is not None
    assert base.steps[1] < step
    said = ask(capsys, "outside-frames")
    assert f" From step {step} on, steps took {format_seconds(seconds)} (median); none was recorded in full detail." in said
    assert read("z2").later is None


def test_measured_figures_of_later_steps_with_the_asked_batch_win() -> None:
    base = read("gpu-long", until_step=20)
    later = LaterBatch(base.work.micro_batch, 2 * base.work.sequence, base.work.accumulation, 2 * base.peak, (21, 40))
    base = replace(base, later=(20, 0.5), later_batch=later)
    answer = answer_changes(base, Changes(seq_length=2 * base.work.sequence))
    assert answer.measured_more == 2 * base.peak
    assert answer.room is not None
    assert answer.room.needed == pytest.approx(answer.recorded.needed + base.peak)
    assert f"with {format_bytes(2 * base.peak)} allocated in steps 21 to 40" in judge_gpu(answer)
    assert describe_time(answer).startswith("Time of a step: 500 ms, the median from step 20 on, with this batch")
    other = answer_changes(base, Changes(seq_length=4 * base.work.sequence))
    assert other.measured_more is None
    assert "with this batch" not in describe_time(other)


def test_a_gpu_that_is_always_busy_takes_no_known_time_for_another_batch() -> None:
    base = read("gpu-gpt2")
    assert base.times is not None
    host = (base.times.forward, base.times.backward)
    busy = replace(base, times=replace(base.times, launches=host, busy=1.0))
    other = replace(base.work, micro_batch=2 * base.work.micro_batch)
    assert "always busy" in find_time_obstacle(busy, base.setup, other, base.nodes)
    assert not find_time_obstacle(busy, base.setup, base.work, base.nodes)
    less = replace(base, times=replace(base.times, launches=host, busy=0.5))
    assert not find_time_obstacle(less, base.setup, other, base.nodes)

"""Findings of the real recordings, and when they are known. recordings/labels.json has labels by hand, with reasons."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import long_recording
import recordings
from zerotop.analysis.findings import Finding, Severity, begin_detection, detect_findings
from zerotop.analysis.findings.support.steps.fp16_warmup import count_sharers
from zerotop.analysis.memory.expected.peak_moments import list_update
from zerotop.analysis.sweeps.baseline import read_baseline
from zerotop.analysis.sweeps.what_if import change_setup
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_rank_steps
from zerotop_probe.recording.events import EngineFacts

LABELS = recordings.read_labels()


class Findings(dict[str, tuple[Finding, ...]]):
    """The findings of each recording at its end, searched when they are asked for."""

    def __missing__(self, name: str) -> tuple[Finding, ...]:
        recording = recordings.open_recording(name)
        self[name] = detect_findings(recording, recording.end_ns)
        return self[name]


@pytest.fixture(scope="module")
def all_findings() -> Findings:
    return Findings()


def find_one(findings: tuple[Finding, ...], name: str) -> Finding:
    """Return the only finding of that name."""
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding


def test_every_recording_has_its_labels() -> None:
    assert recordings.list_recordings() == sorted(LABELS)


# --- the optimizer on the CPU --------------------------------------------------------------------------------------------


def test_the_story_s_double_spike(all_findings: Findings) -> None:
    """Steps 11 to 13 took 2.69, 2.67 and 2.66 s, of which step() 1.81, 1.80 and 1.78; 63 of 64 cores were busy."""
    spike = find_one(all_findings["story"], "double_spike")
    assert spike.ranks == (0, 1, 2, 3)
    assert spike.evidence["gap_s"] == pytest.approx(1.80, abs=0.02)
    assert spike.evidence["share"] == pytest.approx(0.64, abs=0.01)  # step() takes 67 %, and kernels run in 3 % of it
    assert spike.evidence["cores_each"] * 4 == pytest.approx(63, abs=2)
    # OMP_NUM_THREADS was not set: each rank ran about 60 threads and got a quarter of the cores.
    assert spike.evidence["threads_each"] == pytest.approx(60, abs=3)
    assert "4 processes x 59 threads" in spike.details
    assert spike.fix == '"offload_optimizer": {"device": "none"}'
    assert spike.cost == spike.evidence["share"]


def test_the_finding_names_the_memory_that_offload_saves(all_findings: Findings) -> None:
    """Master weights and moments are 12 bytes, 16-bit gradients 2, of the parameters that a rank keeps of 494,032,768."""
    for name, shared_by in (("z2-offload", 1), ("x4-z3", 4)):
        spike = find_one(all_findings[name], "double_spike")
        assert spike.evidence["without_offload_bytes"] == pytest.approx(14 * 494_032_768 / shared_by, rel=1e-6)
        assert "Without offload each GPU would hold" in spike.details


def test_bytes_that_must_be_copied_replace_missed_counts(all_findings: Findings) -> None:
    """A rank of the story copies 4 GB each way; counters of 32 bits that are read too late saw 0.06 GB back."""
    spike = find_one(all_findings["story"], "double_spike")
    assert spike.evidence["pcie_to_gpu_bytes"] < spike.evidence["copied_each_way_bytes"] == 2 * 8_030_261_248 / 4
    assert "PCIe" not in spike.details
    assert "3.74 GiB" in spike.details


def test_one_process_has_as_many_threads_as_cores(all_findings: Findings) -> None:
    """One rank on 16 cores, sampled with 16 busy threads and 14 to 15.8 cores in step()."""
    for name in ("z2-offload", "z3-offload-all"):
        spike = find_one(all_findings[name], "double_spike")
        assert "1 process x 16 threads" in spike.details
        assert 13 < spike.evidence["cores_each"] <= 16


def test_a_bound_of_memory_outside_pytorch_is_called_one() -> None:
    """NVML was read while the allocator grew to its peak, and at no quiet moment near it."""
    recording = recordings.open_recording("story")
    gap = find_one(detect_findings(recording, recording.end_ns), "estimate_gap")
    assert str(gap.headline).startswith("The GPU held at most 35.68 GiB")
    assert "The largest part of the difference is other tensors" in gap.details
    assert "context, NCCL and cuBLAS at most " in gap.details


# --- evaluation ----------------------------------------------------------------------------------------------------------


def test_memory_that_evaluation_adds_and_keeps(all_findings: Findings) -> None:
    """Reserved went from 17,653,825,536 to 22,632,464,384 bytes and stayed; micro-batches of 8 x 512 after 4 x 512."""
    jump = find_one(all_findings["z2"], "validation_jump")
    assert jump.evidence["reserved_before_bytes"] == 17_653_825_536
    assert jump.evidence["kept_bytes"] == jump.evidence["added_bytes"] == 22_632_464_384 - 17_653_825_536
    assert jump.evidence["tokens_ratio"] == 2.0
    assert jump.evidence["left_allocated_bytes"] == 0
    assert jump.advice == ""  # 119 of 140 GiB are free


def test_parameters_that_stage_3_gathered_are_no_leftovers(all_findings: Findings) -> None:
    """After evaluation 996 MB more are allocated: the 494 M parameters in bf16 take 988 of them until training goes on."""
    for name in ("x4-z3", "z3-offload-all"):
        assert find_one(all_findings[name], "validation_jump").evidence["left_allocated_bytes"] < 10_000_000


# --- first real steps ----------------------------------------------------------------------------------------------------


def test_the_state_of_the_first_real_step_is_as_expected(all_findings: Findings) -> None:
    """Two moments in fp32, 8 bytes for each parameter that a rank keeps; 494,032,768 parameters, 8,030,261,248 in four."""
    for name, where, state in (
        ("z2", "device", 8 * 494_032_768),
        ("z2-offload", "host", 8 * 494_032_768),
    ):
        evidence = find_one(all_findings[name], "first_real_step").evidence
        assert evidence[f"optimizer_state_{where}_bytes"] == pytest.approx(state, rel=1e-3)
        assert evidence["expected_bytes"] == state
        assert evidence["bytes_per_parameter"] == pytest.approx(8, abs=0.01)


def test_the_state_is_told_by_what_a_rank_keeps_of_flat_parameters(all_findings: Findings) -> None:
    """FSDP1 divides them, too: 311,588,864 of 623,177,728 parameters in two ranks, two moments in bf16."""
    evidence = find_one(all_findings["x2-slow-gpu"], "first_real_step").evidence
    assert evidence["bytes_per_parameter"] == pytest.approx(4, abs=0.01)
    assert count_sharers(EngineFacts({"parallelism": "FSDP2", "data_parallel": 8, "sharding": {"ranks": 4}})) == 4


def test_the_optimizer_on_the_gpu_needs_what_the_forecast_says(all_findings: Findings) -> None:
    spike = find_one(all_findings["story"], "double_spike")
    base = read_baseline(recordings.open_recording("story"))
    update = list_update(change_setup(base.setup, 2, "none"), base.work)
    states = 12 * 8_030_261_248 / 4
    assert spike.evidence["optimizer_bytes"] == pytest.approx(states)
    assert spike.evidence["needed_bytes"] == pytest.approx(states + sum(row.bytes for row in update))


def test_the_story_of_the_skipped_steps(all_findings: Findings) -> None:
    """Loss scale 2^24, halved ten times; 0.88 s an iteration, then 4.53 s once, then 2.68 s."""
    ended = find_one(all_findings["story"], "skipping_ended")
    assert ended.evidence["skipped_steps"] == 10
    assert [ended.evidence[f"loss_scale_{step}"] for step in range(10)] == [2.0 ** (24 - step) for step in range(10)]
    assert ended.evidence["loss_scale_real"] == 2**14
    assert ended.evidence["iteration_skipped_s"] == pytest.approx(0.88, abs=0.01)
    assert ended.evidence["iteration_first_real_s"] == pytest.approx(4.53, abs=0.01)
    assert ended.evidence["iteration_real_s"] == pytest.approx(2.68, abs=0.01)
    # Adam's two moments of a quarter of the parameters.
    grown = ended.evidence["host_held_real_bytes"] - ended.evidence["host_held_skipped_bytes"]
    assert grown == pytest.approx(2 * 8_030_261_248, rel=0.01)
    assert '"fp16.initial_scale_power" to 14 or less (now 24)' in ended.advice
    assert ended.fix == "bf16=True"  # the Trainer's
    # Which power fits is not known before a step was not skipped.
    skipping = find_one(all_findings["story"], "steps_skipped")
    assert 'set "fp16.initial_scale_power" lower (now 24)' in skipping.advice
    assert ended.evidence["optimizer_state_host_bytes"] == 2 * 8_030_261_248


def test_skipped_steps_announce_the_optimizer_state(all_findings: Findings) -> None:
    early, ended = (find_one(all_findings["story"], name) for name in ("steps_skipped", "skipping_ended"))
    assert early.known_ns <= ended.begin_ns
    assert early.evidence["expected_state_bytes"] == 2 * 8_030_261_248
    assert "host memory" in early.details
    # That fp16 skips a few steps is usual. Ten misled whoever looked at their time.
    assert (early.severity, ended.severity) == (Severity.INFO, Severity.WARNING)


def test_a_finding_follows_the_count_of_skipped_steps(all_findings: Findings) -> None:
    found = find_one(all_findings["z2-fp16"], "steps_skipped")
    assert found.headline.startswith("fp16 skipped 11 of the first 12 steps")
    assert "will change" not in found.details  # a real step was among them
    recording = recordings.open_recording("z2-fp16")
    steps = next(iter(read_rank_steps(recording)))
    assert steps["skipped"][:12].tolist() == [True] * 10 + [False, True]
    for count in range(3, 11):
        (told,) = (one for one in detect_findings(recording, int(steps["end_unix_ns"][count - 1])) if one.step == 0)
        assert told.headline.startswith(f"fp16 skipped the first {count} steps")
        assert "Time and memory will change" in told.details
        assert "GPU memory" in told.details


# --- time, cores, running out of memory ----------------------------------------------------------------------------------


def test_the_end_of_skipping_is_one_finding(all_findings: Findings) -> None:
    """forward and backward take 0.87 s before and after; step() takes 1.8 s more from the first real step on."""
    ended = find_one(all_findings["story"], "skipping_ended")
    assert ended.evidence["iteration_skipped_s"] == pytest.approx(0.88, abs=0.01)
    assert ended.evidence["iteration_real_s"] == pytest.approx(2.68, abs=0.01)
    assert ended.evidence["step_real_s"] - ended.evidence["step_skipped_s"] == pytest.approx(1.80, abs=0.01)
    for name in ("story", "z2-fp16"):
        assert not {"iteration_shift", "first_real_step"} & {finding.name for finding in all_findings[name]}


def test_threads_oversubscribe_the_cores(all_findings: Findings) -> None:
    """Nobody set OMP_NUM_THREADS: 4 ranks x 64 threads of the optimizer on 64 cores."""
    for name in ("story", "x4-z3"):
        crowd = find_one(all_findings[name], "crowded_cores")
        assert 190 < crowd.evidence["threads"] <= 256
        assert crowd.evidence["cores"] == 64
        assert crowd.fix == "export OMP_NUM_THREADS=16"


def test_out_of_memory_by_an_evaluation(all_findings: Findings) -> None:
    """160 x 1024 tokens after 40 x 1024: logits of 160 x 1024 x 151,936 in fp32 are 99,572,776,960 bytes."""
    error = find_one(all_findings["z2-oom"], "out_of_memory")
    assert error.evidence["requested_bytes"] == 160 * 1024 * 151_936 * 4
    assert error.evidence["free_bytes"] == 79_466_463_232
    assert "4.0 times training's 40 x 1024" in error.details
    assert "per_device_eval_batch_size to 40" in error.advice


# --- memory --------------------------------------------------------------------------------------------------------------


def test_the_phase_of_the_peak(all_findings: Findings) -> None:
    """z2's steps: forward 12.96, backward 13.58, step 10.94 GB; 6.98 GB kept. In the story 17.2 of 22.5 GB are kept."""
    owner = find_one(all_findings["z2"], "peak_owner")
    assert owner.evidence["forward_peak_bytes"] == pytest.approx(12.96e9, rel=0.001)
    assert owner.evidence["backward_peak_bytes"] == pytest.approx(13.58e9, rel=0.001)
    assert owner.evidence["step_peak_bytes"] == pytest.approx(10.94e9, rel=0.001)
    assert owner.evidence["held_between_steps_bytes"] == pytest.approx(6.98e9, rel=0.001)
    assert owner.details.startswith("The peak of forward is 12.07 GiB there, that of step 10.19 GiB. 6.50 GiB (51 %")
    # More than a hundred GiB of these devices were never used.
    assert (owner.advice, find_one(all_findings["story"], "peak_owner").advice) == ("", "")


def test_the_allocator_retry_before_out_of_memory(all_findings: Findings) -> None:
    retry = find_one(all_findings["z2-oom"], "allocator_retries")
    assert retry.headline == "Rank 0's allocator flushed its cache to get memory for the first time in step 0"
    assert retry.evidence["retries"] == 1
    assert retry.evidence["reserved_peak_bytes"] == 147_494_797_312
    assert retry.fix == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


# --- staged causes -------------------------------------------------------------------------------------------------------


def test_ranks_with_late_data(all_findings: Findings) -> None:
    assert find_one(all_findings["cpu-stall"], "data_stall").ranks == (0, 1)
    assert find_one(all_findings["cpu-stall"], "data_stall").headline.startswith("74 % of each 135 ms ")
    assert find_one(all_findings["cpu-straggler"], "data_stall").headline.startswith(
        "Rank 1 waits for data for 61 % of each "
    )
    assert find_one(all_findings["cpu-stall"], "data_stall").evidence["data_s"] == pytest.approx(0.1, abs=0.005)
    assert find_one(all_findings["cpu-straggler"], "straggler").ranks == (1,)
    assert find_one(all_findings["cpu-straggler"], "straggler").evidence["late_s"] == pytest.approx(0.06, abs=0.005)


def test_hung_and_dead_ranks(all_findings: Findings) -> None:
    hung = find_one(all_findings["cpu-hang"], "hung_ranks")
    assert hung.ranks == (1,)
    assert hung.evidence["silent_s"] == pytest.approx(45, abs=0.1)
    assert hung.details.endswith("It went on in step 20.")
    assert "Rank 1 was between phases, the other one in backward." in hung.details
    assert find_one(all_findings["cpu-dead"], "dead_rank").ranks == (1,)


def test_a_batch_that_only_one_rank_has_is_named(all_findings: Findings) -> None:
    shift = find_one(all_findings["blind-rank-length"], "iteration_shift")
    assert "rank 1's batches have 1664 tokens instead of 512" in shift.details
    assert shift.severity.name == "WARNING"  # rank 0, whose batches are as before, waits
    pause = find_one(all_findings["blind-late-batches"], "repeated_pause")
    assert pause.ranks == (1,)
    assert pause.evidence["period"] == 8
    assert "on rank 1 take 28 % of their time, most of it at x5_ddp_vit.py:9 in solarize" in pause.details
    early = find_one(all_findings["blind-early-end"], "dead_rank")
    assert early.headline == "Rank 1 ended without an error after 71 steps: rank 0 lost it and failed"
    assert early.details == "Rank 0 ended with RuntimeError at f12_fsdp_earlystop.py:17."


def test_steps_that_are_all_skipped_after_others(all_findings: Findings) -> None:
    stuck = find_one(all_findings["blind-overflows"], "steps_skipped")
    assert stuck.headline == "fp16 has skipped all steps since step 39: nothing is trained any more"
    assert stuck.details.startswith("79 steps in a row overflowed, while the loss scale fell from 4096 to 1.4e-20")


def test_steps_that_are_skipped_without_a_loss_scale() -> None:
    """DeepSpeed skips a step of bf16 or fp32 only if its gradients are not finite."""

    def train_in_bf16(event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "dtype": "bf16", "autocast": None, "kind": None} if event.get("event") == "engine" else event

    recording = recordings.rewrite_events("blind-overflows", train_in_bf16)
    found = detect_findings(recording, recording.last_written_ns)
    assert "steps_skipped" not in {one.name for one in found}
    (lasting,) = (one for one in found if one.name == "gradients_not_finite")
    assert lasting.headline == "All steps since step 39 were skipped: their gradients are infinite or NaN"
    first_ns = int(next(iter(read_rank_steps(recording)))["end_unix_ns"][39])
    (single,) = (one for one in detect_findings(recording, first_ns) if one.name == "gradients_not_finite")
    assert single.headline == "Step 39 was skipped: its gradients are infinite or NaN"


def test_device_memory_that_grows(all_findings: Findings) -> None:
    assert find_one(all_findings["gpu-leak"], "memory_creep").evidence["bytes_per_step"] == 32 << 20
    step = find_one(all_findings["gpu-long"], "memory_step")
    assert (step.evidence["tokens_before"], step.evidence["tokens_after"]) == (4096, 8192)
    assert "8192 tokens instead of 4096" in find_one(all_findings["gpu-long"], "iteration_shift").details


def test_a_drift_and_host_memory_that_grows(all_findings: Findings) -> None:
    """2 ms more in each step; 24 and 12 MiB more."""
    drift = find_one(all_findings["held-drift"], "iteration_drift")
    assert drift.evidence["slope_s"] == pytest.approx(0.002, rel=0.2)
    assert "of it between the phases" in drift.details
    for name, mib in (("held-grows", 24), ("unseen-grows", 12)):
        growth = find_one(all_findings[name], "host_growth")
        assert growth.ranks == (0, 1)
        assert growth.evidence["bytes_per_step"] == pytest.approx(mib << 20, rel=0.15)


def test_the_owner_of_the_peak_tells_in_which_steps_it_was_measured(all_findings: Findings) -> None:
    """Memory of gpu-leak grows afterwards."""
    assert re.match(r"In steps 1 to \d+, ", find_one(all_findings["gpu-leak"], "peak_owner").headline)


def test_the_estimate_against_the_peak(all_findings: Findings) -> None:
    """2 + 18 bytes a parameter of 494,032,768 are estimated; backward's peak of 13.58 GB, 4.07 spare and a context were."""
    gap = find_one(all_findings["z2"], "estimate_gap")
    assert gap.evidence["estimate_bytes"] == 20 * 494_032_768
    assert gap.evidence["measured_bytes"] == pytest.approx(13.58e9 + 4.07e9 + 1.8e9, rel=0.01)
    assert gap.details.startswith("The largest part of the difference is activations and temporaries:")


def test_pinned_memory_against_the_ideal(all_findings: Findings) -> None:
    """18 bytes in tensors, and 2.55 GiB of spare pinned memory over 494,032,768 parameters."""
    over = find_one(all_findings["z3-offload-all"], "pinned_overhead")
    assert over.evidence["bytes_per_parameter"] == pytest.approx(18 + 2.55 * 2**30 / 494_032_768, abs=0.05)


def test_memory_that_was_in_use_before(all_findings: Findings) -> None:
    """20 GiB and a context of 0.5; what the driver keeps is no process's."""
    assert find_one(all_findings["gpu-others"], "others_on_gpu").evidence["used_bytes"] == pytest.approx(
        20.5 * 2**30, rel=0.005
    )


# --- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "missing", ["events-rank", "events-node", "allocator", "gpus", "processes", "hosts", "spans", "begins"]
)
@pytest.mark.parametrize("name", ["story", "z2-oom", "x4-z3"])
def test_missing_evidence_adds_no_finding(tmp_path: Path, all_findings: Findings, name: str, missing: str) -> None:
    folder = recordings.unpack_to_folder(name, tmp_path)
    for path in folder.glob(f"{missing}-*" if not missing.startswith("events") else f"{missing}*"):
        path.unlink()
    recording = Recording.open(folder)
    assert {finding.name for finding in detect_findings(recording, recording.end_ns)} <= {
        finding.name for finding in all_findings[name]
    }


def test_rank_0_may_be_missing(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("story", tmp_path)
    for path in folder.glob("*-rank0-*"):
        path.unlink()
    recording = Recording.open(folder)
    spike = find_one(detect_findings(recording, recording.end_ns), "double_spike")
    assert spike.ranks == (1, 2, 3)


@pytest.mark.parametrize("name", [name for name in sorted(LABELS) if name == "story" or name.startswith(("z", "gpu", "x4"))])
def test_findings_without_a_probe(tmp_path: Path, name: str) -> None:
    """Samplers alone show a double spike where iterations are longer than NVML's average, and nothing wrong."""
    recording = recordings.open_without_probe(name, tmp_path)
    kinds = [(finding.name, finding.step) for finding in detect_findings(recording, recording.end_ns)]
    assert recordings.compare_findings(recordings.read_labels("outside")[name], kinds)[1:] == ([], [])


def test_the_spike_without_a_probe_is_the_same(tmp_path: Path, all_findings: Findings) -> None:
    recording = recordings.open_without_probe("story", tmp_path)
    spike, expected = (
        find_one(detect_findings(recording, recording.end_ns), "double_spike"),
        find_one(all_findings["story"], "double_spike"),
    )
    assert spike.evidence["gap_s"] == pytest.approx(expected.evidence["gap_s"], rel=0.05)
    assert spike.evidence["iteration_s"] == pytest.approx(expected.evidence["iteration_s"], rel=0.05)
    assert spike.ranks == expected.ranks


@pytest.mark.parametrize("name", ["story", "z2", "cpu-straggler", "held-restart"])
def test_two_steps_have_no_wrong_findings(tmp_path: Path, name: str) -> None:
    """The spans after two steps are cut off: findings are about the first step only."""
    folder = recordings.unpack_to_folder(name, tmp_path)
    for path in folder.glob("spans-*"):
        header, _, records = path.read_bytes().partition(b"\n")
        rows = np.frombuffer(records, [tuple(field) for field in json.loads(header)["dtype"]])
        path.write_bytes(header + b"\n" + rows[rows["step"] < 2].tobytes())
    recording = Recording.open(folder)
    kinds = {finding.name for finding in detect_findings(recording, recording.end_ns)}
    assert kinds <= {"first_real_step", "pinned_overhead", "crowded_cores", "dead_rank", "restarted", "hung_ranks"}


@pytest.mark.parametrize("hours", [-2, 2])
@pytest.mark.parametrize("name", ["story", "x4-z3", "cpu-slow", "held-stall"])
def test_a_clock_that_is_hours_off(tmp_path: Path, all_findings: Findings, name: str, hours: int) -> None:
    """One rank's unix time is hours off: no exception and no wrong finding."""
    folder = recordings.unpack_to_folder(name, tmp_path)
    for path in folder.glob("*-rank1-*"):
        header, _, rest = path.read_bytes().partition(b"\n")
        fields = json.loads(header)
        fields["clock"]["unix_ns"] += hours * 3600 * 10**9
        path.write_bytes(json.dumps(fields).encode() + b"\n" + rest)
    recording = Recording.open(folder)
    findings = detect_findings(recording, recording.end_ns)
    assert {finding.name for finding in findings} <= {finding.name for finding in all_findings[name]}
    assert all(finding.begin_ns <= finding.end_ns <= finding.known_ns for finding in findings)


def test_a_long_job_is_read_in_pieces(tmp_path: Path) -> None:
    """An update stops at its time limit, and continues there."""
    recording = Recording.open(long_recording.write_recording(tmp_path / "recording", 40_000))
    detection = begin_detection(recording)
    assert detection.search_piece(recording.last_written_ns) in (True, False)
    assert detection.is_behind
    detection.update()
    assert not detection.is_behind
    assert [(finding.name, finding.step) for finding in detection.findings_at(recording.end_ns)] == [("estimate_gap", 1)]


def test_an_empty_recording_has_none(tmp_path: Path) -> None:
    recording = Recording(tmp_path, {"clock": {"unix_ns": 0, "monotonic_ns": 0}})
    assert detect_findings(recording, 10**18) == ()


def test_ranks_without_their_probe_do_not_hang(tmp_path: Path) -> None:
    """The same silence of 30 s, after each rank has reported that its probe left."""
    folder = recordings.unpack_to_folder("cpu-hang", tmp_path)
    before = Recording.open(folder)
    silent_ns = find_one(detect_findings(before, before.end_ns), "hung_ranks").begin_ns
    for source in before.sources["begins"]:
        (path,) = folder.glob(f"events-rank{source.rank}-*.jsonl")
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time_ns": silent_ns - source.offset_ns + 1, "event": "left", "lost": 0}) + "\n")
    after = Recording.open(folder)
    assert "hung_ranks" not in {finding.name for finding in detect_findings(after, after.end_ns)}


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        (
            "blind-request",
            "iteration_shift",
            "278 ms instead of 103 ms from step 60 on: fit.py:27 | 156 ms of it between the phases (data, forward, backward,"
            " step), most of that at fit.py:27 in report (calls urllib.request.urlopen)",
        ),
        (
            "blind-hooks",
            "iteration_drift",
            "from about step 49 on, 134 ms of it in the forward phase, most of that at f11_hooks.py:15 in hook",
        ),
        ("blind-rows", "iteration_shift", "same time steps have 24 rows instead of 12"),
        ("unseen-long", "iteration_shift", "a rank's batches have 2304 tokens instead of 1152"),
        ("blind-saves", "checkpoint_pause", "From step 64 on, checkpoints take 43 % of the time"),
        ("blind-slow-forward", "slow_forward", "Rank 0 computes slowly: its forward takes 50 ms, the others' 6.7 ms"),
    ],
)
def test_causes_are_named_where_others_have_the_cores(all_findings: Findings, name: str, kind: str, words: str) -> None:
    told = [f"{finding.headline} | {finding.details}" for finding in all_findings[name] if finding.name == kind]
    assert any(words in text for text in told), told


def test_what_several_processes_hold_of_a_gpu_is_their_sum(all_findings: dict[str, list[Finding]]) -> None:
    """Each of the 16 holds at most 1.74 GiB; `zerotop memory` shows 14.645 GiB on GPU 0, and others besides on GPU 1."""
    arrived = max(
        (one for one in all_findings["x2-hang-collectives"] if one.name == "others_arrived"), key=lambda one: one.end_ns
    )
    assert arrived.evidence["used_bytes"] / 2**30 == pytest.approx(14.645, abs=0.001)
    for name, count in (("x2-hang-collectives", 16), ("x2-hang-kernel", 10)):
        told = [one for one in all_findings[name] if one.name == "others_arrived"]
        assert max(one.evidence["processes"] for one in told) == count

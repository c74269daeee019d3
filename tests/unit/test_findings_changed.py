"""Real recordings with a cause written in afterwards: those that could not be staged on the available machines."""

import json
from pathlib import Path

import numpy as np
import pytest

import recordings
from changed_recordings import Rows, change_table, find_named
from zerotop.analysis.findings import Severity
from zerotop.analysis.findings.memory import others_on_gpu
from zerotop.analysis.findings.support import detection
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_rank_steps
from zerotop_probe.recording.tables import PHASE_CODE


def test_a_nearly_full_device_that_is_fragmented(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2", tmp_path)

    def raise_reserved(rows: Rows) -> None:
        late = rows["step"] >= 4
        rows["reserved_bytes"][late] = rows["reserved_peak_bytes"][late] = 130 * 10**9

    change_table(folder, "allocator-rank0", raise_reserved)
    (fragmented,) = find_named(folder, "fragmentation")
    assert fragmented.step == 4
    assert "Expandable segments are off" in fragmented.details
    assert fragmented.fix == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_a_device_with_room_is_not_fragmented(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2", tmp_path)

    def set_reserved(rows: Rows) -> None:
        rows["reserved_bytes"] = rows["reserved_peak_bytes"] = 100 * 10**9

    change_table(folder, "allocator-rank0", set_reserved)
    assert find_named(folder, "fragmentation") == []


def test_before_the_first_step_nothing_is_an_activation(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)

    def raise_first_peak(rows: Rows) -> None:
        rows["allocated_peak_bytes"][0] = rows["reserved_peak_bytes"][0] = 60 * 2**30

    change_table(folder, "allocator-rank0", raise_first_peak)
    (gap,) = find_named(folder, "estimate_gap")
    assert "At the peak, during engine initialization: model states" in gap.details
    assert ", other tensors " in gap.details
    assert "activations" not in gap.details


def test_retries_are_reported_at_each_tenfold(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2", tmp_path)

    def add_retries(rows: Rows) -> None:
        rows["retries"] = np.maximum(0, rows["step"] - 3)

    change_table(folder, "allocator-rank0", add_retries)
    assert [(finding.step, finding.evidence["retries"]) for finding in find_named(folder, "allocator_retries")] == [
        (4, 1.0),
        (13, 10.0),
    ]


@pytest.mark.parametrize(
    ("bits", "lowered", "text"), [(0x40, 0.3, "slowed its clocks down"), (0x40, 0.97, ""), (0x04, 0.97, "")]
)
def test_lowered_clocks_are_the_cause(bits: int, lowered: float, text: str, tmp_path: Path) -> None:
    """The staged sleep of gpu-slow, with a GPU that says it is too hot, or at its power limit, while it lasts."""
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    recording = Recording.open(folder)
    (shift,) = find_named(folder, "iteration_shift")
    (gpus,) = recording.sources["gpus"]
    since_ns = shift.begin_ns - gpus.offset_ns

    def throttle_later(rows: Rows) -> None:
        is_later = rows["time_ns"] > since_ns
        rows["throttle_reasons"] = np.where(is_later, bits, 0)
        rows["sm_clock_mhz"] = np.where(is_later, lowered * 1980, 1980)

    change_table(folder, "gpus", throttle_later)
    (shift,) = find_named(folder, "iteration_shift")
    assert ("of samples (SM clock" in shift.details) is (text != "")
    assert text in shift.details


def test_the_garbage_collector_is_the_cause(tmp_path: Path) -> None:
    """The staged sleep of gpu-slow, as if Python had collected garbage in its place."""
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    (shift,) = find_named(folder, "iteration_shift")
    assert "garbage" not in shift.details
    (process,) = (source for source in Recording.open(folder).sources["spans"] if source.rank == 0)
    lost_s = shift.evidence["after_s"] - shift.evidence["before_s"]
    begin_ns = shift.begin_ns - process.offset_ns
    (path,) = folder.glob("events-rank0-*.jsonl")
    with path.open("a") as file:
        for number in range(10):
            at_ns = begin_ns + round(number * shift.evidence["after_s"] * 1e9)
            facts = {"step": 0, "begin_ns": at_ns, "seconds": lost_s, "collections": 1}
            end_ns = at_ns + round(shift.evidence["after_s"] * 1e9)
            file.write(json.dumps({"time_ns": end_ns, "event": "garbage", **facts}) + "\n")
    (shift,) = find_named(folder, "iteration_shift")
    assert "Python's garbage collector takes " in shift.details
    assert shift.fix == "import gc; gc.collect(); gc.freeze()"


def test_a_job_that_was_being_stopped_has_no_dead_rank(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("cpu-dead", tmp_path)
    (dead,) = find_named(folder, "dead_rank")
    assert dead.ranks == (1,)
    (path,) = folder.glob("events-node-*.jsonl")
    header, *lines = path.read_text().splitlines()
    gone = next(json.loads(line) for line in lines if "rank_gone" in line)
    stop = json.dumps({"time_ns": gone["time_ns"] - 10**9, "event": "stop_sent", "signal": "SIGTERM"})
    path.write_text("\n".join([header, stop, *lines]) + "\n")
    assert find_named(folder, "dead_rank") == []


def test_a_launcher_that_a_signal_ended_takes_its_ranks_with_it(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-offload-110", tmp_path)
    assert find_named(folder, "dead_rank") == []
    (path,) = folder.glob("events-node-*.jsonl")
    text = path.read_text()
    assert '"signal": "SIGTERM"' in text
    path.write_text(text.replace('"signal": "SIGTERM"', '"signal": null'))
    (dead,) = find_named(folder, "dead_rank")
    assert dead.ranks == (0,)


def test_a_gap_that_varies_is_one_finding_and_a_doubled_gap_another(tmp_path: Path) -> None:
    """Steps 1 to 79 have 0.13 to 0.20 s of step()."""
    folder = recordings.unpack_to_folder("gpu-z3-all", tmp_path)
    (spike,) = find_named(folder, "double_spike")
    assert spike.step == 1

    def begin_updates_early(rows: Rows) -> None:
        """From step 40 on the updates begin 0.25 s sooner, during backward."""
        later = (rows["phase"] == PHASE_CODE["step"]) & (rows["step"] >= 40)
        rows["begin_ns"][later] -= 250_000_000

    change_table(folder, "spans-rank0", begin_updates_early)
    assert [one.step for one in find_named(folder, "double_spike")] == [1, 40]


def test_a_gpu_that_works_during_the_update_is_not_idle(tmp_path: Path) -> None:
    """The update takes 208 ms of 398."""
    folder = recordings.unpack_to_folder("gpu-offload-110", tmp_path)
    (before,) = find_named(folder, "double_spike")
    change_table(folder, "gpus", lambda rows: rows["utilization_percent"].fill(80))
    (spike,) = find_named(folder, "double_spike")
    assert before.evidence["share"] > spike.evidence["share"] == spike.cost == pytest.approx(0.2)
    assert spike.headline.startswith("GPUs idle 20 % of each")


def test_a_gpu_that_is_hot_for_long(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)

    def throttle_by_heat(rows: Rows) -> None:
        rows["throttle_reasons"] = 0x40
        rows["temperature_c"] = 91

    assert find_named(folder, "throttled") == []
    change_table(folder, "gpus", throttle_by_heat)
    (hot,) = find_named(folder, "throttled")
    assert hot.evidence["throttled_s"] >= 5
    assert "(hardware thermal)" in hot.headline
    assert "91 °C" in hot.details


def test_the_card_s_power_limit_is_no_throttling(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)

    def throttle_by_power(rows: Rows) -> None:
        rows["throttle_reasons"] = 0x04

    change_table(folder, "gpus", throttle_by_power)
    assert find_named(folder, "throttled") == []


def test_host_memory_that_is_nearly_used_up(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2-offload", tmp_path)

    def fill_host(rows: Rows) -> None:
        rows["cgroup_limit_bytes"] = -1
        rows["memory_available_bytes"] = rows["memory_total_bytes"] // 20

    change_table(folder, "hosts", fill_host)
    (short,) = find_named(folder, "host_memory_short")
    assert "95 % full" in short.headline
    assert short.ranks == (0,)


def test_a_control_group_full_of_file_cache_is_not_short(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2-offload", tmp_path)

    def use_half(rows: Rows) -> None:
        rows["cgroup_used_bytes"] = rows["cgroup_limit_bytes"] = rows["memory_total_bytes"] // 2

    change_table(folder, "hosts", use_half)
    assert find_named(folder, "host_memory_short") == []


def test_a_control_group_full_of_ranks_is_short(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2-offload", tmp_path)

    def fill_cgroup(rows: Rows) -> None:
        rows["cgroup_limit_bytes"] = 10 << 30
        rows["cgroup_used_bytes"] = 9.8 * 2**30

    change_table(folder, "hosts", fill_cgroup)
    (short,) = find_named(folder, "host_memory_short")
    assert "control group's limit of 10.00 GiB" in short.details


def test_swap_that_is_taken_while_ranks_live(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2-offload", tmp_path)

    def use_swap(rows: Rows) -> None:
        rows["swap_used_bytes"] = np.where(np.arange(len(rows)) > len(rows) - 10, 3 << 30, 1 << 30)

    change_table(folder, "hosts", use_swap)
    (swapping,) = find_named(folder, "swapping")
    assert swapping.evidence["swapped_bytes"] == 2 << 30
    assert swapping.advice == "Use less host memory: move the optimizer to NVMe."  # there are no loader workers


def test_a_process_that_comes_to_the_gpu_later(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2", tmp_path)

    def add_process(rows: Rows) -> None:
        # Every other record, of the last ones, is another process's; it must not be there from the first on.
        late = np.arange(len(rows)) % 2 + (np.arange(len(rows)) > len(rows) * 3 // 4) == 2
        rows["pid"][late] = 31337
        rows["used_bytes"][late] = 5 << 30

    assert find_named(folder, "others_arrived") == []
    change_table(folder, "gpu_processes", add_process)
    (other,) = find_named(folder, "others_arrived")
    assert "Process 31337" in other.details
    assert other.fix == "ps -o user,lstart,cmd -p 31337"
    assert other.evidence == {"used_bytes": 5 * 2.0**30, "left_over": 0.0, "processes": 1.0}
    assert other.severity is Severity.INFO  # most of the GPU is free

    def fill_device(rows: Rows) -> None:
        rows["used_bytes"] = rows["total_bytes"] // 4 * 3

    change_table(folder, "gpus", fill_device)
    assert find_named(folder, "others_arrived")[0].severity is Severity.WARNING


def test_a_process_that_left_the_gpu_before_the_first_step_ended_is_not_told(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-others", tmp_path)
    recording = Recording.open(folder)
    (steps,) = read_rank_steps(recording)
    (source,) = recording.sources["gpu_processes"]
    left = source.unix_times(source.array) > int(steps["end_unix_ns"][0]) - 1_000_000_000

    def end_process(rows: Rows) -> None:
        rows["pid"][left & (rows["pid"] == 730)] = rows["pid"][rows["pid"] != 730][-1]

    assert len(find_named(folder, "others_on_gpu")) == 1
    change_table(folder, "gpu_processes", end_process)
    assert find_named(folder, "others_on_gpu") == []


def test_what_others_on_the_gpu_hold_is_kept_up_to_date(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2", tmp_path)

    def add_process(rows: Rows) -> None:
        late = [-5, -3, -2, -1]  # the record between is of the job's own process
        rows["pid"][late], rows["used_bytes"][late] = 31337, [3 << 30, 3100 << 20, 5 << 30, 9 << 30]

    change_table(folder, "gpu_processes", add_process)
    recording = Recording.open(folder)
    runner = detection.Detection(recording, [others_on_gpu.detect])
    runner.update(recording.end_ns)
    told = runner.ordered_findings
    assert [one.evidence["used_bytes"] / 2**30 for one in told] == [3, 5, 9]  # a little more is not told
    assert len({one.event for one in told}) == 1
    (last,) = find_named(folder, "others_arrived")
    assert "9.00 GiB" in last.headline


@pytest.mark.parametrize("later", [0, 3])
def test_processes_that_come_to_two_gpus_are_one_arrival(tmp_path: Path, later: int) -> None:
    """The first record of all may be of one of them, which holds little yet; another comes some samples ``later``."""
    folder = recordings.unpack_to_folder("x2-zero3", tmp_path)

    def add_processes(rows: Rows) -> None:
        rows["pid"][0], rows["used_bytes"][0] = 31337, 10 << 20
        assert rows["gpu"][0] == 0
        for gpu, pid, begin in ((0, 31337, -12), (1, 31338, -12 + later)):
            late = np.flatnonzero(rows["gpu"] == gpu)[begin::2]
            rows["pid"][late], rows["used_bytes"][late] = pid, 5 << 30

    change_table(folder, "gpu_processes", add_processes)
    (other,) = find_named(folder, "others_arrived")
    assert "Processes 31337, 31338" in other.details
    assert other.ranks == (0, 1)
    assert "5.00 GiB of GPUs 0 and 1" in other.headline


def test_more_outside_pytorch_than_a_context_takes(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2", tmp_path)

    def use_more_memory(rows: Rows) -> None:
        rows["used_bytes"] += 6 << 30

    assert find_named(folder, "outside_pytorch") == []
    change_table(folder, "gpu_processes", use_more_memory)
    change_table(folder, "gpus", use_more_memory)
    (outside,) = find_named(folder, "outside_pytorch")
    assert 7 * 2**30 < outside.evidence["outside_bytes"] < 8.5 * 2**30


def write_affinity(folder: Path, cpus: dict[int, str], numa: list[dict[str, object]]) -> None:
    """Write to the sampler's events which cores the ranks may run on."""
    pids = {source.rank: source.pid for source in Recording.open(folder).sources["spans"]}
    (path,) = folder.glob("events-node-*.jsonl")
    header, *lines = path.read_text().splitlines()
    facts = [json.loads(line) for line in lines]
    for event in facts:
        if event["event"] == "node":
            event["numa"] = numa
    first_ns = min(event["time_ns"] for event in facts)
    facts += [
        {"time_ns": first_ns, "event": "affinity", "pid": pids[rank], "cpus": text, "threads": {}}
        for rank, text in cpus.items()
    ]
    path.write_text("\n".join([header, *(json.dumps(event) for event in facts)]) + "\n")


@pytest.mark.parametrize("grown_mib", [64, 0])
def test_memory_that_grows_with_each_checkpoint(tmp_path: Path, grown_mib: int) -> None:
    """The data phases of every fourth step are renamed to checkpoints, and more is allocated after each."""
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)

    def save_checkpoints(rows: Rows) -> None:
        chosen = (rows["phase"] == PHASE_CODE["data"]) & (rows["step"] % 4 == 0) & (rows["step"] > 8)
        rows["phase"][chosen] = PHASE_CODE["checkpoint_save"]

    def grow_by_steps(rows: Rows) -> None:
        rows["allocated_bytes"] += np.maximum(0, rows["step"] // 4 - 2) * (grown_mib << 20)

    change_table(folder, "spans-rank0", save_checkpoints)
    change_table(folder, "allocator-rank0", grow_by_steps)
    creep = find_named(folder, "memory_creep")
    assert len(creep) == (grown_mib > 0)
    for finding in creep:
        assert finding.step == 12
        assert finding.evidence["bytes_per_pause"] == grown_mib << 20
        assert "each of the last 4 checkpoints" in finding.details
        assert finding.evidence["last_step"] > 1000


NODES: list[dict[str, object]] = [{"node": 0, "cpus": "0-31"}, {"node": 1, "cpus": "32-63"}]


@pytest.mark.parametrize(
    ("cpus", "sentence"),
    [
        (["0-15", "0-15", "32-47", "48-63"], "Ranks 0 and 1 share 16 cores while 16 have no rank"),
        (["0-7", "8-15", "16-23", "24-31"], "No rank is bound to NUMA node 1:"),
        (["24-39", "0-15", "40-55", "56-63"], "Rank 0 is bound to cores of several NUMA nodes"),
        (["0-15", "16-31", "32-47", "48-63"], ""),
        (["0-63", "0-63", "0-63", "0-63"], ""),
        (["0-99999999999", "0-15", "16-31", "32-47"], ""),  # a damaged recording
    ],
)
def test_core_binding(tmp_path: Path, cpus: list[str], sentence: str) -> None:
    folder = recordings.unpack_to_folder("x4-z3", tmp_path)
    write_affinity(folder, dict(enumerate(cpus)), NODES)
    findings = find_named(folder, "core_binding")
    assert len(findings) == bool(sentence)
    assert not sentence or sentence in f"{findings[0].headline}. {findings[0].details}"
